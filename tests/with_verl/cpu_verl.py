"""What verl 0.9 needs to run on processes without an accelerator. Test support: nothing here is part of FastRL.

verl loads it in each of its processes (`VERL_USE_EXTERNAL_MODULES=cpu_verl`). Trainer, workers, queue, agent loops,
sharding and checkpoints stay verl's own code; only what names a GPU is given another answer.
"""

import contextlib
import importlib
import os
import sys
import types
from typing import Any

import torch

# The sharded engine is registered for cuda and npu, under which name it runs on any device that FSDP2 knows.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")

from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform
from verl.utils import distributed, fsdp_utils
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplicaRegistry


class _CpuDevice(types.ModuleType):
    """`torch.cpu` with the memory, stream and generator calls of `torch.cuda`, which do nothing or answer 0."""

    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    get_device_name = staticmethod(lambda *_: "CPU")
    mem_get_info = staticmethod(lambda *_: (2**33, 2**34))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "memory" in name:
            return lambda *_, **__: 0
        return getattr(torch.cpu, name, lambda *_, **__: None)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """A platform whose accelerators are processes: Ray is told of as many GPUs as there are to be workers."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDevice("torch_cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def cudart(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


set_platform(CpuPlatform())

# The backend that verl asks for names the device twice, which torch refuses: "cpu:gloo,cpu:gloo".
_init_process_group = distributed.initialize_global_process_group_ray


def _init_on_gloo(timeout_second: int | None = None, backend: str | None = None) -> Any:
    return _init_process_group(timeout_second, backend or "gloo")


distributed.initialize_global_process_group_ray = _init_on_gloo
if "verl.workers.engine_workers" in sys.modules:
    sys.modules["verl.workers.engine_workers"].initialize_global_process_group_ray = _init_on_gloo

# A reference model is offloaded to pinned memory, which needs an accelerator. Here it is where it belongs already.
_not_offloaded = torch.distributed.fsdp.OffloadPolicy
fsdp_utils.CPUOffloadPolicy = lambda pin_memory=True: _not_offloaded()

# Generation by transformers, under the name "hf".
rollout_base._ROLLOUT_REGISTRY["hf", "async"] = "hf_rollout.Adapter"
RolloutReplicaRegistry.register("hf", lambda: importlib.import_module("hf_rollout").Replica)

if "vllm" in sys.modules:
    import bridge

    bridge.keep_weights_loadable()
