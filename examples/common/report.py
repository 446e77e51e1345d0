"""What a training run leaves behind: a table, metrics.json and accuracy.png."""

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
from matplotlib.ticker import MaxNLocator  # noqa: E402

Scores = dict[str, dict[str, float]]
"""Number by metric name and length, e.g. scores["accuracy"]["6"]."""


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    others = {name: metadata.version(name) for name in ("torchdeq", "accelerate")}
    own = {"bedouin": bedouin.__version__, "torch": torch.__version__}
    return {"python": platform.python_version(), **own, **others}


def device_name(device: torch.device) -> str:
    """E.g. "cpu (2 threads)" or the name of the GPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} ({torch.get_num_threads()} threads)"


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold (NaN, Inf) by None, at any depth."""
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
    median = max(scores["num_steps"].values())
    line = f"step {step}  loss {loss:.4f}  accuracy {accuracy}  num_steps {median:g}"
    line += f"  residual {max(scores['residual'].values()):.1e}"
    conditioning = scores["conditioning"].values()
    return f"{line}  conditioning {min(conditioning):.1e}" if conditioning else line


def table(scores: Scores, names: Sequence[str]) -> str:
    """Accuracy by length as text; `names` are the titles of the two accuracies."""
    lines = [f"{'length':>6}  {names[0]:>18}  {names[1]:>18}  {'median num_steps':>16}"]
    for length, accuracy in scores["accuracy"].items():
        sequence, steps = scores["sequence_accuracy"][length], scores["num_steps"][length]
        lines.append(f"{length:>6}  {accuracy:>18.4f}  {sequence:>18.4f}  {steps:>16g}")
    return "\n".join(lines)


def save_figure(path: Path, scores: Scores, *, title: str, train_length: int) -> None:
    """Plot accuracy against length; a dashed line marks the (longest) training length.

    The second axis holds the median number of fixed-point iterations.
    """
    lengths = [int(length) for length in scores["accuracy"]]
    figure, left = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    right = left.twinx()
    steps = list(scores["num_steps"].values())
    right.plot(lengths, steps, color="tab:gray", marker=".", alpha=0.7, label="median iterations")
    left.plot(lengths, list(scores["accuracy"].values()), marker="o", label="token accuracy")
    sequence = list(scores["sequence_accuracy"].values())
    left.plot(lengths, sequence, marker="s", label="sequence accuracy")
    left.axvline(train_length, color="black", linestyle="--", linewidth=1, label="training length")
    left.set(xlabel="sequence length", ylabel="accuracy", ylim=(-0.03, 1.03), title=title)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(ylabel="median fixed-point iterations", ylim=(0, max(2.0, 1.2 * max(steps))))
    handles = [*left.get_lines(), *right.get_lines()]
    left.legend(handles=handles, loc="lower left", fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
