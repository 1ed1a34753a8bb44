"""The two value types that cross every boundary, and the errors a user can cause.

Shape suffixes, used in the whole package:

    _P   one entry per prompt of a step
    _G   one entry per rollout of a group, in sampling order
    _GG  one entry per pair of rollouts of a group
    _T   one entry per token of a rollout
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

UNSCORABLE = -1
"""`Selection.cluster_G` of a rollout without a reward: no kept rollout stands for it."""


class FastRLError(ValueError):
    """What a user can cause and mend. The message says what was given, the rule, why, and the remedy."""


class ConfigError(FastRLError):
    """A setting, or a combination of settings, that cannot work."""


class GroupError(FastRLError):
    """Rollouts, rewards or advantages that do not form a valid group."""


class StateError(FastRLError):
    """A saved state that does not belong to this configuration or version."""


class NoSignalError(FastRLError):
    """Too many steps in a row in which no group had anything to learn from."""


class NonFiniteError(FastRLError):
    """A loss that is NaN or infinite: the optimizer step was not taken."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """All rollouts of one prompt in one step, in sampling order.

    Args:
        prompt_id: Stable key of the prompt in its data set; never the prompt's text.
        tokens_G: G sequences of response token ids, without padding. Empty responses are legal.
        rewards_G: (G,) total rewards. NaN marks a rollout that no reward function could score.
        advantages_G: (G,) advantages from the engine, over the full group; None = computed here.
        outcomes_G: (G,) raw task results (e.g. 0/1 correctness) that decide whether the group has
            zero variance; None = the rewards decide. A total reward that was shaped (length,
            format) can vary in a group whose answers are all wrong.
        logps_G: G sequences of the sampler's log-probs, one per token of `tokens_G`; only
            `similarity: surprisal` reads them.
        sketch_G: (G, D) sketches of each rollout's gradient; only `similarity: gradient` reads them.

    Raises:
        GroupError: lengths that differ, an infinite reward or outcome, or a non-finite advantage, log-prob or sketch.
    """

    prompt_id: str
    tokens_G: Sequence[Sequence[int]]
    rewards_G: np.ndarray
    advantages_G: np.ndarray | None = None
    outcomes_G: np.ndarray | None = None
    logps_G: Sequence[Sequence[float]] | None = None
    sketch_G: np.ndarray | None = None
    num_rollouts: int = field(init=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "num_rollouts", len(self.tokens_G))
        if self.num_rollouts == 0:
            raise GroupError(
                f"prompt {self.prompt_id!r}: a group needs at least one rollout, got none. "
                "Leave out prompts that were not sampled."
            )
        for name in ("rewards_G", "advantages_G", "outcomes_G"):
            values = getattr(self, name)
            if values is None:
                continue
            values = np.asarray(values, dtype=np.float64)
            if values.shape != (self.num_rollouts,):
                raise GroupError(
                    f"prompt {self.prompt_id!r}: {name} has shape {values.shape}, but the group has "
                    f"{self.num_rollouts} rollouts. One value per rollout is needed; nothing is broadcast. "
                    "Check that the reward function returns one reward per rollout."
                )
            set_field(self, name, values)
        for what, values in (("reward", self.rewards_G), ("outcome", self.outcomes_G)):
            if values is None or not np.isinf(values).any():
                continue
            i = int(np.isinf(values).argmax())
            raise GroupError(
                f"prompt {self.prompt_id!r}: rollout {i} has the {what} {values[i]}. It must be finite, or NaN for "
                "a rollout that cannot be scored: nothing can be compared with an infinite one."
            )
        if self.advantages_G is not None and not np.isfinite(self.advantages_G).all():
            raise GroupError(
                f"prompt {self.prompt_id!r}: advantages {self.advantages_G.tolist()} are not all finite. "
                "Give 0 for a rollout that cannot be scored."
            )
        self._check_features()

    def _check_features(self) -> None:
        if self.logps_G is not None:
            lengths = [[len(of_rollout) for of_rollout in rows] for rows in (self.logps_G, self.tokens_G)]
            if lengths[0] != lengths[1]:
                raise GroupError(
                    f"prompt {self.prompt_id!r}: logps_G has {lengths[0]} values for {lengths[1]} tokens. Every token "
                    "needs its log-prob."
                )
        if self.sketch_G is not None and len(self.sketch_G) != self.num_rollouts:
            raise GroupError(
                f"prompt {self.prompt_id!r}: sketch_G has {len(self.sketch_G)} rows for {self.num_rollouts} rollouts. "
                "Every rollout needs one."
            )
        features = [*(self.logps_G or []), [] if self.sketch_G is None else self.sketch_G]
        if not all(np.isfinite(values).all() for values in features):
            raise GroupError(
                f"prompt {self.prompt_id!r}: logps_G or sketch_G has values that are not finite. Look at the engine "
                "that made them."
            )

    @property
    def scorable_G(self) -> np.ndarray:
        """(G,) bool: rollouts that have a reward."""
        return ~np.isnan(self.rewards_G)

    @property
    def results_G(self) -> np.ndarray:
        """(G,) what decides success and zero variance: the outcomes where there are some, else the rewards."""
        return self.rewards_G if self.outcomes_G is None else self.outcomes_G

    @property
    def has_signal(self) -> bool:
        """Whether any rollout has an advantage. False as long as there are no advantages."""
        return self.advantages_G is not None and bool(self.advantages_G.any())


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to train on in one group.

    Args:
        keep_G: (G,) bool.
        weight_G: (G,) float, 0 exactly where dropped; multiplies the advantage.
        cluster_G: (G,) int: index of the kept rollout that stands for this one; `UNSCORABLE` (-1)
            for a rollout without a reward, and for all rollouts of a dropped group.
        reason: Which rule decided: a pruner's name, "zero_variance", "unscorable" or "surplus".
        advantages_G: (G,) advantages to train with in place of the group's. None for every method but PODS, whose
            paper normalises over the rollouts that it keeps.
    """

    keep_G: np.ndarray
    weight_G: np.ndarray
    cluster_G: np.ndarray
    reason: str
    advantages_G: np.ndarray | None = None

    @property
    def num_kept(self) -> int:
        """The retained count G' of the paper, before any alignment."""
        return int(self.keep_G.sum())

    def push_G(self, group: Group) -> np.ndarray:
        """(G,) what each rollout's log-probs are multiplied with: weight times advantage.

        Args:
            group: The one that was selected from, with advantages.
        """
        advantages_G = group.advantages_G if self.advantages_G is None else self.advantages_G
        assert advantages_G is not None
        return self.weight_G * advantages_G


def prompt_entropy(prompt_id: str) -> int:
    """Return a number that seeds a generator of a prompt's own: the same on every machine and in every run."""
    digest = hashlib.blake2b(prompt_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
