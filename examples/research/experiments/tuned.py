"""Pairs of experiments: one chooses a rate for every run, the other reports three seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from research.experiments.plan import TUNING, Experiment, Run, joined
from research.experiments.table import score
from research.runs import read_runs

WIDE_RATES = (5e-4, 1e-3, 2e-3)
"""At d_model 512."""


def tuned(
    name: str,
    question: str,
    options: Mapping[str, str],
    results: Path,
    rates: Sequence[float] = WIDE_RATES,
) -> tuple[Experiment, Experiment]:
    """NAME-tuning, which trains every run of `options` at three rates on seed 100, and NAME with
    the runs whose best rate is known."""
    made = read_runs(results / f"{name}-tuning")
    asked, tuning, reported = " ".join(f"{rate:g}" for rate in rates), [], []
    for run, flags in options.items():
        tuning.append(Run(run, joined(flags, TUNING, f"--lr {asked}")))
        rows = made.get(run, {}).get("rows", ())
        if rows:
            best = max(rows, key=score)["point"]["lr"]
            reported.append(Run(run, joined(flags, f"--seeds 3 --lr {best:g}")))
    return (
        Experiment(f"{name}-tuning", f"{question} Which learning rate?", tuple(tuning)),
        Experiment(name, question, tuple(reported)),
    )
