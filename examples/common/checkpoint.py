"""The folder of a run, and its checkpoint, which accelerate writes: the folder checkpoint-STEP.

A checkpoint gets its name when all its files are written, so that a killed run keeps the last one.
Its manifest has the options of the run and the checksums of the files.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from flags import UsageError, flag

METRICS, WEIGHTS, MANIFEST = "metrics.json", "model.safetensors", "manifest.json"
_MAY_CHANGE = {
    *("out", "resume", "overwrite", "preset", "log_every", "checkpoint_every"),
    *("final_lengths", "final_rows", "final_bytes"),
}
"""Options that a resumed run may change, because they affect neither parameters nor history."""


def find_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint of a run."""
    found = (path.parent for path in folder.glob(f"checkpoint-*/{MANIFEST}"))
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)


def refusal(folder: Path, *, replaces: bool) -> str | None:
    """Why the results of a run, which replaces an earlier one or does not, cannot be written to a
    folder, which is made if there is none."""
    found = find_checkpoint(folder)
    if not replaces and (found is not None or (folder / METRICS).exists()):
        resume = "" if found is None else "continue that run with --resume, "
        return f"without an earlier run, got {folder}: name another one, {resume}or --overwrite it"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(b"trial")
        for path in folder.glob("*.*"):
            path.open("ab").close()
    except OSError as error:
        got = f"{folder}: {error.strerror} ({error.filename or folder})"
        return f"that can be written to, got {got}; name another one"
    return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk or a missing folder into an OSError that says what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch hides one behind the other
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # to free the space
        raise OSError(
            f"{path} could not be written: {error.__context__ or error}; free some space or repair "
            "the folder, then --resume continues from the last checkpoint"
        ) from error


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file but the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {f"{p.relative_to(folder)}": hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def write_checkpoint(
    accelerator: Accelerator, folder: Path, step: int, options: dict[str, Any]
) -> Path:
    """Write the state of everything that accelerate knows, and remove earlier checkpoints."""
    unfinished, path = folder / "unfinished", folder / f"checkpoint-{step}"
    with writing(unfinished):
        # not safetensors, which would write one of the weights that are parts of one buffer
        accelerator.save_state(str(unfinished), safe_serialization=False)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            content = {"config": options, "sha256": checksums(unfinished)}
            (unfinished / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
            earlier = [other for other in folder.glob("checkpoint-*") if other != path]
            shutil.rmtree(path, ignore_errors=True)
            os.replace(unfinished, path)
            for other in earlier:
                shutil.rmtree(other)
    accelerator.wait_for_everyone()
    return path


def read_options(folder: Path, option: str = "--resume") -> tuple[Path, dict[str, Any]]:
    """The last checkpoint of a run, whose files are checked, and the options of the run; `option`
    asked for it. Raises FileNotFoundError without a checkpoint, UsageError for a damaged one."""
    path = find_checkpoint(folder)
    if path is None:
        raise FileNotFoundError(f"{option}: there is no checkpoint in {folder}: train one first")
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        differing = checksums(path).items() ^ content["sha256"].items()
        options = dict(content["config"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise unusable(path, f"one whose manifest cannot be read ({error})", option) from error
    if differing:
        raise unusable(path, f"a damaged one: {min(differing)[0]} is not as written", option)
    return path, options


def load_checkpoint(accelerator: Accelerator, path: Path) -> None:
    """Let everything that accelerate knows continue from a checkpoint. Raises UsageError."""
    try:
        accelerator.load_state(str(path))
    except Exception as error:  # libraries raise errors of many types
        if isinstance(error, UsageError):
            raise
        reason = " ".join(str(error).split())
        raise unusable(path, f"one that does not fit the model or device: {reason}") from error


def unusable(path: Path, got: str, option: str = "--resume") -> UsageError:
    """The error of a checkpoint that this run cannot continue."""
    remedy = f"start without {option}, or name another folder with --out"
    return UsageError(f"{option}: {path} must be a checkpoint of this run, got {got}; {remedy}")


def check_same_run(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UsageError unless the options allow to continue the run that was saved."""
    if foreign := sorted(saved.keys() ^ now.keys()):
        raise unusable(path, f"one of another script or version, without or with {foreign}")
    for name in sorted(saved.keys() - _MAY_CHANGE):
        if saved[name] != now[name]:
            raise UsageError(
                f"--resume: the checkpoint was written with {flag(name)} {saved[name]}, got "
                f"{now[name]}; give the same options or another --out"
            )
