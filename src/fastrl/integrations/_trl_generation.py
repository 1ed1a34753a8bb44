"""Groups of any size in TRL's generation and scoring, which know one size only.

TRL views rewards as (P, G). Where prompts have different numbers of rollouts, each group is filled
up to the largest with rewards of NaN, which all of TRL's baselines and scales leave out: the
advantages stay TRL's own, for every `scale_rewards` and `multi_objective_aggregation`.
"""

import contextlib
import functools
import inspect
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl import GRPOTrainer

from fastrl.batching import round_up_counts
from fastrl.integrations._trl_data import own_row
from fastrl.integrations._trl_prefill import SharedPrefill
from fastrl.integrations._trl_rows import OncePerPrompt, repeat_prompts
from fastrl.integrations._trl_stages import StageTimesMixin


class GroupsMixin(StageTimesMixin):
    """Let TRL generate and score groups of given sizes: images once per prompt, log-probs put off.

    After `_sample`, `_counts_P` are the rollouts of each prompt, `_rewards_per_func` the (N, number
    of reward functions) rewards of all ranks and `_num_tokens` the response lengths on this rank.
    """

    # What TRL's trainer holds and this class sets for a while.
    num_generations: int
    beta: float
    processing_class: Any
    vllm_importance_sampling_correction: bool
    _share_prompt = "auto"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._counts_P = np.zeros(0, dtype=np.int64)
        self._defer_logps = False
        self._round_prompt_ids: list[str] = []
        self._own_slots: list[int] = []
        self._num_tokens_saved = 0
        self._prefill: SharedPrefill | None = None
        super().__init__(*args, **kwargs)

    @property
    def _is_ragged(self) -> bool:
        return bool((self._counts_P != self._counts_P.max()).any())

    def _sample(self, prompts: Sequence[dict[str, Any]], counts_P: np.ndarray) -> dict[str, Any]:
        """Generate and score rollouts of this step's prompts.

        Args:
            prompts: One row of the data set per prompt, the same on every rank.
            counts_P: Rollouts per prompt; raised where the ranks could not share them evenly.

        Returns:
            TRL's batch of this rank's contiguous slice of the N = sum(counts) rollouts. Its
            advantages are those of TRL over full groups.
        """
        num_ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        self._counts_P = round_up_counts(counts_P, num_ranks, self.num_generations)
        slots_N = np.repeat(np.arange(len(prompts)), self._counts_P)
        num_own = len(slots_N) // num_ranks
        own = slots_N[rank * num_own : (rank + 1) * num_own].tolist()
        for logged in self._logs.values():
            logged.clear()  # TRL keeps the last full batch of rows: more than a wave with smaller groups
        with self._full_groups(own):
            batch = super()._generate_and_score_completions([own_row(prompts[p]) for p in own])
        saved = torch.tensor(self._num_tokens_saved, device=self.accelerator.device)
        self._counts["prompt_tokens_saved"] += int(self.accelerator.reduce(saved))
        self._num_tokens_saved = 0
        if self._is_ragged:
            self._leave_out_filling(batch, slice(rank * num_own, (rank + 1) * num_own))
        # Of two reward functions of one name, TRL shows the second.
        for k, name in enumerate(self.reward_func_names):
            self._logs["rewards"][name].clear()
            self._logs["rewards"][name].extend(self._rewards_per_func[:, k].tolist())
        return batch

    @contextlib.contextmanager
    def _full_groups(self, own_slots: Sequence[int]) -> Iterator[None]:
        """Set what TRL reads: the size of a group, no log-probs yet, a processor that looks at an image once."""
        names = ("num_generations", "beta", "processing_class", "vllm_importance_sampling_correction")
        saved = {name: getattr(self, name, None) for name in names}
        self.num_generations = int(self._counts_P.max())
        self.beta, self.vllm_importance_sampling_correction, self._defer_logps = 0.0, False, True
        self._own_slots = np.unique(own_slots, return_inverse=True)[1].tolist()
        if self._is_vlm and not (self.tools or self.environment_factories or self.rollout_func):
            self.processing_class = OncePerPrompt(self.processing_class, self._own_slots)
        try:
            yield
        finally:
            self._defer_logps = False
            for name, value in saved.items():
                setattr(self, name, value)

    def _filling(self) -> torch.Tensor:
        """(P * G,) bool: whether a place in the full groups holds a rollout, or only fills a group up."""
        size = int(self._counts_P.max())
        counts = torch.from_numpy(self._counts_P)
        return (torch.arange(size) < counts[:, None]).flatten()

    def _leave_out_filling(self, batch: dict[str, Any], own: slice) -> None:
        """Undo the filling in the advantages, which TRL has computed for all ranks and cut for this one."""
        column = self._logs["advantages"]
        values = torch.tensor(list(column))[self._filling()]
        column.clear()
        column.extend(values.tolist())
        batch["advantages"] = values[own].to(batch["advantages"])

    def _tokenize_prompts(self, prompts: list) -> Any:
        once = self.processing_class
        if not isinstance(once, OncePerPrompt) or len(prompts) != len(once.slots):
            return super()._tokenize_prompts(prompts)
        slots = once.slots
        first_row = np.unique(slots, return_index=True)[1]
        prompt_ids, images, fields = super()._tokenize_prompts([prompts[row] for row in first_row])
        repeated = repeat_prompts(fields, images, slots)
        if repeated is None:
            return super()._tokenize_prompts(prompts)
        once.fields, once.fields_of_prompts = repeated, fields
        return [prompt_ids[p] for p in slots], images and [images[p] for p in slots], repeated

    def _generate_single_turn(
        self,
        prompt_ids: list,
        images: list | None,
        multimodal_fields: dict,
        num_generations: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ask = functools.partial(super()._generate_single_turn, **kwargs)
        # A tool loop asks again with num_generations = 1: a request per row, whatever the groups are.
        asks_by_group = self.use_vllm and self.vllm_mode == "server" and num_generations > 1
        if self.model.training and asks_by_group and self._is_ragged:
            return self._ask_by_group(ask, prompt_ids, images, multimodal_fields, *args)
        shared = self._ask_once_per_prompt(ask, prompt_ids, images, multimodal_fields, num_generations, *args)
        if shared is not None:
            return shared
        return ask(prompt_ids, images, multimodal_fields, num_generations, *args)

    def _ask_by_group(
        self, ask: Any, prompt_ids: list, images: list | None, multimodal_fields: dict, *args: Any
    ) -> Any:
        """Ask TRL's vLLM client, which knows one number of rollouts, once for each number that there is."""
        counts_N = np.repeat(self._counts_P, self._counts_P)
        all_ids = gather_object(prompt_ids)
        all_images = gather_object(images if images is not None else [None] * len(prompt_ids))
        found: list[Any] = [None] * len(all_ids)
        for count in np.unique(self._counts_P).tolist():
            rows = np.flatnonzero(counts_N == count).tolist()
            # TRL's client sends one prompt (and its images) per group from the main process, and gives
            # every process as many rows back as it put in.
            mine = rows if self.accelerator.is_main_process else []
            asked = [all_ids[row] for row in mine], [all_images[row] for row in mine]
            completions, logprobs = ask(*asked, multimodal_fields, count, *args)
            for k, row in enumerate(mine):
                found[row] = (completions[k], logprobs[k])
        (found,) = broadcast_object_list([found], from_process=0)
        first = self.accelerator.process_index * len(prompt_ids)
        own = found[first : first + len(prompt_ids)]
        return [completion for completion, _ in own], [logprobs for _, logprobs in own]

    def _ask_once_per_prompt(
        self,
        ask: Any,
        prompt_ids: list,
        images: list | None,
        multimodal_fields: dict,
        num_generations: int,
        *args: Any,
    ) -> Any:
        """Generate all rollouts from one prefill per prompt; None where that is not possible or not equal.

        Ranks decide together: sharded engines wait for each other in every forward pass.
        """
        prefill = self._prefill_of_model()
        if prefill is None or not self.model.training or not self._defer_logps:
            return None
        first = self._first_rows(prompt_ids)
        fields = None if first is None else self._fields_of(first, images, multimodal_fields)
        can_share = self._everywhere(fields is not None and prefill.reason is None)
        if not can_share or first is None or fields is None:
            return None
        ids = [prompt_ids[row] for row in first]
        with prefill.sharing(torch.tensor(self._own_slots)):
            answers = ask(ids, images and [images[row] for row in first], fields, num_generations, *args)
        if not self._everywhere(prefill.reason is None):
            if prefill.reason is None:
                prefill.give_up("both paths differ on another rank")
            return None
        self._num_tokens_saved += sum(map(len, prompt_ids)) - sum(map(len, ids))
        return answers

    def _everywhere(self, is_so: bool) -> bool:
        if self.accelerator.num_processes == 1:
            return is_so
        num = self.accelerator.reduce(torch.tensor(int(is_so), device=self.accelerator.device))
        return int(num) == self.accelerator.num_processes

    def _first_rows(self, prompt_ids: list) -> list[int] | None:
        """The first row of each prompt on this rank; None where rows are not those of `_sample`."""
        slots = self._own_slots
        if len(prompt_ids) != len(slots):
            return None
        first = np.unique(slots, return_index=True)[1].tolist()
        is_repeated = all(ids == prompt_ids[first[slot]] for ids, slot in zip(prompt_ids, slots, strict=True))
        return first if is_repeated else None

    def _fields_of(
        self, first: Sequence[int], images: list | None, multimodal_fields: dict
    ) -> dict[str, Any] | None:
        """The processor's fields of these prompts; None where it is not known whose pixels are whose."""
        once = self.processing_class
        if isinstance(once, OncePerPrompt) and once.fields:
            return once.fields_of_prompts
        num_rows = len(self._own_slots)
        if images is not None or any(len(value) != num_rows for value in multimodal_fields.values()):
            return None
        return {name: [value[row] for row in first] for name, value in multimodal_fields.items()}

    def _prefill_of_model(self) -> SharedPrefill | None:
        """What shares the prefill of prompts in this trainer's generation; None where another engine generates."""
        generates_otherwise = self.use_vllm or self.use_transformers_continuous_batching
        generates_otherwise |= _own_generation(type(self)) is not GRPOTrainer
        asks_in_turns = self.tools or self.environment_factories or self.rollout_func
        if self._share_prompt == "off" or generates_otherwise or asks_in_turns:
            return None
        if self._prefill is None:
            self._prefill = SharedPrefill(self.accelerator.unwrap_model(self.model))
        return self._prefill

    def _calculate_rewards(
        self, inputs: list, prompts: list, completions: list, completion_ids_list: list
    ) -> Any:
        if not self.model.training:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except Exception as error:
            rows = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids_list}
            error.add_note(self._where_raised(error, inputs, rows))
            raise
        self._rewards_per_func = rewards
        self._num_tokens = [len(ids) for ids in completion_ids_list]
        if not self._is_ragged:
            return rewards
        filled = self._filling().to(rewards.device)
        full = rewards.new_full((len(filled), rewards.shape[1]), torch.nan)
        full[filled] = rewards
        return full

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if self._defer_logps:
            return None, None, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _where_raised(self, error: BaseException, inputs: list, rows: dict[str, list]) -> str:
        """Name the reward function that an exception passed through, and the prompt it was scoring."""
        codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        named = zip(self.reward_func_names, self.reward_funcs, strict=True)
        raised = [(name, function) for name, function in named if _code(function) in codes]
        rank, num_own = self.accelerator.process_index, len(inputs)
        slots_N = np.repeat(np.arange(len(self._round_prompt_ids)), self._counts_P)
        own_ids = [self._round_prompt_ids[p] for p in slots_N[rank * num_own : (rank + 1) * num_own]]
        if len(raised) != 1:
            names, ids = ", ".join(self.reward_func_names), ", ".join(dict.fromkeys(own_ids))
            return f"FastRL: raised while scoring the prompts {ids} with {names}."
        name, function = raised[0]
        i = self._raising_row(error, function, inputs, rows)
        where = f"prompt {own_ids[i]!r}" if i is not None else f"prompts {', '.join(dict.fromkeys(own_ids))}"
        return f"FastRL: reward function {name!r} raised while scoring {where}."

    def _raising_row(
        self, error: BaseException, function: Any, inputs: list, rows: dict[str, list]
    ) -> int | None:
        """Call a reward function on one rollout after the other until it raises the same; the run is over anyway.

        A rollout is to blame if another prompt's is scored without an error, before it or after it.
        """
        if isinstance(function, torch.nn.Module) or inspect.iscoroutinefunction(_callable(function)):
            return None
        if isinstance(error, OSError) or self.accelerator.num_processes > 1:
            return None  # a service that is down would be asked again, or other ranks would wait
        blamed: int | None = None
        for i in range(len(inputs)):
            if blamed is not None and rows["prompts"][i] == rows["prompts"][blamed]:
                continue
            again = self._error_of_row(i, function, inputs, rows)
            if again is not None and (type(again), str(again)) != (type(error), str(error)):
                return None  # alone, it fails otherwise
            if blamed is not None:
                return blamed if again is None else None
            if again is not None:
                blamed = i
                if i > 0:
                    return i
        return None

    def _error_of_row(
        self, i: int, function: Any, inputs: list, rows: dict[str, list]
    ) -> BaseException | None:
        arguments = {key: [value] for key, value in inputs[i].items() if key not in ("prompt", *rows)}
        arguments |= {key: [values[i]] for key, values in rows.items()}
        if self.environments is not None:
            arguments["environments"] = [self.environments[i]]
        try:
            function(**arguments, trainer_state=self.state, log_extra=_no_log, log_metric=_no_log)
        except Exception as error:
            return error
        return None


def _own_generation(trainer: type) -> type:
    """The class behind ours whose `_generate_single_turn` is called."""
    behind = trainer.__mro__[trainer.__mro__.index(GroupsMixin) + 1 :]
    return next(c for c in behind if "_generate_single_turn" in vars(c))


def _no_log(*args: Any, **kwargs: Any) -> None:
    """Log nothing."""


def _callable(function: Any) -> Any:
    """The Python function behind a reward function: unwrapped, or the `__call__` of an object."""
    function = inspect.unwrap(function)
    function = getattr(function, "func", function)
    return function if inspect.isroutine(function) else type(function).__call__


def _code(function: Any) -> Any:
    return getattr(_callable(function), "__code__", None)
