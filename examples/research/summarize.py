"""Draw several seeds of `train_a5.py` or `train_copy.py`, or a board of a run of chess.

    python examples/research/summarize.py --figure a5.png \\
        examples/results/cpu/a5_cpu_delta_seed{0,1,2}
    python examples/research/summarize.py --figure board.png examples/results/chess/chess-1m-lstm_l1

The figure is drawn from their metrics.json, one a seed: accuracy by length, the median of the seeds
as a line and their range as a band. FOLDER/NAME is the run NAME of FOLDER/runs.json. Of a run of
chess the figure shows the last board of a test game, and beside it what the first model says.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from bedouin.tasks import Group
from common.evaluation import accuracy_figure, png
from common.run import Scores
from research.runs import read_run

GLYPHS = " ♙♘♗♖♕♔♟♞♝♜♛♚"
"""Of the classes of a square."""


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


def board_figure(plies: str, board: list[int], found: list[int]) -> bytes:  # (64,), (64,)
    """Both boards side by side, with the model's errors in red."""
    wrong = [i for i in range(64) if board[i] != found[i]]
    drawn = Figure(figsize=(8.0, 4.3), layout="constrained")
    titles = f"after {plies} plies", f"prediction, {len(wrong)} of 64 squares wrong"
    light = np.add.outer(np.arange(8), np.arange(8)) % 2
    panels = drawn.subplots(1, 2)
    for axes, classes, title in zip(panels, (board, found), titles, strict=True):
        axes.imshow(light, cmap="gray", vmin=-2.5, vmax=1.1, origin="lower")
        for square, kind in enumerate(classes):
            rank, file = divmod(square, 8)
            if axes is panels[1] and square in wrong:
                axes.plot(file, rank, "s", color="C3", alpha=0.6, markersize=26)
            axes.text(file, rank, GLYPHS[kind], fontsize=20, ha="center", va="center")
        axes.set(title=title, xticks=range(8), yticks=range(8))
        axes.set(xticklabels=list("abcdefgh"), yticklabels=range(1, 9))
    return png(drawn)


def main(config: Config) -> None:
    runs = [read_run(path) for path in config.results]
    boards = runs[0].get("rows", [{}])[0].get("boards")
    if boards is None:
        return draw(config.figure, runs)
    plies, board = list(boards.items())[-1]
    config.figure.write_bytes(board_figure(plies, board["labels"], board["found"][0]))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
