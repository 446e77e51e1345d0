"""Print the README's tables from the raw results of `ensemble.py`.

    python examples/summarize.py examples/results/a5_parameterizations.json

One line for each point of the grid, its seeds side by side, failed ones included. Below it, whether
the seeds that lag are those whose local systems came near a singular one.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

NEAR_SINGULAR = 0.05


@dataclass(frozen=True)
class Config:
    """Which results to print."""

    results: tyro.conf.Positional[Path]
    """A results.json of ensemble.py."""


def cells(row: dict[str, Any]) -> list[str]:
    """One table line: the point, token accuracy by length, step at 0.99, smallest pivot."""
    point = row["point"]
    name = f"{point['input_scale']}, n {point['d_state']}, k {point['num_householder']}"
    accuracy = [" ".join(f"{v:.2f}" for v in a["token"]) for a in row["accuracy"].values()]
    steps = " ".join("-" if s is None else str(s) for s in row["step_at_0.99"])
    pivots = " ".join(f"{c:.2f}" for c in row["smallest_conditioning"])
    return [name, *accuracy, steps, pivots]


def crossing(rows: list[dict[str, Any]], scale: str) -> str:
    """How many runs reached 0.99 in training, with and without a near-singular local system."""
    runs = [
        (pivot < NEAR_SINGULAR, step is not None)
        for row in rows
        if row["point"]["input_scale"] == scale
        for pivot, step in zip(row["smallest_conditioning"], row["step_at_0.99"], strict=True)
    ]
    near, far = ([ok for crossed, ok in runs if crossed is side] for side in (True, False))
    return (
        f"{scale}: {sum(near)} of {len(near)} runs that came below a pivot of {NEAR_SINGULAR} "
        f"reached 0.99, {sum(far)} of {len(far)} of the others"
    )


def main(config: Config) -> None:
    report = json.loads(config.results.read_text())
    lengths = list(report["rows"][0]["accuracy"])
    header = ["setting", *(f"at {n}" for n in lengths), "step at 0.99", "smallest pivot"]
    for line in [header, ["---"] * len(header), *map(cells, report["rows"])]:
        print("| " + " | ".join(line) + " |")
    print()
    for scale in dict.fromkeys(row["point"]["input_scale"] for row in report["rows"]):
        print(crossing(report["rows"], scale))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
