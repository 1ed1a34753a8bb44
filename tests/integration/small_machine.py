"""Quick and quiet trainers: one thread for tiny models, and a garbage collector that skips the libraries."""

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def small_machine() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    gc.collect()
    gc.freeze()  # accelerate collects after every run; torch's and transformers' objects need no look
    yield
    gc.unfreeze()
