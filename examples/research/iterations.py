"""Count the steps that iterative solvers take on A5, against tokens, with and without feedback.

    python examples/research/iterations.py    # 8 minutes on a CPU
    python examples/research/iterations.py --figure-only

A layer learns products of 2 to 6 elements of A5 with the exact solver. Untrained and trained it is
then solved on longer products by each iterative solver; the largest number of steps among the
sequences counts. `runs.json` holds every count, null for a solve that did not converge;
`iterations.png` shows them.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from bedouin import Bedouin, SequenceModel, param_groups
from bedouin.solvers import Anderson, Jacobi, Picard, Solver
from bedouin.tasks import Group, WordProblem, stream, token_accuracy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from common.evaluation import png
from research.runs import add_runs, read_runs

RESULTS = Path(__file__).resolve().parents[1] / "results" / "iterations"

SOLVERS = (Picard(rtol=1e-4), Jacobi(rtol=1e-4), Anderson(rtol=1e-4))

FEEDBACK = {"with feedback": ("delta", "B", "C", "mixer"), "without feedback": ()}

ROWS = 8
"""Sequences of a count."""

TASK = WordProblem(Group.from_name("A5"), length=6)


@dataclass(frozen=True)
class Config:
    """What to count."""

    out: Path = RESULTS
    seeds: int = 3
    steps: int = 5000
    """Training steps; counts are made before the first and after the last."""
    d_model: int = 64
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256)
    cap: int = 400
    """Most steps of a solver."""
    figure_only: bool = False
    """Draw what runs.json holds."""


def make_model(
    config: Config, feedback: tuple[str, ...], solver: Solver | Literal["auto"]
) -> SequenceModel:
    layer = Bedouin(
        config.d_model,
        feedback=feedback,
        solver=solver,
        max_steps=config.cap,
        on_unconverged="ignore",
    )
    return SequenceModel(TASK.vocab_size, config.d_model, [layer], output_size=TASK.output_size)


def train(model: SequenceModel, steps: int) -> float | None:
    """Returns the share of labels that are right in the last batch; None for no steps."""
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.01), lr=4e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100)
    rows = stream("train", 0)
    for step in range(steps):
        tokens, labels = TASK.sample(64, rows, length=2 + step * (TASK.length - 1) // steps)
        logits = model(tokens)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
    return float(token_accuracy(logits, labels)) if steps else None


@torch.no_grad()
def counts(config: Config, trained: SequenceModel, feedback: tuple[str, ...]) -> dict[str, Any]:
    """Steps by solver and length; None where a sequence did not converge."""
    found: dict[str, dict[str, int | None]] = {}
    for solver in SOLVERS:
        model = make_model(config, feedback, solver).eval()
        model.load_state_dict(trained.state_dict())
        by_length = found.setdefault(type(solver).__name__, {})
        for length in config.lengths:
            model(TASK.sample(ROWS, stream("test", 0), length=length).tokens)
            stats = model.stats[0]
            steps = int(stats.num_steps.max()) if stats.converged.all() else None
            by_length[str(length)] = steps
    return found


def measure(config: Config) -> dict[str, dict[str, Any]]:
    """An entry for each seed, kind of feedback, and state of training, by its name."""
    entries: dict[str, dict[str, Any]] = {}
    for seed in range(config.seeds):
        for name, feedback in FEEDBACK.items():
            torch.manual_seed(seed)
            model = make_model(config, feedback, "auto")
            for steps in (0, config.steps):
                entry = {
                    **{"seed": seed, "layer": name, "steps": steps},
                    "accuracy": train(model, steps),
                    "iterations": counts(config, model, feedback),
                }
                entries[f"{name}, seed {seed}, {steps} steps"] = entry
                print(json.dumps(entry), flush=True)
    return entries


def figure(entries: list[dict[str, Any]]) -> bytes:
    """Steps against tokens, a panel for each kind of feedback and a line for each seed."""
    drawn = Figure(figsize=(8.0, 3.8), layout="constrained")
    panels = drawn.subplots(1, len(FEEDBACK), sharey=True)
    solvers = [type(solver).__name__ for solver in SOLVERS]
    for axes, layer in zip(panels, FEEDBACK, strict=True):
        for entry in (entry for entry in entries if entry["layer"] == layer):
            for i, solver in enumerate(solvers):
                counted = {int(t): n for t, n in entry["iterations"][solver].items() if n}
                said, style = ("trained", "-") if entry["steps"] else ("untrained", "--")
                label = f"{solver}, {said}" if entry["seed"] == 0 else None
                axes.plot(counted.keys(), counted.values(), f".{style}C{i}", label=label)
        lengths = sorted({int(t) for entry in entries for t in entry["iterations"][solvers[0]]})
        axes.plot(lengths, lengths, ":", color="0.5", label="as many steps as tokens")
        axes.set(title=layer, xlabel="tokens", xscale="log", yscale="log")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
    panels[0].set_ylabel("steps of the slowest of 8 sequences")
    handles = panels[0].get_legend_handles_labels()
    drawn.legend(*handles, loc="outside lower center", ncols=4, fontsize="small")
    return png(drawn)


def main(config: Config) -> None:
    if not config.figure_only:
        add_runs(config.out, measure(config))
    entries = list(read_runs(config.out).values())
    (config.out / "iterations.png").write_bytes(figure(entries))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
