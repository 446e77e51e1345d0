"""Table, JSON, figure and the line of an evaluation."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from bedouin.solvers import SolveStats
from common.evaluation import accuracy_figure, solve_scores
from common.run import Scores, as_json
from research import summarize

RESULTS = Path(__file__).resolve().parents[2] / "examples" / "results"

SCORES: Scores = {
    "accuracy": {"6": 0.995, "12": 0.5},
    "sequence_accuracy": {"6": 0.98, "12": 0.25},
    "num_steps": {"6": 7.0, "12": 13.0},
    "residual": {"6": 1e-6, "12": 3e-5},
    "conditioning": {"6": 0.5, "12": 0.25},
}


def test_json_replaces_what_it_cannot_hold() -> None:
    content = json.loads(as_json({"a": {"6": math.nan}, "h": [{"r": math.inf}, (1, 0.5)]}))
    assert content == {"a": {"6": None}, "h": [{"r": None}, [1, 0.5]]}


def labels(figure: Figure) -> list[str]:
    return [str(line.get_label()) for axes in figure.axes for line in axes.get_lines()]


def test_figure_shows_chance_and_the_iterations_of_iterative_solvers_only(
    figures: list[Figure],
) -> None:
    direct = {**SCORES, "num_steps": {"6": 1.0, "12": 1.0}}
    for scores in (SCORES, direct):
        accuracy_figure([scores], title="A5", train_length=6, chance=1 / 60)
    iterative, exact = figures
    assert "median iterations" in labels(iterative) and len(iterative.axes) == 2
    assert "median iterations" not in labels(exact) and len(exact.axes) == 1
    for figure in figures:
        assert "training length" in labels(figure)
        (chance,) = [x for x in figure.axes[0].get_lines() if x.get_label() == "chance, one token"]
        assert list(chance.get_ydata()) == [1 / 60, 1 / 60]  # type: ignore[arg-type]
        assert not figure.axes[0].collections
        (legend,) = figure.legends  # of the figure, outside of the axes and their curves
        highest = legend.get_window_extent().y1
        assert highest <= min(axes.get_window_extent().y0 for axes in figure.axes)


@pytest.mark.parametrize("runs", [[], [SCORES, {**SCORES, "accuracy": {"6": 1.0}}]])
def test_figure_refuses_runs_that_do_not_belong_together(runs: list[Scores]) -> None:
    with pytest.raises(ValueError, match="runs must be at least one, all evaluated at the same"):
        accuracy_figure(runs, title="A5", train_length=6, chance=1 / 60)


def test_three_seeds_become_one_figure(tmp_path: Path, figures: list[Figure]) -> None:
    paths = tuple(RESULTS / "a5-cpu" / f"a5_cpu_seed{seed}" for seed in range(3))
    summarize.main(summarize.Config(paths, tmp_path / "f.png"))
    axes = figures[0].axes[0]
    assert (
        axes.get_title() == "A5, trained at length 6: seed 0, 1, 2, cpu"
        and len(axes.collections) == 2
    )
    assert len(figures[0].axes) == 1


def test_solve_scores_are_median_worst_and_smallest() -> None:
    fine = torch.ones(3, dtype=torch.bool)
    first = SolveStats(torch.tensor([1, 2, 9]), torch.tensor([0.1, 0.3, 0.2]), fine)
    second = SolveStats(
        torch.tensor([3, 3, 9]), torch.full((3,), 0.05), fine, torch.full((3,), 0.7)
    )
    one: Any = SimpleNamespace(accelerator=SimpleNamespace(gather=lambda tensor: tensor))
    scores = solve_scores(one, [first, second])
    assert scores == pytest.approx({"num_steps": 3.0, "residual": 0.3, "conditioning": 0.7})
