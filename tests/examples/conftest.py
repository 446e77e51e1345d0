"""Lets tests import the scripts of examples/ as a script in that folder does."""

import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True)
def new_accelerator() -> None:
    """Accelerate keeps the precision of a process's first run."""
    AcceleratorState._reset_state()
