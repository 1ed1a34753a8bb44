"""What a training run depends on in FastRL itself, as digests: runs of different code or data are not one comparison.

Comments, docstrings and modules that only look at finished runs do not count. Modules that draw problems count by
what they draw.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import fastrl
from fastrl.bench.tasks import TestbedTask

RECORD = "warmup.json"
"""What a checkpoint's folder says about its making, and no run reads."""
ROOTS = (
    "fastrl.bench.training",
    "fastrl.integrations.trl",
    "fastrl.testbed.model",
    "fastrl.testbed.evaluation",
)
"""Where training begins; the last three are imported by name, which no import statement shows."""
DRAWN_BY = ("fastrl.data.testbed", "fastrl.data.diagrams", "fastrl.data.diagrams_long")


@functools.cache
def source_digest() -> str:
    """A digest of the code that trains."""
    digest = hashlib.sha256()
    for name, file in sorted(training_modules().items()):
        if name not in DRAWN_BY:
            tree = _without_docstrings(ast.parse(file.read_text(encoding="utf-8")))
            digest.update(f"{name}\0{ast.dump(tree)}\0".encode())
    return digest.hexdigest()[:16]


@functools.cache
def digest_of_testbed(task: TestbedTask, seed: int) -> str:
    """A digest of the testbed's problems (pictures, questions, answers) and of the model that they train."""
    from fastrl.data.testbed import problems
    from fastrl.testbed import checkpoint_path

    digest = hashlib.sha256()
    for split, num, of in (("train", task.train_prompts, seed), ("held_out", task.held_out_prompts, 0)):
        for row in problems(split, num, of, problem_set=task.problems):  # type: ignore[arg-type]
            digest.update("\0".join((row.question, row.answer)).encode() + row.image.tobytes())
    for file in sorted(checkpoint_path(task.problems).iterdir()):
        if file.name != RECORD:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def training_modules() -> dict[str, Path]:
    """The modules of FastRL that `ROOTS` import, directly or not, by their names."""
    found: dict[str, Path] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        file = _file_of(name)
        if name in found or file is None:
            continue
        found[name] = file
        waiting += _imports(ast.parse(file.read_text(encoding="utf-8")))
    return found


def _file_of(name: str) -> Path | None:
    """The file of a module of FastRL; None for what is none (a name within a module)."""
    path = Path(fastrl.__file__).parents[1].joinpath(*name.split("."))
    candidates = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in candidates if file.is_file()), None)


def _imports(tree: ast.Module) -> Iterator[str]:
    """What a module imports of FastRL: names of modules, and names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("fastrl"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastrl"):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return tree
