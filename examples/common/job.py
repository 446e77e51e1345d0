"""The three parts of a training run: task (`Problem`), constants (`Job`) and state (`Run`).

Letters: b batch, t time, v classes of the output.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from bedouin.tasks import Batch, Split, Stream, stream
from common.options import RunConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Problem:
    """All that training knows of the task of a script: what the files and the figure say of it, its
    data, and its two accuracies with their names."""

    name: str
    """Short name, in metrics.json and part of the default folder."""
    title: str
    """Title of the figure."""
    chance: float
    """Token accuracy of guessing, a line of the figure."""
    vocab_size: int
    output_size: int
    train_lengths: tuple[int, ...]
    train_batch: Callable[[Stream, int, int], Batch]
    """The training batch of a step, of rows up to a length."""
    test_batch: Callable[[int, Stream], Batch]
    """A test batch of one length."""
    token_accuracy: Callable[[Tensor, Tensor], Tensor]
    """From logits (b, t, v) and labels (b, t)."""
    sequence_accuracy: Callable[[Tensor, Tensor], Tensor]
    """From logits (b, t, v) and labels (b, t)."""
    accuracy_names: tuple[str, str] = ("accuracy", "sequence_accuracy")
    """The names of the two accuracies in the literature, which metrics.json uses as well."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run computes, and where it writes."""

    config: RunConfig
    accelerator: Accelerator
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Job(Place):
    """The constants of a training run."""

    problem: Problem
    config: TrainConfig

    def stream(self, split: Split, draw: int = 0) -> Stream:
        """The stream of a split: one for each process, and two (`draw` 0 and 1) for each seed."""
        rank = self.accelerator.process_index
        return stream(split, 2 * self.config.seed + draw, self.accelerator.device, rank=rank)


@dataclass(kw_only=True)
class Run:
    """The state of a training run."""

    model: nn.Module
    optimizer: AcceleratedOptimizer
    schedule: LambdaLR
    generator: Stream
    length: int
    """The longest training length, which a curriculum lets grow."""
    loss_sum: Tensor
    """Sum () of the training losses since the last evaluation, without those of skipped steps, on
    the device."""
    skipped: Tensor
    """The steps () since the last evaluation whose gradients were not finite, on the device."""
    loss_count: int = 0
    step: int = 0
    seconds: float = 0.0
    stopped: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
