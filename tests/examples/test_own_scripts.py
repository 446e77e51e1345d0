"""Scripts of one's own: a copy of `train_a5.py`, `flags.py` and the folder common, as
examples/README.md tells, in which the options and the task are replaced; and the script to copy, in
a folder of its own, with another automaton."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

OPTIONS = '''
class Sums:
    """Sums of all numbers so far."""

    def __init__(self, modulus: int) -> None:
        self.vocab_size = self.output_size = modulus
        self.chance = 1 / modulus

    def sample(self, b: int, rows: Stream, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(self.vocab_size, (b, length), generator=rows, device=rows.device)
        return tokens, tokens.cumsum(1) % self.vocab_size


@dataclass(frozen=True, kw_only=True)
class WordProblemConfig(TrainConfig):
    """Train a Bedouin model on sums modulo a number."""

    modulus: Count = 7  # The number.
    length: Count = 6  # Length of the training sequences.
    curriculum: Literal["none", "uniform"] = "none"

    def task(self) -> Sums:
        return Sums(self.modulus)


'''
SMALL = ["--preset=cpu", "--threads=1", "--d-model=16", "--d-state=2", "--batch-size=8"]
SMALL += ["--warmup-steps=2", "--eval-every=4", "--checkpoint-every=4", "--steps=8"]
SMALL += ["--eval-rows=16", "--eval-batch-size=16", "--final-rows=32", "--final-lengths", "2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the copies."""
    script = (EXAMPLES / "train_a5.py").read_text(encoding="utf-8")
    pattern = re.compile("^@dataclass.*?(?=^CPU = )", flags=re.DOTALL | re.MULTILINE)
    script, number = pattern.subn(OPTIONS, script)
    script = script.replace("task.group.name.lower()", '"sums"')
    script = script.replace("Word problem of {task.group.name}", "Sums modulo {config.modulus}")
    assert number == 1
    (tmp_path / "train_sums.py").write_text(script, encoding="utf-8")
    shutil.copy(EXAMPLES / "flags.py", tmp_path)
    shutil.copytree(EXAMPLES / "common", tmp_path / "common")
    return tmp_path


def train(folder: Path, *flags: str) -> str:
    """Run the script in its folder; returns what it prints."""
    command = [sys.executable, "train_sums.py", *SMALL, *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_copy_with_a_task_of_ones_own_writes_every_file(folder: Path) -> None:
    printed = train(folder, "--modulus=5")
    results = folder / "runs" / "sums-seed0"
    assert "results in runs/sums-seed0" in printed
    files = {"metrics.json", "accuracy.png", "model.safetensors"}
    assert {path.name for path in results.iterdir()} == files | {"checkpoint-8"}
    metrics: dict[str, Any] = json.loads((results / "metrics.json").read_text(encoding="utf-8"))
    title = "Sums modulo 5, trained at length 6"
    said = {"name": "sums", "title": title, "chance": 0.2, "train_length": 6}
    assert metrics["task"] == said
    assert metrics["config"]["modulus"] == 5 and "group" not in metrics["config"]
    assert list(metrics["accuracy"]) == ["2", "6", "12", "24"]
    assert load_file(results / "model.safetensors")["head.weight"].shape == (5, 16)
    assert imread(results / "accuracy.png").shape == (600, 960, 4)
    for name in files:
        (results / name).unlink()
    train(folder, "--modulus=5", "--resume")
    again = json.loads((results / "metrics.json").read_text(encoding="utf-8"))
    assert again["accuracy"] == metrics["accuracy"] and len(list(results.iterdir())) == 4


# -- the script to copy

SCRIPT = EXAMPLES / "train_your_own.py"
SHORT = ["--d-model", "16", "--length", "6", "--batch", "4", "--steps", "3"]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The script in `folder`, with counting modulo 3, which a third letter resets."""
    text, found = SCRIPT.read_text(), "[[1, 2, 3, 4, 0], [1, 0, 2, 3, 4]]"
    assert found in text
    (folder / "mine.py").write_text(text.replace(found, "[[1, 2, 0], [2, 0, 1], [0, 0, 0]]"))
    command = [sys.executable, "-P", "mine.py", *SHORT, *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_script_is_short_and_needs_three_packages() -> None:
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) <= 120
    imported = {
        line.split()[1].split(".")[0] for line in lines if line.startswith(("import", "from"))
    }
    assert imported == {"argparse", "time", "torch", "bedouin", "matplotlib"}


@pytest.mark.parametrize(
    "flags", [(), ("--layer", "tracking"), ("--layer", "rnn", "--solver", "jacobi")]
)
def test_another_automaton(flags: tuple[str, ...], tmp_path: Path) -> None:
    done = run(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    assert "6 letters:" in done.stdout and "96 letters:" in done.stdout
    assert imread(tmp_path / "automaton.png").std() > 0
    saved = torch.load(tmp_path / "automaton.pt")
    assert saved["model"]["head.weight"].shape == (3, 16)


def test_a_solver_for_a_layer_without_one(tmp_path: Path) -> None:
    done = run(tmp_path, "--layer", "tracking", "--solver", "jacobi")
    assert done.returncode != 0 and "--solver needs a fixed-point layer" in done.stderr
