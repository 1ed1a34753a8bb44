"""Old and reference log-probs after pruning: seconds against the share of rollouts that is kept.

    python benchmarks/deferral.py

With beta > 0 and num_iterations 2, TRL runs two forward passes over every rollout before it knows the rewards.
FastRL runs them over survivors. The random pruner sets the share; lengths are log-normal. Writes
runs/bench/deferral.json and prints markdown.
"""

# ruff: noqa: E402  (settings that torch reads when it is loaded come first)

from fastrl.cli import set_environment

set_environment()

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from workload import ScriptedLengths, arguments, binary_reward, model, prompts, quiet, tokenizer

from fastrl import FastRLConfig
from fastrl.bench.files import write_json
from fastrl.bench.run import versions
from fastrl.integrations.trl import FastGRPOTrainer, TimedGRPOTrainer

SHARES = (1.0, 0.75, 0.5, 0.25)


class Stock(ScriptedLengths, TimedGRPOTrainer):
    spread = 0.6


class Fast(ScriptedLengths, FastGRPOTrainer):
    spread = 0.6


def measure(share: float | None, folder: Path, num_rounds: int) -> dict[str, Any]:
    """Seconds per round of stock TRL (share None) or of FastRL at a share, the first round left out."""
    settings = {"beta": 0.04, "num_iterations": 2, "num_generations": 8, "per_device_train_batch_size": 16}
    saved = folder / "model"
    if not saved.exists():
        model(256, 4).save_pretrained(saved)
    kwargs: dict[str, Any] = {}
    if share is not None:
        pruner = "none" if share == 1.0 else "random"
        config = FastRLConfig(pruner=pruner, keep_share=share, budget="fixed", zero_variance="keep_all")
        kwargs["fastrl"] = config
    trainer = (Stock if share is None else Fast)(
        model=str(saved), reward_funcs=binary_reward, processing_class=tokenizer(),
        args=arguments(folder, max_steps=2 * num_rounds, gradient_accumulation_steps=2, **settings),
        train_dataset=prompts(4 * num_rounds), **kwargs,
    )  # fmt: skip
    trainer.train()
    rows = [row for row in trainer.state.log_history if "fastrl/time/old_ref_s" in row]
    sampled = [row for row in rows if row["fastrl/rollouts"]][1:]
    kept = 1.0 if share is None else float(np.mean([row["fastrl/kept/frac"] for row in sampled]))
    return {
        "share": share,
        "kept": kept,
        "old_ref_s": [row["fastrl/time/old_ref_s"] for row in sampled],
        "update_s": [row["fastrl/time/update_s"] for row in rows[2:]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/deferral.json"))
    args = parser.parse_args()
    quiet()
    order = (None, *SHARES)
    with tempfile.TemporaryDirectory() as folder:
        blocks = [measure(share, Path(folder), args.rounds) for _ in range(args.repeats) for share in order]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, {"blocks": blocks, "versions": versions()})
    print(
        "| method | kept | old + reference log-probs, s per round | of stock | update, s per step | of stock |"
    )
    print("|---|---|---|---|---|---|")
    base: dict[str, float] = {}
    for share in order:
        chosen = [block for block in blocks if block["share"] == share]
        found = {
            name: float(np.median([second for block in chosen for second in block[name]]))
            for name in ("old_ref_s", "update_s")
        }
        base = base or found
        name = "stock TRL" if share is None else "FastRL"
        kept = float(np.mean([block["kept"] for block in chosen]))
        cells = [f"{found[k]:.3f} | {found[k] / base[k]:.2f}" for k in ("old_ref_s", "update_s")]
        print(f"| {name} | {kept:.0%} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
