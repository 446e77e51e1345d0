"""Draw several seeds of `train_a5.py` or `train_copy.py`.

    python examples/research/summarize.py --figure a5.png \\
        examples/results/cpu/a5_cpu_delta_seed{0,1,2}

The figure is drawn from their metrics.json, one a seed: accuracy by length, the median of the seeds
as a line and their range as a band. FOLDER/NAME is the run NAME of FOLDER/runs.json.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from bedouin.tasks import Group
from common.evaluation import accuracy_figure
from common.run import Scores
from flags import UsageError
from research.runs import read_run


@dataclass(frozen=True)
class Config:
    """The results to draw."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """The metrics.json of one or more seeds, or runs of a runs.json."""
    figure: Path
    """The file of the figure."""

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError("results must be one file or more, got none")


def draw(path: Path, runs: list[dict[str, Any]]) -> None:
    """Draw the figure of runs that differ only in the seed. Raises ValueError for other runs."""
    config = runs[0]["config"]
    for run in runs[1:]:
        if differing := different(config, run["config"]) - {"seed", "out"}:
            raise ValueError(f"runs must differ in the seed only, got other {sorted(differing)}")
    task = runs[0].get("task") or task_of_options(config)
    seeds = ", ".join(str(run["seed"]) for run in runs)
    device = runs[0]["device"].partition(" (")[0]
    content = accuracy_figure(
        [scores(run) for run in runs],
        title=f"{task['title']}: seed {seeds}, {device}",
        train_length=task["train_length"],
        chance=task["chance"],
    )
    path.write_bytes(content)


def task_of_options(config: dict[str, Any]) -> dict[str, Any]:
    """What a metrics.json says of the task, for the runs of examples/results, whose files have only
    its options."""
    if "group" in config:
        name, longest = config["group"], config["length"]
        chance = 1 / Group.from_name(name).order
    else:
        name, longest, chance = "Copying", config["max_length"], 1 / config["num_letters"]
    title = f"{name}, trained at length {longest}"
    return {"title": title, "chance": chance, "train_length": longest}


def different(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """The options in which two configurations differ."""
    return {key for key in first | second if first.get(key) != second.get(key)}


def scores(run: dict[str, Any]) -> Scores:
    """The numbers of a metrics.json that a figure shows, with NaN instead of null."""
    names = ("accuracy", "sequence_accuracy", "num_steps")
    return {name: {n: math.nan if v is None else v for n, v in run[name].items()} for name in names}


def main(config: Config) -> None:
    draw(config.figure, [read_run(path) for path in config.results])


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (UsageError, OSError) as error:
        sys.exit(f"error: {error}")
