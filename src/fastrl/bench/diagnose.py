"""`fastrl diagnose`: how faithful are similarities and pruners on these rollouts, measured with true gradients?

The inputs are groups and, for each, the Gram matrix <g_i, g_j> of its rollouts' gradients, from
`fastrl.bench.gradients` or from a file. Only the geometry inside a prompt is known, so every figure is taken
per group and then averaged over groups.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.bench.agreement import (
    PAIRS,
    Similarity,
    agreement,
    checked_matrix,
    describe_pairs,
    find_pairs,
)
from fastrl.bench.faithfulness import Score, faithfulness, score_selection
from fastrl.bench.files import write_json
from fastrl.bench.settings import every_pruner
from fastrl.config import FastRLConfig
from fastrl.method import select, with_advantages
from fastrl.pruners import PRUNERS
from fastrl.similarity import SIMILARITIES
from fastrl.types import ConfigError, Group, GroupError

__all__ = [
    "Score",
    "Similarity",
    "at_share",
    "default_configs",
    "default_similarities",
    "diagnose",
    "measure",
    "read_gram",
    "score_selection",
    "write_gram",
]

STATES = ("signal", "zero_variance", "unscorable", "cancelled")
"""What a group is: with a gradient; all advantages zero; no reward at all; advantages whose gradients sum to zero."""
_CANCELLED = 1e-6
"""Below this share of (sum_i |A_i| |g_i|)^2, the square of a gradient sum is rounding noise."""


def diagnose(
    groups: Sequence[Group],
    grams: Sequence[np.ndarray],
    similarities: Mapping[str, Similarity],
    configs: Mapping[str, FastRLConfig],
    *,
    num_draws: int = 32,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure similarities against true gradient cosines, and pruned gradients against full ones.

    A group without signal has no direction to compare with. It is counted, and takes part in selection since a
    pruner may rank the whole batch, but not in the means.

    Args:
        groups: Advantages are computed over the full group where the engine gave none.
        grams: One (G, G) Gram matrix per group.
        similarities: By name; each is called with groups that have advantages.
        configs: Settings by name; `at_share` brings them to one kept share.
        num_draws: Selections per configuration, each with a generator of its own; at least 2.
        seed: Of all chance.

    Returns:
        JSON-ready: `groups` (num, and how many are each of `STATES`), `num_draws`, `seed`; `pairs`, true cosines by
        kind of pair (`describe_pairs`); `similarities` by name (`agreement`); `pruners` by name (`faithfulness`).

    Raises:
        ConfigError: fewer than two draws.
        GroupError: Gram or similarity matrices that do not belong to the groups.
    """
    if num_draws < 2:
        raise ConfigError(f"num_draws: {num_draws} is below 2: one draw cannot tell bias from chance.")
    if len(groups) != len(grams) or not groups:
        raise GroupError(
            f"{len(groups)} groups came with {len(grams)} Gram matrices: one each is needed, and at least one group."
        )
    groups = with_advantages(groups)
    grams = [
        checked_matrix(gram, group, "the Gram matrix") for group, gram in zip(groups, grams, strict=True)
    ]
    states = [_state(group, gram) for group, gram in zip(groups, grams, strict=True)]
    signal = [p for p, state in enumerate(states) if state == "signal"]
    pairs = {kind: find_pairs(groups, grams, signal, kind) for kind in PAIRS}
    return {
        "groups": {"num": len(groups), **{state: states.count(state) for state in STATES}},
        "num_draws": num_draws,
        "seed": seed,
        "pairs": {kind: describe_pairs(found) for kind, found in pairs.items()},
        "similarities": {
            name: agreement(name, similarity, groups, pairs, np.random.default_rng(seed))
            for name, similarity in similarities.items()
        },
        "pruners": {
            name: faithfulness(groups, grams, signal, config, num_draws=num_draws, seed=seed)
            for name, config in configs.items()
        },
    }


def default_configs() -> dict[str, FastRLConfig]:
    """Return `every_pruner()`, and settings that a look at similarities suggests."""
    configs = every_pruner()
    unbiased = configs["mdap, unbiased"]
    for tau in (0.1, 0.4):
        configs[f"mdap {tau:g}, unbiased"] = replace(unbiased, tau=tau)
    configs["mdap, unbiased, centred"] = replace(unbiased, similarity="centred")
    configs["logdet, centred, matched"] = FastRLConfig(
        pruner="logdet", budget="fixed", similarity="centred", match_weights=True, tau=0.1
    )
    return configs


def default_similarities(groups: Sequence[Group], ngram: int) -> dict[str, Similarity]:
    """Return the similarities that these groups have the data for, by name."""
    has = {
        "surprisal": all(group.logps_G is not None for group in groups),
        "gradient": all(group.sketch_G is not None for group in groups),
    }
    return {
        name: functools.partial(_with_ngram, similarity, ngram)
        for name, similarity in SIMILARITIES.items()
        if has.get(name, True)
    }


def _with_ngram(similarity: Callable[[Group, int], np.ndarray], ngram: int, group: Group) -> np.ndarray:
    return similarity(group, ngram)


def measure(
    *,
    model: str | None,
    data: Path | None,
    gram: Path | None,
    testbed: tuple[int, int],
    out: Path,
    problem_set: str = "short",
    **gradients: Any,
) -> tuple[list[Group], list[np.ndarray]]:
    """Return groups and Gram matrices: from a file, from a model and its rollouts, or from the testbed.

    What is computed is kept in `out`/gram.json.

    Args:
        model, data: A causal language model and JSON lines of its rollouts (`fastrl.bench.rollouts`).
        gram: File of Gram matrices.
        testbed: (prompts, rollouts per prompt), where none of the three is given.
        problem_set: Of the testbed: short or long.
        gradients: As `fastrl.bench.gradients.gram_matrices` takes them.
    """
    if gram is not None and (model or data):
        raise ConfigError("--gram brings gradients along: leave out --model and --data, or --gram.")
    if gram is not None:
        return read_gram(gram)
    if (model is None) != (data is None):
        raise ConfigError(
            "--model and --data belong together: the gradients are those of the model on the rollouts in the data. "
            "Give both, or none for the testbed."
        )
    from fastrl.bench import gradients as g
    from fastrl.bench.rollouts import read_sample

    if model is not None and data is not None:
        sample = read_sample(model, data)
    else:
        sample = g.sample_testbed(*testbed, seed=gradients["seed"], problem_set=problem_set)
    grams = g.gram_matrices(sample.model, sample.rollouts_PG, **gradients)
    write_gram(out / "gram.json", sample.groups, grams)
    return sample.groups, grams


def at_share(
    groups: Sequence[Group], configs: Mapping[str, FastRLConfig], share: float
) -> dict[str, FastRLConfig]:
    """Bring configurations to one kept share, as far as they have a setting for it.

    A pruner that takes `keep_share` gets it; else one that takes `tau` gets the tau in 0, 0.02, ..., 1 that keeps
    closest to it (the lowest of equals). Others stay as they are: `kept_frac` says what was really kept.

    Args:
        groups: Those that will be diagnosed. The share is that of groups with an advantage.
        share: In (0, 1].
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share: {share} is outside (0, 1]: it is the share of rollouts to keep.")
    groups = with_advantages(groups)
    return {name: _at_share(groups, config, share) for name, config in configs.items()}


def _at_share(groups: Sequence[Group], config: FastRLConfig, share: float) -> FastRLConfig:
    options = PRUNERS[config.pruner].options
    if "keep_share" in options:
        return replace(config, keep_share=share)
    has_signal = [group.has_signal for group in groups]
    if "tau" not in options or not any(has_signal):
        return config

    def distance(candidate: FastRLConfig) -> float:
        kept = [s.keep_G for s, counts in zip(select(groups, candidate), has_signal, strict=True) if counts]
        return abs(float(np.concatenate(kept).mean()) - share)

    return min((replace(config, tau=step / 50) for step in range(51)), key=distance)


def _state(group: Group, gram_GG: np.ndarray) -> str:
    assert group.advantages_G is not None
    if not group.scorable_G.any():
        return "unscorable"
    if not group.has_signal:
        return "zero_variance"
    kernel_GG = gram_GG * np.outer(group.advantages_G, group.advantages_G)
    without_cancelling = np.sqrt(np.maximum(np.diag(kernel_GG), 0.0)).sum() ** 2
    return "signal" if kernel_GG.sum() > _CANCELLED * without_cancelling else "cancelled"


def write_gram(path: str | Path, groups: Sequence[Group], grams: Sequence[np.ndarray]) -> None:
    """Write groups and their Gram matrices as JSON: a list with one record per group.

    Fields: prompt (its id), completions (token ids), gram, and where the group has them logprobs (of the
    sampled tokens), rewards, advantages and outcomes. NaN is written as null.
    """
    records = []
    for group, gram_GG in zip(groups, grams, strict=True):
        record: dict[str, Any] = {
            "prompt": group.prompt_id,
            "completions": [[int(token) for token in tokens_T] for tokens_T in group.tokens_G],
            "gram": checked_matrix(gram_GG, group, "the Gram matrix").tolist(),
        }
        if group.logps_G is not None:
            record["logprobs"] = [[float(logp) for logp in logps_T] for logps_T in group.logps_G]
        for name in ("rewards", "advantages", "outcomes"):
            values_G = getattr(group, f"{name}_G")
            if values_G is not None:
                record[name] = [None if np.isnan(value) else float(value) for value in values_G]
        records.append(record)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, records, indent=None, allow_nan=False)


def read_gram(path: str | Path) -> tuple[list[Group], list[np.ndarray]]:
    """Read what `write_gram` wrote, or another program in its format; further fields are ignored.

    Without rewards all rollouts are unscorable (NaN): replace `rewards_G` before `diagnose`.

    Raises:
        GroupError: no such JSON, a field that is missing, or a matrix of another size; names file and record.
    """
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
            raise TypeError("not a list of records")
    except (ValueError, TypeError) as error:
        raise GroupError(
            f"{path}: {error}. A JSON list with one record per prompt is needed, as write_gram writes it."
        ) from error
    found = []
    for number, record in enumerate(records):
        try:
            found.append(_to_group(record))
        except (KeyError, ValueError, TypeError) as error:
            what = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise GroupError(f"{path}, record {number}: {what}") from error
    return [group for group, _ in found], [gram_GG for _, gram_GG in found]


def _to_group(record: Mapping[str, Any]) -> tuple[Group, np.ndarray]:
    def column(name: str) -> Any:
        values = record.get(name)
        return None if values is None else np.array(values, dtype=np.float64)  # null becomes NaN

    rewards_G = column("rewards")
    group = Group(
        prompt_id=str(record["prompt"]),
        tokens_G=record["completions"],
        rewards_G=np.full(len(record["completions"]), np.nan) if rewards_G is None else rewards_G,
        advantages_G=column("advantages"),
        outcomes_G=column("outcomes"),
        logps_G=record.get("logprobs"),
    )
    return group, checked_matrix(record["gram"], group, "the Gram matrix")
