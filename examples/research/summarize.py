"""Print the table of a grid that `ensemble.py` trained, or draw several seeds of one script.

    python examples/research/summarize.py \\
        examples/results/history/a5-one-head.a5_parameterizations
    python examples/research/summarize.py --figure a5.png \\
        examples/results/a5-cpu/a5_cpu_delta_seed{0,1,2}
    python examples/research/summarize.py runs/ensemble/results.json

The table has one line for each point of the grid, with the values of all seeds, failed ones
included. The lines below it show whether the seeds that failed had nearly singular local systems.
The figure is drawn from the metrics.json of `train_a5.py` or `train_copy.py`, one a seed:
accuracy by length, the median of the seeds as a line and their range as a band. FOLDER/NAME is the
run NAME of FOLDER/runs.json.
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
from research.runs import read_run

NEAR_SINGULAR = 0.05


@dataclass(frozen=True)
class Config:
    """The results to print or to draw."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """A results.json of ensemble.py; with --figure the metrics.json of one or more seeds; or runs
    of a runs.json."""
    figure: Path | None = None
    """Draw accuracy by length into this file instead of printing a table."""

    def __post_init__(self) -> None:
        if not self.results or (self.figure is None and len(self.results) > 1):
            raise ValueError(
                f"results must be one file, or with --figure one or more, got {len(self.results)}"
            )


def cells(row: dict[str, Any]) -> list[str]:
    """One table line: the point, token accuracy by length, step at 0.99, smallest pivot."""
    point = row["point"]
    name = f"{point['input_scale']}, n {point['d_state']}, k {point['num_householder']}"
    if row.get("num_heads") is not None:  # of results since there are heads
        name += f", {row['num_heads']} heads"
    if number := sum(row.get("failed", ())):
        name += f" ({number} failed)"
    accuracy = [" ".join(f"{v:.2f}" for v in a["token"]) for a in row["accuracy"].values()]
    steps = " ".join("-" if s is None else str(s) for s in row["step_at_0.99"])
    pivots = " ".join("-" if c is None else f"{c:.2f}" for c in row["smallest_conditioning"])
    return [name, *accuracy, steps, pivots]


def crossing(rows: list[dict[str, Any]], scale: str) -> str:
    """How many runs reached 0.99 in training, with and without a near-singular local system."""
    runs = [
        (pivot is not None and pivot < NEAR_SINGULAR, step is not None)
        for row in rows
        if row["point"]["input_scale"] == scale
        for pivot, step in zip(row["smallest_conditioning"], row["step_at_0.99"], strict=True)
    ]
    near, far = ([ok for crossed, ok in runs if crossed is side] for side in (True, False))
    return (
        f"{scale}: {sum(near)} of {len(near)} runs that came below a pivot of {NEAR_SINGULAR} "
        f"reached 0.99, {sum(far)} of {len(far)} of the others"
    )


def print_table(report: dict[str, Any]) -> None:
    """The grid as Markdown."""
    lengths = list(report["rows"][0]["accuracy"])
    header = ["setting", *(f"at {n}" for n in lengths), "step at 0.99", "smallest pivot"]
    for line in [header, ["---"] * len(header), *map(cells, report["rows"])]:
        print("| " + " | ".join(line) + " |")
    print()
    for scale in dict.fromkeys(row["point"]["input_scale"] for row in report["rows"]):
        print(crossing(report["rows"], scale))


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
    reports = [read_run(path) for path in config.results]
    if config.figure is None:
        print_table(reports[0])
    else:
        draw(config.figure, reports)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
