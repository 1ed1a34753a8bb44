"""Cost of the selection on one core: 256 prompts x 8 rollouts x 512 tokens, and how it grows.

    python benchmarks/selection_cost.py

Tokens follow a Zipf law over 32 000 words, rewards are 0 or 1. Times are processor time of one thread:
wall clock on a core that nobody else uses. Writes docs/img/selection_cost.{svg,png}, prints markdown.
"""
# ruff: noqa: E402  (settings that numpy reads when it is loaded come first)

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import time
from pathlib import Path

import numpy as np

from fastrl import FastRLConfig, Group, select

VOCABULARY = 32_000
BASE = {"prompts": 256, "rollouts": 8, "tokens": 512}
SWEEPS = {
    "prompts": (32, 64, 128, 256, 512),
    "rollouts": (2, 4, 8, 16, 32),
    "tokens": (64, 128, 256, 512, 1024, 2048),
}
AXES = {"prompts": "prompts per step", "rollouts": "rollouts per prompt", "tokens": "tokens per rollout"}
LIMIT_MS = 50
NUM_DATA_SETS = 4
TICKS_MS = (5, 10, 20, 50, 100, 200)


def make_groups(rng: np.random.Generator, *, prompts: int, rollouts: int, tokens: int) -> list[Group]:
    """Random groups: Zipf tokens, rewards with a success rate of its own for each prompt."""
    cdf = np.cumsum(1.0 / np.arange(1, VOCABULARY + 1))
    groups = []
    for p in range(prompts):
        tokens_GT = np.searchsorted(cdf, rng.random((rollouts, tokens)) * cdf[-1])
        rewards_G = (rng.random(rollouts) < rng.random()).astype(float)
        groups.append(Group(prompt_id=str(p), tokens_G=list(tokens_GT), rewards_G=rewards_G))
    return groups


def measure(repeats: int, **sizes: int) -> np.ndarray:
    """(repeats,) milliseconds of one selection, after a warm-up, on a few data sets in turn."""
    data = [make_groups(np.random.default_rng(seed), **sizes) for seed in range(NUM_DATA_SETS)]
    times = []
    for repeat in range(-1, repeats):
        start = time.process_time()
        select(data[repeat % NUM_DATA_SETS], FastRLConfig())
        times.append(1e3 * (time.process_time() - start))
    return np.array(times[1:])


def draw(results: dict[str, dict[int, np.ndarray]], path: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    from fastrl.report.plots import STYLE, look, save

    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.0), layout="constrained", sharey=True)
        for axes, (name, by_size) in zip(panels, results.items(), strict=True):
            sizes = list(by_size)
            median = [np.median(times) for times in by_size.values()]
            low, high = np.quantile(list(by_size.values()), [0.05, 0.95], axis=1)
            axes.fill_between(sizes, low, high, alpha=0.25, linewidth=0)
            axes.plot(sizes, median, marker="o", markersize=4, **look(1))
            slope = median[sizes.index(BASE[name])] / BASE[name]
            axes.plot(sizes, [slope * size for size in sizes], **{**look(0), "linewidth": 1})
            axes.set(xscale="log", yscale="log", xlabel=AXES[name])
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set_yticks(TICKS_MS, [str(tick) for tick in TICKS_MS])
        panels[0].set_ylabel("milliseconds on one core")
        panels[0].set_title("Cost of one selection (dashed: proportional)")
        return save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--figure", type=Path, default=Path("docs/img/selection_cost"))
    args = parser.parse_args()
    base = measure(args.repeats, **BASE)
    results = {
        name: {
            size: base if size == BASE[name] else measure(args.repeats, **{**BASE, name: size})
            for size in sizes
        }
        for name, sizes in SWEEPS.items()
    }
    print("| prompts | rollouts | tokens | median, ms | 5 % - 95 %, ms |")
    print("|---|---|---|---|---|")
    for name, by_size in results.items():
        for size, times in by_size.items():
            sizes = {**BASE, name: size}
            low, high = np.quantile(times, [0.05, 0.95])
            print(
                f"| {' | '.join(map(str, sizes.values()))} | {np.median(times):.1f} | {low:.1f} - {high:.1f} |"
            )
    median = np.median(base)
    verdict = "within" if median <= LIMIT_MS else "above"
    print(f"\nBase case: {median:.1f} ms on one core, {verdict} the {LIMIT_MS} ms that the design allows.")
    print("Figure:", ", ".join(str(file) for file in draw(results, args.figure)))


if __name__ == "__main__":
    main()
