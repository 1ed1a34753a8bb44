"""Commands that look at rollouts and runs, without training."""

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def analyze(
    path: tyro.conf.Positional[Path],
    /,
    settings: tuple[Path, ...] = (),
    stages: tuple[str, ...] = (),
    tokenizer: Path | None = None,
    outcome: str | None = None,
    steps_per_epoch: int | None = None,
    out: Path = Path("runs/analyze"),
) -> None:
    """What would pruning have dropped of a run that you already have? No GPU, no model.

    Args:
        path: Output folder of TRL (log_completions=True), verl's rollout_data_dir, or a folder with rollouts.jsonl.
        settings: Recipes, or YAML files with settings of FastRL. Default: MDAP at several tau, and the peers' pruners.
        stages: Seconds per step of your run: generation=87 old=55 reference=70 update=319 rest=3. Default: the
            published ones of Qwen2.5-VL-7B on Geometry3K.
        tokenizer: Folder or tokenizer.json of the model. Default: words.
        outcome: Column that decides which groups have no signal, such as an accuracy. Default: the total reward.
        steps_per_epoch: Of the run, for the published budget, which changes G after each epoch.
        out: Folder for result.json and the figure.
    """
    from rich.console import Console
    from rich.progress import track

    from fastrl.bench.analyze import analyze as run
    from fastrl.bench.analyze import default_settings
    from fastrl.bench.files import write_json
    from fastrl.bench.logs import find_log, read_log, tokenizer_ids, whitespace_ids
    from fastrl.bench.stage_model import parse_stages
    from fastrl.report.analysis import analysis_table, draw_analysis

    console = Console()
    log = find_log(path)
    tokenize = whitespace_ids() if tokenizer is None else tokenizer_ids(tokenizer)
    steps = track(
        read_log(log, tokenize, outcome=outcome),
        log.kind,
        total=log.num_steps,
        console=console,
        transient=True,
    )
    result = run(
        steps,
        _named(settings) or default_settings(),
        parse_stages(stages),
        num_steps=log.num_steps,
        steps_per_epoch=steps_per_epoch,
    )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "result.json", {"path": str(path), "kind": log.kind, **result})
    console.print(analysis_table(result))
    files = draw_analysis(result, out / "analysis")
    console.print(f"figure: {files[-1]}", highlight=False, markup=False, soft_wrap=True)


def simulate(
    settings: tuple[Path, ...] = (),
    seed: int = 0,
    draws: int = 400,
    steps: int = 80,
    rollouts: int = 8,
    out: Path = Path("runs/simulate"),
) -> None:
    """Bias, variance and G_t of pruners and budgets on a softmax policy whose gradient is known; in seconds.

    Args:
        settings: Recipes, or YAML files with settings of FastRL. Default: every pruner and every budget.
        seed: Of policy, groups and choices.
        draws: Steps at the fixed policy.
        steps: Steps of training.
        rollouts: Rollouts per prompt in the first step.
        out: Folder for result.json and the figure.
    """
    from rich.console import Console

    from fastrl.bench.files import write_json
    from fastrl.bench.simulate import simulate as run
    from fastrl.report.simulation import draw_simulation, simulation_table

    result = run(_named(settings), seed=seed, num_draws=draws, num_steps=steps, num_rollouts=rollouts)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "result.json", result)
    console = Console()
    for table in simulation_table(result):
        console.print(table)
    files = draw_simulation(result, out / "simulation")
    console.print(f"figure: {files[-1]}", highlight=False, markup=False, soft_wrap=True)


def diagnose(
    settings: tuple[Path, ...] = (), model: str | None = None, data: Path | None = None,
    gram: Path | None = None, prompts: int = 32, rollouts: int = 8, problems: Literal["short", "long"] = "short",
    share: float | None = None,
    parameters: Literal["all", "last_block", "lora"] = "all", coordinates: int | None = None, ngram: int = 1,
    seed: int = 0, out: Path = Path("runs/diagnose"),
) -> None:  # fmt: skip
    """How faithful are similarities and pruners to the true gradients of a model's rollouts?

    Without further options: the tiny model of the testbed, on fresh rollouts of its training problems.

    Args:
        settings: Recipes, or YAML files with settings of FastRL. Default: every pruner, and those with weights.
        model: Folder or name of a causal language model (with its LoRA adapter, if it has one); needs --data.
        data: JSON lines with prompt, completions and rewards of one prompt each (see docs/diagnose.md).
        gram: File of Gram matrices that an earlier diagnosis (gram.json) or another program wrote; needs no model.
        prompts: Prompts of the testbed.
        rollouts: Rollouts per prompt of the testbed.
        problems: Problem set of the testbed, with its own model.
        share: Bring every pruner to this share of kept rollouts, as far as it has a setting for it.
        parameters: Whose gradients.
        coordinates: Number of random coordinates, to save memory; default all.
        ngram: Tokens per n-gram of the similarities.
        seed: Of sampling, coordinates and selections.
        out: Folder for gram.json, result.json and the figure.
    """
    from rich.console import Console

    from fastrl.bench.diagnose import at_share, default_configs, default_similarities, measure
    from fastrl.bench.diagnose import diagnose as run
    from fastrl.bench.files import write_json
    from fastrl.report.diagnosis import diagnosis_table, draw_diagnosis

    out.mkdir(parents=True, exist_ok=True)
    gradients: dict[str, Any] = {"parameters": parameters, "num_coordinates": coordinates, "seed": seed}
    groups, grams = measure(
        model=model,
        data=data,
        gram=gram,
        testbed=(prompts, rollouts),
        problem_set=problems,
        out=out,
        **gradients,
    )
    configs = _named(settings) or default_configs()
    if share is not None:
        configs = at_share(groups, configs, share)
    result = run(groups, grams, default_similarities(groups, ngram), configs, seed=seed)
    write_json(out / "result.json", result)
    console = Console()
    console.print(diagnosis_table(result))
    files = draw_diagnosis(result, out / "diagnosis")
    console.print(f"figure: {files[-1]}", highlight=False, markup=False, soft_wrap=True)


def report(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    /,
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html"),
    groups: int = 12,
    live: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    every: float = 10.0,
) -> None:
    """One page on runs, finished or not, that opens offline: curves, tables, statistics, and groups of rollouts.

    Args:
        runs: Output folders of fastrl train or fastrl compare; each becomes a part of the page.
        out: The page, .html; everything on it lies beside it as .json.
        groups: Groups of rollouts to show of each run (it was trained with fastrl.trace: true); 0 = none.
        live: Write it again whenever a file of the runs has changed, until they are finished or Ctrl-C.
        every: Seconds between two looks of --live, and after which the page loads itself again.
    """
    from fastrl.report.page.live import Report, follow

    page = Report(runs=runs, out=out, num_groups=groups, every=every if live else None)
    if live:
        follow(page, lambda line: print(line, flush=True))
        return
    page.write()
    print(f"page: {page.out}\ndata: {page.twin_path}")


def _named(paths: tuple[Path, ...]) -> dict[str, Any]:
    from fastrl.config import FastRLConfig

    return {path.stem: FastRLConfig.load(path) for path in paths}
