"""Which models `fastrl eval` compares, and how: read from a run folder, or told."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fastrl.bench.answers import Sampler, Sampling, TransformersSampler, VllmSampler
from fastrl.bench.benchmarks import InDomain, OutOfDomain, find, rows_of
from fastrl.bench.evaluate import BASE, Item, answer_all, judge, powers_of_two, summarize
from fastrl.bench.files import write_json
from fastrl.bench.lmms import STATED, Harness, run_task
from fastrl.bench.recipe import read_recipe
from fastrl.bench.run import versions
from fastrl.bench.tasks import TestbedTask
from fastrl.data.prompts import read_template
from fastrl.rewards.rules import RULES, Rule
from fastrl.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is evaluated.

    Args:
        models: Name -> folder or hub name; `base` first.
        rule: What counts as an answer, and the format that the models were asked for.
        template, system: The prompt of the training, by name or path.
        max_tokens: Most tokens of an answer.
        processor: Keyword arguments of the processor.
    """

    models: dict[str, str]
    rule: Rule
    template: str | None
    system: str | None
    max_tokens: int
    processor: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `fastrl eval` is asked for; see its options."""

    run: str
    benchmarks: Sequence[str]
    base: str | None = None
    out: Path | None = None
    k: int = 0
    limit: int | None = None
    sources: Sequence[str] = ()
    keep_good: bool = False
    reward: str = "accuracy"
    prompt: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    batch_size: int = 32
    engine: str = "transformers"
    lmms: Harness = field(default_factory=Harness)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ConfigError(
                f"--k {self.k}: the number of sampled answers per row; 0 = the greedy one alone."
            )
        if not self.benchmarks:
            raise ConfigError("--benchmarks: name at least one.")
        for name in self.benchmarks:
            find(name)


def subject_of(request: Request) -> Subject:
    """Read what to evaluate from a run folder (its recipe, its models), or take a model as it is.

    Raises:
        ConfigError: a run folder without a trained model, or a model without a base to compare it with.
    """
    folder = Path(request.run)
    if (folder / "recipe.yaml").is_file():
        return _of_run(folder, request)
    if request.base is None:
        raise ConfigError(
            f"{request.run} has no recipe.yaml, so it is taken as a model, and the model before training is not known. "
            "Name it with --base: an accuracy without it says nothing about training."
        )
    if request.reward not in RULES:
        raise ConfigError(f"--reward {request.reward!r} is unknown. All: {', '.join(RULES)}.")
    name = folder.name or request.run
    return Subject(
        models={BASE: request.base, name if name != BASE else "trained": request.run},
        rule=RULES[request.reward],
        template=request.prompt,
        system=None,
        max_tokens=request.max_tokens or 2048,
        processor={},
    )


def _of_run(folder: Path, request: Request) -> Subject:
    recipe = read_recipe(folder / "recipe.yaml")
    task = recipe.task
    trained = {path.parent.name: str(path) for path in sorted(folder.glob("*/model")) if path.is_dir()}
    if not trained:
        raise ConfigError(
            f"{folder}: no <method>/model folder, so no training ended here. Train the recipe first."
        )
    max_tokens = request.max_tokens or int(recipe.trainer.get("max_completion_length") or 256)
    if isinstance(task, TestbedTask):
        from fastrl.rewards import has_format
        from fastrl.testbed import checkpoint_path

        base, rule = str(checkpoint_path(task.problems)), replace(RULES["paper"], has_format=has_format)
        return Subject(
            models={BASE: request.base or base, **trained}, rule=rule, template=request.prompt, system=None,
            max_tokens=max_tokens, processor={},
        )  # fmt: skip
    sizes = {name: getattr(task, name) for name in ("min_pixels", "max_pixels")}
    return Subject(
        models={BASE: request.base or task.model, **trained},
        rule=RULES[task.reward],
        template=request.prompt or task.prompt,
        system=task.system,
        max_tokens=max_tokens,
        processor={name: value for name, value in sizes.items() if value is not None},
    )


def evaluate_run(
    request: Request, progress: Callable[[str], None] = lambda _: None
) -> tuple[Path, dict[str, Any]]:
    """Evaluate every model on every benchmark.

    Args:
        request: What.
        progress: Told one line per model and benchmark.

    Returns:
        The folder of evaluation.json and of the answers, and the content of evaluation.json.
    """
    subject = subject_of(request)
    folder = request.out or (
        Path(request.run) / "eval" if (Path(request.run) / "recipe.yaml").is_file() else Path("runs") / "eval"
    )
    sampling = Sampling(
        num_samples=request.k,
        max_tokens=subject.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        template=read_template(subject.template) if subject.template is not None else None,
        system=subject.system,
    )
    sources = parse_sources(request.sources, request.benchmarks)
    items: dict[str, dict[str, list[Item]]] = {name: {} for name in request.benchmarks}
    judged: dict[str, dict[str, dict[str, float]]] = {name: {} for name in request.benchmarks}
    rows = {
        name: rows_of(benchmark, source=sources.get(name), limit=request.limit, keep_good=request.keep_good)
        for name in request.benchmarks
        if isinstance(benchmark := find(name), InDomain)
    }
    for label, model in subject.models.items():  # models outside: each is loaded once, and alone
        sampler = functools.cache(functools.partial(_sampler, request, subject, model))
        for name in request.benchmarks:
            if name in rows:
                progress(f"{name}: {label}, {len(rows[name])} problems")
                file = folder / name / f"{label}.jsonl"
                items[name][label] = answer_all(rows[name], sampler, sampling, subject.rule, file)
        del sampler  # lmms-eval loads the model in a process of its own
        for name in request.benchmarks:
            if isinstance(benchmark := find(name), OutOfDomain):
                progress(f"{name}: {label}, by lmms-eval")
                outcome = run_task(
                    request.lmms, name, benchmark.task, model, sampling, folder / name / label,
                    source=sources.get(name), limit=request.limit,
                )  # fmt: skip
                pairs = zip(outcome.rows, outcome.answers, strict=True)
                items[name][label] = [judge(row, answers, STATED) for row, answers in pairs]
                judged[name][label] = outcome.judged
    ks = powers_of_two(request.k)
    result: dict[str, Any] = {
        "models": subject.models,
        "settings": {
            **asdict(request),
            "out": str(folder),
            "template": subject.template,
            "max_tokens": subject.max_tokens,
        },
        "versions": versions(),
        "benchmarks": {
            name: {**summarize(found, ks), "judged": judged[name]} for name, found in items.items()
        },
    }
    write_json(folder / "evaluation.json", result)
    return folder, result


def _sampler(request: Request, subject: Subject, model: str) -> Sampler:
    if request.engine == "vllm":
        return VllmSampler(model)
    return TransformersSampler(model, batch_size=request.batch_size, **subject.processor)


def parse_sources(pairs: Sequence[str], benchmarks: Sequence[str]) -> dict[str, str]:
    """Read `benchmark=path` pairs.

    Raises:
        ConfigError: a pair without =, or of a benchmark that is not run.
    """
    found = {}
    for pair in pairs:
        name, sign, source = pair.partition("=")
        if not sign or not source or name not in benchmarks:
            raise ConfigError(
                f"--sources {pair!r}: write BENCHMARK=PATH for one of the benchmarks that are run: "
                f"{', '.join(benchmarks)}."
            )
        found[name] = source
    return found
