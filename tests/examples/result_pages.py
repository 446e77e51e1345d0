"""The pages of examples/results, and the raw runs as they show them."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from research import experiment
from research.runs import read_runs
from research.summary import summarize

RESULTS = experiment.RESULTS
ROOT = RESULTS.parents[1]
PAGES = {path.parent.name: path for path in sorted(RESULTS.glob("*/README.md"))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
INDEX = (RESULTS / "README.md").read_text(encoding="utf-8")


@cache
def runs_of(folder: str) -> dict[str, Any]:
    """All runs of an experiment by name."""
    return read_runs(RESULTS / folder)


def raw(name: str) -> Any:
    """The content of the run EXPERIMENT/NAME."""
    folder, run = name.split("/")
    return runs_of(folder)[run]


def names_of(*folders: str) -> list[str]:
    """The runs of experiments as EXPERIMENT/NAME."""
    return [f"{folder}/{run}" for folder in folders for run in runs_of(folder)]


def line(page: str, start: str) -> list[str]:
    """The cells of the one table line that begins with `start`."""
    (found,) = [row for row in page.splitlines() if row.startswith(f"| {start}")]
    return [cell.strip() for cell in found.strip("|").split(" | ")]


def joined(values: Iterable[float], digits: int = 2) -> str:
    """The values of seeds, as pages show them."""
    return " ".join(f"{value:.{digits}f}" for value in values)


def of_run(name: str, length: str, metric: str = "token", digits: int = 2) -> str:
    """The values of every seed of a run with one row."""
    (row,) = raw(name)["rows"]
    return joined(row["accuracy"][length][metric], digits)


def of_seeds(name: str, measure: str, length: str, seeds: Iterable[int], digits: int = 2) -> str:
    """The values of runs of one seed each, whose name has {} in its place."""
    return joined((raw(name.format(seed))[measure][length] for seed in seeds), digits)


def seconds(name: str, seeds: Iterable[int]) -> str:
    return joined((raw(name.format(seed))["seconds"] for seed in seeds), 0)


@cache
def summary() -> dict[str, Any]:
    return summarize(RESULTS)


def summed(task: str, model: str, measure: str) -> str:
    """The values of every seed of the table."""
    return joined(summary()[task][model][measure])


def device(content: Any) -> str:
    """CPU, H100 or H200, as a raw file names it."""
    name = content["device"] if "device" in content else content["machine"]["device"]
    return "CPU" if name.startswith("cpu") else re.findall(r"H\d00", name)[0]
