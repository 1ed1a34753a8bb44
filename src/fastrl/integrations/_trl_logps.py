"""Old and reference log-probs and vLLM's importance ratio, computed after pruning, for survivors alone.

TRL computes them right after sampling, for every rollout. The generation mixin tells it not to.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import nanmax, nanmin, use_adapter

from fastrl.integrations._trl_prefix import PackedModel, SharedPrefix, is_worth_it, pack
from fastrl.integrations._trl_rows import FORWARD_FIELDS, MicroBatch
from fastrl.integrations._trl_stages import StageTimesMixin

_PACKED_FIELDS = {
    "compute_entropy", "pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids",
}  # fmt: skip
"""What a packed call may be given; with anything else, rows go through the model one by one."""


def loss_mask(batch: dict[str, Any]) -> torch.Tensor:
    """(B, C): tokens that the loss is taken over."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def importance_ratio(
    old: torch.Tensor,
    sampling: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: str,
    low: float | None,
    high: float | None,
) -> torch.Tensor:
    """Return the weight that corrects for a sampler whose log-probs differ from the trainer's.

        token:     w_t = p_old(o_t) / p_sampler(o_t)          sequence:  w = prod_t w_t
        truncate:  clamp(w, low, high)                        mask:      w where low <= w <= high, else 0

    As TRL's `vllm_importance_sampling_mode`. A token whose sampling log-prob is unknown (NaN) has ratio 1.

    Args:
        old, sampling, mask: (B, C).
        mode: token_truncate | token_mask | sequence_truncate | sequence_mask.
        low, high: Bounds; None = unbounded.

    Returns:
        (B, C) for token modes, (B, 1) for sequence modes.
    """
    log_ratio = torch.nan_to_num((old - sampling) * mask, nan=0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    ratio = log_ratio.exp()
    low, high = low if low is not None else -torch.inf, high if high is not None else torch.inf
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


class DeferredLogpsMixin(StageTimesMixin):
    """Fill micro-batches with the log-probs that TRL's loss reads, under the conditions of TRL."""

    _prefix: SharedPrefix
    _groups_of_call: Sequence[int] | None = None
    _num_packed_away = 0  # tokens of this rank since the last optimizer step

    # A prompt once per micro-batch.

    @contextlib.contextmanager
    def _sharing(self, micro_batch: MicroBatch, *, check: bool = False) -> Iterator[None]:
        """While this is open, the model is called with survivors packed behind their prompt."""
        if check or (self._prefix.is_active and self._prefix.is_checked and is_worth_it(micro_batch.groups)):
            self._groups_of_call = micro_batch.groups
        try:
            yield
        finally:
            self._groups_of_call = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        given = {name for name, value in kwargs.items() if value is not None and value is not False}
        groups = None if args or not given <= _PACKED_FIELDS else self._groups_of_call
        if groups is not None and self._prefix.takes(input_ids[:, -logits_to_keep - 1]):
            packing = pack(attention_mask, logits_to_keep, groups)
            self._num_packed_away += int(attention_mask.sum() - (packing.part >= 0).sum())
            model = PackedModel(model, packing, kwargs.get("num_images"))
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _check_shared_prefix(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Compare both paths on the first micro-batch that shares a prompt on any rank; all ranks decide together."""
        prefix = self._prefix
        if not prefix.is_active or prefix.is_checked or not micro_batches:
            return
        micro_batch = micro_batches[0]
        shares = torch.tensor(float(is_worth_it(micro_batch.groups)), device=self.accelerator.device)
        if not self.accelerator.gather(shares.reshape(1)).any():
            return
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            ordinary = self._logps(self.model, micro_batch)
            with self._sharing(micro_batch, check=True):
                packed = self._logps(self.model, micro_batch)
        self._num_packed_away = 0
        difference = ((packed - ordinary) * micro_batch["completion_mask"]).abs().max()
        error = float(self.accelerator.gather(difference.float().reshape(1)).max())
        prefix.is_checked = True
        reason = prefix.too_far(
            error, ordinary.dtype if self.model.dtype == torch.float32 else self.model.dtype
        )
        if reason is not None:
            prefix.give_up(reason)

    def _end_optimizer_step(self) -> None:
        packed_away = torch.tensor(self._num_packed_away, device=self.accelerator.device)
        self._counts["prompt_tokens_saved"] += int(self.accelerator.reduce(packed_away))
        self._num_packed_away = 0
        super()._end_optimizer_step()

    # Old and reference log-probs.

    def _compute_deferred_logps(self, micro_batches: Sequence[MicroBatch]) -> None:
        generate_every = self.args.steps_per_generation * self.num_iterations
        corrects_vllm = self.use_vllm and self.vllm_importance_sampling_correction
        needs_old = self.args.gradient_accumulation_steps % generate_every != 0 or corrects_vllm
        if not (needs_old or self.beta):
            return
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            for micro_batch in micro_batches:
                with self._sharing(micro_batch):
                    if needs_old:
                        micro_batch["old_per_token_logps"] = self._logps(self.model, micro_batch)
                    if self.beta:
                        micro_batch["ref_per_token_logps"] = self._reference_logps(micro_batch)
        if corrects_vllm:
            self._correct_vllm(micro_batches)

    def _reference_logps(self, micro_batch: MicroBatch) -> torch.Tensor:
        if self.ref_model is not None:
            return self._logps(self.ref_model, micro_batch)
        # A PEFT model is its own reference: without its adapter, or with the frozen copy named "ref".
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logps(self.model, micro_batch)

    def _logps(self, model: Any, micro_batch: MicroBatch) -> torch.Tensor:
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([micro_batch["prompt_ids"], micro_batch["completion_ids"]], dim=1),
            torch.cat([micro_batch["prompt_mask"], micro_batch["completion_mask"]], dim=1),
            micro_batch["completion_ids"].size(1),
            **{key: micro_batch[key] for key in FORWARD_FIELDS if key in micro_batch},
        )[0]

    def _correct_vllm(self, micro_batches: Sequence[MicroBatch]) -> None:
        differences, ratios = [], []
        for micro_batch in micro_batches:
            old, sampling = micro_batch["old_per_token_logps"], micro_batch["sampling_per_token_logps"]
            mask = loss_mask(micro_batch)
            micro_batch["importance_sampling_ratio"] = ratio = importance_ratio(
                old,
                sampling,
                mask,
                mode=self.vllm_importance_sampling_mode,
                low=self.vllm_importance_sampling_clip_min,
                high=self.vllm_importance_sampling_clip_max,
            )
            known = mask.bool() & ~torch.isnan(sampling)
            differences.append((old - sampling).abs()[known])
            ratios.append(ratio.flatten() if ratio.shape[1] != mask.shape[1] else ratio[mask.bool()])
        self._log_agreement(torch.cat(differences), torch.cat(ratios))

    def _log_agreement(self, difference: torch.Tensor, ratio: torch.Tensor) -> None:
        """Log how far sampler and trainer are apart, under TRL's own names; here over survivors."""
        values = {
            "sampling_logp_difference": {"mean": difference, "max": difference},
            "importance_sampling_ratio": {"min": ratio, "mean": ratio, "max": ratio},
        }
        reduce = {"mean": torch.nanmean, "min": nanmin, "max": nanmax}
        for name, kinds in values.items():
            for kind, local in kinds.items():
                own = reduce[kind](local) if local.numel() else local.new_tensor(torch.nan)
                over_ranks = reduce[kind](self.accelerator.gather(own.reshape(1)))
                self._metrics["train"][f"sampling/{name}/{kind}"].append(over_ranks.item())
