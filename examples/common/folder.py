"""The folder of the results, which is created and tested before training."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from common.errors import UsageError

CHECKPOINT = "checkpoint.pt"
UNFINISHED = "checkpoint.tmp"
METRICS, WEIGHTS = "metrics.json", "model.safetensors"
FIGURE, CURVE, SAMPLE = "accuracy.png", "bits_per_byte.png", "sample.txt"


def prepare_folder(folder: Path, accelerator: Accelerator) -> None:
    """Create the folder and test whether all files of a run can be written there.

    Raises:
        UsageError: they cannot; raised in every process.
    """
    obstacle = [_obstacle(folder) if accelerator.is_main_process else None]
    broadcast_object_list(obstacle)
    if obstacle[0] is not None:
        raise UsageError(f"--out must be a folder that can be written to, got {obstacle[0]}")


def refuse_to_replace(folder: Path, *names: str) -> None:
    """Raise UsageError if the folder has one of these files of an earlier run."""
    found = [name for name in names if (folder / name).exists()]
    if found:
        resume = ", continue that run with --resume" if CHECKPOINT in found else ""
        raise UsageError(
            f"--out must be a folder without an earlier run, got {folder} with {found[0]}: name "
            f"another one{resume}, or replace that run with --overwrite"
        )


def _obstacle(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(b"trial")
        for name in (CHECKPOINT, UNFINISHED, METRICS, FIGURE, CURVE, SAMPLE, WEIGHTS):
            if (folder / name).exists():
                (folder / name).open("ab").close()
    except OSError as error:
        return f"{folder}: {error.strerror} ({error.filename or folder}); name another one"
    return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk or a missing folder into an OSError that says what to do."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(
            f"{path} could not be written: {_reason(error)}; free some space or repair the folder, "
            "then --resume continues from the last checkpoint"
        ) from error


def save_weights(
    model: nn.Module,
    path: Path,
) -> None:
    """Write the state_dict of a model with safetensors; tied weights are written once.

    Parameters that are parts of one buffer, as those of cuDNN's LSTM are, are copied, since
    safetensors refuses them.
    """
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    weights = {name: v for name, v in model.state_dict().items() if name not in tied}
    for name, v in weights.items():
        if v.untyped_storage().nbytes() > v.numel() * v.element_size():
            weights[name] = v.clone()
    write_weights(weights, path)


def write_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write tensors with safetensors, which gives its files to their owner alone, and let the file
    have the permissions of other new files."""
    save_file(weights, path, metadata={"format": "pt"})
    mask = os.umask(0)  # there is no other way to read it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _reason(error: BaseException) -> str:
    """The message of the OSError behind `error`, which torch may hide behind a RuntimeError."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link.strerror or str(link)
        link = link.__context__
    return str(error)
