"""Rebuild the testbed's checkpoint: supervised warm-up of the tiny model from random weights.

    python -m fastrl.testbed.warmup --seed 0 --steps 1100 --out DIR
    python -m fastrl.testbed.warmup --problems long --seed 0 --steps 1400 --threads 1 --out DIR

The result is a function of the problem set, the seed, the number of steps, the number of threads and the
CPU's arithmetic.
"""

import argparse
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fastrl.data.testbed import PROBLEM_SETS, Problem, problems, stream
from fastrl.testbed.evaluation import conversation, evaluate
from fastrl.testbed.model import ASSISTANT, build_model, build_processor, cpu_settings

STEPS = {"short": 1100, "long": 1400}
BATCH_SIZE = 32
LEARNING_RATE = 1.5e-3
RAMP_STEPS = 100
NUM_FIRST_LOSSES = 6
NUM_EVALUATION = 400
PACKAGES = ("torch", "transformers", "tokenizers", "pillow")


def warm_up(
    model: Any, processor: Any, *, num_steps: int, seed: int, problem_set: str = "short"
) -> Iterator[float]:
    """Train on the warm-up split and yield the loss of each step.

    The first half of a run does not depend on `num_steps`.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, num_steps)
    )
    supply = stream("warmup", seed, problem_set=problem_set)
    model.train()
    for _ in range(num_steps):
        batch = collate(processor, list(islice(supply, BATCH_SIZE)))
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.item()
    model.eval()


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Ramp up, stay flat, and fall linearly to 3 % over the second half."""
    return min(1.0, (step + 1) / RAMP_STEPS) * (0.03 + 0.97 * min(1.0, 2 * (1 - step / num_steps)))


def collate(processor: Any, batch: list[Problem]) -> dict[str, torch.Tensor]:
    """One padded batch whose labels are the solutions and their end token."""
    chats = [[*conversation(row), {"role": "assistant", "content": row.solution}] for row in batch]
    inputs = processor.apply_chat_template(
        chats,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"return_tensors": "pt", "padding": True},
    )
    ids = inputs["input_ids"]
    marker = ids == processor.tokenizer.convert_tokens_to_ids(ASSISTANT)
    is_solution = (marker.cumsum(1) == 1) & ~marker
    return {**inputs, "labels": ids.masked_fill(~is_solution, -100)}


def first_losses(seed: int, num: int = NUM_FIRST_LOSSES, *, problem_set: str = "short") -> list[float]:
    """The losses of a rebuild's first steps.

    In plain float32 they are the same on any CPU up to rounding, so they tell a changed recipe from a
    changed machine.
    """
    processor = build_processor(problem_set)
    model = build_model(processor, seed)
    steps = warm_up(model, processor, num_steps=STEPS[problem_set], seed=seed, problem_set=problem_set)
    return list(islice(steps, num))


def main() -> None:
    """Train, evaluate on the held-out split, and write weights (bf16), processor and warmup.json."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    start_losses = first_losses(args.seed, problem_set=args.problems)
    settings = cpu_settings(args.threads)
    processor = build_processor(args.problems)
    model = build_model(processor, args.seed)
    start = time.perf_counter()
    losses = []
    for loss in warm_up(model, processor, num_steps=args.steps, seed=args.seed, problem_set=args.problems):
        losses.append(loss)
        if len(losses) % 100 == 0:
            elapsed_s = time.perf_counter() - start
            print(f"step {len(losses)}  loss {sum(losses[-50:]) / 50:.4f}  {elapsed_s:.0f} s", flush=True)
    duration_s = time.perf_counter() - start

    model.to(torch.bfloat16).save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)  # as any other file of the package
    processor.save_pretrained(args.out)
    model.float()  # evaluate what was saved: rounded to bf16
    held_out = problems("held_out", NUM_EVALUATION, problem_set=args.problems)
    max_tokens = PROBLEM_SETS[args.problems].max_tokens
    record = {
        "command": _command(args),
        "seed": args.seed,
        "settings": settings,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "seconds": round(duration_s, 1),
        "first_losses_float32": start_losses,
        "last_loss": sum(losses[-50:]) / len(losses[-50:]),
        "held_out_sampled": evaluate(model, processor, held_out, greedy=False, max_new_tokens=max_tokens),
        "held_out_greedy": evaluate(model, processor, held_out, max_new_tokens=max_tokens),
    }
    (args.out / "warmup.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["held_out_sampled"]), json.dumps(record["held_out_greedy"]), sep="\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", choices=list(PROBLEM_SETS), default="short")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: those of the shipped checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.steps = args.steps or STEPS[args.problems]
    return args


def _command(args: argparse.Namespace) -> str:
    which = "" if args.problems == "short" else f" --problems {args.problems}"
    return f"python -m fastrl.testbed.warmup{which} --seed {args.seed} --steps {args.steps}"


if __name__ == "__main__":
    main()
