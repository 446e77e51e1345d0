"""The figures of results: tracking against copying, and accuracy by length; of further experiments
states that further steps begin with, reflections and feedback, and boards of chess."""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from research.experiments.further import LAYERS, SIZES, TRAININGS
from research.experiments.language_model import LARGE_MODELS
from research.experiments.table import Runs
from research.runs import read_runs
from research.summary import CHESS, MEASURES, NAMES, Models

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
    "bedouin": "C9",
    "lstm_l1": "C3",
    "gated_deltanet_l1": "C2",
    "attention_l2": "C1",
    "hybrid_l2": "0.5",
}
"""The models in the figure of lengths, and their colours."""

LABELS = {
    "tracking": "TrackingDeltaNet",
    "bedouin": "Bedouin",
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

TRAINED = {
    "a5": "A5, trained at 16",
    "a5-from64": "A5, trained at 64",
    "s5": "S5, trained at 16",
    "s5-from64": "S5, trained at 64",
}
"""What the models of "length" were trained on, as the names of their runs begin."""

STARTS = {
    None: ("as trained", "0.4"),
    "zero": ("further steps from zeros", "C1"),
    "carried": ("from the last state of another row", "C0"),
    "noise": ("from such a state with noise", "C3"),
}
"""The states with which further steps began, what the figure calls them, and their colours."""

GLYPHS = " ♙♘♗♖♕♔♟♞♝♜♛♚"
"""Of the classes of a square."""

KINDS = {
    ("-beta2", ""): ("β ≤ 2, feedback", {"color": "C0", "linestyle": "-"}),
    ("", ""): ("β ≤ 1, feedback", {"color": "C0", "linestyle": "--"}),
    ("-beta2", "-unfed"): ("β ≤ 2, no feedback", {"color": "C1", "linestyle": "-"}),
    ("", "-unfed"): ("β ≤ 1, no feedback", {"color": "C1", "linestyle": "--"}),
}
"""The lines of reflections by the endings of their runs: what the figure calls them, and styles."""


def figure_of_both(summary: dict[str, Models], path: Path) -> None:
    """Plot copying against A5: one point for each model of LABELS at the mean of its seeds, with
    lines over their range. Raises ValueError if there is no model."""
    a5, copying = summary["a5"], summary["copy"]
    shown = [model for model in LABELS if model in a5 and model in copying]
    if not shown:
        raise ValueError("no model has runs of both A5 and copying: run the experiments first")
    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.subplots()
    points = {m: (mean(a5[m]["token_512"]), mean(copying[m]["characters_200"])) for m in shown}
    for model, point in points.items():
        x, y = a5[model]["token_512"], copying[model]["characters_200"]
        xerr, yerr = ([[mean(v) - min(v)], [max(v) - mean(v)]] for v in (x, y))
        color = "C0" if model in ("tracking", "bedouin") else "0.45"
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


def figure_of_lengths(summary: dict[str, Models], path: Path) -> None:
    """Plot accuracy against the length, a panel for each task, for the models of CURVES with runs.

    A line is the median of the seeds, the band around it their range, and a dashed line marks the
    longest training length. The points of a length stand side by side, because those of several
    models often coincide.
    """
    figure = Figure(figsize=(10.0, 6.0), layout="constrained")
    panels = figure.subplots(2, 3, sharey=True)
    colors = {m: color for m, color in CURVES.items() if any(m in summary[t] for t in PANELS)}
    for panel, task in zip(panels.flat, PANELS, strict=True):
        title, measure, unit, trained = PANELS[task]
        prefix = MEASURES.get(task, NAMES)["token"]
        curves = {model: _by_length(summary[task].get(model, {}), prefix) for model in colors}
        lengths = sorted(set().union(*curves.values()))
        step = 0.02 * math.log(lengths[-1] / lengths[0]) if lengths else 0.0
        for place, (model, points) in enumerate(curves.items()):
            shift, color = math.exp(step * (place - len(colors) / 2 + 0.5)), colors[model]
            _curve(panel, {shift * n: seeds for n, seeds in points.items()}, color=color)
        panel.axvline(trained, color="black", linestyle="--", linewidth=1, zorder=0)
        panel.set(title=title, xlabel=unit, ylabel=measure, xscale="log", ylim=(-0.04, 1.04))
        panel.set_xticks(lengths, [str(length) for length in lengths])
        panel.xaxis.set_minor_locator(NullLocator())
    _legend(figure, {LABELS[model]: {"color": color} for model, color in colors.items()})
    figure.savefig(path, dpi=150)


def _by_length(numbers: dict[str, Any], prefix: str) -> dict[int, list[float]]:
    """The seeds' values of one measure by length, of the fewest names where there are names."""
    found = {
        tuple(map(int, name.removeprefix(f"{prefix}_").split("_"))): values
        for name, values in numbers.items()
        if name.startswith(f"{prefix}_")
    }
    fewest = min((key[:-1] for key in found), default=())
    return {key[-1]: values for key, values in sorted(found.items()) if key[:-1] == fewest}


def _curve(panel: Axes, points: Mapping[float, list[float]], **style: Any) -> None:
    """The median of the seeds at each point as a line, and their range as a band."""
    low, middle, high = ([of(seeds) for seeds in points.values()] for of in (min, median, max))
    (line,) = panel.plot(list(points), middle, marker="o", markersize=4, linewidth=1.2, **style)
    panel.fill_between(list(points), low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _legend(figure: Figure, styles: Mapping[str, dict[str, Any]]) -> None:
    """Names of lines and their styles, below the panels."""
    handles = [Line2D([], [], marker="o", **style) for style in styles.values()]
    names = list(styles)
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize="small")


def figure_of_starts(runs: Runs) -> Figure | None:
    """Right labels against tokens after further steps from states of each kind: a row of panels for
    each model, a column for what it was trained on."""
    models = ("tracking", "lstm_l1", "bedouin")
    found = {
        f"{LABELS[model]}: {title}": [
            row
            for name in (f"{task}-{model}", f"{task}-more-{model}")
            for row in runs.get(name, {}).get("rows", ())
        ]
        for model in models
        for task, title in TRAINED.items()
    }
    if not any(found.values()):
        return None
    figure = Figure(figsize=(12.0, 8.0), layout="constrained")
    panels = figure.subplots(len(models), len(TRAINED), sharex=True, sharey=True)
    for panel, (title, rows) in zip(panels.flat, found.items(), strict=True):
        for place, (start, (_, color)) in enumerate(STARTS.items()):
            begun = [row["accuracy"] for row in rows if row["point"].get("states") == start]
            if begun:
                shift = 1.1 ** (place - 1.5)  # lines often coincide
                points = {
                    shift * int(n): [v for of in begun for v in of[n]["token"]] for n in begun[0]
                }
                _curve(panel, points, color=color)
        panel.set_title(title, fontsize="medium")
        panel.text(0.5, 0.5, "" if rows else "not run", transform=panel.transAxes, ha="center")
        panel.set(xlabel="tokens", ylabel="right labels")
        panel.set(xscale="log", ylim=(-0.04, 1.04))
        panel.label_outer()
    lengths = sorted({int(n) for rows in found.values() for row in rows for n in row["accuracy"]})
    panels[0, 0].set_xticks(lengths, [f"{n:,}" for n in lengths])
    panels[0, 0].xaxis.set_minor_locator(NullLocator())
    _legend(figure, {name: {"color": color} for name, color in STARTS.values()})
    return figure


def figure_of_reflections(runs: Runs) -> Figure | None:
    """Right labels of A5 by the number of reflections, in two panels of lengths, and by how two of
    them are trained. Without reflections the limit of β has no effect."""
    layers = {name: rows for name in LAYERS if (rows := runs.get(f"a5-{name}", {}).get("rows"))}
    if not layers:
        return None
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    *panels, trained = figure.subplots(1, 3, sharey=True)
    for panel, length in zip(panels, ("128", "512"), strict=True):
        for i, (beta, fed) in enumerate(KINDS):
            points = {}
            for k in (0, 1, 2, 4):
                layer = f"k{k}{beta if k else ''}{fed}"
                if layer in layers:
                    # lines often coincide
                    shifted = k + 0.05 * (i - 1.5)
                    points[shifted] = layers[layer][0]["accuracy"][length]["token"]
            _curve(panel, points, **KINDS[beta, fed][1])
        panel.set(title=f"A5, trained at 16, {length} tokens", xlabel="reflections")
        panel.set(xticks=(0, 1, 2, 4), xlim=(-0.3, 4.3), ylim=(-0.04, 1.04))
    panels[0].set_ylabel("right labels")
    names = [name for name in TRAININGS if runs.get(f"training-{name}", {}).get("rows")]
    for place, name in enumerate(names):
        seeds = runs[f"training-{name}"]["rows"][0]["accuracy"]["16"]["token"]
        trained.plot([place] * len(seeds), seeds, "o", color="C2", alpha=0.6)
    titles = [TRAININGS[name][0] for name in names]
    trained.set_xticks(range(len(names)), titles, fontsize="x-small")
    trained.set(title="16 tokens, 3,000 steps", xlabel="how it is trained")
    _legend(figure, dict(KINDS.values()))
    return figure


def figure_of_bits(runs: Runs) -> Figure | None:
    """Bits per byte of the large language models against steps, and against seconds of training: a
    line for the first seed of each. Runs that shared a GPU have too many seconds."""
    found = {name: run for name in LARGE_MODELS if (run := runs.get(f"{name}-seed0"))}
    if not found:
        return None
    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for color, (name, run) in enumerate(found.items()):
        history, size = run["history"], run["config"]["batch_size"] * run["config"]["length"]
        steps = np.array([entry["step"] for entry in history])
        speeds = np.array([entry["tokens_per_second"]["training"] for entry in history])
        seconds = np.cumsum(np.diff(steps, prepend=0) * size / speeds)
        bits = [entry["bits_per_byte"]["2048"] for entry in history]
        for panel, places in ((by_step, steps), (by_second, seconds)):
            panel.plot(places, bits, color=f"C{color}", label=LARGE_MODELS[name][0])
    by_step.set(xlabel="steps of 65,536 tokens", ylabel="bits per byte", ylim=(0.98, 1.6))
    by_second.set(xlabel="seconds")
    by_second.legend(fontsize="small")
    return figure


def figure_of_boards(runs: Runs) -> Figure | None:
    """The last board of a test game, and what the first seed of each model of 1 M parameters says,
    with its errors in red. Raises ValueError if the runs show several games."""
    shown = {
        LABELS[model]: list(rows[0]["boards"].items())[-1]
        for model in SIZES
        if (rows := runs.get(f"{CHESS['chess']}-{model}", {}).get("rows"))
    }
    if not shown:
        return None
    plies, board = next(iter(shown.values()))
    truth = board["labels"]
    if any((n, of["labels"]) != (plies, truth) for n, of in shown.values()):
        raise ValueError(f"runs of chess must show one game, got several of {list(shown)}")
    boards = {f"the board after {plies} plies": truth}
    for name, (_, of) in shown.items():
        wrong = sum(a != b for a, b in zip(of["found"][0], truth, strict=True))
        boards[f"{name}: {wrong} square{'s' * (wrong != 1)} wrong"] = of["found"][0]
    figure = Figure(figsize=(9.6, 3.4 * math.ceil(len(boards) / 3)), layout="constrained")
    panels = figure.subplots(math.ceil(len(boards) / 3), 3, squeeze=False)
    for panel in panels.flat[len(boards) :]:
        panel.set_axis_off()
    for panel, (title, found) in zip(panels.flat, boards.items(), strict=False):
        _board(panel, found, truth)
        panel.set_title(title, fontsize="medium")
    return figure


def _board(panel: Axes, found: list[int], truth: list[int]) -> None:  # (64,), (64,)
    is_light = np.add.outer(np.arange(8), np.arange(8)) % 2
    panel.imshow(is_light, cmap="gray", vmin=-2.5, vmax=1.1, origin="lower")
    for square, kind in enumerate(found):
        rank, file = divmod(square, 8)
        if kind != truth[square]:
            panel.add_patch(Rectangle((file - 0.5, rank - 0.5), 1, 1, color="C3", alpha=0.6, lw=0))
        panel.text(file, rank, GLYPHS[kind], fontsize=17, ha="center", va="center_baseline")
    panel.set_xticks(range(8), list("abcdefgh"))
    panel.set_yticks(range(8), [str(rank) for rank in range(1, 9)])


FURTHER: dict[str, Callable[[Runs], Figure | None]] = {
    "length/length.png": figure_of_starts,
    "bedouin/bedouin.png": figure_of_reflections,
    "chess/board.png": figure_of_boards,
    "language-large/bits.png": figure_of_bits,
}
"""The figures of further experiments by their files, each of the runs of its folder."""


def write_figures(summary: dict[str, Models], results: Path) -> None:
    """Write all figures; one of further experiments without runs is left out, with a message."""
    figure_of_both(summary, results / "both.png")
    figure_of_lengths(summary, results / "lengths.png")
    for name, draw in FURTHER.items():
        figure = draw(read_runs((results / name).parent))
        if figure is None:
            print(f"{results / name} is not drawn: its runs have not been made", file=sys.stderr)
        else:
            figure.savefig(results / name, dpi=150)
