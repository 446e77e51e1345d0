"""Runs that end early: signals, unusable files and folders, a full disk."""

import json
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.examples.training import SMALL, a5_config, interrupting, last, read_metrics
from tests.processes import start, start_two

import train_a5
import train_copy
from common import script
from common.checkpoint import MANIFEST, checksums, find_checkpoint
from common.options import parse_config
from common.run import Run
from common.script import Interrupted
from flags import UsageError

SHORT: dict[str, Any] = {"d_model": 8, "batch_size": 4, "steps": 4, "group": "Z5"}
SHORT |= {"eval_every": 2, "eval_rows": 8, "final_rows": 8}
FLAGS = (
    *("--preset=cpu", "--d-model=8", "--d-state=2", "--batch-size=4", "--threads=1", "--group=Z5"),
    *("--eval-every=20", "--checkpoint-every=100000", "--eval-rows=8", "--final-rows=8"),
    *("--eval-batch-size=8", "--length=3", "--eval-lengths=3", "--final-lengths=4"),
)


def small(out: Path, **changes: Any) -> train_a5.WordProblemConfig:
    return a5_config(out, **SHORT | changes)


def wait_for_line(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended without {text!r}")


def metrics(folder: Path) -> dict[str, Any]:
    """What a run found, without what may differ between two runs of the same options."""
    content = read_metrics(folder)
    return {name: content[name] for name in content if name not in ("seconds", "config")}


# -- signals


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    steps = "--steps=80"
    process = start(train_a5.__file__, *FLAGS, steps, f"--out={tmp_path / 'cut'}")
    wait_for_line(process, "step 20")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "Traceback" not in errors and "interrupted after step" in errors
    assert len(errors.splitlines()) < 8
    program, path, *given = shlex.split(errors.splitlines()[-1])
    assert (program, path) == (sys.executable, train_a5.__file__)
    assert given[-1] == "--resume" and steps in given
    assert 20 <= int(last(tmp_path / "cut").name.partition("-")[2]) < 80
    for flags in (given, [*FLAGS, steps, f"--out={tmp_path / 'whole'}"]):
        train_a5.main(parse_config(train_a5.PRESETS, flags))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


@contextmanager
def handled(signum: int, handler: Any) -> Iterator[None]:
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        assert signal.getsignal(signum) == handler
        signal.signal(signum, before)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, 3], ids=["in a step", "in the last step"])
def test_the_step_is_finished_and_handlers_are_restored(
    step: int, signum: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the last step the evaluation is left to the next start."""
    done = rf"after step {step + 1} of 4, saved in .*checkpoint-{step + 1}"
    with handled(signum, signal.default_int_handler):
        with pytest.raises(Interrupted, match=done) as stop:
            with interrupting(step, signum):
                train_a5.main(small(tmp_path, checkpoint_every=100))
    assert stop.value.args[1] == signum and last(tmp_path).name == f"checkpoint-{step + 1}"
    assert "finishing the step, then saving" in capfd.readouterr().err
    assert not (tmp_path / "metrics.json").exists()
    train_a5.main(small(tmp_path, resume=True, checkpoint_every=100))
    assert metrics(tmp_path)["steps"] == 4


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with handled(signal.SIGINT, signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt) as stop:
            with interrupting(1, signal.SIGINT, signal.SIGINT):
                train_a5.main(small(tmp_path))
    assert not isinstance(stop.value, Interrupted) and find_checkpoint(tmp_path) is None


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    with handled(signal.SIGINT, signal.SIG_IGN), interrupting(1, signal.SIGINT):
        train_a5.main(small(tmp_path))
    assert metrics(tmp_path)["steps"] == 4


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Interrupted("saved in x", signal.SIGTERM), 143, "saved in x; continue with\n    "),
        (KeyboardInterrupt(), 130, "stopped at once"),
        # Python prints a text as the code and exits with 1
        (UsageError("--out is wrong"), "error: --out is wrong", ""),
        (FloatingPointError("lower --lr"), "error: lower --lr", ""),
        (OSError("disk full"), "error: disk full", ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_status_and_message(
    error: BaseException, code: int | str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(config: train_a5.WordProblemConfig) -> None:
        raise error

    with pytest.raises(SystemExit) as stop:
        script.run_script(main, train_a5.CPU)
    assert stop.value.code == code and message in capsys.readouterr().err


@pytest.mark.slow
def test_processes_stop_at_the_same_step(tmp_path: Path) -> None:
    """Two processes that meet over torch.distributed, of which one gets the signal; one alone
    cannot continue their run."""
    flags = ("--steps=100000", "--log-every=7", f"--out={tmp_path}")
    first, second = start_two(train_a5.__file__, *FLAGS, *flags)
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
    step = int(last(tmp_path).name.partition("-")[2])
    assert step >= 20 and step % 7 == 0 and len(list(last(tmp_path).glob("random_states_*"))) == 2
    with pytest.raises(UsageError, match="2 processes wrote it, got 1; start as many"):
        train_a5.main(parse_config(train_a5.PRESETS, [*FLAGS, *flags, "--resume"]))


# -- checkpoints that cannot be used


def _change(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Damage a file of a checkpoint."""

    def damage(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))

    return damage


def _flip(content: bytes) -> bytes:
    """One bit of a tensor, which torch.load would not notice."""
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


def _other(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Another content, with its checksum, as of another version of the script."""

    def damage(path: Path) -> None:
        content = torch.load(path / name, weights_only=False)
        torch.save(change(content), path / name)
        manifest = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps({**manifest, "sha256": checksums(path)}))

    return damage


WEIGHTS = "pytorch_model.bin"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (_change(WEIGHTS, lambda content: b""), f"a damaged one: {WEIGHTS} is not as written"),
    "one bit": (_change("optimizer.bin", _flip), "a damaged one: optimizer.bin is not as written"),
    "missing": (lambda path: (path / WEIGHTS).unlink(), f"a damaged one: {WEIGHTS} is not as"),
    "added": (
        lambda path: (path / "more.bin").touch(),
        "a damaged one: more.bin is not as written",
    ),
    "manifest": (_change(MANIFEST, lambda content: b"{}"), "one whose manifest cannot be read"),
    "other weights": (
        _other(WEIGHTS, lambda content: {name: v[None] for name, v in content.items()}),
        "does not fit the model or device: .*mismatch",
    ),
    "no optimizer": (_other("optimizer.bin", lambda content: {}), "does not fit the model"),
    "other rows": (
        _other(
            "custom_checkpoint_1.pkl",
            lambda content: {**content, "own": [([], torch.zeros(16, dtype=torch.uint8))]},
        ),
        "does not fit the model or device: .*RNG state",  # as on a GPU
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run."""
    folder = tmp_path_factory.mktemp("finished")
    train_a5.main(small(folder))
    return folder


@pytest.mark.parametrize(("damage", "got"), DAMAGES.values(), ids=DAMAGES)
def test_an_unusable_checkpoint_is_named(
    tmp_path: Path, finished: Path, damage: Callable[[Path], Any], got: str
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    path = last(folder)
    damage(path)
    with pytest.raises(ValueError, match=got) as error:
        train_a5.main(small(folder, resume=True))
    message = str(error.value)
    assert message.startswith(f"--resume: {path} must be a checkpoint of this run, got")
    assert message.endswith("start without --resume, or name another folder with --out")


def test_the_checkpoint_of_another_script_is_named(finished: Path) -> None:
    config = train_copy.CopyingConfig(**{**SMALL, "out": finished, "resume": True})
    with pytest.raises(UsageError, match=r"another script or version, .*'context_len', .*'group'"):
        train_copy.main(config)


def test_there_may_be_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is no checkpoint in {tmp_path / 'none'}"):
        train_a5.main(small(tmp_path / "none", resume=True))
    assert not (tmp_path / "none").exists()


# -- folders that cannot be written, and a full disk


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
    tmp_path: Path, make: Callable[[Path], Path], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "model.safetensors").mkdir(parents=True)
    monkeypatch.setattr(Run, "steps", lambda run: pytest.fail("the training has started"))
    with pytest.raises(UsageError, match=rf"^--out must be a folder .*{reason}.*another one$"):
        train_a5.main(small(make(tmp_path)))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_checkpoint_that_does_not_fit_leaves_the_previous_one(tmp_path: Path) -> None:
    """Python ignores SIGXFSZ, so a write beyond the limit fails like one to a full disk."""
    train_a5.main(small(tmp_path))
    before, (soft, hard) = checksums(last(tmp_path)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="could not be written: .*free some space.*--resume"):
            train_a5.main(small(tmp_path, overwrite=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checksums(last(tmp_path)) == before and not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("name", ["metrics.json", "accuracy.png"])
def test_results_that_do_not_fit_cost_none_of_the_others(
    tmp_path: Path, finished: Path, name: str
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    weights = (folder / "model.safetensors").read_bytes()
    for file in ("model.safetensors", name):
        (folder / file).unlink()
    (folder / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"{name} could not be written: .*No space left.*--resume"):
        train_a5.main(small(folder, resume=True))
    assert (folder / "model.safetensors").read_bytes() == weights
    (folder / name).unlink()
    train_a5.main(small(folder, resume=True))
    assert (folder / name).exists() and metrics(folder) == metrics(finished)
