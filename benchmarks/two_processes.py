"""Two processes and lopsided pruning: what the update costs when one rank would keep nearly everything.

    python benchmarks/two_processes.py

Of 2 x 16 rollouts, 14 of rank 0 and 2 of rank 1 are kept. FastRL moves rows until both have as many. "Unpruned" is
stock TRL on all 32. Seconds are forward, loss and backward of the slower rank. Each case runs twice in ABBA order, with
one thread per process. Writes runs/bench/two_processes.json and prints markdown.
"""

# ruff: noqa: E402  (settings that torch reads when it is loaded come first)

from fastrl.cli import set_environment

set_environment()

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.bench.files import write_json
from fastrl.bench.run import versions

CASES = ("unpruned", "pruned", "pruned", "unpruned")
KEPT_OF_RANK = (14, 2)


def work(folder: Path, steps: int, repeats: int) -> None:
    """What each of the two processes does; rank 0 writes the seconds."""
    import torch
    from workload import ScriptedLengths, arguments, binary_reward, model, prompts, quiet, tokenizer

    from fastrl import FastRLConfig, Selection
    from fastrl.integrations.trl import FastGRPOTrainer, TimedGRPOTrainer

    quiet()
    torch.set_num_threads(1)

    class Stock(ScriptedLengths, TimedGRPOTrainer):
        pass

    class Pruned(ScriptedLengths, FastGRPOTrainer):
        pass

    def lopsided(groups: Any) -> list[Selection]:
        kept = np.concatenate([np.arange(16) < number for number in KEPT_OF_RANK])
        parts = np.split(kept, np.cumsum([group.num_rollouts for group in groups])[:-1])
        return [
            Selection(
                keep_G=keep, weight_G=keep.astype(float), cluster_G=np.arange(len(keep)), reason="lopsided"
            )
            for keep in parts
        ]

    seconds: list[dict[str, Any]] = []
    for repeat in range(repeats):
        for case in CASES:
            settings = {"max_steps": steps, "num_generations": 16, "per_device_train_batch_size": 8}
            config = FastRLConfig(pruner="none", budget="fixed", zero_variance="drop")
            trainer = (Stock if case == "unpruned" else Pruned)(
                model=model(256, 4), reward_funcs=binary_reward, processing_class=tokenizer(),
                args=arguments(folder, gradient_accumulation_steps=2, **settings), train_dataset=prompts(2 * steps),
                **({} if case == "unpruned" else {"fastrl": config}),
            )  # fmt: skip
            assert trainer.accelerator.num_processes == 2, "the launcher started one process"
            if case == "pruned":
                trainer.fastrl.select = lopsided
            trainer.train()
            rows = [row for row in trainer.state.log_history if "fastrl/time/update_s" in row][2:]
            own = torch.tensor([[row["fastrl/time/update_s"], row["fastrl/time/select_s"]] for row in rows])
            slower = trainer.accelerator.gather(own[None]).amax(0)
            seconds.append(
                {
                    "repeat": repeat,
                    "case": case,
                    "update_s": slower[:, 0].tolist(),
                    "plan_s": slower[:, 1].tolist(),
                }
            )
    if int(os.environ["RANK"]) == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")


def launch(folder: Path, steps: int, repeats: int) -> list[dict[str, Any]]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29471", __file__,
        "--worker", str(folder), "--steps", str(steps), "--repeats", str(repeats),
    ]  # fmt: skip
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=1200, stdout=subprocess.DEVNULL)
    return json.loads((folder / "seconds.json").read_text(encoding="utf-8"))


def report(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    def median(case: str, name: str, repeat: int | None = None) -> float:
        chosen = [b for b in blocks if b["case"] == case and repeat in (None, b["repeat"])]
        return float(np.median([second for b in chosen for second in b[name]]))

    ratios = [
        median("pruned", "update_s", r) / median("unpruned", "update_s", r)
        for r in {b["repeat"] for b in blocks}
    ]
    return {
        "update_s": {case: median(case, "update_s") for case in ("unpruned", "pruned")},
        "plan_s": median("pruned", "plan_s"),
        "ratio": median("pruned", "update_s") / median("unpruned", "update_s"),
        "ratio_by_repeat": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/two_processes.json"))
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.steps, args.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        blocks = launch(Path(folder), args.steps, args.repeats)
    result = {**report(blocks), "blocks": blocks, "versions": versions()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, result)
    low, high = min(result["ratio_by_repeat"]), max(result["ratio_by_repeat"])
    seconds = result["update_s"]
    print("| two processes, 32 rollouts | update, s per step |\n|---|---|")
    print(f"| stock TRL, all 32 | {seconds['unpruned']:.3f} |")
    print(f"| FastRL, 14 of rank 0 and 2 of rank 1 kept | {seconds['pruned']:.3f} |")
    print(
        f"\nRatio {result['ratio']:.2f} ({low:.2f} - {high:.2f} over {len(result['ratio_by_repeat'])} ABBA repeats); "
    )
    print(f"selection, plan and moving rows {1000 * result['plan_s']:.0f} ms.")


if __name__ == "__main__":
    main()
