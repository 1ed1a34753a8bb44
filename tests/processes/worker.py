"""One of two processes: trains every case of a suite, and writes rank 0's gradients."""

import os
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from cases import CASES, SUITES, WORLD  # noqa: E402
from random_selections import fifty_random_selections  # noqa: E402
from rows_between_ranks import rows_arrive_as_they_were_sent  # noqa: E402

suite, folder = sys.argv[1], Path(sys.argv[2])
assert int(os.environ["EXPECTED_WORLD_SIZE"]) == WORLD == 2, (
    "the launcher started another number of processes"
)
for name in SUITES[suite]:
    print(name, flush=True)
    trainer, gradients = CASES[name](folder / f"{name}-{os.environ['RANK']}")
    if trainer.accelerator.is_main_process:
        save_file({str(i): gradient for i, gradient in enumerate(gradients)}, folder / f"{name}.safetensors")
    trainer.accelerator.free_memory()
rows_arrive_as_they_were_sent()
fifty_random_selections(folder / "random")
if os.environ["RANK"] == "0":
    (folder / "done").touch()
torch.distributed.destroy_process_group()
