"""The numbers of the table, of its tuning and of chess: one file, and Markdown."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from research.experiments.further import SIZES
from research.experiments.table import (
    EARLIER,
    GATE,
    RATES_OF,
    REPORTED_RUNS,
    TASKS,
    TUNED,
    VARIANTS,
    chosen,
    gate_rows,
    rows_of,
    scores,
    tuned_on,
    tuning_rows,
)
from research.runs import read_runs

Models = dict[str, dict[str, Any]]
"""By model: measures, each a list over the seeds, and its number of tuning runs."""

CHESS = {"chess": "chess-1m", "chess_4m": "chess-4m"}
"""The tasks of chess, one for each size of the models, and how the names of their runs begin."""

NAMES = {"token": "token", "sequence": "sequence", "recall": "recall"}
MEASURES = {
    "copy": {"token": "characters", "sequence": "strings"},
    "mqar": {"token": "accuracy"},
    **dict.fromkeys(CHESS, {"token": "squares", "sequence": "boards", "last": "last_boards"}),
}
"""The names of accuracies in the summary, by task; those of other tasks are NAMES. Of chess these
are the share of right squares, of boards after each ply without error, and of last boards."""

SHOWN = {
    "a5": ("sequence_128", "token_512", "token_2048"),
    "s5": ("token_128", "token_512"),
    "copy": ("characters_100", "characters_200"),
    "mqar": ("accuracy_256", "accuracy_512"),
    "bound_s3": ("token_16_32", "sequence_16_128"),
    "bound_a5": ("token_16_32", "sequence_16_128"),
    **dict.fromkeys(
        CHESS,
        tuple(f"{name}_{plies}" for name in ("squares", "boards") for plies in (60, 120, 200)),
    ),
}
"""The columns of the table, and of that of chess."""

HISTORY = "history"
"""The folder of the runs that later ones replace, among them those of SCREENED."""

SCREENED = {
    "recall_no_memory": ("recall-trials",),
    "recall_by_head": ("recall-trials", "initial-values"),
    **dict.fromkeys(
        ("recall", "recall_n64"), ("recall-trials", "initial-values", "feedback-heads")
    ),
}
"""Runs that chose the setting of `recall` of version 0.2.0, and of what it was before, which are
tuning runs as well: the layer, how it begins, and which heads have feedback."""

TRIALS = "tracking-trials"
"""The folder of the runs that chose the form and the options of `tracking`."""


def summarize(results: Path) -> dict[str, Models]:
    """The content of summary.json: by task and model, every measure of all reported seeds."""
    folders = [read_runs(results / name) for name in REPORTED_RUNS]
    tuning, history = read_runs(results / TUNED), read_runs(results / HISTORY)
    gate, trials = read_runs(results / GATE), read_runs(results / TRIALS)
    found: dict[str, Models] = {}
    for task in TASKS:
        found[task] = {}
        for model in (*EARLIER, *VARIANTS):
            runs = (folder.get(f"{task}-{model}", {}) for folder in folders)
            rows = [row for found_there in runs for row in found_there.get("rows", ())]
            if rows:
                number = len(tuning_rows(tuning, task, model)) + _screened(history, task, model)
                number += sum(len(scores(row)) for row in gate_rows(gate, task, model))
                number += _tried(trials, task) if model == "tracking" else 0
                found[task][model] = {**_measures(task, rows), "tuning_runs": number}
    return found | _chess(read_runs(results / "chess"))


def _chess(runs: dict[str, Any]) -> dict[str, Models]:
    """The tasks of chess that have runs."""
    found: dict[str, Models] = {}
    for task, size in CHESS.items():
        for model in SIZES:
            if rows := runs.get(f"{size}-{model}", {}).get("rows"):
                tried = runs.get(f"{size}-{model}-tuning", {}).get("rows", ())
                number = sum(len(scores(row)) for row in tried)
                numbers = {**_measures(task, rows), "tuning_runs": number}
                found.setdefault(task, {})[model] = numbers
    return found


def _measures(task: str, rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    names = MEASURES.get(task, NAMES)
    return {
        f"{shown}_{length}": [value for row in rows for value in row["accuracy"][length][name]]
        for length, measured in rows[0]["accuracy"].items()
        for name, shown in names.items()
        if name in measured
    }


def _screened(history: dict[str, Any], task: str, model: str) -> int:
    """Of a model of SCREENED: the layers of Bedouin that were screened on a task or on that of its
    rate."""
    names = SCREENED.get(model, ())
    rows = [row for name in names if name in history for row in history[name]["rows"]]
    return sum(
        len(row.get("models") or row["seeds"])
        for row in rows
        if row.get("layer") in (None, "bedouin")
        if {"bound": "bound_s3"}.get(row["task"], row["task"]) in (task, RATES_OF[task])
    )


def _tried(trials: dict[str, Any], task: str) -> int:
    """The trainings on a task among the trials of `tracking`, one a seed. The name of a trial
    contains its task; those of variants, as "a5-tracking_blocks", do not count."""
    place = re.compile(rf"(?<![a-z0-9_]){task}[- ](?!tracking_)")
    rows = [
        row
        for name in trials
        if place.search(name)
        for row in trials[name].get("rows", [trials[name]])
    ]
    firsts = [next(iter(row["accuracy"].values()))["token"] for row in rows if "accuracy" in row]
    return sum(len(first) if isinstance(first, list) else 1 for first in firsts)


def markdown(results: Path, tasks: Collection[str] = TASKS) -> str:
    """The table, or that of chess: a line for each model and task, with the values of all seeds;
    without the models of version 0.2.0."""
    summary, lines = summarize(results), []
    runs = read_runs(results / REPORTED_RUNS[0]) | read_runs(results / "chess")
    for task, of in summary.items():
        if task not in tasks:
            continue
        models = {model: numbers for model, numbers in of.items() if model not in EARLIER}
        begin = CHESS.get(task, task)
        rows = {model: next(iter(rows_of(runs, f"{begin}-{model}")), {}) for model in models}
        sizes = [row["parameters"] for row in rows.values() if "parameters" in row]
        span = f", {min(sizes):,} to {max(sizes):,} parameters" if sizes else ""
        lines += [f"**{task}**{span}", "", *_header("model", "state", *SHOWN[task], "tuning runs")]
        for model, numbers in models.items():
            values = [" ".join(f"{v:.2f}" for v in numbers[name]) for name in SHOWN[task]]
            state = str(rows[model].get("state_size", ""))
            lines.append(_cells([model, state, *values, str(numbers["tuning_runs"])]))
        lines.append("")
    return "\n".join(lines)


def tuning_markdown(results: Path) -> str:
    """Every tuning run: a line for each form and learning rate, with "chosen" at the best of each
    model, which its reported runs take unless the gate settles another rate."""
    runs, lines = read_runs(results / TUNED), []
    models = dict.fromkeys([*VARIANTS, *(m for of in summarize(results).values() for m in of)])
    for task in TASKS:
        names = SHOWN[task]
        lines += [f"**{task}**", "", *_header("form", "rate", *names, "choice")]
        for model in models:
            rows = tuning_rows(runs, task, model) if tuned_on(task, model) == task else {}
            best = chosen(runs, task, model)
            for (form, rate), row in rows.items():
                measures = _measures(task, [row])
                values = [" ".join(f"{v:.2f}" for v in measures[name]) for name in names]
                mark = "chosen" if (form, rate) == best else ""
                lines.append(_cells([form, f"{rate:g}", *values, mark]))
        lines.append("")
    return "\n".join(lines)


def _header(*names: str) -> list[str]:
    return [_cells(list(names)), _cells(["---"] * len(names))]


def _cells(cells: list[str]) -> str:
    return f"|{'|'.join(cells)}|"
