"""The batches that a task returns, and what the tasks share.

Letters: b batch, t time.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bedouin.tasks.streams import Split, resolve_split, whole_number

IGNORE: Final = -100
"""The label of positions that losses and accuracies ignore (`ignore_index` of `cross_entropy`)."""


class Batch(NamedTuple):
    """A batch of rows; unpacks as `tokens, labels = task.sample(...)`."""

    tokens: Tensor  # (b, t) int64
    labels: Tensor  # (b, t) int64, IGNORE at positions without a label

    def to(self, device: torch.device | str | None) -> "Batch":
        """The same batch on a device; itself for None."""
        return self if device is None else Batch(self.tokens.to(device), self.labels.to(device))


class Task:
    """The sizes of a task and its `sample`."""

    @property
    def vocab_size(self) -> int:
        """Number of input ids."""
        raise NotImplementedError

    @property
    def output_size(self) -> int:
        """Number of classes."""
        return self.vocab_size

    @property
    def chance(self) -> float:
        """Accuracy of guessing, for `scaled_accuracy`."""
        return 1 / self.output_size

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        *,
        device: torch.device | str | None = None,
        length: int | None = None,
        split: Split | None = None,
    ) -> Batch:
        """Draw rows on the generator's device, without synchronization.

        Args:
            batch_size: number of rows, 0 or more.
            generator: a `stream("train" | "test", seed)`; a plain `torch.Generator` draws from the
                distribution over all rows, or from `split`.
            device: the device of the result; None: the generator's.
            length: of every row, in the unit of the field `length`; None: as the fields say.
            split: None or the stream's own.

        Returns tokens and labels (b, t), t the largest length in tokens. Raises ValueError for a
        number out of its range and another split, and TypeError for another type.
        """
        b = whole_number("batch_size", batch_size, 0)
        return self._draw(b, length, resolve_split(generator, split), generator).to(device)

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        """Random rows that belong to `split`; `length` is not checked yet."""
        raise NotImplementedError


def as_text(tokens: Tensor, symbols: Sequence[str], ignored: str) -> list[str]:
    """Rows (b, t) as text, with `ignored` for `IGNORE`. Synchronizes with the device."""
    return ["".join(ignored if i == IGNORE else symbols[i] for i in row) for row in tokens.tolist()]
