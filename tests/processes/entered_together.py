"""What sharded engines need (FSDP, ZeRO-3): every rank enters the same modules in the same order.

Such an engine gathers a module's weights over the ranks when it is entered. A rank that skips a forward pass, or the
vision tower of one, leaves the others waiting for ever. Here every module's entry is a small collective that compares
names, so that a difference is an error at once. Run by the worker, on two processes.
"""

import zlib

import torch
import torch.distributed
from cases import CASES, OTHER, Fast

from fastrl import batching

WATCHED = [
    *(f"grpo-{selection}-two_iterations" for selection in ("mdap", "rank_1_empty", "one_row", "nothing")),
    "reference", "shrink", "ragged-pruned", "vision-mdap", "vision-rank_1_empty",
]  # fmt: skip


class OutOfStep(AssertionError):
    pass


class Watched(Fast):
    """Compares over the ranks each module that a log-prob or update pass enters; generation is not watched."""

    num_entered = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.is_watching = False
        for model in filter(None, (self.model, self.ref_model)):
            for name, module in model.named_modules():
                module.register_forward_pre_hook(lambda *_, name=name: self.enter(name))

    def enter(self, name):
        if not self.is_watching:
            return
        code = zlib.crc32(name.encode())
        largest = torch.tensor([code, -code])
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        type(self).num_entered += 1
        if largest.tolist() != [code, -code]:
            raise OutOfStep(f"this rank enters {name!r}, another one does not")

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.is_watching = True
        try:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        finally:
            self.is_watching = False


def modules_are_entered_together(folder) -> None:
    for name in WATCHED:
        Watched.num_entered = 0
        CASES[name](folder / name, trainer_class=Watched)
        assert Watched.num_entered > 10, f"{name}: nothing was watched"
    ranks_out_of_step_are_noticed(folder)


def ranks_out_of_step_are_noticed(folder) -> None:
    """With images on one rank only, as a plan without its care for images would have it, the check fails."""
    plan = batching._with_images_everywhere
    batching._with_images_everywhere = lambda steps_R, image_N: steps_R
    try:
        OTHER["vision-rank_1_empty"](folder / "unwatchful", trainer_class=Watched)
    except OutOfStep:
        return
    finally:
        batching._with_images_everywhere = plan
    raise AssertionError("ranks that entered different modules were not noticed")
