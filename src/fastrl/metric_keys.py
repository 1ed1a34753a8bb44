"""Every metric that FastRL logs under `fastrl/`: its meaning, its unit, and the engines that log it."""

import re
from dataclasses import dataclass

PREFIX = "fastrl/"
ENGINES = ("TRL", "verl", "EasyR1")
_TRL, _VERL, _RAY = ("TRL",), ("verl",), ("verl", "EasyR1")


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of them.

    Args:
        key: Without the prefix `fastrl/`. A part in angle brackets stands for any text.
        meaning: What the number says, in one sentence.
        unit: What it is counted in; "share" lies in [0, 1].
        engines: Whose runs hold it.
        when: The settings under which it is logged; empty = always.
    """

    key: str
    meaning: str
    unit: str
    engines: tuple[str, ...] = ENGINES
    when: str = ""

    def matches(self, key: str) -> bool:
        """Whether `key`, without the prefix, is this metric or one of this family."""
        pattern = "".join(
            ".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", self.key)
        )
        return re.fullmatch(pattern, key) is not None


METRICS: dict[str, tuple[Metric, ...]] = {
    "Sampled": (
        Metric("num_rollouts/mean", "G_t: rollouts sampled per prompt, mean over the prompts", "rollouts"),
        Metric("num_rollouts/min", "the fewest that a prompt got", "rollouts"),
        Metric("num_rollouts/max", "the most that a prompt got", "rollouts"),
        Metric("rollouts", "sampled in the optimizer step (TRL) or in the step (verl, EasyR1)", "rollouts"),
        Metric("prompts/sampled", "prompts sampled in the round", "prompts", _TRL),
        Metric("prompts/skipped", "prompts that the budget gave no rollout", "prompts", _TRL),
        Metric(
            "prompts/waves",
            "calls of generation in the round; above 1 where `refill` samples again",
            "calls",
            _TRL,
        ),
        Metric(
            "prompt_tokens_saved",
            "prompt tokens of these rollouts, images included, that generation, log-probs and update did not "
            "compute again",
            "tokens",
            _TRL,
        ),
    ),
    "Kept": (
        Metric("kept/mean", "retained per prompt, before alignment", "rollouts"),
        Metric("kept/min", "the fewest retained of a prompt", "rollouts"),
        Metric("kept/max", "the most retained of a prompt", "rollouts"),
        Metric("kept/frac", "retained rollouts of all sampled ones", "share"),
        Metric("kept/tokens_frac", "response tokens of retained rollouts, of all response tokens", "share"),
        Metric("frac_zero_variance", "groups whose rewards (or `outcome_key`) are all equal", "share"),
        Metric("frac_unscorable", "rollouts without a reward; never kept", "share"),
        Metric(
            "frac_image_token",
            "rollouts in which the model wrote an image token that no image stands behind; never kept",
            "share",
            _TRL,
        ),
        Metric("weight/max", "the largest weight of a survivor", "weight"),
        Metric(
            "weight/effective_size", "(sum w)^2 / sum w^2 over survivors: as many of equal weight", "rollouts"
        ),
        Metric("advantage/abs_mean_all", "mean of the absolute advantage over all rollouts", "advantage"),
        Metric("advantage/abs_mean_kept", "mean of the absolute advantage over survivors", "advantage"),
        Metric(
            "similarity/mean_within_class",
            "mean Jaccard similarity of rollouts of equal advantage, over at most 16 groups of the step",
            "share",
        ),
        Metric("empty_steps", "steps in a row without any signal; `max_empty_steps` stops the run", "steps"),
    ),
    "Trained on": (
        Metric("trained/rows", "rows that the step trained on, after alignment", "rows"),
        Metric("trained/tokens", "loss tokens of these rows", "tokens"),
        Metric("trained/rows_per_update", "rows of one optimizer step, filling rows included", "rows", _VERL),
        Metric("top_up/frac", "trained rows that alignment added back", "share"),
        Metric(
            "trained/<name>",
            "the engine's own `critic/score/*`, `critic/rewards/*`, `critic/advantages/*` and `response_length/*` "
            "over the trained rows; under their own names they are over all rollouts",
            "as the engine's",
            _RAY,
        ),
    ),
    "Budget": (
        Metric("budget/ars_current", "G of the next step", "rollouts", when="budget: ars"),
        Metric(
            "budget/ars_reference",
            "G'_ref (Eq. 13); no value in the first epoch",
            "rollouts",
            when="budget: ars",
        ),
        Metric("budget/discovery_current", "G of the next step", "rollouts", when="budget: discovery"),
        Metric(
            "budget/discovery_yield",
            "useful rollouts per group at that G",
            "rollouts",
            when="budget: discovery",
        ),
        Metric(
            "budget/discovery_next_yield",
            "useful rollouts that one rollout more would add",
            "rollouts",
            when="budget: discovery",
        ),
        Metric(
            "budget/discovery_rollout_cost",
            "what sampling a rollout costs, in rollouts trained on",
            "ratio",
            when="budget: discovery",
        ),
        Metric("budget/per_prompt_seen", "prompts with evidence", "prompts", when="budget: per_prompt"),
        Metric(
            "budget/per_prompt_without_chance",
            "prompts of this step that would be skipped now",
            "share",
            when="budget: per_prompt",
        ),
        Metric(
            "budget/greso_p_easy",
            "GRESO's base probability for easy prompts",
            "probability",
            when="budget: greso",
        ),
        Metric(
            "budget/greso_p_hard",
            "GRESO's base probability for hard prompts",
            "probability",
            when="budget: greso",
        ),
    ),
    "Time": (
        Metric("time/generation_s", "sampling, per optimizer step", "seconds", _TRL),
        Metric("time/rewards_s", "reward functions, per optimizer step", "seconds", _TRL),
        Metric("time/old_ref_s", "old and reference log-probs, per optimizer step", "seconds", _TRL),
        Metric(
            "time/select_s", "selection, alignment and moving of rows, per optimizer step", "seconds", _TRL
        ),
        Metric("time/update_s", "forward, loss and backward, per optimizer step", "seconds", _TRL),
        Metric(
            "time/saved_est_s",
            "what the pruned rollouts would have cost in log-probs and update, at this step's price per row",
            "seconds",
            ("TRL", "verl"),
        ),
    ),
}
"""All metrics by what they are about, in the order of the documentation."""


def find_metric(key: str) -> Metric | None:
    """Return the metric that `key` belongs to (with or without the prefix), exact names before families."""
    bare = key.removeprefix(PREFIX)
    metrics = [metric for group in METRICS.values() for metric in group]
    exact = [metric for metric in metrics if metric.key == bare]
    return next(iter(exact or [metric for metric in metrics if metric.matches(bare)]), None)
