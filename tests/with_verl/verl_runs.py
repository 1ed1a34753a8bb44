"""Start real verl on CPU processes and read what it logged. Test support.

A rollout server that dies leaves verl waiting for ever: every run has a limit, after which all of its processes are
killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 400
_MARK = "FASTRL_TEST_RUN"  # in the environment of every process of a run

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "cpu_verl",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "HYDRA_FULL_ERROR": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

SETTINGS = """
data.train_batch_size=4 data.max_prompt_length=32 data.max_response_length=12 data.dataloader_num_workers=0
data.filter_overlong_prompts=False data.shuffle=False data.seed=1
algorithm.adv_estimator=grpo trainer.device=cpu
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False actor_rollout_ref.actor.use_torch_compile=False
+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512 actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512
actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.agent.num_workers=1 actor_rollout_ref.rollout.calculate_log_probs=True
actor_rollout_ref.rollout.n_gpus_per_node=1 actor_rollout_ref.rollout.dtype=float32
reward.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.val_before_train=False
trainer.logger=[console,file] trainer.save_freq=-1 trainer.test_freq=-1 trainer.resume_mode=disable
ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.include_dashboard=False
+ray_kwargs.ray_init.object_store_memory=300000000
""".split()

REFERENCE = """
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.ref.strategy=fsdp2
actor_rollout_ref.ref.fsdp_config.strategy=fsdp2 actor_rollout_ref.ref.fsdp_config.use_torch_compile=False
+actor_rollout_ref.ref.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=512
""".split()

GSPO = """
actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4
""".split()

# One server for both ranks: two would each count how often they were asked.
TWO_RANKS = """
trainer.n_gpus_per_node=2 +ray_kwargs.ray_init.num_gpus=2 actor_rollout_ref.rollout.tensor_model_parallel_size=2
""".split()

VLLM = """
actor_rollout_ref.rollout.free_cache_engine=False +actor_rollout_ref.rollout.enable_sleep_mode=False
actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.max_model_len=64
actor_rollout_ref.rollout.max_num_seqs=16 actor_rollout_ref.rollout.gpu_memory_utilization=0.2
actor_rollout_ref.rollout.max_num_batched_tokens=512
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
""".split()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its exit status, everything it printed, and one mapping of metrics per step."""

    returncode: int
    output: str
    steps: list[dict]

    def __getitem__(self, metric: str) -> list:
        return [step.get(metric) for step in self.steps]


def command(folder: Path, *overrides: str, module: str, rollout: str) -> list[str]:
    """verl's command line for the tiny task in `folder`; a later override of the same key wins."""
    of_task = [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.rollout.name={rollout}",
        f"reward.custom_reward_function.path={HERE}/tiny_task.py",
        *(VLLM if rollout == "vllm" else []),
    ]
    last = {}
    for override in [*SETTINGS, *of_task, *overrides]:
        last[override.partition("=")[0].lstrip("+")] = override
    return [sys.executable, "-m", module, *last.values()]


def environment(out: Path) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent / "with_vllm"), os.environ.get("PYTHONPATH", "")])
    of_run = {"VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"), _MARK: str(out)}
    return {**os.environ, **ENVIRONMENT, **of_run, "PYTHONPATH": path}


def start(
    folder: Path, out: Path, *overrides: str, module: str = "fastrl.integrations.verl", rollout: str = "hf"
) -> subprocess.Popen:
    """Start a run whose output goes to `out`/output.txt."""
    out.mkdir(parents=True, exist_ok=True)
    line = command(
        folder, f"trainer.default_local_dir={out}/checkpoints", *overrides, module=module, rollout=rollout
    )
    with (out / "output.txt").open("a") as log:
        return subprocess.Popen(
            line, stdout=log, stderr=subprocess.STDOUT, env=environment(out), cwd=out, start_new_session=True
        )


def finish(process: subprocess.Popen, out: Path, *, limit_s: float = LIMIT_S) -> Run:
    """Wait for a run; at the limit, kill all of its processes."""
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill(process, out)
    return Run(
        returncode=process.returncode,
        output=(out / "output.txt").read_text(errors="replace"),
        steps=read(out),
    )


def run(
    folder: Path,
    out: Path,
    *overrides: str,
    module: str = "fastrl.integrations.verl",
    rollout: str = "hf",
    limit_s: float = LIMIT_S,
) -> Run:
    """Run verl to its end, which must be a good one."""
    process = start(folder, out, *overrides, module=module, rollout=rollout)
    finished = finish(process, out, limit_s=limit_s)
    assert finished.returncode == 0, f"verl ended with {finished.returncode}:\n{finished.output[-6000:]}"
    return finished


def kill(process: subprocess.Popen, out: Path) -> None:
    """SIGKILL to the driver and to all that Ray started for it, which has sessions of its own."""
    mark = f"{_MARK}={out}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
    process.wait(timeout=30)


def read(out: Path) -> list[dict]:
    """The metrics of each step, in the order in which they were logged."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines]
    return [{"step": record["step"], **record["data"]} for record in records]
