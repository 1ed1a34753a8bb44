"""A model's answers to the rows of a benchmark: one greedy, and as many sampled as pass@k needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fastrl.data.prompts import Template, messages
from fastrl.data.rows import Row


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn.

    Args:
        num_samples: Sampled answers per row; 0 = the greedy one alone.
        max_tokens: Most tokens of an answer.
        temperature: Of the sampled answers; no other cut of the distribution is made.
        seed: Of the sampled answers.
        template, system: Around the problem, as in training.
    """

    num_samples: int = 0
    max_tokens: int = 2048
    temperature: float = 1.0
    seed: int = 0
    template: Template | None = None
    system: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a model said to one row: a greedy text, and sampled ones."""

    greedy: str
    samples: tuple[str, ...]


class Sampler(Protocol):
    """A model that answers."""

    def answer(self, rows: Sequence[Row], sampling: Sampling) -> Iterator[Answers]:
        """Yield the answers of each row, in the order of rows."""
        ...


def chat(row: Row, sampling: Sampling) -> list[dict[str, Any]]:
    """The conversation that asks for a row's answer, as in training; content is text where it has no image."""
    return messages(row, sampling.template, sampling.system, as_blocks=bool(row.images))


def _seed(seed: int, start: int) -> int:
    return int(np.random.SeedSequence((seed, start)).generate_state(1)[0])


class TransformersSampler:
    """Answers by `transformers`' generate: every model, any device; slow for long answers of large models.

    Args:
        model: Folder or hub name.
        batch_size: Sequences that are generated at once.
        dtype: Of the weights; "auto" = as saved.
        processor: Keyword arguments of the processor, such as max_pixels.
    """

    def __init__(self, model: str, *, batch_size: int = 32, dtype: str = "auto", **processor: Any) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

        config = AutoConfig.from_pretrained(model)
        is_vlm = config.get_text_config() is not config
        kind = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        self._model = kind.from_pretrained(model, dtype=dtype).to(device).eval()
        self._processor = AutoProcessor.from_pretrained(model, **processor)
        self._batch_size = batch_size

    def answer(self, rows: Sequence[Row], sampling: Sampling) -> Iterator[Answers]:
        """Answer in batches; torch's own random state is as before afterwards."""
        import torch

        per_batch = max(1, self._batch_size // max(1, sampling.num_samples))
        for start in range(0, len(rows), per_batch):
            batch = rows[start : start + per_batch]
            greedy = self._generate(batch, sampling, do_sample=False)
            samples: list[list[str]] = [[] for _ in batch]
            if sampling.num_samples:
                with torch.random.fork_rng():
                    torch.manual_seed(_seed(sampling.seed, start))
                    samples = self._generate(
                        batch, sampling, do_sample=True, temperature=sampling.temperature, top_k=0, top_p=1.0,
                        num_return_sequences=sampling.num_samples,
                    )  # fmt: skip
            for (text,), drawn in zip(greedy, samples, strict=True):
                yield Answers(greedy=text, samples=tuple(drawn))

    def _generate(self, rows: Sequence[Row], sampling: Sampling, **options: Any) -> list[list[str]]:
        import torch

        chats = [
            self._processor.apply_chat_template(
                chat(row, sampling), add_generation_prompt=True, tokenize=False
            )
            for row in rows
        ]
        inputs: dict[str, Any] = {"text": chats}
        if any(row.images for row in rows):
            inputs["images"] = [[picture.decode() for picture in row.images] for row in rows]
        encoded = self._processor(
            **inputs, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(self._model.device)
        with torch.no_grad():
            output = self._model.generate(**encoded, max_new_tokens=sampling.max_tokens, **options)
        new = output[:, encoded["input_ids"].shape[1] :]
        texts = self._processor.batch_decode(new, skip_special_tokens=True)
        num = len(texts) // len(rows)
        return [texts[i * num : (i + 1) * num] for i in range(len(rows))]


class VllmSampler:
    """Answers by vLLM: for models and answers of real size.

    Args:
        model: Folder or hub name.
        engine: Keyword arguments of `vllm.LLM`, such as tensor_parallel_size.
    """

    def __init__(self, model: str, **engine: Any) -> None:
        from transformers import AutoProcessor
        from vllm import LLM

        self._llm = LLM(model, **engine)
        self._processor = AutoProcessor.from_pretrained(model)

    def answer(self, rows: Sequence[Row], sampling: Sampling) -> Iterator[Answers]:
        """Answer all rows at once: vLLM makes its own batches."""
        from vllm import SamplingParams

        prompts = [self._prompt(row, sampling) for row in rows]
        shared = {"max_tokens": sampling.max_tokens}
        greedy = self._llm.generate(prompts, SamplingParams(temperature=0.0, **shared))
        samples: list[Any] = [None] * len(rows)
        if sampling.num_samples:
            drawn = SamplingParams(
                n=sampling.num_samples, temperature=sampling.temperature, seed=sampling.seed, **shared
            )
            samples = self._llm.generate(prompts, drawn)
        for first, rest in zip(greedy, samples, strict=True):
            texts = () if rest is None else tuple(output.text for output in rest.outputs)
            yield Answers(greedy=first.outputs[0].text, samples=texts)

    def _prompt(self, row: Row, sampling: Sampling) -> dict[str, Any]:
        text = self._processor.apply_chat_template(
            chat(row, sampling), add_generation_prompt=True, tokenize=False
        )
        prompt: dict[str, Any] = {"prompt": text}
        if row.images:
            prompt["multi_modal_data"] = {"image": [picture.decode() for picture in row.images]}
        return prompt
