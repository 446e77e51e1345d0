"""What an experiment is: a question, and the runs that answer it."""

import shlex
from dataclasses import dataclass
from typing import Literal

Script = Literal["ensemble", "train_a5", "train_copy", "train_lm"]

TUNING = "--seeds 1 --first-seed 100"
"""Settings are chosen on seeds from 100 on."""
THREE_TUNING = "--seeds 3 --first-seed 100"
"""For choices that one seed cannot decide."""
NARROW = "--d-model 256 --autocast bf16"
STRINGS = (
    "--task copy --min-string 5 --max-string 50 --context 256 --eval-lengths 50 75 100 200 "
    "--batch-size 64"
)


@dataclass(frozen=True)
class Run:
    """One command. A training script may name a baseline (`research/baselines.py`)."""

    name: str
    """Its name in the file of the experiment's runs."""
    options: str
    """The command line of the script."""
    script: Script = "ensemble"

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.options)


@dataclass(frozen=True)
class Experiment:
    """A question, and the runs that answer it."""

    name: str
    """Also that of its folder in examples/results."""
    question: str
    runs: tuple[Run, ...]

    def __post_init__(self) -> None:
        names = [run.name for run in self.runs]
        if len(set(names)) < len(names):
            raise ValueError(f"the runs of {self.name} must have different names, got {names}")


def joined(*options: str) -> str:
    """Several groups of flags as one command line; a later flag overrides an earlier one."""
    return " ".join(part for part in options if part)
