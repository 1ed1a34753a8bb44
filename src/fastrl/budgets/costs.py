"""What a rollout costs: seconds of an engine's stages, told apart by how many rollouts they were spent on."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.budgets.base import check_keys
from fastrl.types import Group, Selection


class StageCosts:
    """Seconds of a rollout sampled, of one trained on, and of the rest of a step per prompt: discounted least squares.

    Generation and update have parts that do not grow with their numbers of rows (prompts, launches): where those
    numbers have varied, a line tells the two apart. Seconds belong to the step before the one that is observed, whose
    counts are remembered.

    Args:
        discount: Of old steps per step.
    """

    _NAMES = ("weight", "rest", "prompts", "x", "xx", "y", "xy", "u", "uu", "v", "uv")
    """Discounted sums; x rollouts sampled in y seconds, u rollouts trained on in v seconds."""

    def __init__(self, discount: float) -> None:
        self._discount = discount
        self.sums = dict.fromkeys(self._NAMES, 0.0)
        self.last: list[float] | None = None  # rollouts sampled, kept, prompts of the step before

    def observe(
        self,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        seconds: Mapping[str, float] | None,
    ) -> None:
        if seconds is not None and self.last is not None:
            x, u, prompts = self.last
            y, v = float(seconds["generation"]), float(seconds["update"])
            rest = max(0.0, float(seconds["step"]) - y - v)
            found = (1.0, rest, prompts, x, x * x, y, x * y, u, u * u, v, u * v)
            for name, value in zip(self._NAMES, found, strict=True):
                self.sums[name] = self._discount * self.sums[name] + value
        self.last = [
            float(sum(group.num_rollouts for group in groups)),
            float(sum(selection.num_kept for selection in selections)),
            float(len(groups)),
        ]

    def prices(self) -> tuple[float, float]:
        """c_gen and c_rest (per prompt) as multiples of c_upd; 1 and 0 where nothing was measured."""
        s = self.sums
        if not (s["weight"] and s["y"] > 0 and s["v"] > 0 and s["u"]):
            return 1.0, 0.0
        per_sampled, fixed_sampling = _line(s["weight"], s["x"], s["xx"], s["y"], s["xy"])
        per_kept, fixed_update = _line(s["weight"], s["u"], s["uu"], s["v"], s["uv"])
        rest = (s["rest"] + fixed_sampling + fixed_update) / s["prompts"]
        return per_sampled / per_kept, rest / per_kept

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self.sums), "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(state, self.state_dict(), "costs of the discovery budget")
        check_keys(state["sums"], self.sums, "costs of the discovery budget")
        self.sums = {name: float(state["sums"][name]) for name in self._NAMES}
        self.last = None if state["last"] is None else [float(value) for value in state["last"]]


def _line(weight: float, x: float, xx: float, y: float, xy: float) -> tuple[float, float]:
    """Slope, and intercept as a weighted sum, of the least-squares line through weighted sums of points.

    While x has varied by less than 10 % (standard deviation over mean), the slope is noise: the average is taken, which
    calls rollouts dearer than they are, so that G moves and the slope can be told. Noise must not make a row free or
    dearer than on average either: the slope stays within [0.2, 1] of it.
    """
    average, spread = y / x, xx - x * x / weight
    slope = average
    if spread > 0.01 * xx:
        slope = min(max((xy - x * y / weight) / spread, 0.2 * average), average)
    return slope, y - slope * x
