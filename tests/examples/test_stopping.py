"""Runs that end early: signals, unusable files and folders, a full disk."""

import dataclasses
import json
import os
import pickle
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import train_a5
import train_copy
from bedouin.tasks import Batch, Stream
from common import script, training
from common.checkpoint import read_checkpoint
from common.errors import Interrupted, UsageError
from common.options import parse_config

SMALL: dict[str, Any] = {
    **{"device": "cpu", "d_model": 8, "d_state": 2, "num_householder": 1, "batch_size": 4},
    **{"steps": 4, "warmup_steps": 2, "log_every": 2, "eval_every": 2, "checkpoint_every": 2},
    **{"eval_rows": 8, "final_rows": 8, "eval_batch_size": 8, "group": "Z5", "length": 3},
}
FLAGS = (
    *("--preset=cpu", "--d-model=8", "--d-state=2", "--batch-size=4", "--threads=1", "--group=Z5"),
    *("--eval-every=20", "--checkpoint-every=100000", "--eval-rows=8", "--final-rows=8"),
    *("--eval-batch-size=8", "--length=3", "--eval-lengths=3", "--final-lengths=4"),
)


def small(out: Path, **changes: Any) -> train_a5.WordProblemConfig:
    return train_a5.WordProblemConfig(**{**SMALL, "out": out, **changes})


def default_signals() -> None:
    """A process that a shell starts in the background would ignore Ctrl-C, and so its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*flags: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, train_a5.__file__, *FLAGS, *flags],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )


def wait_for_line(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended without {text!r}")


def metrics(folder: Path) -> dict[str, Any]:
    """What a run found, without what may differ between two runs of the same options."""
    content: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return {name: content[name] for name in content if name not in ("seconds", "config")}


# -- signals


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    steps = "--steps=80"
    process = start(steps, f"--out={tmp_path / 'cut'}")
    wait_for_line(process, "step 20")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "Traceback" not in errors and "interrupted after step" in errors
    assert len(errors.splitlines()) < 8
    program, path, *given = shlex.split(errors.splitlines()[-1])
    assert (program, path) == (sys.executable, train_a5.__file__)
    assert given[-1] == "--resume" and steps in given
    assert 20 <= read_checkpoint(tmp_path / "cut" / "checkpoint.pt")["step"] < 80
    whole = [*FLAGS, steps, f"--out={tmp_path / 'whole'}"]
    for flags in (given, whole):
        train_a5.main(parse_config(train_a5.PRESETS, flags))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    one, two = (read_checkpoint(tmp_path / out / "checkpoint.pt") for out in ("cut", "whole"))
    for name, value in one["model"].items():
        assert torch.equal(value, two["model"][name]), name


def train_with_signals(
    config: train_a5.WordProblemConfig, *signals: int, step: int = 1
) -> dict[str, Any]:
    """Train; the process gets the signals while the batch of a step is drawn."""
    problem = train_a5.word_problem(config)

    def train_batch(rows: Stream, now: int, longest: int) -> Batch:
        if now == step:
            for signum in signals:
                signal.raise_signal(signum)
        return problem.train_batch(rows, now, longest)

    return training.train(dataclasses.replace(problem, train_batch=train_batch), config)


@contextmanager
def handled(signum: int, handler: Any) -> Iterator[None]:
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        assert signal.getsignal(signum) == handler
        signal.signal(signum, before)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_step_is_finished_and_handlers_are_restored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], signum: signal.Signals
) -> None:
    with (
        handled(signum, signal.default_int_handler),
        pytest.raises(Interrupted, match="after step 2 of 4, saved in .*checkpoint.pt") as stop,
    ):
        train_with_signals(small(tmp_path, checkpoint_every=100), signum)
    assert stop.value.signum == signum
    assert read_checkpoint(tmp_path / "checkpoint.pt")["step"] == 2
    assert "finishing the step, then saving" in capfd.readouterr().err


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with (
        handled(signal.SIGINT, signal.default_int_handler),
        pytest.raises(KeyboardInterrupt) as stop,
    ):
        train_with_signals(small(tmp_path), signal.SIGINT, signal.SIGINT)
    assert not isinstance(stop.value, Interrupted)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_signal_in_the_last_step_leaves_the_evaluation_to_the_next_start(tmp_path: Path) -> None:
    with (
        handled(signal.SIGINT, signal.default_int_handler),
        pytest.raises(Interrupted, match="after step 4 of 4"),
    ):
        train_with_signals(small(tmp_path), signal.SIGINT, step=3)
    assert not (tmp_path / "metrics.json").exists()
    train_a5.main(small(tmp_path, resume=True))
    assert metrics(tmp_path)["steps"] == 4


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Interrupted("saved in x", signal.SIGINT), 130, "saved in x; continue with\n    "),
        (Interrupted("saved in x", signal.SIGTERM), 143, "--resume"),
        (KeyboardInterrupt(), 130, "stopped at once"),
        (UsageError("--out is wrong"), 1, "error: --out is wrong"),
        (FloatingPointError("lower --lr"), 1, "error: lower --lr"),
        (OSError("disk full"), 1, "error: disk full"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_status_and_message(
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(config: train_a5.WordProblemConfig) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["train_a5.py", "--preset=cpu"])
    with pytest.raises(SystemExit) as stop:
        script.run_script(main, train_a5.PRESETS)
    printed = capsys.readouterr().err
    if isinstance(stop.value.code, str):  # Python prints it and exits with 1
        assert status == 1 and message in stop.value.code
    else:
        assert stop.value.code == status and message in printed


@pytest.mark.slow
def test_processes_stop_at_the_same_step(tmp_path: Path) -> None:
    """Two processes that meet over torch.distributed, of which one gets the signal."""
    flags = ("--steps=100000", "--log-every=7", f"--out={tmp_path}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    where |= {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    first, second = (start(*flags, **where, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1"))
    try:
        wait_for_line(first, "step 20")
        second.send_signal(signal.SIGINT)
        errors = [process.communicate(timeout=180)[1] for process in (first, second)]
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert (first.returncode, second.returncode) == (130, 130)
    assert "accelerate launch ..." in errors[0] and "accelerate launch" not in errors[1]
    content = read_checkpoint(tmp_path / "checkpoint.pt")
    assert content["step"] >= 20 and content["step"] % 7 == 0 and len(content["random"]) == 2


# -- checkpoints that cannot be used


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    """One bit of a tensor, which torch.load would not notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _without(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = read_checkpoint(path)
        del content[name]
        torch.save(content, path)

    return damage


def _other_weights(path: Path) -> None:
    content = read_checkpoint(path)
    content["model"] = {name: value[None] for name, value in content["model"].items()}
    torch.save(content, path)


def _other_generator(path: Path) -> None:
    content = read_checkpoint(path)
    content["random"][0]["data"] = torch.zeros(16, dtype=torch.uint8)  # as on a GPU
    torch.save(content, path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "cut file of 0 bytes"),
    "text": (lambda path: path.write_text("no checkpoint\n"), "cut file of 14 bytes"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "another or a cut file"),
    "safetensors": (lambda path: save_file({"a": torch.ones(2)}, path), "another or a cut file"),
    "half": (_cut, "another or a cut file"),
    "one bit": (_flip, r"a damaged one \(checksum of "),
    "tensor": (lambda path: torch.save(torch.ones(2), path), "without the entry 'loss_count'"),
    "state dict": (lambda path: torch.save({"a": torch.ones(2)}, path), "without the entry"),
    "object": (lambda path: torch.save(Path("x"), path), "another or a cut file"),
    "without optimizer": (_without("optimizer"), "without the entry 'optimizer' of type dict"),
    "other weights": (_other_weights, "does not fit the model or the device: .*size mismatch"),
    "other generator": (_other_generator, "does not fit the model or the device: .*RNG state"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The checkpoint of a whole run."""
    folder = tmp_path_factory.mktemp("finished")
    train_a5.main(small(folder))
    return (folder / "checkpoint.pt").read_bytes()


@pytest.mark.parametrize(("damage", "got"), DAMAGES.values(), ids=DAMAGES)
def test_an_unusable_checkpoint_is_named(
    tmp_path: Path, finished: bytes, damage: Callable[[Path], Any], got: str
) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(finished)
    damage(path)
    with pytest.raises(ValueError, match=got) as error:
        train_a5.main(small(tmp_path, resume=True))
    message = str(error.value)
    assert message.startswith(f"--resume: {path} must be a checkpoint of this run, got")
    assert message.endswith("start without --resume, or name another folder with --out")


def test_the_checkpoint_of_another_script_is_named(tmp_path: Path, finished: bytes) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(finished)
    shared = {name: SMALL[name] for name in SMALL if name not in ("group", "length")}
    config = train_copy.CopyingConfig(**{**shared, "out": tmp_path, "resume": True})
    with pytest.raises(UsageError, match=r"another script or version, .*'context_len', .*'group'"):
        train_copy.main(config)


# -- folders that cannot be written


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda tmp: tmp / "file", "File exists"),
        (lambda tmp: tmp / "file" / "below", "Not a directory"),
        (lambda tmp: Path("/dev/null/x"), "Not a directory"),
        (lambda tmp: Path("/proc/bedouin"), "No such file or directory"),
        (lambda tmp: tmp / "taken", r"Is a directory \(.*model.safetensors\)"),
    ],
    ids=["file", "below a file", "below a device", "proc", "a result is a folder"],
)
def test_a_folder_that_cannot_be_written_is_found_at_the_start(
    tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "model.safetensors").mkdir(parents=True)
    config = small(make(tmp_path))

    def train_batch(rows: Stream, now: int, longest: int) -> Batch:
        pytest.fail("the training has started")

    problem = dataclasses.replace(train_a5.word_problem(config), train_batch=train_batch)
    with pytest.raises(UsageError, match=rf"^--out must be a folder .*{reason}.*another one$"):
        training.train(problem, config)
    assert (tmp_path / "file").read_text() == "mine"


# -- a full disk


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Python ignores SIGXFSZ, so a write beyond the limit fails like one to a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_that_does_not_fit_leaves_the_previous_one(tmp_path: Path) -> None:
    train_a5.main(small(tmp_path))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with largest_file(len(before) // 2), pytest.raises(OSError, match="File too large"):
        train_a5.main(small(tmp_path, overwrite=True))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not (tmp_path / "checkpoint.tmp").exists()


@pytest.mark.parametrize("name", ["metrics.json", "accuracy.png"])
def test_results_that_do_not_fit(tmp_path: Path, finished: bytes, name: str) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(finished)
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"{name} could not be written: .*No space left.*--resume"):
        train_a5.main(small(tmp_path, resume=True))
