"""Parity of a string of bits.

Letters: b batch, t time.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from bedouin.tasks.batch import IGNORE, Batch
from bedouin.tasks.checks import one_of, whole_number
from bedouin.tasks.lengths import draw_lengths
from bedouin.tasks.streams import Split, draw_last, resolve_split, row_hash

LabelAt = Literal["last", "every"]

_PAD = 2


@dataclass(frozen=True)
class Parity:
    """Whether the number of ones is odd.

    Two rows of `Parity(length=6, min_length=3)`; the padding is token 2, `.` is ignored:

        tokens  1 0 1 1 0 1     1 1 1 0 2 2
        labels  . . . . . 0     . . . 1 . .

    The same with `label_at="every"`:

        labels  1 1 0 1 1 0     1 0 1 1 . .

    Protocol. Bits are uniform and independent, except that the last one keeps the row in its
    stream's split (see `bedouin.tasks.streams`): of the two rows that differ in the last bit only,
    one is a train row and one is a test row. Published (xLSTM, arXiv 2405.04517; Unlocking
    State-Tracking in Linear RNNs Through Negative Eigenvalues, arXiv 2411.12537): a label at the
    last position, lengths uniform from 3 to 40 in training and from 40 to 256 in the test
    (`min_length=3, length=40`, then `min_length=40, length=256`), scaled accuracy with
    `chance=1/2`. The lengths of their code count the answer, which is no token here.

    Args:
        length: number of bits in a row, the largest one if `min_length` is given.
        min_length: draw the number of bits of every row uniformly from `min_length` to `length`,
            both included, and fill rows with padding up to `length`. None: every row has `length`.
        label_at: `"last"`: at the last bit; `"every"`: at every bit, the parity up to it.

    Raises:
        ValueError: a field out of its range.
        TypeError: a number that is no int.
    """

    length: int = 40
    min_length: int | None = None
    label_at: LabelAt = "last"

    def __post_init__(self) -> None:
        whole_number("length", self.length, 1)
        if self.min_length is not None:
            whole_number("min_length", self.min_length, 1, self.length + 1)
        one_of("label_at", self.label_at, get_args(LabelAt))

    @property
    def vocab_size(self) -> int:
        """Number of input ids: the two bits and the padding."""
        return 3

    @property
    def output_size(self) -> int:
        """Number of classes: even and odd."""
        return 2

    @property
    def chance(self) -> float:
        """Accuracy of guessing, for `scaled_accuracy`."""
        return 1 / 2

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        *,
        device: torch.device | str | None = None,
        length: int | None = None,
        split: Split | None = None,
    ) -> Batch:
        """Draw rows, on the generator's device and without waiting for it.

        Args:
            batch_size: number of rows, 0 or more.
            generator: a `stream("train" | "test", seed)`; a plain `torch.Generator` draws from
                the uniform distribution over all rows, or from the `split` that is named.
            device: where the result is moved to, if not where it was made.
            length: number of bits in every row, without padding; None for the lengths of the task.
            split: None for the stream's own; naming another one raises.

        Returns:
            tokens and labels (b, t), t = `length`.

        Raises:
            ValueError: a negative batch size, a length below 1, or not the stream's split.
            TypeError: a batch size or length that is no int, or no generator.
        """
        if length is None:
            least, most = self.min_length or self.length, self.length
        else:
            least = most = whole_number("length", length, 1)
        batch_size = whole_number("batch_size", batch_size, 0)
        split = resolve_split(generator, split)
        lengths = draw_lengths(batch_size, range(least, most + 1), generator).unsqueeze(-1)  # (b,1)
        shape = (batch_size, most)
        bits = torch.randint(2, shape, generator=generator, device=generator.device)
        position = torch.arange(most, device=generator.device)
        bits = bits.masked_fill(position >= lengths - 1, 0)
        last = draw_last(row_hash(bits), self.output_size, split, generator)
        bits = bits.scatter(-1, lengths - 1, last.unsqueeze(-1))
        asked = position < lengths if self.label_at == "every" else position == lengths - 1
        return Batch(
            bits.masked_fill(position >= lengths, _PAD),
            (bits.cumsum(-1) % 2).masked_fill(~asked, IGNORE),
        ).to(device)
