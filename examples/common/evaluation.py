"""Accuracy and solver statistics by length, over all processes."""

import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from bedouin.model import SequenceModel
from bedouin.solvers import SolveStats
from bedouin.tasks import Stream
from common.job import Job
from common.report import Scores


def layer_stats(model: nn.Module, accelerator: Accelerator) -> list[SolveStats]:
    """Statistics of the last solve of every layer."""
    plain = accelerator.unwrap_model(model)
    if not isinstance(plain, SequenceModel):
        raise TypeError(f"the model must be a SequenceModel, got {type(plain).__name__}")
    return list(plain.stats)


def solve_scores(stats: Sequence[SolveStats], accelerator: Accelerator) -> dict[str, float]:
    """Median num_steps, largest residual, smallest conditioning over samples and processes.

    The residual is NaN if any sample has failed. Baselines have no statistics and no scores.
    """
    if not stats:
        return {}
    num_steps = accelerator.gather(torch.cat([item.num_steps for item in stats]))
    residual = accelerator.gather(torch.cat([item.residual for item in stats]))
    scores = {"num_steps": float(num_steps.double().median()), "residual": float(residual.max())}
    pivots = [item.conditioning for item in stats if item.conditioning is not None]
    if pivots:
        scores["conditioning"] = float(accelerator.gather(torch.cat(pivots)).min())
    return scores


@torch.no_grad()
def evaluate_length(
    job: Job, model: nn.Module, *, length: int, rows: int, generator: Stream
) -> dict[str, float]:
    """Scores on `rows` test rows of one length, rounded up to whole batches, in each process."""
    metrics = (job.problem.token_accuracy, job.problem.sequence_accuracy)
    stats: list[SolveStats] = []
    accuracies: list[Tensor] = []
    for _ in range(math.ceil(rows / job.config.eval_batch_size)):
        batch = job.problem.test_batch(length, generator)
        logits = model(batch.tokens)
        accuracies.append(torch.stack([metric(logits, batch.labels) for metric in metrics]))
        stats += layer_stats(model, job.accelerator)
    mean = job.accelerator.reduce(torch.stack(accuracies).mean(0), reduction="mean")
    accuracy, sequence_accuracy = mean.tolist()
    solved = solve_scores(stats, job.accelerator)
    return {"accuracy": accuracy, "sequence_accuracy": sequence_accuracy, **solved}


def evaluate(job: Job, model: nn.Module, *, final: bool) -> Scores:
    """Scores by metric and length, on the same test rows at every call.

    The evaluation after training (`final`) draws other rows than those during training, so that its
    result is not biased by an early stop that the latter decided.
    """
    rows = job.config.final_rows if final else job.config.eval_rows
    names = ("accuracy", "sequence_accuracy", "num_steps", "residual", "conditioning")
    scores: Scores = {name: {} for name in names}
    model.eval()
    for length in lengths(job, final=final):
        generator = job.stream("test", draw=int(final))
        found = evaluate_length(job, model, length=length, rows=rows, generator=generator)
        for name, value in found.items():
            scores[name][str(length)] = value
    model.train()
    return scores


def lengths(job: Job, *, final: bool) -> list[int]:
    """The lengths of an evaluation, which always include the longest training length."""
    asked = {*job.config.eval_lengths, max(job.problem.train_lengths)}
    return sorted(asked | set(job.config.final_lengths) if final else asked)


def stop_accuracy(job: Job, scores: Scores) -> float:
    """The accuracy that decides about an early stop: the lowest at a training length."""
    trained = set(lengths(job, final=False)) & set(job.problem.train_lengths)
    return min(scores["accuracy"][str(length)] for length in trained)
