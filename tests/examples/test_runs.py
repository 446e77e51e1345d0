"""The file of a set of runs: what is added stays, whoever writes at the same time."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import research.runs
from research.runs import RUNS, add_runs, read_run, read_runs


def test_a_run_replaces_the_one_of_its_name_alone(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    assert read_runs(folder) == {}
    add_runs(folder, {"b": {"loss": 0.1}, "a": [1, "Δ"]})
    add_runs(folder, {"b": {"loss": math.inf}, "c": None})
    assert read_runs(folder) == {"a": [1, "Δ"], "b": {"loss": math.inf}, "c": None}
    text = (folder / RUNS).read_text(encoding="utf-8")
    assert text == '{\n"a":[1,"Δ"],\n"b":{"loss":Infinity},\n"c":null\n}\n'
    assert [path.name for path in folder.iterdir()] == [RUNS]
    (tmp_path / "new").touch()
    assert (folder / RUNS).stat().st_mode == (tmp_path / "new").stat().st_mode


ADDING = """
import sys
from pathlib import Path
from research.runs import add_runs
for i in range(10):
    add_runs(Path(sys.argv[1]), {f"{sys.argv[2]}-{i}": int(sys.argv[2])})
"""


def test_processes_side_by_side_lose_no_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ADDING, str(tmp_path)]
    examples = Path(research.runs.__file__).parents[1]
    started = [subprocess.Popen([*command, str(n)], cwd=examples) for n in range(4)]
    assert [process.wait(timeout=60) for process in started] == [0] * 4
    assert read_runs(tmp_path) == {f"{n}-{i}": n for n in range(4) for i in range(10)}


def test_the_file_that_the_next_process_writes_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def replace_before_the_next_process(unfinished: Path, path: Path) -> None:
        replace(unfinished, path)
        unfinished.touch()  # by the process that waited for the lock of the replaced file

    monkeypatch.setattr(os, "replace", replace_before_the_next_process)
    add_runs(tmp_path, {"a": 1})
    assert {path.name for path in tmp_path.iterdir()} == {RUNS, "runs.tmp"}


def test_an_error_of_the_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_a_part(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    add_runs(tmp_path, {"a": 1})
    monkeypatch.setattr(Path, "write_text", write_a_part)
    with pytest.raises(OSError, match="No space left"):
        add_runs(tmp_path, {"b": 2})
    assert read_runs(tmp_path) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == [RUNS]


def test_a_run_is_named_by_its_file_or_its_folder(tmp_path: Path) -> None:
    add_runs(tmp_path / "set", {"a": {"seed": 1}})
    (tmp_path / "one.json").write_text(json.dumps({"seed": 2}))
    assert read_run(tmp_path / "set" / "a") == {"seed": 1}
    assert read_run(tmp_path / "one.json") == {"seed": 2}
    with pytest.raises(ValueError, match=r"FOLDER/NAME with a name in FOLDER/runs.json, got .*/b"):
        read_run(tmp_path / "set" / "b")
