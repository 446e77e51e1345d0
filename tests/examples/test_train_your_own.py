"""The script to copy: in a folder of its own, with another automaton."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_your_own.py"
SMALL = ["--d-model", "16", "--length", "6", "--batch", "4", "--steps", "3"]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The script in `folder`, with counting modulo 3, which a third letter resets."""
    text, found = SCRIPT.read_text(), "[[1, 2, 3, 4, 0], [1, 0, 2, 3, 4]]"
    assert found in text
    (folder / "mine.py").write_text(text.replace(found, "[[1, 2, 0], [2, 0, 1], [0, 0, 0]]"))
    command = [sys.executable, "-P", "mine.py", *SMALL, *flags]
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
