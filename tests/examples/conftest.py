"""Lets tests import the scripts of examples/ as a script in that folder does."""

import sys
from pathlib import Path
from typing import Any

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
    """The figures that are saved, so that a test can read what they show."""
    saved: list[Figure] = []
    save = Figure.savefig

    def savefig(self: Figure, *args: Any, **options: Any) -> None:
        saved.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved
