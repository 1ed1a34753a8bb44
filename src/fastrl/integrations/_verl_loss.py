"""verl's loss over explicit denominators.

verl divides a mini-batch by its own tokens (token-mean), or by its number of rows, filling rows included (seq-mean):
both change with what was pruned. The trainer sends what to divide by instead, for policy, KL and entropy terms alike.
"""

from typing import Any

from verl.utils import tensordict_utils
from verl.workers.utils.losses import ppo_loss

ROWS, TOKENS = "fastrl_rows", "fastrl_tokens"
"""Keys of the batch's extra information: what a mini-batch divides by, over all ranks."""


def loss_over_denominators(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Call verl's loss for one micro-batch, with its denominators replaced where the batch says so.

    Args:
        config: The actor's.
        model_output, data, dp_group: As verl's loss takes them. Where `data` has `fastrl_rows`, seq-mean modes divide
            by that many rows; token-mean divides by `fastrl_tokens`, or by the mini-batch's own tokens where it is 0.
    """
    if ROWS in data.keys():  # noqa: SIM118 - a TensorDict
        # A mini-batch that trains on nothing divides its zero loss by one.
        tokens = data[TOKENS] or data["batch_num_tokens"] or 1
        tensordict_utils.assign_non_tensor(data, global_batch_size=data[ROWS], batch_num_tokens=tokens)
    return ppo_loss(config, model_output, data, dp_group)
