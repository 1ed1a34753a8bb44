"""Seconds of a step, stage by stage: stock verl against FastRL on it, and the same task on TRL beside them.

    .venv-verl/bin/python benchmarks/verl_step_time.py verl
    .venv/bin/python benchmarks/verl_step_time.py trl
    .venv/bin/python benchmarks/verl_step_time.py table

8 prompts x 8 rollouts of at most 48 tokens, one update, tau 0.8, a fixed G; a model of 12 million random weights that
answers in digits. verl: its V1 trainer, FSDP2 on one CPU process, real vLLM; its replay buffer polls every 10 ms
instead of every 2 s, which would hide everything. TRL: one process, generation by transformers. In ABBA order; the
first steps of each run are left out.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
OUT = ROOT / "runs" / "bench"
PROMPTS, ROLLOUTS, TOKENS, STEPS, WARM_UP = 8, 8, 48, 8, 3
MODEL = {"hidden": 384, "layers": 8}
ORDER = ("stock", "fastrl", "fastrl", "stock")
STAGES = ("generation", "log-probs", "update", "rest", "step")

NAMES = {
    "verl": {
        "generation": "timing_s/gen",
        "log-probs": "timing_s/old_log_prob",
        "update": "timing_s/update_actor",
        "step": "timing_s/step",
    },
    "trl": {
        "generation": "fastrl/time/generation_s",
        "log-probs": "fastrl/time/old_ref_s",
        "update": "fastrl/time/update_s",
        "step": "step_time",
    },
}
"""What each engine calls the seconds of a stage."""

OVERRIDES = f"""
data.train_batch_size={PROMPTS} data.max_response_length={TOKENS} actor_rollout_ref.rollout.n={ROLLOUTS}
actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS} actor_rollout_ref.actor.optim.lr=1e-7
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1024 actor_rollout_ref.rollout.max_model_len=128
actor_rollout_ref.rollout.max_num_seqs=64 actor_rollout_ref.rollout.calculate_log_probs=False
trainer.total_training_steps={STEPS} trainer.total_epochs={STEPS}
""".split()
FASTRL = ("+fastrl.tau=0.8", "+fastrl.budget=fixed")


def seconds_of(
    method: str, rows: list[dict[str, float]], names: dict[str, str], trained: list[float]
) -> dict[str, Any]:
    """Seconds of each stage, by step, under one name for both engines."""
    return {
        "method": method,
        **{stage: [row[name] for row in rows] for stage, name in names.items()},
        "trained": trained,
    }


def on_verl() -> list[dict[str, Any]]:
    sys.path.insert(0, str(ROOT / "tests" / "with_verl"))
    import tiny_task
    import verl_runs

    verl_runs.ENVIRONMENT["VERL_USE_EXTERNAL_MODULES"] = "cpu_verl,fast_poll"
    blocks = []
    with tempfile.TemporaryDirectory() as folder:
        task = tiny_task.make(Path(folder), **MODEL)
        for number, method in enumerate(ORDER):
            module = "verl.trainer.main_ppo" if method == "stock" else "fastrl.integrations.verl"
            extra = () if method == "stock" else FASTRL
            run = verl_runs.run(
                task, Path(folder) / str(number), *OVERRIDES, *extra, module=module, rollout="vllm"
            )
            steps = run.steps[WARM_UP:]
            all_rows = PROMPTS * ROLLOUTS
            trained = [step.get("fastrl/trained/rows", all_rows) / all_rows for step in steps]
            blocks.append(seconds_of(method, steps, NAMES["verl"], trained))
    return blocks


def on_trl() -> list[dict[str, Any]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT / "tests" / "with_verl"))
    import tiny_task
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    from fastrl import FastRLConfig
    from fastrl.integrations.trl import FastGRPOTrainer, TimedGRPOTrainer

    torch.set_num_threads(1)

    def reward(completions: list, answer: list, **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            tiny_task.compute_score("", text, gold)["score"] for text, gold in zip(texts, answer, strict=True)
        ]

    blocks = []
    with tempfile.TemporaryDirectory() as folder:
        task = tiny_task.make(Path(folder), **MODEL)
        rows = Dataset.from_parquet(str(task / "train.parquet"))
        data = Dataset.from_list(
            [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows]
        )
        for method in ORDER:
            args = GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=PROMPTS * ROLLOUTS,
                num_generations=ROLLOUTS,
                max_completion_length=TOKENS,
                max_steps=STEPS,
                # verl computes old log-probs in every step; TRL where a batch serves more than one of them.
                steps_per_generation=1,
                learning_rate=1e-7,
                logging_steps=1,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            )
            extra = {} if method == "stock" else {"fastrl": FastRLConfig(budget="fixed")}
            kind = TimedGRPOTrainer if method == "stock" else FastGRPOTrainer
            trainer = kind(
                model=AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32),
                processing_class=AutoTokenizer.from_pretrained(task / "model"),
                reward_funcs=reward,
                args=args,
                train_dataset=data,
                **extra,
            )
            trainer.train()
            log = [row for row in trainer.state.log_history if "fastrl/time/update_s" in row][WARM_UP:]
            trained = [row["fastrl/trained/rows"] / row["fastrl/rollouts"] for row in log]
            blocks.append(seconds_of(method, log, NAMES["trl"], trained))
    return blocks


def table() -> str:
    lines = ["| seconds per step (median) | stock | FastRL | ratio (by repeat) |", "|---|---|---|---|"]
    for engine in ("verl", "trl"):
        path = OUT / f"verl_step_time_{engine}.json"
        if not path.is_file():
            continue
        blocks = json.loads(path.read_text(encoding="utf-8"))
        for block in blocks:
            known = [block[stage] for stage in ("generation", "log-probs", "update")]
            block["rest"] = [step - sum(parts) for step, *parts in zip(block["step"], *known, strict=True)]
        kept = np.mean(
            [value for block in blocks if block["method"] == "fastrl" for value in block["trained"]]
        )
        for stage in STAGES:
            by = {
                method: [float(np.median(block[stage])) for block in blocks if block["method"] == method]
                for method in ("stock", "fastrl")
            }
            stock, fast = (float(np.mean(by[method])) for method in ("stock", "fastrl"))
            ratios = sorted(
                after / before for before, after in zip(by["stock"], by["fastrl"], strict=True) if before
            )
            shown = f"{fast / stock:.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})" if stock else "-"
            lines.append(f"| {engine}: {stage} | {stock:.3f} | {fast:.3f} | {shown} |")
        lines.append(f"| {engine}: rows trained on | 100% | {kept:.0%} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("verl", "trl", "table"))
    what = parser.parse_args().what
    if what != "table":
        OUT.mkdir(parents=True, exist_ok=True)
        blocks = on_verl() if what == "verl" else on_trl()
        (OUT / f"verl_step_time_{what}.json").write_text(json.dumps(blocks), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
