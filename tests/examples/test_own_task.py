"""A task of one's own, as examples/README.md tells to train on it: a copy of `train_a5.py` and of
the folder common, in which the options and the problem are replaced."""

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
@dataclass(frozen=True, kw_only=True)
class WordProblemConfig(TrainConfig):
    """Train a Bedouin model on sums modulo a number."""

    modulus: Count = 7
    """The number."""
    length: Count = 6
    """Length of the training sequences."""


'''
PROBLEM = '''
def word_problem(config: WordProblemConfig) -> Problem:
    """Sums of all numbers so far."""

    def batch(rows: Stream, size: int, length: int) -> Batch:
        shape = size, length
        tokens = torch.randint(config.modulus, shape, generator=rows, device=rows.device)
        return Batch(tokens, tokens.cumsum(1) % config.modulus)

    return Problem(
        name="sums",
        title=f"Sums modulo {config.modulus}",
        chance=1 / config.modulus,
        vocab_size=config.modulus,
        output_size=config.modulus,
        train_lengths=(config.length,),
        train_batch=lambda rows, step, longest: batch(rows, config.batch_size, longest),
        test_batch=lambda length, rows: batch(rows, config.eval_batch_size, length),
        token_accuracy=token_accuracy,
        sequence_accuracy=sequence_accuracy,
    )


'''
SMALL = ["--preset=cpu", "--threads=1", "--d-model=16", "--d-state=2", "--batch-size=8"]
SMALL += ["--warmup-steps=2", "--eval-every=4", "--checkpoint-every=4", "--steps=8"]
SMALL += ["--eval-rows=16", "--eval-batch-size=16", "--final-rows=32", "--final-lengths", "2"]


def replaced(text: str, start: str, end: str, new: str) -> str:
    """The text with all that lies between two lines replaced."""
    changed, number = re.subn(f"^{start}.*?(?=^{end})", new, text, flags=re.DOTALL | re.MULTILINE)
    assert number == 1
    return changed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the copies."""
    script = (EXAMPLES / "train_a5.py").read_text(encoding="utf-8")
    script = replaced(script, "@dataclass", "CPU = ", OPTIONS)
    script = replaced(script, "def word_problem", "def main", PROBLEM)
    (tmp_path / "train_sums.py").write_text(script, encoding="utf-8")
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
    assert {path.name for path in results.iterdir()} == {
        *("metrics.json", "accuracy.png", "model.safetensors", "checkpoint.pt"),
    }
    metrics: dict[str, Any] = json.loads((results / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["task"] == {
        **{"name": "sums", "title": "Sums modulo 5", "chance": 0.2, "train_length": 6},
    }
    assert metrics["config"]["modulus"] == 5 and "group" not in metrics["config"]
    assert list(metrics["accuracy"]) == ["2", "6", "12", "24"]
    weights = load_file(results / "model.safetensors")
    checkpoint = torch.load(results / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == 8 and checkpoint["model"].keys() == weights.keys()
    assert all(torch.equal(weights[name], value) for name, value in checkpoint["model"].items())
    assert imread(results / "accuracy.png").shape == (600, 960, 4)
    before = metrics["accuracy"]
    for name in ("metrics.json", "accuracy.png", "model.safetensors"):
        (results / name).unlink()
    train(folder, "--modulus=5", "--resume")
    metrics = json.loads((results / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["accuracy"] == before and len(list(results.iterdir())) == 4
