"""Rollouts that a run has left behind, step by step: TRL's completions, verl's rollout data, FastRL's own records.

| format | where | a step | a group |
|---|---|---|---|
| trl | `output_dir/completions/completions_*.parquet` (`log_completions=True`) | a file | rows in order |
| verl | `trainer.rollout_data_dir`: `1.jsonl`, `2.jsonl`, ... | a file | lines of one `uid`, else `input` |
| fastrl | `rollouts.jsonl` (`fastrl.trace: true`) | lines of one step | as recorded |

One step is in memory at a time, so a folder may be larger than memory. What cannot be read is counted, never guessed.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.trace import group_of
from fastrl.types import ConfigError, FastRLError, Group

Tokenize = Callable[[str], Sequence[int]]
_Row = Mapping[str, Any]
_TRL_COLUMNS = ("step", "prompt", "completion", "advantage")


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """The groups of one step.

    Args:
        step: Its number in the log.
        groups: Those with at least two rollouts.
        problems: Kind of problem -> how often it was met in this step.
    """

    step: int
    groups: list[Group]
    problems: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log that was found.

    Args:
        kind: trl, verl or fastrl.
        files: In the order of steps; for fastrl the one file.
        num_steps: Steps that it holds.
    """

    kind: str
    files: list[Path]
    num_steps: int


def find_log(path: Path) -> Log:
    """Find a log in a folder, or take a file.

    Raises:
        ConfigError: nothing that is known, or EasyR1's generations.log, which has no groups.
    """
    folders = [path, path / "completions", path / "fastrl"] if path.is_dir() else []
    for files in [[path], *(sorted(folder.glob("*")) for folder in folders)]:
        log = _log_of([file for file in files if file.is_file()])
        if log is not None:
            return log
    validation = path / "generations.log" if path.is_dir() else path
    if validation.name == "generations.log" and validation.is_file():
        raise ConfigError(
            f"{validation}: EasyR1 writes a few answers of its validation here, without groups or steps. Pruning needs "
            "all rollouts of a prompt, which EasyR1 itself does not log. Run python -m fastrl.integrations.easyr1 with "
            "fastrl.pruner=none fastrl.budget=fixed fastrl.trace=true: EasyR1's own run, which writes rollouts.jsonl."
        )
    raise ConfigError(
        f"{path}: no rollouts there. Known: completions_*.parquet (TRL with log_completions=True), 1.jsonl, 2.jsonl, "
        "... (verl's trainer.rollout_data_dir), rollouts.jsonl (FastRL with trace: true)."
    )


def _log_of(files: Sequence[Path]) -> Log | None:
    """The log that some of these files are."""
    tables = [file for file in files if file.name.startswith("completions_") and file.suffix == ".parquet"]
    if tables:
        return Log(kind="trl", files=tables, num_steps=len(tables))
    records = [file for file in files if file.name == "rollouts.jsonl"]
    if records:
        return Log(kind="fastrl", files=records, num_steps=len(set(_step_marks(records[0]))))
    numbered = [file for file in files if file.suffix == ".jsonl" and file.stem.isdigit()]
    if numbered:
        return Log(kind="verl", files=sorted(numbered, key=lambda f: int(f.stem)), num_steps=len(numbered))
    return None


def read_log(log: Log, tokenize: Tokenize, *, outcome: str | None = None) -> Iterator[LoggedStep]:
    """Yield the steps of a log.

    Args:
        log: From `find_log`.
        tokenize: Text -> token ids; not used for fastrl, which records tokens.
        outcome: Column that decides zero variance, such as an accuracy; None = the total reward.
    """
    if log.kind == "fastrl":
        yield from _fastrl_steps(log.files[0])
        return
    read, group = (_trl_rows, _in_order) if log.kind == "trl" else (_verl_rows, _in_any_order)
    for number, file in enumerate(log.files, start=1):
        problems: Counter[str] = Counter()
        rows = list(read(file, outcome, problems))
        step = int(rows[0]["step"]) if rows and rows[0].get("step") is not None else number
        found = group(rows, problems)
        problems["group of one"] += sum(len(members) < 2 for members in found)
        groups = [_group(members, tokenize) for members in found if len(members) > 1]
        yield LoggedStep(step=step, groups=groups, problems=+problems)


def whitespace_ids() -> Tokenize:
    """Words as tokens, numbered as they come: enough to compare rollouts without a tokenizer."""
    known: dict[str, int] = {}

    def tokenize(text: str) -> list[int]:
        return [known.setdefault(word, len(known)) for word in text.split()]

    return tokenize


def tokenizer_ids(file: Path) -> Tokenize:
    """The tokens of a `tokenizer.json`.

    Raises:
        ConfigError: no such file, or not one of the tokenizers library.
    """
    from tokenizers import Tokenizer

    path = file / "tokenizer.json" if file.is_dir() else file
    if not path.is_file():
        raise ConfigError(f"{file}: no tokenizer.json there.")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _trl_rows(file: Path, outcome: str | None, problems: Counter[str]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowInvalid, OSError):
        problems["file unreadable"] += 1
        return
    missing = {"prompt", "completion"} - set(table.column_names)
    if missing:
        problems[f"no column {', '.join(sorted(missing))}"] += 1
        return
    rewards = [
        name
        for name, kind in zip(table.column_names, table.schema.types, strict=True)
        if name not in _TRL_COLUMNS and not name.startswith("fastrl/") and pyarrow.types.is_floating(kind)
    ]
    _check_outcome(outcome, rewards, file)
    for row in table.to_pylist():
        parts = [row[name] for name in rewards if row[name] is not None and row[name] == row[name]]
        yield {
            "step": row.get("step"),
            "prompt": row.get("fastrl/group") or json.dumps(row["prompt"], sort_keys=True),
            "text": _text(row["completion"]),
            "reward": sum(parts) if parts else np.nan,
            "outcome": None if outcome is None else row[outcome],
            "advantage": row.get("advantage"),
        }


def _verl_rows(file: Path, outcome: str | None, problems: Counter[str]) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
                found = {
                    "step": row.get("step"),
                    "prompt": row["input"],
                    "sample": _sample_of(row.get("uid")),
                    "text": row["output"],
                    "reward": float(row["score"]),
                    "advantage": None,
                }
            except (json.JSONDecodeError, KeyError, TypeError, ValueError):
                problems["line unreadable"] += 1
                continue
            _check_outcome(outcome, row, file)
            yield {**found, "outcome": None if outcome is None else row[outcome]}


def _sample_of(uid: Any) -> str | None:
    """The sample in a key of verl 0.9, which is {sample}_{rollout}_{output}."""
    sample, *places = str(uid).rsplit("_", 2)
    return sample if len(places) == 2 and all(place.isdigit() for place in places) else None


def _check_outcome(outcome: str | None, columns: Any, file: Path) -> None:
    if outcome is not None and outcome not in columns:
        raise ConfigError(
            f"{file}: no column {outcome!r} to decide zero variance by. There is {', '.join(columns)}."
        )


def _in_order(rows: Sequence[_Row], problems: Counter[str]) -> list[list[_Row]]:
    """Groups of rows that lie one after the other, as TRL writes them.

    Neighbours may have the same text and other images ("Find x."), so a run of equal prompts may be several groups:
    the number of rollouts is the largest that divides all runs.
    """
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row["prompt"])]
    size = gcd(*map(len, runs)) if runs else 0
    if size < 2:
        size = _usual(runs)
    groups = []
    for run in runs:
        if len(run) % size:
            problems["group of another size"] += 1
            groups.append(run)
        else:
            groups += [run[start : start + size] for start in range(0, len(run), size)]
    return groups


def _in_any_order(rows: Sequence[_Row], problems: Counter[str]) -> list[list[_Row]]:
    """Groups of rows in any order, as verl writes them after it has balanced its batch.

    verl 0.9 writes the sample of each row. Without it, prompts of the same text cannot be told apart, and are left out.
    """
    has_samples = all(row["sample"] is not None for row in rows)
    together: dict[str, list[_Row]] = {}
    for row in rows:
        together.setdefault(row["sample" if has_samples else "prompt"], []).append(row)
    if has_samples:
        return list(together.values())
    size, groups = _usual(list(together.values())), []
    for group in together.values():
        if len(group) > size and len(group) % size == 0:
            problems["prompts of one text"] += len(group) // size
        else:
            problems["group of another size"] += len(group) != size
            groups.append(group)
    return groups


def _usual(groups: Sequence[Sequence[Any]]) -> int:
    return Counter(map(len, groups)).most_common(1)[0][0] if groups else 0


def _group(rows: Sequence[_Row], tokenize: Tokenize) -> Group:
    rewards = np.array([row["reward"] for row in rows], dtype=np.float64)
    advantages = None
    if all(row["advantage"] is not None for row in rows):
        advantages = np.nan_to_num(np.array([row["advantage"] for row in rows], dtype=np.float64))
    has_outcomes = all(row["outcome"] is not None for row in rows)
    return Group(
        prompt_id=blake2b(rows[0]["prompt"].encode("utf-8", "replace"), digest_size=8).hexdigest(),
        tokens_G=[tokenize(row["text"]) for row in rows],
        rewards_G=rewards,
        advantages_G=advantages,
        outcomes_G=np.array([row["outcome"] for row in rows], dtype=np.float64) if has_outcomes else None,
    )


def _text(completion: Any) -> str:
    """A completion as text: a string, or the contents of a conversation's messages."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message.get("content") or "") for message in completion or ())


def _step_marks(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            start = line.find('"step": ')
            if start >= 0:
                yield line[start : line.find(",", start)]


def _fastrl_steps(file: Path) -> Iterator[LoggedStep]:
    problems: Counter[str] = Counter()

    def records() -> Iterator[dict[str, Any]]:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                    places = record["step"], record["group"], record["rollout"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    problems["line unreadable"] += 1
                    continue
                if all(isinstance(place, int) for place in places):
                    yield record

    for step, of_step in groupby(records(), key=lambda record: record["step"]):
        groups = []
        for _, of_group in groupby(of_step, key=lambda record: record["group"]):
            rows = list(of_group)
            try:
                group = group_of(rows, file)
            except FastRLError:
                group = None
            if group is None or group.num_rollouts < 2:
                problems["group not whole"] += 1
            else:
                groups.append(group)
        yield LoggedStep(step=step, groups=groups, problems=Counter(problems))
        problems.clear()
