"""The table at d_model 512, with rates of its own."""

from pathlib import Path

from research.experiments.plan import Experiment, joined
from research.experiments.table import RECIPE, TASKS, TUNED, VARIANTS, chosen, layer_flags
from research.experiments.tuned import tuned
from research.runs import read_runs

MODELS = ("tracking", "lstm_l1", "gated_deltanet_l1", "hybrid_l2", "attention_l2")


def width(results: Path) -> tuple[Experiment, Experiment]:
    """Every task, in the form that the tuning of the table has chosen, or the first one."""
    runs, options = read_runs(results / TUNED), {}
    for task, flags in TASKS.items():
        for model in MODELS:
            form, _ = chosen(runs, task, model) or (VARIANTS[model][0], None)
            options[f"{task}-{model}"] = joined(flags, RECIPE, "--d-model 512", layer_flags(form))
    return tuned("width", "Does a layer of width 512 lose a task?", options, results)
