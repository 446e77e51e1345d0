"""The numbers of the table: one file, Markdown, and a figure of tracking against copying."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend must be chosen first)

from research.experiments.table import (  # noqa: E402
    RATES_OF,
    REPORTED_RUNS,
    TASKS,
    TUNED,
    VARIANTS,
    rows_of,
    tuning_rows,
)
from research.runs import read_runs  # noqa: E402

Models = dict[str, dict[str, Any]]
"""By model: measures, each a list over the seeds, and its number of tuning runs."""

NAMES = {"token": "token", "sequence": "sequence", "recall": "recall"}
MEASURES = {
    "copy": {"token": "characters", "sequence": "strings"},
    "mqar": {"token": "accuracy"},
}
"""The names of accuracies in the summary, by task; those of other tasks are NAMES."""

SHOWN = {
    "a5": ("sequence_128", "token_512", "token_2048"),
    "s5": ("token_128", "token_512"),
    "copy": ("characters_100", "characters_200"),
    "mqar": ("accuracy_256", "accuracy_512"),
    "bound_s3": ("token_16_32", "sequence_16_32", "sequence_16_128", "recall_16_128"),
    "bound_a5": ("token_16_32", "sequence_16_32", "recall_16_32"),
}
"""The columns of the table."""

LABELS = {
    "recall": "Bedouin.recall",
    "recall_n64": "64 states",
    "recall_by_head": "feedback by head",
    "recall_layer": "feedback of all heads",
    "deltaproduct_l1": "DeltaProduct",
    "deltaproduct_l2": "DeltaProduct, two layers",
    "gated_deltanet_l1": "Gated DeltaNet",
    "lstm_l1": "LSTM",
    "attention_l2": "attention, two layers",
    "rdn_l1": "Recurrent Delta Net",
    "m2rnn_l1": "M²RNN",
    "hybrid_l2": "hybrid, two layers",
}
"""The models of the figure, and what it calls them."""

SCREENED = {
    "recall_no_memory": ("recall-trials",),
    "recall_by_head": ("recall-trials", "initial-values"),
    **dict.fromkeys(
        ("recall", "recall_n64"), ("recall-trials", "initial-values", "feedback-heads")
    ),
}
"""Runs that chose the setting of `recall`, and of what it was before, which are tuning runs as
well: the layer, how it begins, and which heads have feedback."""


def summarize(results: Path) -> dict[str, Models]:
    """The content of summary.json: by task and model, every measure of all reported seeds."""
    folders = [read_runs(results / name) for name in REPORTED_RUNS]
    tuning = read_runs(results / TUNED)
    found: dict[str, Models] = {}
    for task in TASKS:
        found[task] = {}
        for model in VARIANTS:
            rows = [row for runs in folders for row in rows_of(runs, f"{task}-{model}")]
            if rows:
                number = len(tuning_rows(tuning, task, model)) + _screened(results, task, model)
                found[task][model] = {**_measures(task, rows), "tuning_runs": number}
    return found


def _measures(task: str, rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    names = MEASURES.get(task, NAMES)
    return {
        f"{shown}_{length}": [value for row in rows for value in row["accuracy"][length][name]]
        for length, measured in rows[0]["accuracy"].items()
        for name, shown in names.items()
        if name in measured
    }


def _screened(results: Path, task: str, model: str) -> int:
    """Of a model of SCREENED: the layers of Bedouin that were screened on a task or on that of its
    rate."""
    paths = [results / folder / "trials.json" for folder in SCREENED.get(model, ())]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    rows = [row for text in texts for row in json.loads(text)["rows"]]
    return sum(
        len(row.get("models") or row["seeds"])
        for row in rows
        if row.get("layer") in (None, "bedouin")
        if {"bound": "bound_s3"}.get(row["task"], row["task"]) in (task, RATES_OF[task])
    )


def markdown(results: Path) -> str:
    """The table: a line for each model and task, with the values of all seeds."""
    summary, lines = summarize(results), []
    for task, models in summary.items():
        runs = read_runs(results / REPORTED_RUNS[0])
        header = ["model", "parameters", "state", *SHOWN[task], "tuning runs"]
        lines += [f"**{task}**", "", _cells(header), _cells(["---"] * len(header))]
        for model, numbers in models.items():
            row = next(iter(rows_of(runs, f"{task}-{model}")), {})
            sizes = [str(row.get(name, "")) for name in ("parameters", "state_size")]
            values = [" ".join(f"{v:.2f}" for v in numbers[name]) for name in SHOWN[task]]
            lines.append(_cells([model, *sizes, *values, str(numbers["tuning_runs"])]))
        lines.append("")
    return "\n".join(lines)


def _cells(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figure_of_both(summary: dict[str, Models], path: Path) -> None:
    """Plot copying against A5: one point for each model of LABELS at the mean of its seeds, with
    lines over their range. Raises ValueError if there is no model."""
    a5, copying = summary["a5"], summary["copy"]
    shown = [model for model in LABELS if model in a5 and model in copying]
    if not shown:
        raise ValueError("no model has runs of both A5 and copying: run the experiments first")
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    points = {m: (mean(a5[m]["token_512"]), mean(copying[m]["characters_200"])) for m in shown}
    for model, point in points.items():
        x, y = a5[model]["token_512"], copying[model]["characters_200"]
        xerr, yerr = ([[mean(v) - min(v)], [max(v) - mean(v)]] for v in (x, y))
        color = "C0" if model.startswith("recall") else "0.45"
        axes.errorbar(*point, yerr, xerr, "o", color=color, elinewidth=0.8)
        is_right = point[0] > 0.5
        # a label above the point would cover that of a point just above it
        is_below = any(
            abs(u - point[0]) < 0.1 and 0 < v - point[1] < 0.04 for u, v in points.values()
        )
        axes.annotate(
            LABELS[model],
            point,
            (-7 if is_right else 7, -12 if is_below else 5),
            textcoords="offset points",
            ha="right" if is_right else "left",
            color=color,
            fontsize="small",
            fontweight="bold" if model == "recall" else "normal",
        )
    axes.set(
        xlabel="A5: right labels in sequences of 512 (trained at 16)",
        ylabel="copying: right characters of 200 letters (trained to 50)",
        xlim=(-0.03, 1.03),
        ylim=(-0.03, 1.07),
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
