"""Scripts of examples/research that count and draw what a small layer has learned."""

from pathlib import Path
from typing import Any

import pytest

import train_a5
from research import iterations, states
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
