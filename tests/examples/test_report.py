"""Table, JSON and the line of an evaluation."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from bedouin.solvers import SolveStats
from common.evaluation import layer_stats, solve_scores
from common.report import Scores, evaluation_line, save_figure, table, write_metrics

SCORES: Scores = {
    "accuracy": {"6": 0.995, "12": 0.5},
    "sequence_accuracy": {"6": 0.98, "12": 0.25},
    "num_steps": {"6": 7.0, "12": 13.0},
    "residual": {"6": 1e-6, "12": 3e-5},
    "conditioning": {"6": 0.5, "12": 0.25},
}


class OneProcess:
    """The part of an Accelerator that collects numbers, for a single process."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model


def test_json_replaces_what_it_cannot_hold(tmp_path: Path) -> None:
    write_metrics(tmp_path / "m.json", {"a": {"6": math.nan}, "h": [{"r": math.inf}, (1, 0.5)]})
    content = json.loads((tmp_path / "m.json").read_text())
    assert content == {"a": {"6": None}, "h": [{"r": None}, [1, 0.5]]}


def test_evaluation_line_has_every_number() -> None:
    line = evaluation_line(500, 1.25, SCORES)
    assert line == (
        "step 500  loss 1.2500  accuracy 6: 0.9950  12: 0.5000  num_steps 13  "
        "residual 3.0e-05  conditioning 2.5e-01"
    )
    assert "conditioning" not in evaluation_line(1, 1.0, {**SCORES, "conditioning": {}})


def test_table_has_a_row_for_each_length() -> None:
    rows = table(SCORES, ("accuracy", "sequence_accuracy")).splitlines()
    assert rows[0].split() == ["length", "accuracy", "sequence_accuracy", "median", "num_steps"]
    assert rows[2].split() == ["12", "0.5000", "0.2500", "13"]


def test_figure_is_drawn_with_nonfinite_scores_too(tmp_path: Path) -> None:
    scores = {**SCORES, "accuracy": {"6": math.nan, "12": 0.5}}
    save_figure(tmp_path / "f.png", scores, title="A5", train_length=6)
    assert (tmp_path / "f.png").stat().st_size > 5000


def test_solve_scores_are_median_worst_and_smallest() -> None:
    fine = torch.ones(3, dtype=torch.bool)
    first = SolveStats(torch.tensor([1, 2, 9]), torch.tensor([0.1, 0.3, 0.2]), fine)
    second = SolveStats(
        torch.tensor([3, 3, 9]), torch.full((3,), 0.05), fine, torch.full((3,), 0.7)
    )
    scores = solve_scores([first, second], OneProcess())
    assert scores == pytest.approx({"num_steps": 3.0, "residual": 0.3, "conditioning": 0.7})


def test_failed_sample_shows_in_the_residual() -> None:
    stats = SolveStats(
        torch.ones(2, dtype=torch.int64), torch.tensor([0.1, math.nan]), torch.tensor([True, False])
    )
    scores = solve_scores([stats], OneProcess())
    assert math.isnan(scores["residual"])


def test_another_model_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a SequenceModel, got Linear"):
        layer_stats(nn.Linear(1, 1), OneProcess())
