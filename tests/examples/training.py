"""Short trainings that several tests start: their options, interruptions, and two processes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import train_a5
from common.checkpoint import find_checkpoint
from common.run import Run

SMALL: dict[str, Any] = {
    **{"device": "cpu", "d_model": 16, "d_state": 2, "num_householder": 1, "batch_size": 8},
    **{"steps": 6, "warmup_steps": 2, "log_every": 2, "eval_every": 3, "checkpoint_every": 2},
    **{"eval_rows": 16, "final_rows": 32, "eval_batch_size": 16, "final_lengths": (2,)},
}


def a5_config(out: Path, **changes: Any) -> train_a5.WordProblemConfig:
    values = {**SMALL, "length": 3, "eval_lengths": (3, 5), "out": out, **changes}
    return train_a5.WordProblemConfig(**values)


def read_metrics(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return content


def last(folder: Path) -> Path:
    """The last checkpoint of a run."""
    path = find_checkpoint(folder)
    assert path is not None
    return path


@contextmanager
def interrupting(step: int, *signals: int) -> Iterator[None]:
    """Signals that arrive before the update of a step; without any it raises KeyboardInterrupt."""
    update = Run.update

    def interrupted(run: Run, *args: Any, **shown: Any) -> None:
        if run.step == step and not signals:
            raise KeyboardInterrupt
        for signum in signals if run.step == step else ():
            signal.raise_signal(signum)
        update(run, *args, **shown)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "update", interrupted)
        yield


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
