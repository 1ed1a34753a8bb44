"""Count what is left in verl's transfer queue when a step begins. Test support, loaded into every process."""

import json
import os
from pathlib import Path
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import PPOTrainer


def _record(self: Any) -> None:
    left = {partition: len(keys) for partition, keys in (tq.kv_list() or {}).items()}
    with Path(os.environ["FASTRL_TEST_QUEUE"]).open("a") as file:
        file.write(json.dumps(left) + "\n")


PPOTrainer.on_step_begin = _record
