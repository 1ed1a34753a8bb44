"""The field's scars: one test per public report of a trainer, a sampler or a reward that went wrong.

The names say which report (project, number, what must hold). Tests of the core need numpy only; those
that need an engine are skipped without TRL.
"""

import gc
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def _small_machine():
    """One thread for tiny models, and a garbage collector that skips the libraries."""
    if find_spec("torch") is None:
        yield
        return
    import torch

    torch.set_num_threads(1)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
