"""Figures of the time of forward + backward.

    python examples/benchmarks/figure.py    # examples/results/speed.png from speed.json beside it

`draw` plots the rows of a run against the number of tokens and the batch size, `draw_recorded` the
recorded times of the layers against the number of tokens.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend must be chosen first)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from benchmarks.measure import Numbers, best_ms  # noqa: E402
from benchmarks.setting import Shape  # noqa: E402
from benchmarks.table import Row  # noqa: E402
from benchmarks.targets import PAPER_16, PAPER_100, SCAN_BOTH  # noqa: E402

RESULTS = Path(__file__).resolve().parents[1] / "results"

LAYERS = {
    "tracking": ("TrackingDeltaNet", "C0"),
    "chosen": ("recall of 0.2.0 (H200)", "C9"),
    "16 heads": ("Bedouin, 16 heads of 64", "C2"),
    "8 heads": ("Bedouin, 8 heads of 128", "C1"),
    "1 head": ("Bedouin, 1 head", "C4"),
    "lstm": ("LSTM (cuDNN)", "C3"),
    "mamba": ("Mamba", "C5"),
}
"""The layers of speed.json in the figure, as far as it has them: name and colour."""

Curve = list[tuple[int, float]]
"""Sizes and milliseconds, in the order of the sizes."""


def curves(rows: Sequence[Row]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """The times against time at equal batch sizes, and against the batch size at equal times.

    A curve has a name and at least two points.
    """
    by_time: dict[str, Curve] = {}
    by_batch: dict[str, Curve] = {}
    for row in rows:
        ms, shape = best_ms(row["numbers"], "both"), Shape.parse(row["shape"])
        if ms is not None:
            by_time.setdefault(f"{row['title']}, batch {shape.b}", []).append((shape.t, ms))
            by_batch.setdefault(f"{row['title']}, {shape.t} tokens", []).append((shape.b, ms))
    both = ({n: sorted(c) for n, c in found.items() if len(c) > 1} for found in (by_time, by_batch))
    first, second = both
    return first, second


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw both sets of curves on logarithmic axes. Raises ValueError if there are none."""
    found = curves(rows)
    if not any(found):
        raise ValueError(
            "rows must have two shapes with the same batch size or time: pass, for example, "
            "--shapes 16x256 16x1024 64x256"
        )
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for panel, lines, label in zip(axes, found, ("tokens", "batch size"), strict=True):
        for name, curve in lines.items():
            panel.plot(*zip(*curve, strict=True), marker="o", label=name)
        panel.set(xlabel=label, ylabel="forward + backward, ms", xscale="log", yscale="log")
        sizes = sorted({size for curve in lines.values() for size, _ in curve})
        _set_ticks(panel, {size: str(size) for size in sizes})
        if lines:
            panel.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_recorded(path: Path, entries: Sequence[Numbers]) -> None:
    """Draw the captured times of the layers of speed.json by number of tokens, on logarithmic axes.

    Beside them are the constants of `targets.py`: the scan alone of mamba-ssm, and the paper's code
    between 16 and 100 iterations. Raises ValueError if no layer of LAYERS was measured.
    """
    figure, axes = plt.subplots(figsize=(7.0, 4.6), layout="constrained")
    batches: dict[int, int] = {}
    for layer, (name, color) in LAYERS.items():
        of_layer = [row for row in entries if row["layer"] == layer and row["graph_ms"] is not None]
        shapes = [Shape.parse(row["shape"]) for row in of_layer]
        batches |= {shape.t: shape.b for shape in shapes}
        if shapes:
            ms = [row["graph_ms"] for row in of_layer]
            axes.plot([shape.t for shape in shapes], ms, "o-", color=color, label=name)
    if not batches:
        raise ValueError(f"entries must have times of a layer among {tuple(LAYERS)}, got none")
    tokens = [Shape.parse(shape).t for shape in SCAN_BOTH]
    scan, few, many = (list(of.values()) for of in (SCAN_BOTH, PAPER_16, PAPER_100))
    axes.plot(tokens, scan, "--", color="0.4", label="scan of mamba-ssm alone")
    axes.fill_between(tokens, few, many, color="0.85", label="paper's code, 16 to 100 iterations")
    axes.set(xlabel="tokens (batch size)", ylabel="forward + backward, ms", xscale="log")
    axes.set(yscale="log")
    _set_ticks(axes, {t: f"{t}\n({batches[t]})" for t in sorted(batches)})
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _set_ticks(axes: Axes, labels: dict[int, str]) -> None:
    """These ticks of x, and powers of ten with their double and half in y."""
    axes.set_xticks(list(labels), list(labels.values()))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())


@dataclass(frozen=True)
class Config:
    """What to draw."""

    recorded: Path = RESULTS / "speed.json"
    """Times of the layers, as `bench.py --speed` writes them."""
    out: Path = RESULTS / "speed.png"


def main(config: Config) -> None:
    draw_recorded(config.out, json.loads(config.recorded.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
