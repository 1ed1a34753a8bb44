"""Held-out accuracy of a model on testbed problems, by generation and the rewards' own grading."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from fastrl.data.testbed import Problem
from fastrl.rewards import extract_boxed, grade_answer, has_format


def conversation(problem: Problem) -> list[dict[str, Any]]:
    """The prompt as a chat with a picture in it."""
    content = [{"type": "image", "image": problem.image}, {"type": "text", "text": problem.question}]
    return [{"role": "user", "content": content}]


def evaluate(
    model: Any,
    processor: Any,
    problems: Sequence[Problem],
    *,
    greedy: bool = True,
    seed: int = 0,
    batch_size: int = 120,
    max_new_tokens: int = 24,
) -> dict[str, Any]:
    """Answer each problem once; return `accuracy`, `format`, `families` (accuracy of each) and `num`.

    Sampling is at temperature 1 from `seed`. The global random state of torch and the model's training
    mode are as before afterwards, so evaluating during training changes nothing.
    """
    if not problems:
        raise ValueError("evaluate() got no problems; pass at least one.")
    right, texts = _right(model, processor, problems, greedy, seed, batch_size, max_new_tokens)
    families = defaultdict(list)
    for problem, value in zip(problems, right, strict=True):
        families[problem.family].append(value)
    return {
        "accuracy": sum(right) / len(right),
        "format": sum(map(has_format, texts)) / len(texts),
        "families": {family: sum(values) / len(values) for family, values in families.items()},
        "num": len(problems),
    }


def _right(
    model: Any,
    processor: Any,
    problems: Sequence[Problem],
    greedy: bool,
    seed: int,
    batch_size: int,
    max_new_tokens: int,
) -> tuple[list[float], list[str]]:
    """Grade one answer to each problem; random state and training mode stay as they were."""
    was_training = model.training
    cuda = [model.device] if model.device.type == "cuda" else []
    model.eval()
    try:
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(seed)
            texts = [
                text
                for start in range(0, len(problems), batch_size)
                for text in _answer(
                    model, processor, problems[start : start + batch_size], greedy, max_new_tokens
                )
            ]
    finally:
        model.train(was_training)
    right = [grade_answer(extract_boxed(t), p.answer) or 0.0 for t, p in zip(texts, problems, strict=True)]
    return right, texts


def pass_at(
    model: Any,
    processor: Any,
    problems: Sequence[Problem],
    *,
    k: int,
    seed: int = 0,
    batch_size: int = 120,
    max_new_tokens: int = 24,
) -> float:
    """The share of problems that at least one of k answers gets right, sampled at temperature 1 (pass@k)."""
    if not problems or k < 1:
        raise ValueError(
            f"pass_at() got {len(problems)} problems and k = {k}; it needs at least one of each."
        )
    repeated = [problem for problem in problems for _ in range(k)]
    right = _right(model, processor, repeated, False, seed, batch_size, max_new_tokens)[0]
    return sum(any(right[i : i + k]) for i in range(0, len(right), k)) / len(problems)


@torch.no_grad()
def _answer(
    model: Any, processor: Any, problems: Sequence[Problem], greedy: bool, max_new_tokens: int
) -> list[str]:
    inputs = processor.apply_chat_template(
        [conversation(problem) for problem in problems],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"return_tensors": "pt", "padding": True},
    ).to(model.device)
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    output = model.generate(**inputs, **sampling, max_new_tokens=max_new_tokens)
    return processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
