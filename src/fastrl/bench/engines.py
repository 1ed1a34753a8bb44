"""A recipe as the command lines of other engines: the same data, batch, loss, schedule and settings of FastRL.

A recipe is written in TRL's words. What verl and EasyR1 call differently is in one table each below; what they do not
have is refused, or said beside the command.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastrl.bench.recipe import Recipe
from fastrl.bench.tasks import DataTask
from fastrl.config import FastRLConfig
from fastrl.data.prompts import PIXELS_PER_TOKEN, template_names
from fastrl.types import ConfigError

_DUAL_CLIP = 3.0
"""verl's and EasyR1's own; TRL has it only where the recipe says `delta`."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to type.

    Args:
        data: Command that writes the data.
        start: Command and arguments that start training.
        notes: What differs from the same recipe in TRL.
    """

    data: str
    start: list[str]
    notes: list[str]

    def __str__(self) -> str:
        lines = [f"# {note}" for note in self.notes]
        return "\n".join([*lines, self.data, " \\\n    ".join(self.start)])


def command(recipe: Recipe, engine: str) -> Command:
    """Return the commands that train a recipe with another engine.

    Args:
        recipe: On a data set; the testbed's model is TRL's own business.
        engine: verl or easyr1.

    Raises:
        ConfigError: a recipe of the testbed, or a setting that the engine does not have.
    """
    if not isinstance(recipe.task, DataTask):
        raise ConfigError(
            f"{recipe.name}: the testbed is trained by TRL. Take a recipe with a data set, such as "
            "recipes/geometry3k/qwen2_5_vl_7b_grpo.yaml."
        )
    return ENGINES[engine](recipe, recipe.task)


def _verl(recipe: Recipe, task: DataTask) -> Command:
    settings = {
        **_verl_data(recipe, task),
        **_verl_actor(recipe, task),
        **_verl_rollout(recipe, task),
        "reward.custom_reward_function.path": "pkg://fastrl.rewards.verl",
        "reward.custom_reward_function.name": task.reward,
        **_schedule(recipe, task, test="trainer.test_freq"),
        "trainer.nnodes": 1,
    }
    notes = ["A second node: trainer.nnodes=2, after `ray start` on both (docs/integrations/verl.md)."]
    if recipe.trainer.get("delta") is None:
        notes.append(f"verl clips negative advantages at a ratio of {_DUAL_CLIP:g} too; TRL does not.")
    if task.overlong_buffer:
        notes.append(
            f"task.overlong_buffer={task.overlong_buffer} is left out: verl's rule functions know no length. "
            "Wrap fastrl.rewards.verl to add it."
        )
    of_fastrl, refills = _of_fastrl(recipe.fastrl)
    if refills:
        settings["algorithm.filter_groups.enable"] = True
        settings["algorithm.filter_groups.metric"] = of_fastrl.get("outcome_key", "reward")
        notes.append("Groups without signal are replaced by verl's replay buffer, not by FastRL's refill.")
    return Command(
        data=_data_command(task, "verl"),
        start=_line("python -m fastrl.integrations.verl", settings, of_fastrl, prefix="+fastrl."),
        notes=notes,
    )


def _verl_data(recipe: Recipe, task: DataTask) -> dict[str, Any]:
    return {
        **_data(recipe, task),
        "data.image_key": "images",
        "data.train_batch_size": _batch(recipe)[1],
        "data.filter_overlong_prompts": True,
    }


def _verl_actor(recipe: Recipe, task: DataTask) -> dict[str, Any]:
    get, actor = recipe.trainer.get, "actor_rollout_ref.actor"
    _, prompts = _batch(recipe)
    loss, aggregation = _verl_loss(recipe)
    beta = float(get("beta", 0.0))
    settings = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": get("scale_rewards", "group") not in (False, "none"),
        "actor_rollout_ref.model.path": task.model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": bool(get("gradient_checkpointing", False)),
        f"{actor}.ppo_mini_batch_size": prompts // _updates(recipe),
        f"{actor}.ppo_epochs": int(get("num_iterations", 1)),
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 2 * (_prompt_tokens(task) + _response_tokens(recipe)),
        f"{actor}.optim.lr": float(get("learning_rate", 1e-6)),
        f"{actor}.optim.weight_decay": float(get("weight_decay", 0.0)),
        f"{actor}.optim.clip_grad": float(get("max_grad_norm", 1.0)),
        f"{actor}.clip_ratio_low": _clips(recipe)[0],
        f"{actor}.clip_ratio_high": _clips(recipe)[1],
        f"{actor}.clip_ratio_c": float(get("delta") or _DUAL_CLIP),
        f"{actor}.policy_loss.loss_mode": loss,
        f"{actor}.loss_agg_mode": aggregation,
        f"{actor}.use_kl_loss": beta > 0,
        f"{actor}.kl_loss_coef": beta,
        f"{actor}.kl_loss_type": "low_var_kl",
    }
    if aggregation == "seq-mean-token-sum-norm":
        settings[f"{actor}.loss_scale_factor"] = _response_tokens(recipe)
    return settings


def _verl_rollout(recipe: Recipe, task: DataTask) -> dict[str, Any]:
    get, rollout = recipe.trainer.get, "actor_rollout_ref.rollout"
    tokens = 4 * (_prompt_tokens(task) + _response_tokens(recipe))
    return {
        f"{rollout}.name": "vllm",
        f"{rollout}.n": _batch(recipe)[0],
        f"{rollout}.temperature": float(get("temperature", 1.0)),
        f"{rollout}.top_p": float(get("top_p", 1.0)),
        f"{rollout}.tensor_model_parallel_size": int(get("vllm_tensor_parallel_size", 1)),
        f"{rollout}.gpu_memory_utilization": float(get("vllm_gpu_memory_utilization", 0.6)),
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": tokens,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": tokens,
    }


def _verl_loss(recipe: Recipe) -> tuple[str, str]:
    """(loss_mode, loss_agg_mode)"""
    kind = recipe.trainer.get("loss_type", "dapo")
    modes = {
        "grpo": "seq-mean-token-mean",
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    }
    if kind not in modes:
        raise ConfigError(
            f"loss_type: {kind} has no counterpart in verl that was compared. Choose one of {', '.join(modes)}."
        )
    if recipe.trainer.get("importance_sampling_level", "token") == "sequence":
        return "gspo", "seq-mean-token-mean"
    return "vanilla", modes[kind]


def _easyr1(recipe: Recipe, task: DataTask) -> Command:
    settings = {
        "config": "examples/config.yaml",
        **_easyr1_data(recipe, task),
        **_easyr1_algorithm(recipe, task),
        "worker.reward.reward_function": (
            f"$(python -c 'import fastrl.rewards.easyr1 as m; print(m.__file__)'):{task.reward}"
        ),
        **_schedule(recipe, task, test="trainer.val_freq"),
    }
    notes = []
    of_fastrl, refills = _of_fastrl(recipe.fastrl)
    if refills:
        settings |= {
            "algorithm.online_filtering": True,
            "algorithm.filter_key": of_fastrl.get("outcome_key", "overall"),
            "algorithm.filter_low": 0.01,
            "algorithm.filter_high": 0.99,
        }
        notes.append(
            "Groups without signal are replaced by EasyR1's online filtering, not by FastRL's refill."
        )
    return Command(
        data=_data_command(task, "easyr1"),
        start=_line("python -m fastrl.integrations.easyr1", settings, of_fastrl, prefix="fastrl."),
        notes=notes,
    )


def _easyr1_data(recipe: Recipe, task: DataTask) -> dict[str, Any]:
    settings = {
        **_data(recipe, task),
        "data.format_prompt": _template_file(task.prompt),
        "data.rollout_batch_size": _batch(recipe)[1],
    }
    pixels = {"data.min_pixels": task.min_pixels, "data.max_pixels": task.max_pixels}
    return settings | {name: value for name, value in pixels.items() if value}


def _easyr1_algorithm(recipe: Recipe, task: DataTask) -> dict[str, Any]:
    get, kind = recipe.trainer.get, recipe.trainer.get("loss_type", "dapo")
    if kind not in ("grpo", "dapo", "bnpo"):
        raise ConfigError(
            f"loss_type: {kind} is none of EasyR1's averages (token, seq). Choose grpo or dapo."
        )
    n, prompts = _batch(recipe)
    beta, by_sequence = float(get("beta", 0.0)), get("importance_sampling_level", "token") == "sequence"
    settings = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.disable_kl": beta == 0,
        "algorithm.use_kl_loss": True,
        "algorithm.kl_coef": beta,
        "algorithm.kl_penalty": "low_var_kl",
        "worker.actor.model.model_path": task.model,
        "worker.actor.global_batch_size": prompts // _updates(recipe),
        "worker.actor.clip_ratio_low": _clips(recipe)[0],
        "worker.actor.clip_ratio_high": _clips(recipe)[1],
        "worker.actor.clip_ratio_dual": float(get("delta") or _DUAL_CLIP),
        "worker.actor.loss_avg_mode": "seq" if by_sequence or kind == "grpo" else "token",
        "worker.actor.optim.lr": float(get("learning_rate", 1e-6)),
        "worker.actor.optim.weight_decay": float(get("weight_decay", 0.0)),
        "worker.actor.max_grad_norm": float(get("max_grad_norm", 1.0)),
        "worker.rollout.n": n,
        "worker.rollout.temperature": float(get("temperature", 1.0)),
        "worker.rollout.top_p": float(get("top_p", 1.0)),
        "worker.rollout.tensor_parallel_size": int(get("vllm_tensor_parallel_size", 1)),
        "worker.rollout.gpu_memory_utilization": float(get("vllm_gpu_memory_utilization", 0.6)),
    }
    return settings | ({"worker.actor.loss_type": "gspo_token"} if by_sequence else {})


def _template_file(name: str | None) -> str:
    if name in template_names():
        return f"$(python -c 'import fastrl.data as d; print(d.__path__[0])')/templates/{name}.jinja"
    return "null" if name is None else name


ENGINES: Mapping[str, Callable[[Recipe, DataTask], Command]] = {"verl": _verl, "easyr1": _easyr1}


def _data(recipe: Recipe, task: DataTask) -> dict[str, Any]:
    """What verl and EasyR1 call alike."""
    return {
        "data.train_files": f"{_folder(task)}/train.parquet",
        "data.val_files": f"{_folder(task)}/test.parquet",
        "data.max_prompt_length": _prompt_tokens(task),
        "data.max_response_length": _response_tokens(recipe),
        "data.seed": recipe.seed,
    }


def _line(start: str, settings: Mapping[str, Any], of_fastrl: Mapping[str, Any], *, prefix: str) -> list[str]:
    changes = {f"{prefix}{name}": value for name, value in of_fastrl.items()}
    return [start, *(f"{name}={_plain(value)}" for name, value in {**settings, **changes}.items())]


def _of_fastrl(settings: FastRLConfig) -> tuple[dict[str, Any], bool]:
    """(what differs from the published setting, whether groups without signal are replaced)

    TRL names a reward after its function; verl and EasyR1 after the entry that the function returns.
    """
    changed = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    }
    refill = changed.pop("refill", "none")
    if refill in ("kept", "skipped"):
        raise ConfigError(
            f"fastrl.refill: {refill} is sampled in waves by the TRL integration only. Train this recipe with TRL."
        )
    changed.pop("max_refills", None)
    if settings.outcome_key is not None:
        changed["outcome_key"] = settings.outcome_key.removesuffix("_reward")
    return changed, refill == "signal"


def _schedule(recipe: Recipe, task: DataTask, *, test: str) -> dict[str, Any]:
    """TRL counts optimizer steps where the others count rounds."""
    get, per_round = recipe.trainer.get, _updates(recipe)
    return {
        "trainer.n_gpus_per_node": task.processes or 1,
        "trainer.total_epochs": math.ceil(float(get("num_train_epochs", 1))),
        "trainer.save_freq": max(1, int(get("save_steps", 500)) // per_round),
        test: max(1, int(get("eval_steps") or 500) // per_round),
        "trainer.experiment_name": recipe.name,
    }


def _batch(recipe: Recipe) -> tuple[int, int]:
    """(rollouts per prompt, prompts per round)"""
    n = int(recipe.trainer.get("num_generations", 8))
    return n, int(recipe.trainer["generation_batch_size"]) // n


def _updates(recipe: Recipe) -> int:
    """Optimizer steps of a round."""
    get, processes = recipe.trainer.get, getattr(recipe.task, "processes", None) or 1
    rows = get("per_device_train_batch_size", 8) * get("gradient_accumulation_steps", 1) * processes
    return max(1, int(recipe.trainer["generation_batch_size"]) // rows)


def _clips(recipe: Recipe) -> tuple[float, float]:
    low = float(recipe.trainer.get("epsilon", 0.2))
    return low, float(recipe.trainer.get("epsilon_high") or low)


def _response_tokens(recipe: Recipe) -> int:
    return int(recipe.trainer.get("max_completion_length", 256))


def _prompt_tokens(task: DataTask) -> int:
    """Room for a problem of 1,024 tokens and one image of the largest size, in whole multiples of 1,024."""
    image = (task.max_pixels or 0) / PIXELS_PER_TOKEN**2
    return 1024 * math.ceil((1024 + image) / 1024)


def _folder(task: DataTask) -> str:
    return f"data/{task.name}"


def _data_command(task: DataTask, engine: str) -> str:
    words = ["fastrl data", task.name, f"--to {engine}", f"--out {_folder(task)}"]
    if task.source:
        words.append(f"--source {task.source}")
    if task.prompt and engine == "verl":  # EasyR1 adds its own template
        words.append(f"--prompt {task.prompt}")
    return " ".join(words)


def _plain(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
