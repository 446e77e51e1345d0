"""Accuracy and solver statistics by length, over all processes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bedouin import SequenceModel
from bedouin.solvers import SolveStats
from bedouin.tasks import Batch, Stream
from common.options import TrainConfig
from common.report import Scores, accuracy_figure
from common.run import Run

MEASURES = ("accuracy", "sequence_accuracy", "num_steps", "residual", "conditioning")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The test of a task, by length, and what the files and the figure say of it."""

    config: TrainConfig
    title: str
    train_length: int
    """The longest training length, at which every evaluation tests."""
    chance: float
    """Token accuracy of guessing, a line of the figure."""
    sample: Callable[[int, Stream], Batch]
    """Test rows of one length."""
    accuracies: tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
    """Of tokens and of sequences, from logits (b, t, v) and labels (b, t)."""
    names: tuple[str, str] = ("accuracy", "sequence_accuracy")
    """The names of the two accuracies in the literature, which metrics.json uses as well."""

    @torch.no_grad()
    def scores(self, run: Run, *, final: bool) -> Scores:
        """By metric and length, on the same test rows at every call.

        The evaluation after training (`final`) draws other rows than those during training.
        """
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
                stats += layer_stats(run)
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
                whole, steps = scores["sequence_accuracy"][n], scores["num_steps"].get(n, "-")
                print(f"{n:>6}  {accuracy:>18.4f}  {whole:>18.4f}  {steps:>16}")
        said = {"title": self.title, "train_length": self.train_length, "chance": self.chance}
        named = {token: scores["accuracy"], sequence: scores["sequence_accuracy"]}
        found = {"task": {"name": run.name, **said}, **scores, **named}
        return run.finish(found, {"accuracy.png": lambda: accuracy_figure([scores], **said)})


def layer_stats(run: Run) -> list[SolveStats]:
    """Statistics of the last solve of every layer."""
    model = run.accelerator.unwrap_model(run.model)
    if not isinstance(model, SequenceModel):
        raise TypeError(f"the model must be a SequenceModel, got {type(model).__name__}")
    return list(model.stats)


def solve_scores(run: Run, stats: list[SolveStats]) -> dict[str, float]:
    """Median num_steps, largest residual, smallest conditioning over samples and processes.

    The residual is NaN if any sample has failed. A layer without a solve has no scores.
    """
    if not stats:
        return {}
    gather = run.accelerator.gather
    num_steps = gather(torch.cat([item.num_steps for item in stats])).double().median()
    residual = gather(torch.cat([item.residual for item in stats])).max()
    scores = {"num_steps": float(num_steps), "residual": float(residual)}
    pivots = [item.conditioning for item in stats if item.conditioning is not None]
    return scores | ({"conditioning": float(gather(torch.cat(pivots)).min())} if pivots else {})
