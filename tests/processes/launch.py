"""Start scripts on two processes, and turn a hang into a failure."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil

HERE = Path(__file__).parent


def start(script: str, *arguments: str, num_processes: int, log: Path) -> subprocess.Popen:
    """Start a script of this folder in a process group of its own; its output goes to `log`."""
    command = [sys.executable, str(HERE / script), *arguments]
    if num_processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_processes)]
        command[1:1] = [*launcher, "--master_addr", "127.0.0.1", "--master_port", str(port)]
    paths = [str(HERE), str(HERE.parent / "integration"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths),
        "EXPECTED_WORLD_SIZE": str(num_processes), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with log.open("a", encoding="utf-8") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a process and everything that it started.

    torchrun gives every rank a session of its own: a signal to the launcher's group would leave them running.
    """
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        launcher = psutil.Process(process.pid)
        for member in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def run(script: str, *arguments: str, num_processes: int, log: Path, limit_s: float) -> None:
    """Run a script to its end.

    Raises:
        AssertionError: it failed, or took longer than the limit: a rank waits for another. Shows the last output.
    """
    process = start(script, *arguments, num_processes=num_processes, log=log)
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        code = f"no end after {limit_s:g} s: a rank waits for another"
    finally:
        kill(process)
    assert code == 0, f"{script} {' '.join(arguments)}: {code}\n{log.read_text(encoding='utf-8')[-6000:]}"
