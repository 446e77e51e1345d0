"""How far a model tracks after further training from states of its own."""

from pathlib import Path

from research.experiments.plan import Experiment, Run, joined
from research.experiments.table import NARROW, RATES_OF, RECIPE, TASKS, TUNED, rows_of, score
from research.runs import read_runs

LONG = "--eval-lengths 512 2048 16384 131072"
FLAGS = {
    "a5": LONG,
    "a5-from64": f"--length 64 {LONG}",
    "s5": LONG,
    "s5-from64": f"--length 64 {LONG}",
    "bound_a5": "--eval-definitions 16 --eval-lengths 128 512",
}
"""Of the tasks of the table, trained with 16 tokens, or up to 32 operations, unless "from64" says
so."""
MODELS = {"tracking": "tracking", "lstm_l1": "lstm_l1_forget"}


def length(results: Path) -> Experiment:
    """Five seeds at the rate that the table's tuning has chosen for the task or for its like."""
    tuning, runs = read_runs(results / TUNED), []
    for name, flags in FLAGS.items():
        task = name.partition("-")[0]
        for model, form in MODELS.items():
            rows = rows_of(tuning, f"{task}-{form}") or rows_of(tuning, f"{RATES_OF[task]}-{form}")
            rate = max(rows, key=score)["point"]["lr"] if rows else 2e-3
            layer = f"--model {form} --lr {rate:g} --seeds 5 --states zero carried noise"
            runs.append(Run(f"{name}-{model}", joined(TASKS[task], flags, RECIPE, NARROW, layer)))
    return Experiment("length", "How far do models track from states of their own?", tuple(runs))
