"""Out-of-domain sets by lmms-eval, in an environment of its own: it generates, our grading reads.

lmms-eval asks with its own prompts and logs every answer. The score of our rules is made from those logs. A judge,
where one is asked for, is lmms-eval's own affair, and its score is kept apart.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastrl.bench.answers import Answers, Sampling
from fastrl.bench.files import write_json
from fastrl.bench.standins import write_standin
from fastrl.data.rows import Row
from fastrl.rewards.extraction import extract_answer
from fastrl.rewards.rules import RULES
from fastrl.types import ConfigError

DEFAULT_PYTHON = ".venv-lmms/bin/python"
STANDIN = "standin"
"""The source of our ten-item stand-ins."""
KINDS = {
    "llava": "llava_hf", "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl",
}  # fmt: skip
"""Type of a model in transformers -> lmms-eval's name of it."""
_CHOICE = re.compile(r"(?:^|[\n;]|Choices:)[ ]*([A-H])[.:)][ ]?(.*?)(?=\s*(?:[\n;]|$))")
_MAX_BARE = 32  # characters: a text so short, without box or tags, is an answer and nothing else


def extract_stated(text: str) -> str | None:
    """The answer in a box or in tags; else a text of at most 32 characters as a whole; else None."""
    found = extract_answer(text)
    if found is None and 0 < len(text.strip()) <= _MAX_BARE:
        return text.strip()
    return found


STATED = replace(RULES["accuracy"], extract=extract_stated)
"""The rule for lmms-eval's prompts: no format of ours is asked for, and a bare short answer counts."""


@dataclass(frozen=True, kw_only=True)
class Harness:
    """An installed lmms-eval and how it is to load models.

    Args:
        python: Of its environment.
        kind: lmms-eval's name of the kind of model; None = by the type of the model.
        judge: Let it judge too; needs the key of the judge's interface (OPENAI_API_KEY).
    """

    python: str = DEFAULT_PYTHON
    kind: str | None = None
    judge: bool = False

    def tasks_folder(self) -> Path:
        """Where its task files lie.

        Raises:
            ConfigError: there is no lmms-eval.
        """
        code = "import importlib.util as u; print(u.find_spec('lmms_eval').submodule_search_locations[0])"
        try:
            found = subprocess.run(
                [self.python, "-c", code], capture_output=True, text=True, check=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"{self.python} has no lmms-eval ({error}). Make its environment with `make venv-lmms`, or name one "
                "with --lmms-python."
            ) from error
        return Path(found.stdout.strip()) / "tasks"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What lmms-eval gave for one model and task: rows, answers to them, and the scores of its judge."""

    rows: list[Row]
    answers: list[Answers]
    judged: dict[str, float]


def run_task(
    harness: Harness,
    benchmark: str,
    task: str,
    model: str,
    sampling: Sampling,
    folder: Path,
    *,
    source: str | None = None,
    limit: int | None = None,
) -> Outcome:
    """Answer a task greedily, and once more for each sampled answer.

    Args:
        harness: Which lmms-eval.
        benchmark, task: Our name, and lmms-eval's.
        model: Folder or hub name.
        sampling: Number of samples, their temperature, most tokens, seed; the prompt is the task's own.
        folder: For logs; a pass that is finished there is not run again.
        source: `standin`, or a folder with task files that lmms-eval is to include; None = its own, from the hub.
        limit: The first so many items.
    """
    include = source
    if source == STANDIN:
        include = str(folder / "standin")
        task = write_standin(benchmark, Path(include), harness.tasks_folder())
    options = ["--tasks", task]
    if include is not None:
        options += ["--include_path", include]
    if limit is not None:
        options += ["--limit", str(limit)]
    greedy, judged = _pass(harness, model, options, sampling, folder / "greedy", seed=None)
    rows = [_row(benchmark, sample) for sample in greedy]
    drawn = [
        _pass(harness, model, options, sampling, folder / f"sample-{i}", seed=sampling.seed + i)[0]
        for i in range(sampling.num_samples)
    ]
    answers = [
        Answers(greedy=_text(sample), samples=tuple(_text(samples[i]) for samples in drawn))
        for i, sample in enumerate(greedy)
    ]
    return Outcome(rows=rows, answers=answers, judged=judged)


def choices_in(question: str) -> tuple[str, ...] | None:
    """The texts of the choices A, B, ... that a question lists; None if it lists none."""
    found: list[str] = []
    for letter, text in _CHOICE.findall(question):
        if ord(letter) - ord("A") == len(found):
            found.append(text.strip())
    return tuple(found) if len(found) > 1 else None


def _pass(
    harness: Harness,
    model: str,
    options: Sequence[str],
    sampling: Sampling,
    folder: Path,
    *,
    seed: int | None,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run lmms-eval once, unless its logs with the same command lie there; return samples and metrics."""
    command = [*_command(harness, model, sampling, seed), *options]
    done = folder / "command.json"
    if not done.is_file() or json.loads(done.read_text(encoding="utf-8")) != command:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.rglob("*_*.json*"):
            old.unlink()
        _run(harness, [*command, "--output_path", str(folder)], folder / "log.txt")
        write_json(done, command)
    samples = [json.loads(line) for file in _logs(folder, "*_samples_*.jsonl") for line in _lines(file)]
    samples.sort(key=lambda sample: int(sample["doc_id"]))
    return samples, _metrics(folder) if harness.judge else {}


def _command(harness: Harness, model: str, sampling: Sampling, seed: int | None) -> list[str]:
    import torch

    kind = harness.kind or _kind(model)
    name = "model" if kind.startswith("vllm") else "pretrained"
    arguments = f"{name}={model}"
    if not torch.accelerator.is_available():
        arguments += ",device=cpu,device_map=cpu"
    generation = f"max_new_tokens={sampling.max_tokens}"
    if seed is None:
        generation += ",temperature=0,do_sample=False"
    else:
        generation += f",temperature={sampling.temperature},top_p=1.0,do_sample=True"
    command = [
        harness.python, "-m", "lmms_eval", "--model", kind, "--model_args", arguments, "--batch_size", "1",
        "--log_samples", "--gen_kwargs", generation, "--seed", str(seed or 0),
    ]  # fmt: skip
    return command if harness.judge else [*command, "--predict_only"]


def _kind(model: str) -> str:
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(model).model_type
    if found not in KINDS:
        raise ConfigError(
            f"{model} is of the type {found}, and which of lmms-eval's kinds loads it is not known. Name it with "
            f"--lmms-model. Known: {', '.join(KINDS)}."
        )
    return KINDS[found]


def _run(harness: Harness, command: Sequence[str], log: Path) -> None:
    environment = {**os.environ}
    if harness.judge and not environment.get("OPENAI_API_KEY"):
        raise ConfigError("--judge: lmms-eval's judge needs a key. Set OPENAI_API_KEY, or leave --judge out.")
    # Tasks make a client when they are loaded; without a judge nobody calls it.
    environment.setdefault("OPENAI_API_KEY", "unused")
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    # lmms-eval ends with 0 after an error, too: only its logs say that it is done.
    if done.returncode or not list(_logs(log.parent, "*_samples_*.jsonl")):
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
        raise ConfigError(f"lmms-eval failed; the last line of {log}: {''.join(last)[:500]}")


def _logs(folder: Path, pattern: str) -> Iterator[Path]:
    yield from sorted(folder.rglob(pattern))


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]


def _metrics(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for file in _logs(folder, "*_results.json"):
        results: Mapping[str, Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["results"]
        for values in results.values():
            for key, value in values.items():
                metric = key.partition(",")[0]
                if isinstance(value, int | float) and not metric.endswith("_stderr"):
                    found[metric] = float(value)
    return found


def _row(benchmark: str, sample: Mapping[str, Any]) -> Row:
    return Row(
        id=f"{benchmark}-{int(sample['doc_id']):05d}",
        problem=str(sample["input"]),
        answer=str(sample["target"]).strip(),
        source=benchmark,
        choices=choices_in(str(sample["input"])),
    )


def _text(sample: Mapping[str, Any]) -> str:
    """What the model said, reasoning included: a text, or lists around one.

    lmms-eval leaves `resps` out where it is the same as `filtered_resps`.
    """
    found = sample.get("resps", sample.get("filtered_resps"))
    while isinstance(found, list):
        found = found[0] if found else ""
    return str(found)
