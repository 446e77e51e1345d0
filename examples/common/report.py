"""The results of a training run: JSON and a figure."""

import io
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import matplotlib
import torch

import bedouin

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend must be chosen first)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

Scores = dict[str, dict[str, float]]
"""Number by metric name and length, e.g. scores["accuracy"]["6"]."""


def versions() -> dict[str, str]:
    """Versions of the packages on which the numbers depend."""
    others = {name: metadata.version(name) for name in ("torchdeq", "accelerate")}
    own = {"bedouin": bedouin.__version__, "torch": torch.__version__}
    return {"python": platform.python_version(), **own, **others}


def device_name(device: torch.device) -> str:
    """E.g. "cpu (2 threads)" or the name of the GPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} ({torch.get_num_threads()} threads)"


def as_json(metrics: Mapping[str, Any]) -> bytes:
    """Numbers as JSON; those that JSON cannot represent (NaN, Inf) become null."""
    plain = json.loads(json.dumps(metrics), parse_constant=lambda name: None)
    return (json.dumps(plain, indent=1) + "\n").encode()


def png(figure: Figure) -> bytes:
    """The picture of a figure, which is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    plt.close(figure)
    return buffer.getvalue()


def accuracy_figure(
    runs: Sequence[Scores], *, title: str, train_length: int, chance: float
) -> bytes:
    """Token and sequence accuracy against length; runs are those of different seeds.

    A line is the median of the runs and the band around it their range. A dashed line marks the
    (longest) training length, a dotted one the token accuracy of guessing, `chance`. Where some
    solve took more than one step, a second axis holds the median number of iterations; an exact
    sweep always takes one. Raises ValueError if there are no runs or they differ in the lengths.
    """
    if len({tuple(run["accuracy"]) for run in runs}) != 1:
        raise ValueError("runs must be at least one, all evaluated at the same lengths")
    figure, left = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    _draw(left, runs, "accuracy", marker="o", label="token accuracy")
    _draw(left, runs, "sequence_accuracy", marker="s", label="sequence accuracy")
    left.axvline(train_length, color="black", linestyle="--", linewidth=1, label="training length")
    left.axhline(chance, color="black", linestyle=":", linewidth=1, label="chance, one token")
    left.set(xlabel="sequence length", ylabel="accuracy", ylim=(-0.03, 1.03), title=title)
    handles = left.get_lines()
    most = max((steps for run in runs for steps in run["num_steps"].values()), default=1)
    if most > 1:
        right = left.twinx()
        style = {"color": "tab:gray", "marker": ".", "alpha": 0.7}
        _draw(right, runs, "num_steps", label="median iterations", **style)
        right.yaxis.set_major_locator(MaxNLocator(integer=True))
        right.set(ylabel="median fixed-point iterations", ylim=(0, 1.2 * most))
        handles = [*handles, *right.get_lines()]
    # beside the axes, since curves may be anywhere in them
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
    return png(figure)


def _draw(axes: Axes, runs: Sequence[Scores], name: str, **style: Any) -> None:
    """The median of one metric over the runs as a line, their range as a band."""
    lengths = [int(length) for length in runs[0][name]]
    values = torch.tensor([list(run[name].values()) for run in runs])  # (run, length)
    (line,) = axes.plot(lengths, values.quantile(0.5, dim=0).tolist(), **style)
    if len(runs) > 1:
        low, high = values.amin(0).tolist(), values.amax(0).tolist()
        axes.fill_between(lengths, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
