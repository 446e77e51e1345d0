"""The results of a set of runs in one JSON file, which maps their names to what each has written.

The file has one run a line, sorted by name, so that a run that is added or made again changes one
line. Several processes may write into one file at the same time.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUNS = "runs.json"
"""The name of the file; the folder has that of the experiment."""


def read_runs(folder: Path) -> dict[str, Any]:
    """All runs of a folder by name; none if it has no file of runs."""
    path = folder / RUNS
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def read_run(path: Path) -> Any:
    """The content of a run: of a JSON file, or of FOLDER/NAME, the run NAME of FOLDER/runs.json.

    Raises ValueError if there is neither the file nor such a run.
    """
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    runs = read_runs(path.parent)
    if path.name not in runs:
        raise ValueError(
            f"a run must be a JSON file or FOLDER/NAME with a name in FOLDER/{RUNS}, got {path}"
        )
    return runs[path.name]


def add_runs(folder: Path, runs: Mapping[str, Any]) -> None:
    """Add runs to those of a folder, in place of runs of the same names."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _write(folder / RUNS, {**read_runs(folder), **runs})


def _write(path: Path, runs: Mapping[str, Any]) -> None:
    """Write all runs; who reads at the same time gets the old file or the new one."""
    lines = (
        f"{json.dumps(name)}:{json.dumps(runs[name], ensure_ascii=False, separators=(',', ':'))}"
        for name in sorted(runs)
    )
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f"{path.name}.", delete=False
    ) as unfinished:
        try:
            unfinished.write(text)
            unfinished.close()
            os.chmod(unfinished.name, mode)
            os.replace(unfinished.name, path)
        except BaseException:
            os.unlink(unfinished.name)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process writes the runs of this folder."""
    with (folder / "runs.lock").open("a") as lock:  # given up when it is closed, also by a crash
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
