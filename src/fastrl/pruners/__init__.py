"""Which rollouts of a step to train on.

A pruner is a pure callable `(groups, *, rng) -> [Selection, ...]`, one selection per group. Every
group carries advantages over the full group, and `rng` is the only source of chance. A pruner
keeps at least one rollout of every group that has a scorable one (CPPO, which ranks the whole batch, is the
exception), and never an unscorable one. To add one: a class in a module here, a line in `PRUNERS`; the contract
tests then cover it.
"""

from fastrl.pruners.base import Pruner, from_clusters, group_rngs, keep_all, keep_none
from fastrl.pruners.baselines import AdvantageOnly, KeepAll, RandomPruner
from fastrl.pruners.kernels import LeverageSampling, LogDet
from fastrl.pruners.mdap import MDAP
from fastrl.pruners.peers import MaxVariance, TopAdvantage

__all__ = [
    "MDAP",
    "PRUNERS",
    "AdvantageOnly",
    "KeepAll",
    "LeverageSampling",
    "LogDet",
    "MaxVariance",
    "Pruner",
    "RandomPruner",
    "TopAdvantage",
    "from_clusters",
    "group_rngs",
    "keep_all",
    "keep_none",
]

PRUNERS: dict[str, type[Pruner]] = {
    "none": KeepAll,
    "mdap": MDAP,
    "advantage_only": AdvantageOnly,
    "random": RandomPruner,
    "top_advantage": TopAdvantage,
    "max_variance": MaxVariance,
    "logdet": LogDet,
    "leverage": LeverageSampling,
}
