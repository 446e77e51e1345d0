"""Lets tests import the scripts of examples/ as a script in that folder does."""

import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from matplotlib.figure import Figure

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True)
def new_accelerator() -> None:
    """Accelerate keeps the precision of a process's first run."""
    AcceleratorState._reset_state()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that a script would save, so that a test can read what they show."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: saved.append(figure))
    return saved
