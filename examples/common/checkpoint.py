"""Checkpoints: the whole state of a `Run` in one file, so that a killed run continues exactly.

`accelerate.save_state` writes a folder of files one after the other, over those of the step before:
a kill in between leaves parts of two steps. Here one file, of which a checksum is tested when it is
read, takes the place of the one before it at once.
"""

import dataclasses
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from common.checks import flag
from common.errors import UsageError
from common.folder import CHECKPOINT, UNFINISHED, writing
from common.job import Place, Run
from common.options import RunConfig

_COUNTERS = {
    **{"loss_count": int, "step": int, "length": int},
    **{"seconds": float, "stopped": bool, "history": list},
}
_STATES = {
    **{"model": dict, "optimizer": dict, "schedule": dict},
    **{"random": list, "loss_sum": Tensor, "skipped": Tensor, "config": dict},
}
_REMEDY = "start without --resume, or name another folder with --out"
_MAY_CHANGE = frozenset(
    (
        "out",
        "resume",
        "overwrite",
        "preset",
        "log_every",
        "checkpoint_every",
        "final_lengths",
        "final_rows",
        "final_bytes",
    )
)
"""Options that a resumed run may change, because they affect neither parameters nor history."""


def checkpoint_path(job: Place) -> Path:
    """The path of a job's checkpoint."""
    return job.folder / CHECKPOINT


def plain_config(config: RunConfig) -> dict[str, Any]:
    """The options as JSON values."""
    plain = dataclasses.asdict(config)
    listed = {key: list(item) if isinstance(item, tuple) else item for key, item in plain.items()}
    return {key: str(item) if isinstance(item, Path) else item for key, item in listed.items()}


def save_checkpoint(job: Place, run: Run) -> None:
    """Write the whole run; a process killed while writing leaves the previous file untouched."""
    model, optimizer = whole_states(job, run)
    content = {
        "model": model,
        "optimizer": optimizer,
        "schedule": run.schedule.state_dict(),
        "random": gather_object([_random_state(run)]),
        # that of all processes, each of which continues with it
        "loss_sum": job.accelerator.reduce(run.loss_sum.clone(), reduction="mean"),
        "skipped": run.skipped,
        "config": plain_config(job.config),
        **{name: getattr(run, name) for name in _COUNTERS},
    }
    if job.accelerator.is_main_process:
        with writing(checkpoint_path(job)):
            _replace(checkpoint_path(job), content)
    job.accelerator.wait_for_everyone()


def whole_states(job: Place, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of model and optimizer; those of a sharded model are gathered, which all
    processes must do together, and empty but in the main one."""
    model = job.accelerator.unwrap_model(run.model)
    if not job.accelerator.is_fsdp2:
        return model.state_dict(), run.optimizer.state_dict()
    from common.sharded import gather_states  # imports for seconds

    return gather_states(model, run.optimizer.optimizer)


def _load_states(job: Place, run: Run, states: tuple[dict[str, Any], dict[str, Any]]) -> None:
    model = job.accelerator.unwrap_model(run.model)
    if not job.accelerator.is_fsdp2:
        model.load_state_dict(states[0])
        run.optimizer.load_state_dict(states[1])
        return
    from common.sharded import scatter_states  # imports for seconds

    scatter_states(model, run.optimizer.optimizer, states)


def _replace(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_name(UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure could leave an empty new file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)  # after an error, to free the space on a full disk


def check_resumable(job: Place) -> None:
    """Raise FileNotFoundError if there is no checkpoint; creates no folder."""
    path = checkpoint_path(job)
    if not path.exists():
        raise FileNotFoundError(f"--resume: there is no checkpoint {path}; start without --resume")


def load_checkpoint(job: Place, run: Run) -> None:
    """Set `run` to the state in the file.

    Raises:
        FileNotFoundError: no checkpoint.
        UsageError: a file that is not a checkpoint or is damaged, or one written with other
            options, by another script or by another number of processes.
    """
    check_resumable(job)
    path = checkpoint_path(job)
    content = read_checkpoint(path)
    _check_same_job(content, job)
    try:
        _load_states(job, run, (content["model"], content["optimizer"]))
        run.schedule.load_state_dict(content["schedule"])
        run.loss_sum.copy_(content["loss_sum"])
        run.skipped.copy_(content["skipped"])
        _restore_random_state(run, content["random"][job.accelerator.process_index])
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise _unusable(path, f"one that does not fit the model or the device: {reason}") from error
    for name in _COUNTERS:
        setattr(run, name, content[name])


def read_checkpoint(path: Path, option: str = "--resume") -> dict[str, Any]:
    """The content that `save_checkpoint` wrote, with tensors on the CPU.

    option: the flag that asked for it.

    Raises:
        UsageError: a file that is not a checkpoint, or is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not verify checksums
        if damaged is not None:
            raise _unusable(path, f"a damaged one (checksum of {damaged})", option)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except OSError as error:
        raise _unusable(
            path, f"one that cannot be read ({error.strerror or error})", option
        ) from error
    except Exception as error:  # other and damaged files raise errors of many types
        size = path.stat().st_size
        reason = str(error).partition("\n")[0]
        got = f"another or a cut file of {size} bytes ({reason})"
        raise _unusable(path, got, option) from error
    expected = {**_COUNTERS, **_STATES}
    entries: dict[str, Any] = content if isinstance(content, dict) else {}
    for name, kind in expected.items():
        if not isinstance(entries.get(name), kind):
            got = f"a file without the entry {name!r} of type {kind.__name__}"
            raise _unusable(path, got, option)
    return entries


def _unusable(path: Path, got: str, option: str = "--resume") -> UsageError:
    if option != "--resume":
        return UsageError(f"{option}: {path} must be a checkpoint of a training script, got {got}")
    return UsageError(f"--resume: {path} must be a checkpoint of this run, got {got}; {_REMEDY}")


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


def _check_same_job(content: dict[str, Any], job: Place) -> None:
    saved, now = content["config"], plain_config(job.config)
    foreign = sorted(saved.keys() ^ now.keys())
    if foreign:
        raise _unusable(
            checkpoint_path(job),
            f"one of another script or version, which do not share the options {foreign}",
        )
    for name in sorted(saved.keys() - _MAY_CHANGE):
        if saved[name] != now[name]:
            raise UsageError(
                f"--resume: the checkpoint was written with {flag(name)} {saved[name]}, got "
                f"{now[name]}; give the same options or another --out"
            )
    written_by, processes = len(content["random"]), job.accelerator.num_processes
    if written_by != processes:
        raise UsageError(
            f"--resume: {written_by} processes wrote the checkpoint, got {processes}; start as many"
        )
