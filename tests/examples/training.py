"""Short trainings that several tests start: their options and interruptions."""

import json
import signal
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
