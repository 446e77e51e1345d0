"""A checkpoint is all of a `Run` in one file, so that a killed run continues bit for bit."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from common.job import Job, Run
from common.options import TrainConfig

_COUNTERS = ("loss_count", "step", "seconds", "stopped", "history")
_MAY_CHANGE = frozenset(
    ("out", "resume", "preset", "log_every", "checkpoint_every", "final_lengths", "final_rows")
)
"""Options that a resumed run may set anew: none touches the parameters or the history."""


def checkpoint_path(job: Job) -> Path:
    """Where the checkpoint of a job lies."""
    return job.folder / "checkpoint.pt"


def plain_config(config: TrainConfig) -> dict[str, Any]:
    """The options as JSON values."""
    plain = dataclasses.asdict(config)
    listed = {key: list(item) if isinstance(item, tuple) else item for key, item in plain.items()}
    return {key: str(item) if isinstance(item, Path) else item for key, item in listed.items()}


def save_checkpoint(job: Job, run: Run) -> None:
    """Write the whole run; a kill while writing leaves the previous file untouched."""
    content = {
        "model": job.accelerator.unwrap_model(run.model).state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "random": gather_object([_random_state(run)]),
        "loss_sum": run.loss_sum,
        "config": plain_config(job.config),
        **{name: getattr(run, name) for name in _COUNTERS},
    }
    if job.accelerator.is_main_process:
        path = checkpoint_path(job)
        unfinished = path.with_suffix(".tmp")
        torch.save(content, unfinished)
        os.replace(unfinished, path)
    job.accelerator.wait_for_everyone()


def load_checkpoint(job: Job, run: Run) -> None:
    """Bring `run` to the state in the file.

    Raises:
        FileNotFoundError: no checkpoint.
        ValueError: it was written with other options or another number of processes.
    """
    path = checkpoint_path(job)
    if not path.exists():
        raise FileNotFoundError(f"--resume: there is no checkpoint {path}; start without --resume")
    content = torch.load(path, map_location="cpu", weights_only=True)
    _check_same_job(content, job)
    job.accelerator.unwrap_model(run.model).load_state_dict(content["model"])
    run.optimizer.load_state_dict(content["optimizer"])
    run.loss_sum.copy_(content["loss_sum"])
    for name in _COUNTERS:
        setattr(run, name, content[name])
    _restore_random_state(run, content["random"][job.accelerator.process_index])


def _random_state(run: Run) -> dict[str, Any]:
    state = {"data": run.generator.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(run: Run, state: dict[str, Any]) -> None:
    run.generator.set_state(state["data"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _check_same_job(content: dict[str, Any], job: Job) -> None:
    saved, now = content["config"], plain_config(job.config)
    for name in sorted((saved.keys() | now.keys()) - _MAY_CHANGE):
        if saved.get(name) != now.get(name):
            raise ValueError(
                f"--resume: the checkpoint was written with {name} {saved.get(name)}, got "
                f"{now.get(name)}; give the same options or another --out"
            )
    written_by, processes = len(content["random"]), job.accelerator.num_processes
    if written_by != processes:
        raise ValueError(f"--resume: {written_by} processes wrote the checkpoint, got {processes}")
