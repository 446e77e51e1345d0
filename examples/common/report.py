"""The results of a training run: a table, metrics.json and a figure."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import matplotlib
import torch

import bedouin

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend must be chosen first)
from matplotlib.axes import Axes  # noqa: E402
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


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent (NaN, Inf) by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write metrics.json; a number that is not finite becomes null."""
    text = json.dumps(finite(metrics), indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def evaluation_line(step: int, loss: float, scores: Scores) -> str:
    """One line: step, loss, accuracy by length, median num_steps, worst residual, conditioning."""
    accuracy = "  ".join(f"{length}: {value:.4f}" for length, value in scores["accuracy"].items())
    line = f"step {step}  loss {loss:.4f}  accuracy {accuracy}"
    if scores["num_steps"]:  # not of a baseline
        line += f"  num_steps {max(scores['num_steps'].values()):g}"
        line += f"  residual {max(scores['residual'].values()):.1e}"
    conditioning = scores["conditioning"].values()
    return f"{line}  conditioning {min(conditioning):.1e}" if conditioning else line


def table(scores: Scores, names: Sequence[str]) -> str:
    """Accuracy by length as text; `names` are the titles of the two accuracies."""
    lines = [f"{'length':>6}  {names[0]:>18}  {names[1]:>18}  {'median num_steps':>16}"]
    for length, accuracy in scores["accuracy"].items():
        sequence = scores["sequence_accuracy"][length]
        steps = f"{scores['num_steps'][length]:g}" if scores["num_steps"] else "-"
        lines.append(f"{length:>6}  {accuracy:>18.4f}  {sequence:>18.4f}  {steps:>16}")
    return "\n".join(lines)


def save_figure(
    path: Path, runs: Sequence[Scores], *, title: str, train_length: int, chance: float
) -> None:
    """Plot token and sequence accuracy against length; runs are those of different seeds.

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
    figure.savefig(path, dpi=150)
    plt.close(figure)


def save_curve(path: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Plot the bits per byte of held-out text against the steps, a line for each length of the
    pieces."""
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    steps = [entry["step"] for entry in history]
    for length in history[0]["bits_per_byte"]:
        values = [entry["bits_per_byte"][length] for entry in history]
        axes.plot(steps, values, marker="o", label=f"pieces of {length} bytes")
    axes.set(xlabel="training steps", ylabel="bits per byte of held-out text")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(axes: Axes, runs: Sequence[Scores], name: str, **style: Any) -> None:
    """The median of one metric over the runs as a line, their range as a band."""
    lengths = [int(length) for length in runs[0][name]]
    values = torch.tensor([list(run[name].values()) for run in runs])  # (run, length)
    (line,) = axes.plot(lengths, values.quantile(0.5, dim=0).tolist(), **style)
    if len(runs) > 1:
        low, high = values.amin(0).tolist(), values.amax(0).tolist()
        axes.fill_between(lengths, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
