"""Processes that tests start."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTS = os.pathsep.join([str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")])
"""The path of a process that runs a file of tests."""


def start(*command: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a process that a shell starts in the background would ignore Ctrl-C, and so its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def start_two(*command: str, **environment: str) -> "list[subprocess.Popen[str]]":
    """Two processes that meet over torch.distributed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"} | environment
    shared |= {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return [start(*command, **shared, RANK=rank, LOCAL_RANK=rank) for rank in "01"]


def end(processes: "list[subprocess.Popen[str]]") -> None:
    """Wait for processes, none of which may fail."""
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
