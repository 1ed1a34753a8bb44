"""`FastRLConfig`: every setting, its rule, and its reason. The defaults are the published setting."""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from fastrl.budgets import BUDGETS
from fastrl.pruners import PRUNERS
from fastrl.refill import REFILLS
from fastrl.similarity import SIMILARITIES
from fastrl.types import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, to which `1e-6` is a number: YAML 1.1 wants a point in it, and would read a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass(frozen=True, kw_only=True)
class FastRLConfig:
    """How rollouts are pruned and budgeted. `FastRLConfig()` is the published setting.

    Args:
        pruner: none | mdap | advantage_only | random | top_advantage (CPPO) | max_variance (PODS) | logdet |
            leverage.
        tau: MDAP's similarity threshold in [0, 1]; 0 keeps everything, 1 about one per class. For logdet and
            leverage, the ridge relative to the mean of the kernel's diagonal.
        similarity: jaccard (paper) | centred (cosine of centred n-gram counts) | surprisal (the same, tokens weighed
            by the sampler's log-probs) | gradient (cosine of the engine's gradient sketches).
        ngram: Tokens per n-gram of the similarity.
        compare: kept (paper: with all kept rollouts of a class) | seed (released script: its first).
        advantage_tol: |A_i - A_j| below this is the same class.
        representative: first (paper) | random: which member of a cluster is trained on.
        per_cluster: Most rollouts that stand for one cluster.
        weighting: A survivor weighs (cluster size) ** weighting / (rollouts that stand for it): 0 = paper, 1 =
            unbiased.
        keep_share: Share that random, top_advantage, max_variance, logdet and leverage keep, in (0, 1].
        match_weights: Weigh logdet's survivors so that their sum matches the full one.
        zero_variance: Groups whose rewards (or outcomes) are all equal: keep_one (paper: one class
            of A = 0, of which the pruner keeps at least one) | drop | keep_all.
        denominator: What the loss divides by: kept (paper: what is trained on) | live (rollouts of
            groups with signal) | full (all rollouts: dropping A = 0 then changes nothing).
        budget: fixed | ars (paper) | discovery | per_prompt | greso: how many rollouts the next step samples per
            prompt.
        min_rollouts: Floor under the budget, at least 2 (one rollout has no baseline).
        max_rollouts: Ceiling; None = the engine's own number, which it may not exceed.
        initial_rollouts: What discovery begins with, and the mean of per_prompt; None = the ceiling.
        rollout_cost: What discovery takes sampling a rollout to cost, as a multiple of training on one; None = measured
            by the engine, which makes G_t depend on the clock.
        refill: More prompts within a step: none | skipped (for those that the budget skips) | signal (DAPO: until as
            many groups have signal as the engine's batch has prompts) | kept (CPPO: until the survivors fill it).
        max_refills: Most times that a step samples again for `refill`.
        align: How the kept count reaches a multiple of the ranks: top_up (paper: pruned rollouts of
            highest |A|) | dummy (rows without weight).
        micro_batches: repack (the fewest micro-batches; the rest of the micro-steps are skipped) |
            shrink (all micro-steps, with fewer rows each: least memory).
        updates: fixed (as many optimizer steps as without pruning, on fewer rows each) | rows (as many rows per
            optimizer step, in fewer steps; verl and EasyR1 only).
        share_prompt: auto (a prompt is computed once per group where transformers generates, and once per micro-batch
            in log-probs and update; both for models that were compared with the ordinary path) | off.
        outcome_key: Reward column that decides zero variance (e.g. accuracy_reward); None = the total.
        max_empty_steps: Steps in a row without any signal (and with at least 64 groups), after which
            training stops with an explanation.
        trace: Write a record of every rollout and its fate to the run folder.
        seed: Of every random choice, together with the step.

    Raises:
        ConfigError: a value out of range, or a combination that cannot work.
    """

    pruner: str = "mdap"
    tau: float = 0.8
    similarity: str = "jaccard"
    ngram: int = 1
    compare: str = "kept"
    advantage_tol: float = 1e-4
    representative: str = "first"
    per_cluster: int = 1
    weighting: float = 0.0
    keep_share: float = 0.5
    match_weights: bool = False
    zero_variance: str = "keep_one"
    denominator: str = "kept"
    budget: str = "ars"
    min_rollouts: int = 2
    max_rollouts: int | None = None
    initial_rollouts: int | None = None
    rollout_cost: float | None = None
    refill: str = "none"
    max_refills: int = 8
    align: str = "top_up"
    micro_batches: str = "repack"
    updates: str = "fixed"
    share_prompt: str = "auto"
    outcome_key: str | None = None
    max_empty_steps: int = 10
    trace: bool = False
    seed: int = 0

    _choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "pruner": tuple(PRUNERS),
        "similarity": tuple(SIMILARITIES),
        "compare": ("kept", "seed"),
        "representative": ("first", "random"),
        "zero_variance": ("keep_one", "drop", "keep_all"),
        "denominator": ("kept", "live", "full"),
        "budget": tuple(BUDGETS),
        "refill": REFILLS,
        "align": ("top_up", "dummy"),
        "micro_batches": ("repack", "shrink"),
        "updates": ("fixed", "rows"),
        "share_prompt": ("auto", "off"),
    }
    _ranges: ClassVar[dict[str, tuple[float, float, str]]] = {
        "tau": (0.0, 1.0, "it is a share of n-grams that differ"),
        "ngram": (1, 64, "an n-gram has at least one token"),
        "advantage_tol": (1e-12, 1.0, "0 would split equal advantages by rounding noise"),
        "per_cluster": (1, 4096, "a cluster is stood for by at least one rollout"),
        "weighting": (0.0, 1.0, "0 is the paper's weighting, 1 the unbiased one"),
        "keep_share": (1e-6, 1.0, "it is the share of rollouts to keep"),
        "min_rollouts": (2, 4096, "one rollout alone has no baseline"),
        "max_rollouts": (2, 4096, "one rollout alone has no baseline"),
        "initial_rollouts": (2, 4096, "one rollout alone has no baseline"),
        "rollout_cost": (1e-6, 1e6, "it is a ratio of two costs"),
        "max_refills": (1, 1000, "it counts the times that a step samples again"),
        "max_empty_steps": (1, 10**9, "it counts steps"),
        "seed": (0, 2**63 - 1, "it seeds the generators"),
    }

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        for name, choices in self._choices.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    f"{name}: {value!r} is not one of {', '.join(choices)}.{did_you_mean(value, choices)}"
                )
        for name, (low, high, reason) in self._ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name}: {value} is outside [{low:g}, {high:g}]: {reason}.")
        if self.max_rollouts is not None and self.max_rollouts < self.min_rollouts:
            raise ConfigError(
                f"max_rollouts: {self.max_rollouts} is below min_rollouts: {self.min_rollouts}. "
                "Raise one or lower the other."
            )
        self._check_combinations()

    def _check_combinations(self) -> None:
        lowest, highest = self.min_rollouts, self.max_rollouts or math.inf
        if self.initial_rollouts is not None and not lowest <= self.initial_rollouts <= highest:
            raise ConfigError(
                f"initial_rollouts: {self.initial_rollouts} is outside [min_rollouts, max_rollouts] = [{lowest}, "
                f"{highest}]: the budget stays in these bounds. Change one of the three."
            )
        if self.refill == "kept" and self.pruner != "top_advantage":
            raise ConfigError(
                f"refill: kept with pruner: {self.pruner}: it samples 1 / keep_share times the prompts, so that the "
                "survivors of CPPO's ranking fill the batch. Set pruner: top_advantage, or another refill."
            )
        if self.weighting > 0 and self.align == "top_up":
            raise ConfigError(
                f"weighting: {self.weighting} asks for survivors that stand for their cluster, but align: top_up "
                "adds rollouts back by |A|, which no weight makes unbiased. Set align: dummy."
            )
        if self.weighting > 0 and self.pruner == "mdap" and self.representative == "first":
            raise ConfigError(
                f"weighting: {self.weighting} with representative: first always lets the first rollout speak for "
                "its cluster, which is not unbiased. Set representative: random."
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any] | None) -> "FastRLConfig":
        """Build from a mapping (a YAML block); unknown keys are errors with a suggestion."""
        settings = dict(settings or {})
        names = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in names:
                raise ConfigError(
                    f"{key!r} is not a setting of FastRL.{did_you_mean(key, names)} All: {', '.join(names)}."
                )
        return cls(**settings)

    @classmethod
    def load(cls, path: str | Path) -> "FastRLConfig":
        """Read a YAML file: either the settings themselves, or a recipe with a `fastrl:` block."""
        content: Any = read_yaml(path)
        if "fastrl" in content:
            content = content["fastrl"]
            if content is not None and not isinstance(content, dict):
                raise ConfigError(
                    f"{path}: fastrl: {content!r} is a {type(content).__name__}; the block is a mapping of settings. "
                    "To train without FastRL, set pruner: none and budget: fixed."
                )
        return cls.from_dict(content)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, in the order of the documentation."""
        return dataclasses.asdict(self)

    @property
    def is_identity(self) -> bool:
        """Whether this configuration changes nothing: the engine's own algorithm."""
        same_groups = self.budget == "fixed" and self.max_rollouts is None
        same_prompts = self.refill == "none"
        return same_groups and same_prompts and self.pruner == "none" and self.zero_variance != "drop"


def parse_yaml(text: str, where: str) -> Any:
    """Read YAML, and nothing but data.

    Raises:
        ConfigError: not YAML; names `where` it came from.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML. {error}") from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a mapping from a YAML file, and those that it builds on.

    `base: other.yaml`, or a list of files, all relative to this one, are read first: each changes what those before
    it say, and this file changes them all. Blocks are changed key by key.

    Raises:
        ConfigError: a file that cannot be read, is no mapping, or is its own base.
    """
    return _read_yaml(Path(path), ())


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `below` as changed by `above`, one level of blocks deep."""
    merged = dict(below)
    for key, value in above.items():
        is_block = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if is_block else value
    return merged


def _read_yaml(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in readers:
        raise ConfigError(
            f"{path}: base: is a circle: {' -> '.join(map(str, (*readers, path)))}. Remove one."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}). Give the path of a YAML file."
        ) from error
    content = parse_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: expected a mapping of `key: value` lines, found a {type(content).__name__}."
        )
    base = content.pop("base", None) or []
    merged: dict[str, Any] = {}
    for name in base if isinstance(base, list) else [base]:
        merged = merge(merged, _read_yaml(path.parent / str(name), (*readers, path.resolve())))
    return merge(merged, content)


def _check_type(name: str, value: Any, annotation: str) -> None:
    """YAML knows no types: catch `tau: "0.8"` and `ngram: 1.5` here, not in the middle of a run."""
    allowed: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "float": (int, float),
        "bool": (bool,),
    }
    expected, _, optional = annotation.replace("<class '", "").replace("'>", "").partition(" | ")
    if optional and value is None:
        return
    wrong_bool = isinstance(value, bool) and expected != "bool"
    if wrong_bool or not isinstance(value, allowed[expected]):
        remedy = ""
        if isinstance(value, str):
            remedy = " Write it without quotes."
        raise ConfigError(
            f"{name}: {value!r} is a {type(value).__name__}; this setting takes a {expected}.{remedy}"
        )


def did_you_mean(value: Any, choices: Iterable[str]) -> str:
    """Return a sentence that suggests the closest choice, or nothing."""
    close = difflib.get_close_matches(str(value), list(choices), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
