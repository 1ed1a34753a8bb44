"""The command line: one function per subcommand of `fastrl`. It parses and calls."""

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

# Read when torch and transformers are loaded. Waiting threads that spin for long cost a busy CPU most;
# threads that never spin cost small models a third of their time.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "5000",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
EXTRAS = {
    **dict.fromkeys(
        (
            "torch",
            "transformers",
            "trl",
            "accelerate",
            "datasets",
            "tokenizers",
            "PIL",
            "math_verify",
            "jinja2",
        ),
        "trl",
    ),
    **dict.fromkeys(("matplotlib", "pyarrow"), "report"),
}

app = tyro.extras.SubcommandApp()


@app.command
def train(
    recipe: tyro.conf.Positional[Path],
    /,
    changes: Annotated[tuple[Path, ...], tyro.conf.arg(name="with")] = (),
    set: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = (),
    out: Path | None = None,
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    command: Literal["verl", "easyr1"] | None = None,
) -> None:
    """Train a recipe: stock TRL first unless it says otherwise, then with FastRL; a table and a figure at the end.

    Args:
        recipe: YAML file with keys of TRL's GRPOConfig, a task block and a fastrl block.
        changes: YAML files that change the recipe, such as recipes/methods/unbiased.yaml.
        set: Change settings of the recipe: key=value, such as learning_rate=1e-5 or fastrl.tau=0.6.
        out: Folder of this run. Default: runs/<recipe>-<time>.
        dry_run: Print all settings, rows, batch shapes, steps, tokens and memory, and stop.
        command: Print the commands that train this recipe with another engine, and stop.
    """
    from rich.console import Console

    from fastrl.bench.recipe import read_recipe
    from fastrl.report.console import RunProgress, run_table

    console = Console()
    overrides = [override for group in set for override in group]
    resolved = read_recipe(recipe, overrides, changes=changes)
    if command is not None:
        from fastrl.bench.engines import command as command_of

        print(command_of(resolved, command))
        return
    if dry_run:
        import yaml

        from fastrl.bench.plan import plan
        from fastrl.report.plan import plan_table

        print(yaml.safe_dump(resolved.to_dict(), sort_keys=False))
        console.print(plan_table(plan(resolved)))
        return

    from fastrl.bench.run import is_main_process, run_recipe

    done = run_recipe(resolved, out=out, progress=RunProgress(console))
    if not is_main_process():
        return
    console.print(run_table(done.summary))
    console.print(f"run folder: {done.folder}", highlight=False, markup=False, soft_wrap=True)

    from fastrl.report.plots import draw_run

    _, image = draw_run(done.folder)
    console.print(f"figure:     {image}", highlight=False, markup=False, soft_wrap=True)


@app.command
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


@app.command(name="eval")
def evaluate(
    run: tyro.conf.Positional[str], /, benchmarks: tuple[str, ...], base: str | None = None, k: int = 0,
    limit: int | None = None, sources: tuple[str, ...] = (),
    keep_good: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False, reward: str = "accuracy",
    prompt: str | None = None, max_tokens: int | None = None, temperature: float = 1.0, batch_size: int = 32,
    engine: Literal["transformers", "vllm"] = "transformers", lmms_python: str = ".venv-lmms/bin/python",
    lmms_model: str | None = None, judge: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False, seed: int = 0,
    out: Path | None = None,
) -> None:  # fmt: skip
    """Accuracy of a trained model beside its base model, greedy and sampled, with intervals over problems.

    Args:
        run: Run folder of `fastrl train`, or folder or hub name of a model.
        benchmarks: testbed, geometry3k, geoqa8k, math; by lmms-eval: mathverse, mathvision, mathvista, wemath.
        base: Model before training. Default: that of the run's recipe.
        k: Sampled answers per problem, for pass@1 to pass@k; 0 = greedy only.
        limit: The first so many problems of each benchmark.
        sources: Where data lies: geometry3k=PATH; for benchmarks of lmms-eval a folder of task files, or `standin`
            for ten items that we draw. Default: the hub.
        keep_good: Leave out problems with faults, as `fastrl data` does.
        reward: Of a model without a run folder: what counts as an answer (paper, easyr1_math, r1v, accuracy).
        prompt: Template around the problem. Default: that of the run's recipe.
        max_tokens: Most tokens of an answer. Default: that of the run's recipe, or 2048.
        temperature: Of sampled answers.
        batch_size: Sequences at once (transformers).
        engine: What generates.
        lmms_python: Python of the environment with lmms-eval (`make venv-lmms`).
        lmms_model: lmms-eval's name of the kind of model, such as qwen2_5_vl or vllm. Default: by the model.
        judge: Let lmms-eval's judge score, too; needs OPENAI_API_KEY. Kept apart from the score of our rules.
        seed: Of sampled answers.
        out: Folder of answers and of evaluation.json. Default: RUN/eval.
    """
    from rich.console import Console

    from fastrl.bench.evaluation import Request, evaluate_run
    from fastrl.bench.lmms import Harness
    from fastrl.report.evaluation import evaluation_tables

    console = Console()
    request = Request(
        run=run, benchmarks=benchmarks, base=base, k=k, limit=limit, sources=sources, keep_good=keep_good,
        reward=reward, prompt=prompt, max_tokens=max_tokens, temperature=temperature, batch_size=batch_size,
        engine=engine, lmms=Harness(python=lmms_python, kind=lmms_model, judge=judge), seed=seed, out=out,
    )  # fmt: skip
    folder, result = evaluate_run(request, lambda line: console.print(line, markup=False))
    for table in evaluation_tables(result):
        console.print(table)
    console.print(f"answers and evaluation.json: {folder}", highlight=False, markup=False, soft_wrap=True)


@app.command
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


@app.command
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


@app.command
def diagnose(
    settings: tuple[Path, ...] = (), model: str | None = None, data: Path | None = None,
    gram: Path | None = None, prompts: int = 32, rollouts: int = 8, share: float | None = None,
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
        model=model, data=data, gram=gram, testbed=(prompts, rollouts), out=out, **gradients
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


def _named(paths: tuple[Path, ...]) -> dict[str, Any]:
    from fastrl.config import FastRLConfig

    return {path.stem: FastRLConfig.load(path) for path in paths}


@app.command
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


@app.command
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


def set_environment() -> None:
    """Set what torch and transformers read when they are loaded; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def main() -> int:
    """Run the command line and return its exit code: 0, 1 (doctor found a problem) or 2 (a user's error)."""
    set_environment()
    # What the next major version of transformers renames is no news to somebody who trains.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    try:
        return app.cli(prog="fastrl", description="GRPO on the rollouts that teach something.") or 0
    except ValueError as error:
        from fastrl.types import FastRLError

        if not isinstance(error, FastRLError):
            raise
        print(f"fastrl: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f'fastrl: {error.name} is missing: pip install "fastrl-grpo[{extra}]"', file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
