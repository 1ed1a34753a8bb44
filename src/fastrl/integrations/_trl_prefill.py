"""One prefill per prompt in transformers' generation, however many rollouts the prompt gets.

`generate` is given P distinct prompts. After it has prepared their inputs (positions, image features), two of its steps
are replaced for as long as it runs:

    expand    P rows -> N rows, row n continuing prompt index[n]; also where counts differ between prompts
    prefill   the model's own, on the P rows; then the cache and the last logits are taken by index

Everything else is the model's own code, so positions, padding, images and sampling are those of the ordinary path.
"""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

VERIFIED = (
    "gemma", "llama", "llava", "mistral", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_vl", "smollm3",
)  # fmt: skip
"""Types of models whose tokens were compared with the ordinary path in tests."""
_EXPECTED = {
    "_expand_inputs_for_generation": ["expand_size", "is_encoder_decoder", "input_ids", "model_kwargs"],
    "_prefill": ["input_ids", "generation_config", "model_kwargs", "is_first_iteration"],
}
_CHECKED_TOKENS = 3
# Of the spread of a row's logits: they differ by the order of sums, which is another one in a batch of another size.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class SharedPrefill:
    """Shares the prefill of prompts in a model's `generate`, after comparing both paths once.

    Args:
        model: What the trainer generates with, unwrapped: a transformers model, or a PEFT model around one.

    `reason` says why prompts are not shared; None = they are.
    """

    def __init__(self, model: Any) -> None:
        self._model = _generating(model)
        self.reason: str | None = None
        self._is_checked = False
        reason = _why_not(self._model)
        if reason is not None:
            self.give_up(reason)

    @contextlib.contextmanager
    def sharing(self, index: torch.Tensor) -> Iterator[None]:
        """While this is open, `generate` answers P prompts with len(index) rows, row n continuing prompt index[n].

        If the comparison of its first call fails, `reason` is set, and what that call returned is of no use.
        """
        model, ordinary = self._model, self._model.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            if not self._is_checked:
                self._check(ordinary, index, *args, **kwargs)
            if self.reason is not None:
                return torch.nn.functional.pad(kwargs["input_ids"], (0, 1))  # an answer of one token
            with _shared(model, index):
                return ordinary(*args, **kwargs)

        model.generate = generate
        try:
            yield
        finally:
            del model.generate

    def _check(self, ordinary: Any, index: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compare logits of a few greedy tokens with the ordinary path; if they differ, say so and share no more."""
        self._is_checked = True
        reason = _why_not_with(kwargs["generation_config"], self._model.generation_config)
        if reason is not None:
            return self.give_up(reason)
        kwargs = {**kwargs, "generation_config": _greedy(kwargs["generation_config"])}
        wanted = ordinary(*args, **kwargs)
        with _shared(self._model, index):
            found = ordinary(*args, **kwargs)
        error = _largest_difference(wanted, found, index)
        allowed = _TOLERANCE.get(self._model.dtype, _TOLERANCE[torch.bfloat16])
        if error > allowed:
            kind, dtype = self._model.config.model_type, self._model.dtype
            self.give_up(
                f"logits of {kind} differ by {error:.2g} of their spread from the ordinary path on the first batch, "
                f"{allowed:g} is allowed for {dtype} (dropout in generation does that, too)"
            )

    def give_up(self, reason: str) -> None:
        """Share no more, and say why."""
        self.reason = reason
        warnings.warn(f"share_prompt: {reason}. Prompts are prefilled once per rollout.", stacklevel=2)


def _generating(model: Any) -> Any:
    """The transformers model whose `generate` runs in the end."""
    while not isinstance(model, GenerationMixin):
        inner = (
            model.get_base_model() if hasattr(model, "get_base_model") else getattr(model, "_orig_mod", None)
        )
        if inner is None or inner is model:
            return model
        model = inner
    return model


def _why_not(model: Any) -> str | None:
    if not isinstance(model, GenerationMixin):
        return f"{type(model).__name__} does not generate by transformers"
    for name, wanted in _EXPECTED.items():
        method = getattr(type(model), name, None)
        found = [] if method is None else [p for p in inspect.signature(method).parameters if p != "self"]
        if found != wanted:
            return f"this transformers' {name} takes {found or 'nothing'}, expected {wanted}"
    kind = model.config.model_type
    if kind not in VERIFIED:
        return (
            f"models of the type {kind} were not compared with the ordinary path; {', '.join(VERIFIED)} were"
        )
    return None


def _why_not_with(config: GenerationConfig, default: GenerationConfig) -> str | None:
    """What in a generation's settings does not go with a cache that is taken by index; None in `config` = `default`."""
    use_cache, implementation = (
        value if (value := getattr(config, name, None)) is not None else getattr(default, name, None)
        for name in ("use_cache", "cache_implementation")
    )
    if use_cache is False:
        return "use_cache is off, so there is no prefill to share"
    if implementation not in (None, "dynamic"):
        return f"cache_implementation {implementation!r} has a fixed number of rows"
    return None


@contextlib.contextmanager
def _shared(model: Any, index: torch.Tensor) -> Iterator[None]:
    """Replace expansion and prefill on this one model."""
    prefill = model._prefill
    of_prompts: dict[str, Any] = {}

    def expand_by_index(
        expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> Any:
        of_prompts.update(model_kwargs, input_ids=input_ids)
        rows = index.to(input_ids.device)
        return input_ids[rows], {key: _rows_of(key, value, rows) for key, value in model_kwargs.items()}

    def prefill_prompts(
        input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool = True
    ) -> Any:
        shared = {**model_kwargs, **of_prompts, "cache": model_kwargs["cache"]}
        ids = shared.pop("input_ids")
        outputs = prefill(ids, generation_config, shared, is_first_iteration=is_first_iteration)
        rows = index.to(outputs.logits.device)
        outputs.cache.batch_select_indices(rows)
        outputs.logits = outputs.logits[:, -1:][rows]
        return outputs

    model._expand_inputs_for_generation, model._prefill = expand_by_index, prefill_prompts
    try:
        yield
    finally:
        del model._expand_inputs_for_generation, model._prefill


def _rows_of(key: str, value: Any, rows: torch.Tensor) -> Any:
    """Expand what decoding reads; images are read by the prefill alone."""
    if value is None or key not in ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"):
        return value
    # Multimodal positions have a dimension for time, height and width before that of rows; one row serves them all.
    axis = value.ndim - 2
    return value if value.shape[axis] == 1 else value.index_select(axis, rows)


def _greedy(config: GenerationConfig) -> GenerationConfig:
    greedy = copy.deepcopy(config)
    greedy.update(
        do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None, max_new_tokens=_CHECKED_TOKENS,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return greedy


def _largest_difference(wanted: Any, found: Any, index: torch.Tensor) -> float:
    """Between logits of the same row after the same tokens, relative to their standard deviation."""
    rows, num_new, worst = index.to(found.sequences.device), len(found.logits), 0.0
    tokens, others = wanted.sequences[rows], found.sequences
    is_same = torch.ones(len(rows), dtype=torch.bool, device=others.device)
    for step in range(min(num_new, len(wanted.logits))):
        logits = wanted.logits[step][rows].float()
        difference = (logits - found.logits[step].float()).abs().amax(dim=1) / logits.std(dim=1).clamp(
            min=1e-6
        )
        if is_same.any():
            worst = max(worst, float(difference[is_same].max()))
        place = others.shape[1] - num_new + step
        is_same &= tokens[:, place] == others[:, place]
    return worst
