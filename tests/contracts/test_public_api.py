"""What users may rely on: names, signatures, settings, import cost, layers. A change here is a release note."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastrl

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fastrl"

# --- names and signatures -----------------------------------------------------------------------


def test_the_public_names_are_frozen():
    assert fastrl.__all__ == [
        "ConfigError",
        "FastRL",
        "FastRLConfig",
        "FastRLError",
        "Group",
        "GroupError",
        "NoSignalError",
        "Selection",
        "StateError",
        "__version__",
        "read_rollouts",
        "select",
        "summarize",
        "write_rollouts",
    ]
    assert dir(fastrl) == fastrl.__all__
    assert all(getattr(fastrl, name) is not None for name in fastrl.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'FastRl'"):
        fastrl.FastRl  # noqa: B018


def test_the_version_is_that_of_the_distribution():
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert declared
    assert declared[1] == fastrl.__version__


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (
            fastrl.FastRL,
            "__init__",
            "(self, config=None, *, num_rollouts, total_steps=None, steps_per_epoch=None)",
        ),
        (fastrl.FastRL, "plan", "(self, prompt_ids)"),
        (fastrl.FastRL, "num_prompts", "(self, num_prompts)"),
        (fastrl.FastRL, "num_prompts_missing", "(self, groups, num_prompts)"),
        (fastrl.FastRL, "select", "(self, groups, *, num_prompts=None)"),
        (fastrl.FastRL, "observe", "(self, groups, selections, *, seconds=None)"),
        (fastrl.FastRL, "state_dict", "(self)"),
        (fastrl.FastRL, "load_state_dict", "(self, state)"),
        (fastrl.FastRL, "metrics", "(self)"),
        (fastrl, "select", "(groups, config=None, *, rng=None)"),
        (fastrl, "summarize", "(groups, selections)"),
        (fastrl, "read_rollouts", "(path)"),
        (fastrl, "write_rollouts", "(path, groups, selections, *, step)"),
    ],
)
def test_the_signatures_are_frozen(owner, name, parameters):
    signature = inspect.signature(getattr(owner, name))
    bare = signature.replace(
        parameters=[p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    assert str(bare) == parameters


def fields_of(kind):
    def annotation(field):
        return field.type.__name__ if isinstance(field.type, type) else str(field.type)

    return [(f.name, annotation(f), f.default) for f in dataclasses.fields(kind) if f.init]


def test_the_settings_with_their_types_and_defaults_are_frozen():
    assert fields_of(fastrl.FastRLConfig) == [
        ("pruner", "str", "mdap"),
        ("tau", "float", 0.8),
        ("similarity", "str", "jaccard"),
        ("ngram", "int", 1),
        ("compare", "str", "kept"),
        ("advantage_tol", "float", 1e-4),
        ("representative", "str", "first"),
        ("per_cluster", "int", 1),
        ("weighting", "float", 0.0),
        ("keep_share", "float", 0.5),
        ("match_weights", "bool", False),
        ("zero_variance", "str", "keep_one"),
        ("denominator", "str", "kept"),
        ("budget", "str", "ars"),
        ("min_rollouts", "int", 2),
        ("max_rollouts", "int | None", None),
        ("initial_rollouts", "int | None", None),
        ("rollout_cost", "float | None", None),
        ("refill", "str", "none"),
        ("max_refills", "int", 8),
        ("align", "str", "top_up"),
        ("micro_batches", "str", "repack"),
        ("updates", "str", "fixed"),
        ("share_prompt", "str", "auto"),
        ("outcome_key", "str | None", None),
        ("max_empty_steps", "int", 10),
        ("trace", "bool", False),
        ("seed", "int", 0),
    ]


def test_every_setting_is_documented():
    arguments = inspect.getdoc(fastrl.FastRLConfig).partition("Args:\n")[2].partition("\nRaises:")[0]
    documented = re.findall(r"^ {4}(\w+): ", arguments, re.M)
    assert documented == [field.name for field in dataclasses.fields(fastrl.FastRLConfig)]


def test_the_core_types_are_frozen():
    required = dataclasses.MISSING
    assert [(name, default) for name, _, default in fields_of(fastrl.Group)] == [
        ("prompt_id", required),
        ("tokens_G", required),
        ("rewards_G", required),
        ("advantages_G", None),
        ("outcomes_G", None),
        ("logps_G", None),
        ("sketch_G", None),
    ]
    assert [name for name, _, _ in fields_of(fastrl.Selection)] == [
        "keep_G",
        "weight_G",
        "cluster_G",
        "reason",
        "advantages_G",
    ]


# --- import cost --------------------------------------------------------------------------------

HEAVY = ("torch", "transformers", "trl", "datasets", "accelerate", "matplotlib", "pandas", "pyarrow", "PIL")


def loaded_by(code, *, path=None):
    """Top-level modules that `code` loads in a fresh interpreter."""
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    if path is not None:
        script = f"import sys\nsys.path.insert(0, {str(path)!r})\n{script}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


USES = {
    "the package": "import fastrl",
    "the configuration": "from fastrl import FastRLConfig; FastRLConfig()",
    "a run": (
        "from fastrl import FastRL; FastRL(num_rollouts=8, total_steps=8, steps_per_epoch=2).plan(['a', 'b'])"
    ),
    "a selection": (
        "import numpy as np; from fastrl import Group, select, summarize; "
        "g = [Group(prompt_id='a', tokens_G=[[1], [2]], rewards_G=np.array([0.0, 1.0]))]; summarize(g, select(g))"
    ),
}


@pytest.mark.parametrize("use", list(USES))
def test_the_core_runs_without_any_engine(use):
    loaded = loaded_by(USES[use])
    assert "fastrl" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_importing_the_package_costs_numpy_at_most():
    allowed = set(sys.stdlib_module_names) | {"fastrl", "numpy"}
    assert loaded_by("import fastrl") <= allowed


def test_the_import_check_sees_a_heavy_module(tmp_path):
    (tmp_path / "torch.py").write_text("", encoding="utf-8")
    (tmp_path / "user.py").write_text("import fastrl\nimport torch\n", encoding="utf-8")
    assert "torch" in loaded_by("import user", path=tmp_path)


# --- layers and sizes ---------------------------------------------------------------------------


def test_the_layer_contracts_hold():
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_outgrows_its_limit():
    modules = sorted(SOURCE.rglob("*.py"))
    assert SOURCE / "method.py" in modules
    too_long = {}
    for module in modules:
        limit = 500 if module.parent.name == "integrations" else 400
        length = len(module.read_text(encoding="utf-8").splitlines())
        if length > limit:
            too_long[str(module.relative_to(SOURCE))] = (length, limit)
    assert too_long == {}


# --- documents ----------------------------------------------------------------------------------


def test_the_example_of_the_method_page_runs_as_printed(tmp_path):
    page = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    loop, example = re.findall(r"```python\n(.*?)```", page, re.S)
    groups = [fastrl.Group(prompt_id="q", tokens_G=[[1], [2]], rewards_G=np.array([1.0, 0.0]))]
    names = {
        "FastRL": fastrl.FastRL,
        "FastRLConfig": fastrl.FastRLConfig,
        "prompt_ids": ["q"],
        "groups": groups,
    }
    exec(loop, names)
    assert names["counts"].tolist() == [8]
    assert names["selections"][0].keep_G.all()
    shown = re.search(r"```text\n(.*?)```", page, re.S)
    assert shown
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == shown[1]


def test_the_contributing_page_names_every_rule_a_checker_enforces():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for command in ("ruff check", "ruff format", "mypy", "lint-imports", "pytest"):
        assert command in page
    for registry in ("PRUNERS", "BUDGETS"):
        assert registry in page


def test_a_selection_made_in_one_line_equals_the_long_way():
    groups = [fastrl.Group(prompt_id="q", tokens_G=[[1], [1], [2]], rewards_G=np.array([1.0, 1.0, 0.0]))]
    run = fastrl.FastRL(fastrl.FastRLConfig(), num_rollouts=3, total_steps=1, steps_per_epoch=1)
    for one, two in zip(fastrl.select(groups), run.select(groups), strict=True):
        assert one.keep_G.tolist() == two.keep_G.tolist()
        assert one.weight_G.tolist() == two.weight_G.tolist()
