"""The figure of the recorded times of forward + backward by number of tokens.

python examples/benchmarks/figure.py    # examples/results/speed.png from speed.json beside it
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from benchmarks.measure import Numbers
from benchmarks.setting import Shape
from benchmarks.targets import PAPER_16, PAPER_100, SCAN_BOTH
from common.evaluation import png

RESULTS = Path(__file__).resolve().parents[1] / "results"

LAYERS = {
    "tracking": ("TrackingDeltaNet", "C0"),
    "16 heads": ("Bedouin, 16 heads of 64", "C2"),
    "8 heads": ("Bedouin, 8 heads of 128", "C1"),
    "1 head": ("Bedouin, 1 head", "C4"),
    "lstm": ("LSTM (cuDNN)", "C3"),
    "mamba": ("Mamba", "C5"),
}
"""The layers of speed.json in the figure, as far as it has them: name and colour."""


def draw(path: Path, entries: Sequence[Numbers]) -> None:
    """Draw the captured times of the layers of speed.json by number of tokens, on logarithmic axes.

    Beside them are the constants of `targets.py`: the scan alone of mamba-ssm, and the paper's code
    between 16 and 100 iterations. Raises ValueError if no layer of LAYERS was measured.
    """
    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axes = figure.subplots()
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
    axes.set_xticks(sorted(batches), [f"{t}\n({batches[t]})" for t in sorted(batches)])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    path.write_bytes(png(figure))


@dataclass(frozen=True)
class Config:
    """What to draw."""

    recorded: Path = RESULTS / "speed.json"
    """Times of the layers, as `bench.py --speed` writes them."""
    out: Path = RESULTS / "speed.png"


def main(config: Config) -> None:
    draw(config.out, json.loads(config.recorded.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
