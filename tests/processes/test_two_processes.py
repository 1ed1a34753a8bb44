"""Two processes do what one does: the same gradients, whatever is pruned and however rows are spread."""

import pytest
import torch
from cases import ACCUMULATED, ACCUMULATIONS, CASES, LOSSES, SUITES, WORLD
from launch import run
from safetensors.torch import load_file

TOLERANCE = 1e-6
VISION_TOLERANCE = (
    5e-6  # float32 convolutions and long sums round by the shape of the batch (found: up to 2.1e-6)
)
pytestmark = [pytest.mark.trl, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def on_two(tmp_path_factory, request):
    """Gradients of the worker: the whole suite in one launch, because importing TRL takes seconds."""
    assert WORLD == 1
    folder = tmp_path_factory.mktemp("two")
    wants_all = any(item.get_closest_marker("slow") for item in request.session.items)
    run(
        "worker.py",
        "all" if wants_all else "quick",
        str(folder),
        num_processes=2,
        log=folder / "log",
        limit_s=500,
    )
    assert (folder / "done").is_file()

    def gradients(name):
        saved = load_file(folder / f"{name}.safetensors")
        return [saved[str(i)] for i in range(len(saved))]

    return gradients


def test_rows_arrive_whole_and_random_selections_are_in_step(on_two):
    """What the worker asserts itself, on both ranks: rows_between_ranks, random_selections."""


def named(names):
    quick = set(SUITES["quick"])
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def assert_equal(found, expected, tolerance=TOLERANCE):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert torch.isfinite(a).all()
        assert float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-12)


@pytest.mark.parametrize(
    "name", named(name for name in CASES if name not in ACCUMULATED and "entropy" not in name)
)
def test_gradients_equal_those_of_one_process(on_two, tmp_path, name):
    _, expected = CASES[name](tmp_path)
    norms = [float(gradient.norm()) for gradient in expected]
    assert (max(norms) == 0) if "-nothing-" in name else (max(norms) > 1e-4), "a test of zeros proves nothing"
    assert_equal(on_two(name), expected, VISION_TOLERANCE if name.startswith("vision") else TOLERANCE)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=() if loss in ("dapo", "gspo") else pytest.mark.slow) for loss in LOSSES],
)
def test_the_update_does_not_depend_on_accumulation_or_ranks(on_two, tmp_path, loss):
    _, expected = CASES[f"accumulate-{loss}-1"](tmp_path / "1")
    assert float(expected[0].norm()) > 1e-4
    for steps in ACCUMULATIONS:
        name = f"accumulate-{loss}-{steps}"
        assert_equal(CASES[name](tmp_path / str(steps))[1], expected)
        assert_equal(on_two(name), expected)


def test_entropy_quantile_is_that_of_stock_trl(on_two):
    expected = on_two("entropy-Stock")
    assert float(expected[0].norm()) > 1e-4
    for a, b in zip(on_two("entropy-Fast"), expected, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())
