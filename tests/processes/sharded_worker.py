"""One of two processes of `test_sharded.py`: `sharded_worker.py KIND FOLDER`.

Sharded engines (FSDP, ZeRO-3) gather a module's weights over the ranks when it is entered, and scatter its
gradient when it is left. A rank that skips a pass, or the vision tower of one, leaves the others waiting
for ever.

    emulated             every entry into a module is a small collective that compares names: a rank out of
                         step is an error at once, with the module's name
    fsdp2-transformers   torch's fully_shard for real, applied by `from_pretrained(distributed_config=)`
    fsdp2-accelerate     the same, applied by accelerate's FSDP plugin (`GRPOConfig(fsdp=True)`)
    zero2, zero3         DeepSpeed for real
    unbalanced           fsdp2-transformers without FastRL's care for images; must not end well
    stuck                one rank waits for ever
"""

import contextlib
import os
import sys
import time
import warnings
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

KIND, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
if KIND == "stuck":
    dist.init_process_group("gloo")
    if RANK == 0:
        dist.barrier()
    time.sleep(600)

import numpy as np  # noqa: E402
from accelerate import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from cases import KEEP_ALL, MDAP, SELECTIONS, UNEVEN, Fast, train  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from transformers.trainer_callback import PrinterCallback  # noqa: E402
from transformers.utils import logging  # noqa: E402
from trl_support import (  # noqa: E402
    grpo_args,
    length_reward,
    parity_reward,
    text_dataset,
    text_model,
    text_tokenizer,
    vision_dataset,
)

from fastrl import Selection, batching  # noqa: E402
from fastrl.integrations.trl import FastGRPOTrainer  # noqa: E402
from fastrl.testbed.model import checkpoint_path  # noqa: E402

# Selections: functions of the groups alone, so the same on every rank.


class ImagesOnOneRank:
    """Keep two rollouts with an image on one rank and two without on the other: nothing moves by itself.

    With four groups in a round, the first two are those of rank 0. `num_rounds` counts the rounds
    that had such prompts.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.num_rounds = rank, 0

    def __call__(self, groups):
        halves = [range(2), range(2, 4)]
        image = [k for k in halves[self.rank] if has_image(groups[k])][:1]
        plain = [k for k in halves[1 - self.rank] if not has_image(groups[k])][:1]
        self.num_rounds += bool(image and plain)
        return [first_two(group, k in image + plain) for k, group in enumerate(groups)]


def has_image(group) -> bool:
    return int(group.prompt_id) % 3 > 0  # of vision_dataset(image_counts=(0, 1, 2))


def first_two(group, is_kept: bool) -> Selection:
    keep_G = np.arange(group.num_rollouts) < (2 if is_kept else 0)
    return Selection(
        keep_G=keep_G, weight_G=keep_G.astype(float), cluster_G=np.arange(len(keep_G)), reason="test"
    )


TWO_ITERATIONS = {"num_iterations": 2, "max_steps": 4}
CASES = {
    "mdap": {"config": MDAP},
    "rank 1 empty": {"choose": SELECTIONS["rank_1_empty"]["choose"]},
    "one row in the world": {"choose": SELECTIONS["one_row"]["choose"]},
    "nothing": {"choose": SELECTIONS["nothing"]["choose"]},
    "two iterations": {"config": MDAP, **TWO_ITERATIONS},
    "reference": {"choose": UNEVEN, "beta": 0.04, **TWO_ITERATIONS},
    "vision": {"vision": True, "config": MDAP},
    "images on rank 0": {"vision": True, "choose": ImagesOnOneRank(0)},
    "images on rank 1": {"vision": True, "choose": ImagesOnOneRank(1), **TWO_ITERATIONS},
}


def parts(vision: bool, text_kwargs: dict | None = None, vision_kwargs: dict | None = None) -> dict:
    """The model of a case, its data and its processor; from disk, where TRL loads the reference from too."""
    kwargs = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    if not vision:
        model = Qwen2ForCausalLM.from_pretrained(FOLDER / "text_model", **kwargs, **(text_kwargs or {}))
        return {"model": model, "dataset": text_dataset(), "processing_class": text_tokenizer()}
    model = AutoModelForImageTextToText.from_pretrained(checkpoint_path(), **kwargs, **(vision_kwargs or {}))
    processor = AutoProcessor.from_pretrained(checkpoint_path(), local_files_only=True)
    return {"model": model, "dataset": vision_dataset(image_counts=(0, 1, 2)), "processing_class": processor}


# Emulation.


class OutOfStep(AssertionError):
    pass


class Watched(Fast):
    """Compares each module that a log-prob or update pass enters over the ranks; generation is not compared.

    Real generation has as many passes as its longest answer; engines make the ranks wait for each other there
    (`synced_gpus`).
    """

    compared: ClassVar[Counter] = Counter()  # module -> entries, over all passes
    num_passes = num_ignored = 0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.is_watching = False
        for role, model in (("policy", self.model), ("reference", self.ref_model)):
            for name, module in model.named_modules() if model is not None else ():
                where = f"{role}:{name}"
                module.register_forward_pre_hook(lambda *_, where=where: self.enter(where))

    def enter(self, where: str) -> None:
        if not self.is_watching:
            Watched.num_ignored += 1
            return
        Watched.compared[where] += 1
        same_on_all_ranks(where)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if self._defer_logps:  # answered without a pass
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.is_watching = True
        Watched.num_passes += 1
        same_on_all_ranks("begin, gradients" if torch.is_grad_enabled() else "begin")
        try:
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        finally:
            self.is_watching = False
        same_on_all_ranks("end")  # a rank that has entered fewer modules is here too early
        return result


def same_on_all_ranks(what: str) -> None:
    """Raise on every rank unless all of them have come to the same point."""
    code = torch.tensor(zlib.crc32(what.encode()))
    low, high, total = code.clone(), code.clone(), code.clone()
    for value, op in ((low, dist.ReduceOp.MIN), (high, dist.ReduceOp.MAX), (total, dist.ReduceOp.SUM)):
        dist.all_reduce(value, op=op, group=WATCH)
    if not (low == high == code and total == code * dist.get_world_size()):
        raise OutOfStep(f"rank {RANK} is at {what!r}, another rank is elsewhere")


class Sampling(Watched):
    """Rollouts for real, on rank 1 shorter ones."""

    def _generate_single_turn(self, *args, **kwargs):
        self.generation_config.max_new_tokens = 8 - 4 * RANK
        return FastGRPOTrainer._generate_single_turn(self, *args, **kwargs)


def watched(name: str, trainer_class=Watched, *, vision=False, **kwargs) -> None:
    Watched.compared, Watched.num_passes, Watched.num_ignored = Counter(), 0, 0
    settings = {"gradient_accumulation_steps": 2, "learning_rate": 1e-6 if vision else 0.05, **kwargs}
    train(FOLDER / name, trainer_class, **parts(vision), **settings)
    if RANK == 0:
        print(f"{name}: {Watched.num_passes} passes, {Watched.compared.total()} modules", flush=True)


def emulated() -> None:
    for name, case in CASES.items():
        watched(name, **case)
        num_models = 2 if "beta" in case else 1
        assert Watched.num_passes >= 2, "an update pass in each of two steps, at least"
        assert sum(count for where, count in Watched.compared.items() if where.endswith(":")) == (
            Watched.num_passes
        ), "each pass enters one model"
        assert len({where.split(":")[0] for where in Watched.compared}) == num_models
        if case.get("vision"):
            assert any("vision_tower" in where for where in Watched.compared)
        if "num_iterations" in case:  # 4 updates; old log-probs (and those of a reference) of two rounds
            assert Watched.num_passes >= 6 + 2 * (num_models - 1)
    for rank in range(2):
        assert CASES[f"images on rank {rank}"]["choose"].num_rounds > 0
    watched("sampling", Sampling)
    ignored = [None, None]
    dist.all_gather_object(ignored, Watched.num_ignored)
    assert ignored[0] > ignored[1] > 0, "generation enters modules, and not the same number on both ranks"
    emulation_can_fail()


def emulation_can_fail() -> None:
    with without_care_for_images():
        must_be_noticed(lambda: watched("unbalanced", vision=True, choose=ImagesOnOneRank(0)))
    layer = type(text_model().model.layers[0])
    forward = layer.forward

    def short_cut(self, hidden_states, *args, **kwargs):
        is_skipped = RANK == 1 and torch.is_grad_enabled() and self.self_attn.layer_idx == 1
        return hidden_states if is_skipped else forward(self, hidden_states, *args, **kwargs)

    layer.forward = short_cut
    try:
        must_be_noticed(lambda: watched("fewer modules"))
    finally:
        layer.forward = forward


@contextlib.contextmanager
def without_care_for_images():
    """No micro-batch gets an image because another rank's has one."""
    plan = batching._with_images_everywhere
    batching._with_images_everywhere = lambda steps_R, image_N: steps_R
    try:
        yield
    finally:
        batching._with_images_everywhere = plan


def must_be_noticed(run) -> None:
    try:
        run()
    except OutOfStep as error:
        print(f"noticed: {error}", flush=True)
        return
    raise AssertionError("ranks that entered different modules were not noticed")


# Engines for real.


class Parameters(TrainerCallback):
    """The whole parameters after every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_step_end(self, args, state, control, model=None, **_):
        self.steps.append(whole(model))


def whole(model) -> torch.Tensor:
    parameters = list(model.parameters())
    gathered = contextlib.nullcontext()
    if KIND.startswith("zero"):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(parameters)
    with gathered:
        full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
        return torch.cat([p.detach().flatten() for p in full]).double()


TEXT_LAYERS, VISION_LAYERS = ["Qwen2DecoderLayer"], ["LlamaDecoderLayer", "SiglipEncoderLayer"]
VISION_PLAN = {"model.vision_tower.encoder.layers.*": "free_full_weight"}


def start_engine() -> dict:
    """Arguments of GRPOConfig that start the engine. Test support: accelerate starts neither on a bare CPU.

    Without an accelerator it takes two processes for one (DeepSpeed), or starts DDP instead (FSDP).
    """
    if KIND in ("fsdp2-transformers", "unbalanced"):
        return {}
    is_fsdp = KIND == "fsdp2-accelerate"
    del os.environ["ACCELERATE_USE_CPU"]
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    kind = DistributedType.MULTI_GPU if is_fsdp else DistributedType.MULTI_CPU
    PartialState._prepare_backend = lambda *_: ("gloo", kind)
    if is_fsdp:
        return {"use_cpu": False, "fsdp": True}
    zero = {"stage": int(KIND[-1]), "stage3_param_persistence_threshold": 0}  # shard the smallest tensor too
    batch = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    return {
        "use_cpu": False,
        "deepspeed": {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **batch},
    }


def steps_of(name: str, engine: dict | None, *, vision=False, choose=None, config=KEEP_ALL, **kwargs) -> list:
    """Train a case; returns the parameters after each step, the first entry those before it."""
    sharded = {}
    if engine is not None and KIND in ("fsdp2-transformers", "unbalanced"):
        from transformers.distributed import DistributedConfig

        sharded = {
            "text_kwargs": {"distributed_config": DistributedConfig(fsdp_size=2)},
            "vision_kwargs": {"distributed_config": DistributedConfig(fsdp_size=2, fsdp_plan=VISION_PLAN)},
        }
    if engine and engine.get("fsdp"):
        layers = VISION_LAYERS if vision else TEXT_LAYERS
        kwargs["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": layers}
    settings = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2,
        "learning_rate": 1e-4 if vision else 0.05, **kwargs, **(engine or {}),
    }  # fmt: skip
    args = grpo_args(FOLDER / name, **settings)
    made = parts(vision, **sharded)
    trainer = Fast(
        model=made["model"], processing_class=made["processing_class"], train_dataset=made["dataset"],
        reward_funcs=[parity_reward, length_reward], args=args, fastrl=config,
    )  # fmt: skip
    assert trainer.accelerator.num_processes == dist.get_world_size() == 2
    trainer.remove_callback(PrinterCallback)
    parameters = Parameters()
    parameters.steps.append(whole(trainer.model))
    trainer.add_callback(parameters)
    if choose:
        trainer.fastrl.select = lambda groups, num_prompts=None: choose(groups)
    trainer.train()
    check_engine(trainer, is_plain=engine is None)
    return parameters.steps


def check_engine(trainer, *, is_plain: bool) -> None:
    """What was started is what was asked for."""
    from torch.distributed.fsdp import FSDPModule

    model = trainer.model_wrapped
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    whole_size = sum(p.numel() for p in model.parameters())
    if is_plain:
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    elif KIND.startswith("zero"):
        assert type(model).__name__ == "DeepSpeedEngine"
        assert model.zero_optimization_stage() == int(KIND[-1])
        if KIND == "zero3":
            assert all(p.ds_tensor.numel() < p.ds_numel for p in model.parameters() if p.ds_numel > 2)
    else:
        assert len(sharded) > 2
        assert local < 0.6 * whole_size
        if trainer._is_vlm:
            assert any("vision_tower" in name for name in sharded)


def real() -> None:
    """The engine's parameters after each step, against those of plain data parallelism."""
    expected = {name: steps_of(name, None, **case) for name, case in CASES.items()}
    engine = start_engine()
    for name, case in CASES.items():
        found = steps_of(f"{name} sharded", engine, **case)
        start = expected[name][0]
        assert len(found) == len(expected[name]) > 2
        for a, b in zip(found, expected[name], strict=True):
            moved, error = float((b - start).norm()), float((a - b).norm())
            if RANK == 0:
                print(f"{name}: moved {moved:.3g}, error {error:.1e}", flush=True)
            # Engines sum in another order, and parameters are rounded to float32 after each step.
            assert error <= 2e-6 * moved + 1e-9 * float(start.norm())
        assert (moved == 0) == (name == "nothing")


logging.disable_progress_bar()
if KIND.startswith("zero"):
    import deepspeed  # noqa: F401
WATCH = None
assert PartialState(cpu=True).num_processes == int(os.environ["EXPECTED_WORLD_SIZE"]) == 2
if RANK == 0:
    text_model().save_pretrained(FOLDER / "text_model")
dist.barrier()
if KIND == "emulated":
    # A group of its own: its collectives are never taken for the trainer's, and a hang becomes an error.
    WATCH = dist.new_group(timeout=timedelta(seconds=20))
    emulated()
elif KIND == "unbalanced":
    with without_care_for_images():
        steps_of("unbalanced", start_engine(), vision=True, choose=ImagesOnOneRank(0))
else:
    real()
dist.barrier()
if RANK == 0:
    (FOLDER / "done").touch()
os._exit(0)  # engines keep threads that a normal exit waits for
