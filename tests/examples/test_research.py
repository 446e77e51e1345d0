"""Scripts of examples/research: sizes, iterations, states and figures are those of their runs."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import train_a5
from bedouin import Bedouin
from bedouin.solvers import SolveStats
from common.evaluation import accuracy_figure, solve_scores
from common.run import Scores, as_json
from research import iterations, parameters, states, summarize
from research.runs import read_runs

PAGE = iterations.RESULTS / "README.md"


def test_steps_are_counted_before_and_after_training(tmp_path: Path) -> None:
    config = iterations.Config(tmp_path, seeds=1, steps=2, lengths=(2, 3), cap=40)
    iterations.main(config)
    entries = list(read_runs(tmp_path).values())
    assert [entry["steps"] for entry in entries] == [0, 2, 0, 2]
    for entry in entries:
        assert entry["iterations"].keys() == {"Picard", "Jacobi", "Anderson"}
        # exact after t steps, and one more finds that nothing changes
        assert all(1 <= entry["iterations"]["Jacobi"][t] <= int(t) + 1 for t in ("2", "3"))
    assert (tmp_path / "iterations.png").stat().st_size > 1000


def test_a_solve_that_does_not_converge_is_null() -> None:
    config, feedback = iterations.Config(lengths=(16,), cap=1), iterations.FEEDBACK["with feedback"]
    found = iterations.counts(config, iterations.make_model(config, feedback, "auto"), feedback)
    assert all(of == {"16": None} for of in found.values())


@pytest.mark.parametrize("layer", list(iterations.FEEDBACK))
def test_the_page_of_iterations_has_the_numbers_of_its_runs(layer: str) -> None:
    runs = read_runs(iterations.RESULTS)
    untrained, trained = (
        [runs[f"{layer}, seed {seed}, {steps} steps"]["iterations"] for seed in range(3)]
        for steps in (0, 5000)
    )
    page = PAGE.read_text(encoding="utf-8")
    for solver in ("Picard", "Jacobi", "Anderson"):
        cells = [
            " ".join("–" if of[solver][t] is None else str(of[solver][t]) for of in trained)
            for t in ("16", "64", "256")
        ]
        assert f"| {layer} | {solver} | {' | '.join(cells)} |" in page
    right = [runs[f"{layer}, seed {seed}, 5000 steps"]["accuracy"] for seed in range(3)]
    assert min(right) > 0.985 if layer == "with feedback" else max(right) < 0.285
    counts = {n for of in untrained for by_length in of.values() for n in by_length.values()}
    assert counts == ({7, 8, 9} if layer == "with feedback" else {3})


def test_states_of_a_run_are_drawn(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        **{"device": "cpu", "d_model": 8, "d_state": 2, "batch_size": 4, "steps": 2, "length": 3},
        **{"eval_lengths": (2,), "final_lengths": (), "eval_rows": 4, "final_rows": 4},
        **{"warmup_steps": 1, "eval_every": 2, "checkpoint_every": 2, "out": tmp_path / "run"},
    }
    train_a5.main(train_a5.WordProblemConfig(**values))
    states.main(states.Config(tmp_path / "run", length=3, words=4, out=tmp_path / "states.png"))
    assert (tmp_path / "states.png").stat().st_size > 1000


RESULTS = Path(parameters.__file__).parents[1] / "results"


def test_numbers_are_those_of_the_layers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "sizes.json"
    config = parameters.Config((16,), num_householder=2, num_heads=(1, 4), length=6, out=out)
    parameters.main(config)
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    rows = [parameters.Sizes(**row) for row in report["layers"]]
    assert printed.splitlines() == parameters.table(rows) and report["config"]["length"] == 6
    found = {row.layer: row for row in rows}
    for heads, title in ((1, "Bedouin, 1 head"), (4, "Bedouin, 4 heads")):
        layer = Bedouin(16, num_heads=heads, num_householder=2)
        assert found[title].parameters == sum(p.numel() for p in layer.parameters())
        assert found[title].state_bytes == 4 * (32 * 16 + 32)
    assert f"| 16 | Mamba | {found['Mamba'].parameters:,} | 1.00 |" in printed
    # keys and values
    assert found["Attention"].state_bytes == 2 * 4 * 6 * 16
    with pytest.raises(ValueError, match="--num-heads must divide the 32 inner channels"):
        parameters.Config(d_model=(16,), num_heads=(3,))


def test_the_table_is_that_of_the_raw_file() -> None:
    report = json.loads((RESULTS / "parameters" / "parameters.json").read_text())
    # the page shows one width of three
    rows = [parameters.Sizes(**row) for row in report["layers"] if row["d_model"] == 512]
    assert "\n".join(parameters.table(rows)) in (RESULTS / "parameters" / "README.md").read_text()


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
