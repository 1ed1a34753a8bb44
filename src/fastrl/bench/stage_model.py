"""Seconds of a step from the seconds of its stages: what pruning can save, and what it cannot.

    seconds = generation * rollout_share + (old + reference + update) * kept_share + rest

That time is proportional to rollouts is an assumption. It predicts the published step of FastRL within 1 %,
but promises too much for the paper's random pruning (Table 5: without 50 % and 75 % of the rollouts a run was
1.60 and 2.10 times as fast, the model says 1.71 and 2.66): real stages have fixed parts, which `rest` is for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from fastrl.config import did_you_mean
from fastrl.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds per step of each stage, of the method that others are compared with.

    Args:
        generation: Sampling and scoring: proportional to the rollouts sampled.
        old, reference, update: Log-probs of the old policy and of the reference, and the update:
            proportional to the rollouts trained on.
        rest: What no share changes: weights handed to the sampler, waiting for the longest answer.

    Raises:
        ConfigError: a negative time, or no time at all.
    """

    generation: float
    old: float
    reference: float
    update: float
    rest: float = 0.0

    def __post_init__(self) -> None:
        seconds = asdict(self)
        if not (min(seconds.values()) >= 0 and 0 < self.total < inf):
            raise ConfigError(
                f"stage times {seconds}: seconds are finite, none is negative, and a step takes some, or it has no "
                "ratio to another. Give measured seconds; 0 for a stage that the run does not have."
            )

    @property
    def total(self) -> float:
        return self.generation + self.trained + self.rest

    @property
    def trained(self) -> float:
        """The part that pruning shortens."""
        return self.old + self.reference + self.update


PUBLISHED = {
    ("Geo3K", "GRPO"): StageTimes(generation=87.05, old=55.44, reference=70.14, update=319.37, rest=2.96),
    ("Geo3K", "FastRL"): StageTimes(generation=79.53, old=21.02, reference=26.59, update=121.07, rest=1.45),
    ("GeoQA", "GRPO"): StageTimes(generation=60.41, old=61.51, reference=58.58, update=240.95, rest=1.65),
    ("GeoQA", "FastRL"): StageTimes(generation=46.07, old=25.74, reference=24.51, update=100.82, rest=1.44),
}
"""Seconds per step, Qwen2.5-VL-7B on H20 GPUs (arXiv 2609.36932, Table 8). `rest`: printed total - printed stages."""

PUBLISHED_HOURS = {
    "Geo3K": {0.0: 29.72, 0.2: 29.33, 0.4: 25.64, 0.6: 21.26, 0.8: 13.87, 1.0: 12.65},
    "GeoQA": {0.0: 54.65, 0.2: 53.87, 0.4: 51.98, 0.6: 49.39, 0.8: 25.65, 1.0: 24.11},
}
"""Hours of training by tau (arXiv 2609.36932, Table 7); tau = 0 is plain GRPO."""


def parse_stages(pairs: Sequence[str]) -> StageTimes:
    """Read `stage=seconds` pairs; stages that are not named take no time. No pair = the published stages of Geo3K.

    Raises:
        ConfigError: an unknown stage, or seconds that are no number.
    """
    if not pairs:
        return PUBLISHED["Geo3K", "GRPO"]
    found = dict.fromkeys((f.name for f in fields(StageTimes)), 0.0)
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in found:
            raise ConfigError(
                f"stage {name!r} is unknown.{did_you_mean(name, found)} All: {', '.join(found)}."
            )
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"stage {pair!r}: write {name}=SECONDS, such as {name}=12.5.") from None
    return StageTimes(**found)


def predict(stages: StageTimes, *, kept_share: float, rollout_share: float = 1.0) -> float:
    """Return the seconds of a step.

    Args:
        kept_share: Rollouts trained on / those of the method whose stages these are, at least 0.
        rollout_share: Rollouts sampled / its own (G_t / G_1), at least 0; above 1 where G grows.

    Raises:
        ConfigError: a negative or non-finite share.
    """
    for name, value in (("kept_share", kept_share), ("rollout_share", rollout_share)):
        if not 0 <= value < inf:
            raise ConfigError(
                f"{name}: {value} is not >= 0 and finite. It compares rollouts with the base method's: 0.4, say."
            )
    return stages.generation * rollout_share + stages.trained * kept_share + stages.rest


def speedup(stages: StageTimes, *, kept_share: float, rollout_share: float = 1.0) -> float:
    """Return base / predicted seconds, for the shares of `predict`; infinite where no time is left."""
    seconds = predict(stages, kept_share=kept_share, rollout_share=rollout_share)
    return stages.total / seconds if seconds else inf


def with_generation_share(share: float) -> StageTimes:
    """Return a step of one second, `share` in [0, 1] of it generation and the rest update.

    Its `speedup` is Amdahl's law, 1 / (share * rollout_share + (1 - share) * kept_share).
    """
    return StageTimes(generation=share, old=0.0, reference=0.0, update=1 - share)


def implied_kept_share(stages: StageTimes, *, ratio: float, rollout_share: float = 1.0) -> float:
    """Return the kept share for which `speedup` gives a ratio; negative where no pruning explains it.

    Raises:
        ConfigError: a ratio that is not positive, or stages of which pruning shortens nothing.
    """
    if not (0 < ratio < inf and stages.trained > 0):
        raise ConfigError(
            f"speed-up {ratio}, {stages.trained} s of old, reference and update: a kept share follows only from a "
            "positive ratio and from stages that pruning shortens. Give base / new seconds of such a step."
        )
    return (stages.total / ratio - stages.generation * rollout_share - stages.rest) / stages.trained


def from_run(summary: Mapping[str, Any], key: str | None = None) -> StageTimes:
    """Return the stages of one's own run, per step, as if every rollout that it sampled were trained on.

    What trained rollouts cost is scaled by generated / trained, so a run of FastRL tells too what its
    step would cost unpruned, at its own mean G. Old and reference log-probs share a clock: `old`.

    Args:
        summary: Content of the run's summary.json (`bench.summary`).
        key: One of its methods; None = the first: the base method, where there is one.

    Raises:
        ConfigError: an unknown key, or a run without seconds or rollouts of an update.
    """
    methods = {method["key"]: method for method in summary["methods"]}
    key = next(iter(methods)) if key is None else key
    if key not in methods:
        raise ConfigError(
            f"{key!r} is no method of this run: {', '.join(methods)}.{did_you_mean(key, methods)}"
        )
    seconds, rollouts, steps = (methods[key][name] for name in ("stage_s", "rollouts", "num_steps"))
    if not (seconds["update"] > 0 and rollouts["trained"] > 0):
        raise ConfigError(
            f"{key!r} has {seconds['update']} s of update for {rollouts['trained']:.0f} trained rollouts: nothing "
            "tells what a rollout costs. Take a run that trained, with FastRL's clocks."
        )
    per_trained = rollouts["generated"] / rollouts["trained"] / steps
    return StageTimes(
        generation=(seconds["generation"] + seconds["rewards"]) / steps,
        old=seconds["old_ref"] * per_trained,
        reference=0.0,
        update=seconds["update"] * per_trained,
        rest=(seconds["select"] + seconds["rest"]) / steps,
    )
