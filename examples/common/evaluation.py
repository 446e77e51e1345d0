"""Accuracy and solver statistics by length, over all processes, and their figure."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from bedouin.solvers import SolveStats
from bedouin.tasks import Batch, Stream
from common.options import TrainConfig
from common.run import Run, Scores

MEASURES = ("accuracy", "sequence_accuracy", "num_steps", "residual", "conditioning")
Accuracy = Callable[[Tensor, Tensor], Tensor]  # from logits (b, t, v) and labels (b, t)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The test of a task, by length, and what the files and the figure say of it."""

    config: TrainConfig
    title: str  # of the figure
    train_length: int  # the longest, at which every evaluation tests
    chance: float  # the token accuracy of guessing
    sample: Callable[[int, Stream], Batch]  # test rows of one length
    accuracies: tuple[Accuracy, Accuracy]  # of tokens and of sequences
    names: tuple[str, str] = ("accuracy", "sequence_accuracy")  # those of the literature

    @torch.no_grad()
    def scores(self, run: Run, *, final: bool) -> Scores:
        """By metric and length, on the same test rows at every call; the evaluation after training
        (`final`) draws others than those during training."""
        lengths = {*self.config.eval_lengths, self.train_length}
        lengths |= set(self.config.final_lengths) if final else set()
        rows = self.config.final_rows if final else self.config.eval_rows
        found: Scores = {name: {} for name in MEASURES}
        run.model.eval()
        for length in sorted(lengths):
            generator, accuracies, stats = run.stream("test", draw=int(final)), [], []
            for _ in range(math.ceil(rows / self.config.eval_batch_size)):
                tokens, labels = self.sample(length, generator)
                logits = run.model(tokens)
                accuracies.append(torch.stack([own(logits, labels) for own in self.accuracies]))
                stats += run.accelerator.unwrap_model(run.model).stats
            mean = run.accelerator.reduce(torch.stack(accuracies).mean(0), reduction="mean")
            values = dict(zip(MEASURES, mean.tolist(), strict=False)) | solve_scores(run, stats)
            for name, value in values.items():
                found[name][str(length)] = value
        run.model.train()
        return found

    def record(self, run: Run) -> None:
        """Evaluate during training."""
        scores = self.scores(run, final=False)
        line = "accuracy " + "  ".join(f"{n}: {v:.4f}" for n, v in scores["accuracy"].items())
        for name, worst in (("num_steps", max), ("residual", max), ("conditioning", min)):
            if scores[name]:  # not of every layer
                line += f"  {name} {worst(scores[name].values()):.3g}"
        run.record(scores, line)

    def finish(self, run: Run) -> dict[str, Any]:
        """Evaluate after training, print a table and write all results."""
        scores, (token, sequence) = self.scores(run, final=True), self.names
        if run.accelerator.is_main_process:
            print(f"{'length':>6}  {token:>18}  {sequence:>18}  {'median num_steps':>16}")
            for n, accuracy in scores["accuracy"].items():
                whole, steps = scores["sequence_accuracy"][n], scores["num_steps"].get(n)
                shown = "-" if steps is None else f"{steps:g}"
                print(f"{n:>6}  {accuracy:>18.4f}  {whole:>18.4f}  {shown:>16}")
        said: dict[str, Any] = {"title": self.title, "chance": self.chance}
        said |= {"train_length": self.train_length}
        named = {token: scores["accuracy"], sequence: scores["sequence_accuracy"]}
        found = {"task": {"name": run.name, **said}, **scores, **named}
        return run.finish(found, {"accuracy.png": lambda: accuracy_figure([scores], **said)})


def solve_scores(run: Run, stats: Sequence[SolveStats]) -> dict[str, float]:
    """Median num_steps, largest residual (NaN if any sample has failed) and smallest conditioning
    over samples and processes; nothing of a layer without a solve."""
    if not stats:
        return {}
    gather = run.accelerator.gather
    num_steps = gather(torch.cat([item.num_steps for item in stats])).double().median()
    residual = gather(torch.cat([item.residual for item in stats])).max()
    scores = {"num_steps": float(num_steps), "residual": float(residual)}
    pivots = [item.conditioning for item in stats if item.conditioning is not None]
    return scores | ({"conditioning": float(gather(torch.cat(pivots)).min())} if pivots else {})


def accuracy_figure(
    runs: Sequence[Scores], *, title: str, train_length: int, chance: float
) -> bytes:
    """Token and sequence accuracy against length: of runs with different seeds the median as a line
    and the range as a band. Where some solve took more than one step, a second axis holds the
    median number of iterations. Raises ValueError if there are no runs or their lengths differ."""
    if len({tuple(run["accuracy"]) for run in runs}) != 1:
        raise ValueError("runs must be at least one, all evaluated at the same lengths")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    left = figure.subplots()
    _draw(left, runs, "accuracy", marker="o", label="token accuracy")
    _draw(left, runs, "sequence_accuracy", marker="s", label="sequence accuracy")
    thin: dict[str, Any] = {"color": rcParams["axes.edgecolor"], "linewidth": 1}
    left.axvline(train_length, **thin, linestyle="--", label="training length")
    left.axhline(chance, **thin, linestyle=":", label="chance, one token")
    highest = max(value for run in runs for value in run["accuracy"].values())
    top = 1.0 if highest > 0.3 else 1.5 * max(highest, chance)
    limits = (-0.03 * top, 1.03 * top)
    left.set(xlabel="sequence length", ylabel="accuracy", title=title, ylim=limits)
    handles = left.get_lines()
    most = max((steps for run in runs for steps in run["num_steps"].values()), default=1)
    if most > 1:  # an exact sweep always takes one
        right = left.twinx()
        _draw(right, runs, "num_steps", label="median iterations", color="tab:gray", marker=".")
        right.yaxis.set_major_locator(MaxNLocator(integer=True))
        right.set(ylabel="median fixed-point iterations", ylim=(0, 1.2 * most))
        handles = [*handles, *right.get_lines()]
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


def png(figure: Figure) -> bytes:
    """The picture of a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    return buffer.getvalue()
