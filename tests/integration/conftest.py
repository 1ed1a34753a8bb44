"""Quick and quiet trainers: one thread for tiny models, and a garbage collector that skips the libraries."""

import gc

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _small_machine():
    torch.set_num_threads(1)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    gc.collect()
    gc.freeze()  # accelerate collects after every run; torch's and transformers' objects need no look
    yield
    gc.unfreeze()
