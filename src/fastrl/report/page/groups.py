"""Some groups of a run, to look at: every rollout with its reward, its fate, and the distances inside its class."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.advantages import advantage_classes
from fastrl.report.page.problems import Decoder, Prompts
from fastrl.report.page.read import dig, read_json
from fastrl.similarity import SIMILARITIES
from fastrl.trace import group_of
from fastrl.types import Group

MOST_CHARACTERS = 8_000
"""Of one text on the page; how long the whole is, is said."""
_NOT_RECORDED = ("surprisal", "gradient")
"""Similarities that need what records do not hold."""
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the records of a group lie in a file.

    Args:
        step, group: Of the records.
        start, end: Bytes of the file.
        num_dropped: Rollouts that were not kept.
        has_signal: Whether their advantages differ from 0.
        num_different: Different rollouts.
    """

    step: int
    group: int
    start: int
    end: int
    num_dropped: int
    has_signal: bool
    num_different: int


def sample_groups(folder: Path, run: Mapping[str, Any], num: int) -> dict[str, Any]:
    """Choose and read groups of a run, evenly over steps, those with dropped rollouts first.

    Args:
        folder: Of the run.
        run: As read.
        num: Groups in all.

    Returns:
        groups, and notes: why there are none, or what is missing.
    """
    files = sorted(folder.rglob("rollouts.jsonl"))
    if not files or not num:
        reason = "No rollouts were recorded: train with fastrl.trace: true (--set fastrl.trace=true) to see groups."
        return {"groups": [], "notes": [reason if num else "Groups were left out (--groups 0)."]}
    groups: list[dict[str, Any]] = []
    notes: list[str] = []
    shown = [files[round(i)] for i in np.linspace(0, len(files) - 1, min(num, len(files)))]
    if len(files) > len(shown):
        notes.append(f"{len(files)} records were found; groups of {len(shown)} of them are shown.")
    for file, share in zip(shown, _shares(num, len(shown)), strict=True):
        try:
            groups += _of_file(file, folder, run, share, notes)
        except (ValueError, KeyError, TypeError, OSError) as error:  # what else than records may lie there
            notes.append(f"{file.relative_to(folder)}: {error}")
    return {"groups": groups, "notes": list(dict.fromkeys(notes))}


def _shares(num: int, parts: int) -> list[int]:
    return [num // parts + (part < num % parts) for part in range(parts)]


def _of_file(
    file: Path, folder: Path, run: Mapping[str, Any], num: int, notes: list[str]
) -> list[dict[str, Any]]:
    settings = read_json(file.with_name("run.json")).get("fastrl") or dig(run, "settings", "fastrl") or {}
    method = file.parents[2] if file.parent.name == "fastrl" and len(file.parents) > 2 else file.parent
    seed = re.search(r"seed-?(\d+)", str(file.relative_to(folder)))
    prompts = Prompts(run["settings"], seed=int(seed[1]) if seed else None)
    decoder = Decoder(method / "model", run["settings"])
    found = [
        _described(records, settings, prompts, decoder, str(method.relative_to(folder)))
        for records in _read(file, choose(index(file), num))
    ]
    notes += [note for note in (prompts.note, decoder.note) if note]
    if settings.get("similarity") in _NOT_RECORDED:
        notes.append(
            f"Distances are those of Jaccard: {settings['similarity']} needs what records do not hold."
        )
    return found


def index(file: Path) -> list[Place]:
    """Find whole groups in a file of records, in the order of the file; no rollout is held in memory."""
    places: list[Place] = []
    position, start = 0, 0
    rows: list[tuple[int, int, int, bool, bool, int]] = []
    with file.open("rb") as lines:
        for line in lines:
            row = _light(line)
            if row is None:  # the half line of a run that is writing, or a line of something else
                position += len(line)
                rows, start = [], position
                continue
            if rows and row[:2] != rows[0][:2]:
                rows, start = [], position
            position += len(line)
            rows.append(row)
            if len(rows) == row[2]:
                places.append(
                    Place(
                        step=row[0], group=row[1], start=start, end=position,
                        num_dropped=sum(not r[3] for r in rows), has_signal=any(r[4] for r in rows),
                        num_different=len({r[5] for r in rows}),
                    )
                )  # fmt: skip
                rows, start = [], position
    return places


def _light(line: bytes) -> tuple[int, int, int, bool, bool, int] | None:
    """(step, group, rollouts of the group, kept, has an advantage, a hash of the tokens) of a record."""
    try:
        record = json.loads(line)
        return (
            int(record["step"]), int(record["group"]), int(record["num_rollouts"]), bool(record["keep"]),
            bool(record["advantage"]), hash(tuple(record["tokens"])),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None


def choose(places: Sequence[Place], num: int) -> list[Place]:
    """Choose groups: steps evenly over the run; within a step those where pruning had a choice to make first."""
    by_step: dict[int, list[Place]] = {}
    for place in places:
        by_step.setdefault(place.step, []).append(place)
    steps = sorted(by_step)
    if not steps:
        return []
    chosen = sorted({round(x) for x in np.linspace(0, len(steps) - 1, min(num, len(steps)))})
    picked = []
    for step, share in zip((steps[i] for i in chosen), _shares(num, len(chosen)), strict=True):
        ranked = sorted(by_step[step], key=_rank)
        picked += sorted(ranked[:share], key=lambda place: place.group)
    return picked


def _rank(place: Place) -> tuple[bool, bool, int]:
    return not (place.has_signal and place.num_dropped), not place.num_dropped, -place.num_different


def _read(file: Path, places: Iterable[Place]) -> Iterable[list[dict[str, Any]]]:
    with file.open("rb") as content:
        for place in places:
            content.seek(place.start)
            yield [json.loads(line) for line in content.read(place.end - place.start).splitlines()]


def _described(
    records: list[dict[str, Any]],
    settings: Mapping[str, Any],
    prompts: Prompts,
    decoder: Decoder,
    method: str,
) -> dict[str, Any]:
    """One group as the page shows it."""
    group = group_of(records, "rollouts.jsonl")
    records = sorted(records, key=lambda record: record["rollout"])
    prompt = prompts.of(group.prompt_id)
    classes = _classes(group, settings)
    return {
        "method": method,
        "step": records[0]["step"] + 1,
        "prompt_id": shown_text(group.prompt_id)["text"],
        "prompt": None if prompt is None else shown_text(prompt["text"]),
        "answer": None if prompt is None else shown_text(prompt["answer"])["text"],
        "images": [] if prompt is None else prompt["images"],
        "reason": str(records[0]["reason"]),
        "tau": settings.get("tau"),
        "num_kept": sum(record["keep"] for record in records),
        "num_rollouts": len(records),
        "rollouts": [_rollout(record, records, classes, decoder) for record in records],
        "classes": classes,
    }


def _rollout(
    record: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    classes: Sequence[Mapping[str, Any]],
    decoder: Decoder,
) -> dict[str, Any]:
    kept = ("reward", "outcome", "advantage", "keep", "weight", "cluster")
    return {
        "index": record["rollout"],
        "num_tokens": len(record["tokens"]),
        **{name: record[name] for name in kept},
        "fate": _fate(record, records, classes),
        **shown_text(decoder.text(record["tokens"])),
    }


def _fate(
    record: Mapping[str, Any], records: Sequence[Mapping[str, Any]], classes: Sequence[Mapping[str, Any]]
) -> str:
    """What a kept rollout stands for, or what stands for a dropped one, and how far away it is."""
    index, leader = record["rollout"], record["cluster"]
    if record["keep"]:
        others = sum(other["cluster"] == index for other in records) - 1
        return f"stands for itself and {others} more" if others > 0 else "stands for itself"
    if record["reward"] is None:
        return "has no reward"
    if leader < 0:
        return f"its group was dropped ({record['reason']})"
    for found in classes:
        members = found["members"]
        if index in members and leader in members:
            distance = found["distances"][members.index(index)][members.index(leader)]
            return f"rollout {leader} stands for it, at distance {distance:.2f}"
    return f"rollout {leader} stands for it"


def _classes(group: Group, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Classes of equal advantage, with the distances of their members."""
    name = settings.get("similarity", "jaccard")
    name = name if name in SIMILARITIES and name not in _NOT_RECORDED else "jaccard"
    distance_GG = 1.0 - SIMILARITIES[name](group, int(settings.get("ngram") or 1))
    advantages_G = np.zeros(group.num_rollouts) if group.advantages_G is None else group.advantages_G
    classes = advantage_classes(advantages_G, group.scorable_G, float(settings.get("advantage_tol") or 1e-4))
    described = [
        {
            "advantage": float(advantages_G[members[0]]),
            "members": members,
            "similarity": name,
            "distances": np.round(distance_GG[np.ix_(members, members)], 4).tolist(),
        }
        for members in classes
    ]
    unscorable = np.flatnonzero(~group.scorable_G).tolist()
    if unscorable:
        described.append({"advantage": None, "members": unscorable, "similarity": name, "distances": []})
    return described


def shown_text(text: str) -> dict[str, Any]:
    """A text that may be shown: cut where it is long, control characters as pictures, marks of direction counted."""
    cut = text[:MOST_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return {
        "text": "".join(_picture(c) for c in cut),
        "num_characters": len(text),
        "is_cut": len(text) > MOST_CHARACTERS,
        "num_direction_marks": len(_BIDI.findall(text)),
    }


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20 and character not in "\n\t":
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else character
