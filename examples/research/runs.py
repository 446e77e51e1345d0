"""The results of a set of runs in one JSON file, which maps their names to what each has written.

The file has one run a line, sorted by name, so that a run that is added or made again changes one
line. Several processes may write into one file at the same time.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from flags import UsageError

RUNS = "runs.json"
"""The name of the file; the folder has that of the experiment."""


def read_runs(folder: Path) -> dict[str, Any]:
    """All runs of a folder by name, whose contents must not be changed; none if it has no file of
    runs."""
    path = folder / RUNS
    if not path.exists():
        return {}
    found = path.stat()
    return dict(_parsed(path, found.st_ino, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=32)
def _parsed(path: Path, *version: int) -> dict[str, Any]:
    """The content of a file of runs in a version, of which a large one takes a second."""
    text = path.read_text(encoding="utf-8")
    return dict(json.loads(text)) if text else {}  # a new file is empty until it is first written


def read_run(path: Path) -> Any:
    """The content of a run: of a JSON file, or of FOLDER/NAME, the run NAME of FOLDER/runs.json.

    Raises UsageError if there is neither the file nor such a run.
    """
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    runs = read_runs(path.parent)
    if path.name not in runs:
        raise UsageError(
            f"a run must be a JSON file or FOLDER/NAME with a name in FOLDER/{RUNS}, got {path}"
        )
    return runs[path.name]


def add_runs(folder: Path, runs: Mapping[str, Any]) -> None:
    """Add runs to those of a folder, in place of runs of the same names."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / RUNS):
        _write(folder / RUNS, {**read_runs(folder), **runs})


def _write(path: Path, runs: Mapping[str, Any]) -> None:
    """Write all runs; who reads at the same time gets the old file or the new one."""
    lines = (
        f"{json.dumps(name)}:{json.dumps(runs[name], ensure_ascii=False, separators=(',', ':'))}"
        for name in sorted(runs)
    )
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    unfinished = path.with_name("runs.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
    except BaseException:
        unfinished.unlink(missing_ok=True)  # to free the space on a full disk
        raise
    # The lock is that of the old file, so from here on another process may write `unfinished`.
    os.replace(unfinished, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process writes the file, which is created if there is none; a process
    that ends gives its lock up."""
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # otherwise another process has replaced the file since it was opened
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield
                return
