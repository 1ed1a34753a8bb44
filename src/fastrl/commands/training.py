"""Commands that train or run a model."""

from pathlib import Path
from typing import Annotated, Literal

import tyro


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
