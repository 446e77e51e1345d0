"""The README's Python runs, and its numbers are those of the raw results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "examples" / "results"


def test_first_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(_blocks()[0], names)
    assert names["y"].shape == (8, 100, 64)
    assert names["y_t"].shape == (8, 64)
    assert bool(names["layer"].stats.converged.all())


def test_solve_example_runs() -> None:
    generator = torch.Generator().manual_seed(0)
    W = 0.1 * torch.randn(16, 16, generator=generator)
    names: dict[str, Any] = {"torch": torch, "W": W, "x": torch.randn(4, 16, generator=generator)}
    exec(_blocks()[1], names)
    assert names["solution"].result.message == "every sample converged"


def test_decoding_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(_blocks()[0], names)
    names["layer"].requires_grad_(False)
    exec(_blocks()[2], names)
    assert names["x_t"].shape == (1, 64)
    assert names["state"].y.shape == (1, 128)


def test_table_of_parameterizations_is_that_of_the_raw_results() -> None:
    rows = json.loads((RESULTS / "a5_parameterizations.json").read_text())["rows"]
    for row in rows:
        point = row["point"]
        start = f"| {point['input_scale']}, n {point['d_state']}, k {point['num_householder']} |"
        shown = next(line for line in README.splitlines() if line.startswith(start))
        accuracy = [" ".join(f"{v:.2f}" for v in a["token"]) for a in row["accuracy"].values()]
        assert [cell.strip() for cell in shown.split("|")[2:5]] == accuracy


@pytest.mark.parametrize("name", re.findall(r"examples/results/\w+\.\w+|[a-z0-9_]+\.json", README))
def test_named_results_exist(name: str) -> None:
    if name != "metrics.json":
        assert (RESULTS / Path(name).name).exists()


def _blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)
