"""One layer against the best rivals: tracking, recall, and both in one sequence, with one recipe.

Every model has about the same number of parameters (`models.py`), one optimizer, schedule, warm-up
and weight decay, and a learning rate that "table-tuning" chose for it on seed 100, on A5,
copying and bound permutations of S3; S5, associative recall and bound permutations of A5 take the
same rates, but for models that have tuning runs of their own there (`OWN_TUNING`). What a
model has to choose besides, as gating, is chosen there, too.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from research.experiments.plan import TUNING, Experiment, Run, joined
from research.runs import read_runs

Runs = dict[str, Any]
"""The content of a runs.json."""
Tasks = dict[str, str]
"""Flags of tasks."""

TUNED, REPORTED_RUNS = "table-tuning", ("table", "table-more")
"""The experiments that choose, and those that the summary shows."""
NARROW = "--d-model 256"
RECIPE = "--autocast bf16 --schedule hold --concurrent"
_WORDS = (
    "--length 16 --eval-lengths 16 128 512 2048 --batch-size 256 --steps 12000 "
    "--curriculum quadruple --curriculum-until 0.5"
)
_BOUND = (
    "--task bound --eval-definitions 16 16 24 --eval-lengths 32 128 128 --batch-size 128 "
    "--curriculum quadruple --curriculum-from 4 --curriculum-until 0.3"
)
TASKS = {
    "a5": _WORDS,
    "s5": f"{_WORDS} --group S5",
    "copy": (
        "--task copy --min-string 5 --max-string 50 --context 256 --eval-lengths 50 100 200 "
        "--batch-size 64 --steps 5000"
    ),
    "mqar": (
        "--task mqar --length 256 --pairs 32 --eval-lengths 256 512 --batch-size 64 --steps 5000"
    ),
    "bound_s3": f"{_BOUND} --group S3 --steps 8000",
    "bound_a5": f"{_BOUND} --group A5 --steps 12000",
}
"""From --curriculum-until on, models that have not learned the short rows train on all lengths,
too."""
_LENGTHS = (
    "--length 40 --eval-from 40 --eval-lengths 40 256 --batch-size 256 --steps 6000 "
    "--curriculum quadruple --curriculum-until 0.5"
)
LANGUAGES = {task: f"--task {task} {_LENGTHS}" for task in ("parity", "arithmetic", "brackets")}
"""Parity, arithmetic modulo 5 without and with brackets; lengths as published."""
RATES = (1e-3, 2e-3, 4e-3)
BEYOND = {1e-3: 5e-4, 4e-3: 8e-3}
"""The further rate where the best one is at an edge."""
ALSO = {"s5-tracking": (8e-3,), "bound_a5-tracking": (5e-4, 8e-3)}
"""Further rates of some tuning runs, whichever of the three is best."""
RATES_OF = {
    **{"a5": "a5", "s5": "a5", "copy": "copy", "mqar": "copy"},
    **{"bound_s3": "bound_s3", "bound_a5": "bound_s3"},
    **dict.fromkeys(LANGUAGES, "a5"),
}
"""The task whose tuning runs choose the rate and the form."""
FURTHER = (("a5", 2e-3), ("copy", 2e-3), ("copy", 8e-3), ("mqar", 1e-3))
"""Further rates of "table-gate", for tasks on which a seed does not pass at the chosen one."""
GATE = "table-gate"
"""The folder of its runs."""
_CONTROLS = "tracking_no_feedback", "tracking_no_read", "tracking_positive", "tracking_blocks"
OWN_TUNING = {
    "mqar": (
        "bedouin",
        "tracking",
        *_CONTROLS,
        "deltaproduct_l1",
        "gated_deltanet_l1",
        "lstm_l1",
        "m2rnn_l1",
        "hybrid_l2",
    ),
    "s5": ("tracking", "tracking_blocks"),
    "bound_a5": ("tracking", "tracking_blocks"),
}
"""Models that have tuning runs of their own on a task: on MQAR those that did not learn it with the
rate of copying; `tracking` and its parts in two blocks on every task. The number of tuning runs
stands beside the results."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "bedouin": ("bedouin", "bedouin_states", "bedouin_slow"),
    "tracking": ("tracking",),
    "tracking_no_feedback": ("tracking_no_feedback",),
    "tracking_no_read": ("tracking_no_read",),
    "tracking_positive": ("tracking_positive",),
    "tracking_blocks": ("tracking_blocks",),
    "deltaproduct_l1": ("deltaproduct_l1", "deltaproduct_l1_gated"),
    "deltaproduct_l2": ("deltaproduct_l2", "deltaproduct_l2_gated"),
    "gated_deltanet_l1": (
        "gated_deltanet_l1",
        "gated_deltanet_l1_large",
        "gated_deltanet_l1_slow",
    ),
    "lstm_l1": ("lstm_l1", "lstm_l1_forget"),
    "attention_l2": ("attention_l2", "attention_l2_nope"),
    "rdn_l1": ("rdn_l1", "rdn_l1_slow"),
    "m2rnn_l1": ("m2rnn_l1", "m2rnn_l1_square"),
    "gdn2_l1": ("gdn2_l1", "gdn2_l1_slow"),
    "kda_l1": ("kda_l1", "kda_l1_slow"),
    "mamba3_l1": ("mamba3_l1",),
    "hybrid_l2": ("hybrid_l2", "hybrid_l2_lstm_first", "hybrid_l2_slow"),
}
"""The models of the table, and the forms of each that tuning compares."""

EARLIER = (
    *("recall", "recall_n64", "recall_by_head", "recall_no_memory", "recall_no_feedback"),
    *("recall_no_x", "recall_no_erase", "recall_k2", "recall_layer"),
)
"""Models of version 0.2.0, which later ones do not have: their runs stay in the summary."""


def forms(model: str) -> tuple[str, ...]:
    """The forms of a model of the table or of an earlier version."""
    return VARIANTS.get(model, (model,))


def tuned_on(task: str, model: str) -> str:
    """The task whose tuning runs choose the rate and the form of a model."""
    return task if model in OWN_TUNING.get(task, ()) else RATES_OF[task]


def scores(row: dict[str, Any]) -> list[float]:
    """For each seed, the share of labels that are right, averaged over test lengths."""
    by_length = [measures["token"] for measures in row["accuracy"].values()]
    found = map(fmean, zip(*by_length, strict=True))
    return [-math.inf if math.isnan(value) else value for value in found]


def score(row: dict[str, Any]) -> float:
    """What tuning compares: the mean of `scores`."""
    return fmean(scores(row))


def rows_of(runs: Runs, name: str) -> list[dict[str, Any]]:
    """The rows of a run, and of those whose names add a learning rate to its name."""
    return [
        row
        for found in sorted(runs)
        if found == name or found.startswith(f"{name}-0.")
        for row in runs[found].get("rows", ())
    ]


def tuning_rows(runs: Runs, task: str, model: str) -> dict[tuple[str, float], dict[str, Any]]:
    """The tuning runs of a model for a task that have been made, by form and learning rate."""
    return {
        (form, row["point"]["lr"]): row
        for form in forms(model)
        for row in rows_of(runs, f"{tuned_on(task, model)}-{form}")
    }


def chosen(runs: Runs, task: str, model: str) -> tuple[str, float] | None:
    """The form and the learning rate with the best score; None without tuning runs."""
    rows = tuning_rows(runs, task, model)
    return max(rows, key=lambda choice: score(rows[choice]), default=None)


def compared(runs: Runs, task: str, model: str) -> tuple[str, float] | None:
    """What `chosen` gives, but None until every form has its three rates."""
    rows = tuning_rows(runs, task, model)
    all_made = all((form, rate) in rows for form in VARIANTS[model] for rate in RATES)
    return chosen(runs, task, model) if all_made else None


def tuned(runs: Runs, task: str, model: str) -> tuple[str, float] | None:
    """What `compared` gives, but None until the best form has its further rate."""
    best = compared(runs, task, model)
    if best is None or best[1] not in BEYOND:
        return best
    return best if (best[0], BEYOND[best[1]]) in tuning_rows(runs, task, model) else None


def gate_rows(gate: Runs, task: str, model: str) -> list[dict[str, Any]]:
    """The rows of the gate at several rates, which choose one; none where it has a single rate."""
    rows = rows_of(gate, f"{task}-{model}")
    return rows if len(rows) > 1 else []


def settled(runs: Runs, gate: Runs, task: str, model: str) -> tuple[str, float] | None:
    """What `tuned` gives. Where the gate has seeds at several rates, the rate whose worst seed is
    the best, that of tuning and those of the gate together; none of them is reported."""
    choice, rows = tuned(runs, task, model), tuning_rows(runs, task, model)
    of_gate = {row["point"]["lr"]: row for row in gate_rows(gate, task, model)}
    if choice is None or not of_gate:
        return choice
    form = choice[0]
    worst = {rate: min(*scores(row), *scores(rows[form, rate])) for rate, row in of_gate.items()}
    return form, max(worst, key=lambda rate: worst[rate])


def layer_flags(form: str) -> str:
    """The flags of a layer."""
    # kernels of this library, or of cuDNN, leave little that could be fused
    is_fused = form.startswith(("lstm_l1", "tracking", "bedouin"))
    return f"--model {form}" if is_fused else f"--model {form} --compile"


def _tuning(runs: Runs) -> Experiment:
    """Three rates for every form, and a further one where the best is at an edge."""
    found = []
    for task in (*sorted(set(RATES_OF.values())), *OWN_TUNING):
        for model, forms in VARIANTS.items():
            if tuned_on(task, model) != task:
                continue
            best = compared(runs, task, model)
            for form in forms:
                options = joined(TASKS[task], RECIPE, NARROW, layer_flags(form), TUNING)
                rates = " ".join(f"{rate:g}" for rate in RATES)
                found.append(Run(f"{task}-{form}", f"{options} --lr {rates}"))
                further = set(ALSO.get(f"{task}-{form}", ()))
                if best is not None and best[0] == form and best[1] != RATES[1]:
                    further.add(BEYOND.get(best[1], best[1]))
                for rate in sorted(further):
                    found.append(Run(f"{task}-{form}-{rate:g}", f"{options} --lr {rate:g}"))
    return Experiment(TUNED, "Which learning rate and which form?", tuple(found))


def _reported(
    runs: Runs,
    name: str,
    question: str,
    tasks: Tasks,
    seeds: range,
    models: Iterable[str] = tuple(VARIANTS),
    gate: Runs | None = None,
) -> Experiment:
    """The runs of all models whose learning rate is known."""
    found = []
    for task, flags in tasks.items():
        for model in models:
            choice = settled(runs, gate or {}, task, model)
            if choice is None:
                continue
            layer = f"{layer_flags(choice[0])} --lr {choice[1]:g}"
            options = joined(flags, RECIPE, NARROW, layer)
            drawn = f"--seeds {len(seeds)} --first-seed {seeds[0]}"
            found.append(Run(f"{task}-{model}", f"{options} {drawn}"))
    return Experiment(name, question, tuple(found))


def _gate(runs: Runs) -> Experiment:
    """What decides whether `tracking` replaces `recall`, on seeds after that of tuning."""
    name, question = GATE, "Does TrackingDeltaNet do on tuning seeds what recall of 0.2.0 did?"
    chosen_rate = _reported(runs, name, question, TASKS, range(101, 103), models=("tracking",))
    options = joined(RECIPE, NARROW, layer_flags("tracking"), "--seeds 2 --first-seed 101")
    further = (
        Run(f"{task}-tracking-{rate:g}", joined(TASKS[task], options, f"--lr {rate:g}"))
        for task, rate in FURTHER
    )
    return Experiment(name, question, (*chosen_rate.runs, *further))


def tables(results: Path) -> tuple[Experiment, ...]:
    """Tuning, the reported seeds, more of them, and languages."""
    runs = read_runs(results / TUNED)
    words = {task: TASKS[task] for task in ("a5", "s5")}
    table, more = REPORTED_RUNS
    three, gate = range(3), read_runs(results / GATE)
    return (
        _tuning(runs),
        _reported(
            runs, table, "Which layer tracks, recalls, and does both?", TASKS, three, gate=gate
        ),
        _reported(runs, more, "The same for two more seeds", TASKS, range(3, 5), gate=gate),
        _reported(runs, "table-seeds", "Which layer tracks further?", words, range(5, 10)),
        _reported(runs, "table-languages", "Parity and arithmetic at length", LANGUAGES, three),
        _gate(runs),
    )
