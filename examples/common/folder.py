"""The folder of the results: made and tried out before the training, written to during it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError

from common.errors import UsageError

CHECKPOINT = "checkpoint.pt"
UNFINISHED = "checkpoint.tmp"
METRICS, FIGURE, WEIGHTS = "metrics.json", "accuracy.png", "model.safetensors"


def prepare_folder(folder: Path, accelerator: Accelerator) -> None:
    """Make the folder and try whether all that a run writes can be written there.

    Raises:
        UsageError: it can't, in every process alike.
    """
    obstacle = [_obstacle(folder) if accelerator.is_main_process else None]
    broadcast_object_list(obstacle)
    if obstacle[0] is not None:
        raise UsageError(f"--out must be a folder that can be written to, got {obstacle[0]}")


def _obstacle(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(b"trial")
        for name in (CHECKPOINT, UNFINISHED, METRICS, FIGURE, WEIGHTS):
            if (folder / name).exists():
                (folder / name).open("ab").close()
    except OSError as error:
        return f"{folder}: {error.strerror} ({error.filename or folder}); name another one"
    return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a full disk or a lost folder raises into an OSError that says what to do."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(
            f"{path} could not be written: {_reason(error)}; make room or mend the folder, then "
            "--resume continues from the last checkpoint"
        ) from error


def _reason(error: BaseException) -> str:
    """torch raises a RuntimeError about its own bookkeeping while it handles the OSError."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link.strerror or str(link)
        link = link.__context__
    return str(error)
