"""Commands that prepare: data, settings, the installation."""

from pathlib import Path
from typing import Annotated, Literal

import tyro


def data(
    name: tyro.conf.Positional[str], /, to: Literal["trl", "verl", "easyr1"] | None = None,
    out: Path | None = None, source: str | None = None, splits: tuple[str, ...] = (),
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    keep_good: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False, limit: int | None = None,
    prompt: str | None = None, system: str | None = None, columns: tuple[str, ...] = (),
    max_prompt_tokens: int | None = None, model: str | None = None, max_pixels: int | None = None,
) -> None:  # fmt: skip
    """Check a data set row by row, and write it as the parquet files that an engine reads.

    Args:
        name: geometry3k, geoqa8k-r1v, math, or file (JSONL, CSV or parquet of your own).
        to: Engine to write for; needs --out.
        out: Folder of the files, one for each split.
        source: Where the data lies: folder, zip, file or hub name. Default: the published name on the hub.
        splits: Which splits. Default: train and test; of a file, train.
        check: Check only, and write nothing.
        keep_good: Leave out rows with faults, and say which; otherwise they stop the command.
        limit: Take the first so many good rows of each split.
        prompt: Template around the problem: a name that ships with FastRL (paper, easyr1_math, r1v, accuracy) or a
            .jinja file. EasyR1 adds its own (data.format_prompt).
        system: System message.
        columns: Of a file: ours=theirs, such as problem=question.
        max_prompt_tokens: Longer prompts are faults; without --model only image tokens are counted, by Qwen's rule.
        model: Folder or name of the model whose processor counts tokens.
        max_pixels: Largest image for the model; larger ones are shrunk before tokens are counted.
    """
    from fastrl.data.prepare import Request, prepare

    request = Request(
        name=name, check=check, to=to, out=out, source=source, splits=splits, keep_good=keep_good, limit=limit,
        prompt=prompt, system=system, columns=columns, max_prompt_tokens=max_prompt_tokens, model=model,
        max_pixels=max_pixels,
    )  # fmt: skip
    for done in prepare(request):
        print(f"{done.split}: {done.report}")
        if done.file is not None:
            print(f"{done.split}: written to {done.file}")


def config(check: Path | None = None, print_defaults: bool = False) -> None:
    """Check a file of settings, or print the defaults, which are the published setting.

    Args:
        check: Recipe, or YAML file with settings of FastRL; prints all settings that result.
        print_defaults: Print the defaults as YAML (also without any option).
    """
    import yaml

    from fastrl.bench.recipe import check_file
    from fastrl.config import FastRLConfig

    if check is not None:
        print(yaml.safe_dump(check_file(check), sort_keys=False), end="")
    if print_defaults or check is None:
        print(yaml.safe_dump(FastRLConfig().to_dict(), sort_keys=False), end="")


def doctor(recipe: Path | None = None) -> int:
    """Check this installation, this machine and optionally a recipe; say how to mend what is wrong.

    Args:
        recipe: Recipe whose batch sizes are checked.
    """
    from rich.console import Console

    from fastrl.bench.doctor import examine
    from fastrl.report.console import doctor_table

    checks = examine(recipe)
    Console().print(doctor_table([check.to_dict() for check in checks]))
    return int(any(check.status == "problem" for check in checks))
