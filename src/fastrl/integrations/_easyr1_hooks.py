"""What EasyR1's step looks up by name, and its worker, as FastRL needs them."""

import functools
from collections.abc import Mapping
from typing import Any

from fastrl.integrations._ray_metrics import all_and_trained

PUSH = "fastrl_push"
"""Column of a batch: frozen advantage times weight, on every token."""
UPDATES = "fastrl_updates"
"""Entry of a batch's meta information: optimizer steps to take on it."""
OF_ALL = "fastrl_of_all"
"""Entry of a batch's meta information: EasyR1's metrics of data over all rollouts."""


def frozen_advantages(compute_advantage: Any) -> Any:
    """Advantages were computed over full groups: those of survivors must not be."""

    @functools.wraps(compute_advantage)
    def frozen(data: Any, *args: Any, **kwargs: Any) -> Any:
        if PUSH not in data.batch.keys():  # noqa: SIM118 - a TensorDict
            return compute_advantage(data, *args, **kwargs)
        data.batch["advantages"] = data.batch["returns"] = data.batch[PUSH]
        return data

    return frozen


def metrics_of_all(compute_data_metrics: Any) -> Any:
    """Metrics of data over all rollouts, and over the trained ones beside them."""

    @functools.wraps(compute_data_metrics)
    def of_all(batch: Any, *args: Any, **kwargs: Any) -> Any:
        found = compute_data_metrics(batch, *args, **kwargs)
        known = batch.meta_info.get(OF_ALL)
        if known is None:
            return found
        return {**found, **all_and_trained(known, found)}

    return of_all


def recorded_seconds(compute_timing_metrics: Any, seconds: dict[str, float]) -> Any:
    """What the discovery budget takes its prices from."""

    @functools.wraps(compute_timing_metrics)
    def recorded(batch: Any, timing_raw: Mapping[str, float], *args: Any, **kwargs: Any) -> Any:
        spent = {name: timing_raw.get(name, 0.0) for name in ("gen", "old", "ref", "update_actor", "step")}
        update = spent["old"] + spent["ref"] + spent["update_actor"]
        seconds.update(generation=spent["gen"], update=update, step=spent["step"])
        return compute_timing_metrics(batch, timing_raw, *args, **kwargs)

    return recorded


def with_varying_batches(host: Any) -> type:
    """Return EasyR1's FSDPWorker for batches whose number of rows changes.

    Its cache of processed images compares the prompts of two batches entry by entry, which numpy refuses where there
    are not as many; and a mini-batch has a fixed number of rows, where `updates: fixed` wants a fixed number of them.
    """

    class FastRLFSDPWorker(host):
        def _process_multi_modal_inputs(self, data: Any) -> Any:
            cached, uids = self._cache.get("uid"), data.non_tensor_batch.get("uid")
            if cached is not None and uids is not None and len(cached) != len(uids):
                self._cache.clear()
            return super()._process_multi_modal_inputs(data)

        @functools.wraps(host.update_actor)  # with what tells Ray how to share out rows
        def update_actor(self, data: Any) -> Any:
            actor, num_updates = self.config.actor, data.meta_info.get(UPDATES)
            own = actor.global_batch_size_per_device
            if num_updates is not None:
                shared = getattr(self, "ulysses_sequence_parallel_size", 1)
                actor.global_batch_size_per_device = -(-len(data) // num_updates) * shared
            try:
                return super().update_actor(data)
            finally:
                actor.global_batch_size_per_device = own

    return FastRLFSDPWorker
