"""A user's own rollouts: JSON lines with a prompt, its completions and their rewards, as their model reads them.

    {"id": "q1", "prompt": "2 + 2 =" , "completions": ["4", "5"], "rewards": [1, 0]}

`prompt` is a text or a list of chat messages (of text), `completions` are texts or lists of token ids, a reward is a
number or null. Optional: `id` (else the number of the line), `outcomes`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.bench.gradients import Sample, with_completion
from fastrl.types import Group, GroupError


def read_sample(model: str, path: str | Path) -> Sample:
    """Load a causal language model, and the rollouts in a file as it reads them.

    For vision-language models, build `Rollout`s yourself and call `fastrl.bench.gradients.gram_matrices`.

    Args:
        model: Folder or name, as transformers takes it. Its own code is never run (trust_remote_code is off).
        path: JSON lines.

    Raises:
        GroupError: a line that is no such record; names file and line.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    groups, rollouts_PG = [], []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt = _encode_prompt(tokenizer, record["prompt"])
            tokens_G = [_encode_completion(tokenizer, completion) for completion in record["completions"]]
            groups.append(_group(record, tokens_G, number))
        except (KeyError, TypeError, ValueError) as error:
            what = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise GroupError(
                f"{path}, line {number}: {what}. A line holds prompt, completions and rewards."
            ) from error
        rollouts_PG.append([with_completion(prompt, tokens_T) for tokens_T in tokens_G])
    if not groups:
        raise GroupError(f"{path} holds no rollouts. Give one JSON record per line and prompt.")
    return Sample(model=loaded, groups=groups, rollouts_PG=rollouts_PG)


def _encode_prompt(tokenizer: Any, prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return dict(tokenizer(prompt, return_tensors="pt"))
    return dict(
        tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    )


def _encode_completion(tokenizer: Any, completion: Any) -> list[int]:
    if isinstance(completion, str):
        return tokenizer(completion, add_special_tokens=False)["input_ids"]
    return [int(token) for token in completion]


def _group(record: Mapping[str, Any], tokens_G: list[list[int]], number: int) -> Group:
    outcomes = record.get("outcomes")
    return Group(
        prompt_id=str(record.get("id", number)),
        tokens_G=tokens_G,
        rewards_G=np.array(record["rewards"], dtype=np.float64),
        outcomes_G=None if outcomes is None else np.array(outcomes, dtype=np.float64),
    )
