"""A figure of the time of forward + backward: against the number of tokens, and the batch size."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend must be chosen first)
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator  # noqa: E402

from benchmarks.measure import best_ms  # noqa: E402
from benchmarks.setting import Shape  # noqa: E402
from benchmarks.table import Row  # noqa: E402

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
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_locator(NullLocator())
        if lines:
            panel.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
