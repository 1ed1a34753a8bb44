"""Let verl's trainer look for finished rollouts every 10 ms instead of every 2 s. For benchmarks only."""

import time
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


def _wait(self: Any, partition_id: str, last_debug_time: float) -> float:
    time.sleep(0.01)
    return last_debug_time


ReplayBuffer._wait_for_next_poll = _wait
