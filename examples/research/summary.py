"""The numbers of the table and of its tuning: one file, Markdown, and figures of the accuracy by
length and of tracking against copying."""

import math
import re
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend must be chosen first)
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import NullLocator  # noqa: E402

from research.experiments.table import (  # noqa: E402
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
    "bound_s3": ("token_16_32", "sequence_16_128"),
    "bound_a5": ("token_16_32", "sequence_16_128"),
}
"""The columns of the table."""

PANELS = {
    "a5": ("A5", "right labels", "tokens", 16),
    "s5": ("S5", "right labels", "tokens", 16),
    "copy": ("copying", "right characters", "letters", 50),
    "mqar": ("associative recall", "right values", "tokens", 256),
    "bound_s3": ("bound S3, 16 names", "right products", "operations", 32),
    "bound_a5": ("bound A5, 16 names", "right products", "operations", 32),
}
"""The tasks in the figure of lengths: title, measure, unit and longest training value of the
length."""

CURVES = {
    "tracking": "C0",
    "recall": "C9",
    "lstm_l1": "C3",
    "gated_deltanet_l1": "C2",
    "attention_l2": "C1",
    "hybrid_l2": "0.5",
}
"""The models in the figure of lengths, and their colours."""

LABELS = {
    "tracking": "TrackingDeltaNet",
    "recall": "recall of 0.2.0",
    "deltaproduct_l1": "DeltaProduct",
    "deltaproduct_l2": "DeltaProduct, two layers",
    "gated_deltanet_l1": "Gated DeltaNet",
    "lstm_l1": "LSTM",
    "attention_l2": "attention, two layers",
    "rdn_l1": "Recurrent Delta Net",
    "m2rnn_l1": "M²RNN",
    "gdn2_l1": "Gated DeltaNet-2",
    "kda_l1": "Kimi Delta Attention",
    "mamba3_l1": "Mamba-3",
    "hybrid_l2": "hybrid, two layers",
}
"""The models of the figures, and what these call them."""

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


def markdown(results: Path) -> str:
    """The table: a line for each model and task, with the values of all seeds; of version 0.2.0
    `recall` alone."""
    summary, lines = summarize(results), []
    earlier = set(EARLIER[1:])
    runs = read_runs(results / REPORTED_RUNS[0])
    for task, of in summary.items():
        models = {model: numbers for model, numbers in of.items() if model not in earlier}
        rows = {model: next(iter(rows_of(runs, f"{task}-{model}")), {}) for model in models}
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
    for task, names in SHOWN.items():
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
        color = "C0" if model.startswith(("tracking", "recall")) else "0.45"
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
            fontweight="bold" if model == "tracking" else "normal",
        )
    axes.set(
        xlabel="A5: right labels in sequences of 512 (trained at 16)",
        ylabel="copying: right characters of 200 letters (trained to 50)",
        xlim=(-0.03, 1.03),
        ylim=(-0.03, 1.07),
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def figure_of_lengths(summary: dict[str, Models], path: Path) -> None:
    """Plot the accuracy of the models of CURVES against the length, a panel for each task.

    A line is the median of the seeds, the band around it their range, and a dashed line marks the
    longest training length. The points of a length stand side by side, because those of several
    models often coincide.
    """
    figure, axes = plt.subplots(2, 3, figsize=(10.0, 6.0), sharey=True, layout="constrained")
    for panel, task in zip(axes.flat, PANELS, strict=True):
        title, measure, unit, trained = PANELS[task]
        prefix = MEASURES.get(task, NAMES)["token"]
        curves = {model: _by_length(summary[task].get(model, {}), prefix) for model in CURVES}
        lengths = sorted(set().union(*curves.values()))
        step = 0.02 * math.log(lengths[-1] / lengths[0]) if lengths else 0.0
        for place, (model, points) in enumerate(curves.items()):
            shift, color = math.exp(step * (place - len(CURVES) / 2 + 0.5)), CURVES[model]
            x = [shift * length for length in points]
            low, middle, high = ([of(v) for v in points.values()] for of in (min, median, max))
            panel.plot(x, middle, "o-", color=color, markersize=4, linewidth=1.2)
            panel.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        panel.axvline(trained, color="black", linestyle="--", linewidth=1, zorder=0)
        panel.set(title=title, xlabel=unit, ylabel=measure, xscale="log", ylim=(-0.04, 1.04))
        panel.set_xticks(lengths, [str(length) for length in lengths])
        panel.xaxis.set_minor_locator(NullLocator())
    handles = [Line2D([], [], marker="o", color=color) for color in CURVES.values()]
    names = [LABELS[model] for model in CURVES]
    figure.legend(handles, names, loc="outside lower center", ncols=len(CURVES), fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _by_length(numbers: dict[str, Any], prefix: str) -> dict[int, list[float]]:
    """The seeds' values of one measure by length, of the fewest names where there are names."""
    found = {
        tuple(map(int, name.removeprefix(f"{prefix}_").split("_"))): values
        for name, values in numbers.items()
        if name.startswith(f"{prefix}_")
    }
    fewest = min((key[:-1] for key in found), default=())
    return {key[-1]: values for key, values in sorted(found.items()) if key[:-1] == fewest}
