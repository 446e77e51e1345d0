"""Parity of a string of bits.

Letters: b batch, t time.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

from bedouin.tasks import streams
from bedouin.tasks.batch import IGNORE, Batch, Task
from bedouin.tasks.streams import Split

LabelAt = Literal["last", "every"]

_PAD = 2


@dataclass(frozen=True)
class Parity(Task):
    """Whether the number of ones is odd.

    Two rows of `Parity(length=6, min_length=3)`; the padding is token 2, `.` is ignored:

        tokens  1 0 1 1 0 1     1 1 1 0 2 2
        labels  . . . . . 0     . . . 1 . .

    The same with `label_at="every"`:

        labels  1 1 0 1 1 0     1 0 1 1 . .

    Protocol. Bits are uniform and independent, except that the last one keeps the row in its
    stream's split (see `bedouin.tasks.streams`). Published (xLSTM, arXiv 2405.04517; arXiv
    2411.12537): a label at the last position, lengths uniform from 3 to 40 in training and from 40
    to 256 in the test, scaled accuracy. The lengths of their code count the answer, no token here.

    Args:
        length: number of bits in a row, the largest one if `min_length` is given.
        min_length: draw the number of bits of every row uniformly from `min_length` to `length` and
            fill rows with padding up to `length`. None: every row has `length`.
        label_at: `"last"`: at the last bit; `"every"`: at every bit, the parity up to it.

    Raises ValueError for a field out of its range and TypeError for a number that is no int.
    """

    vocab_size: ClassVar[int] = 3  # the two bits and the padding
    output_size: ClassVar[int] = 2  # even and odd

    length: int = 40
    min_length: int | None = None
    label_at: LabelAt = "last"

    def __post_init__(self) -> None:
        streams.whole_number("length", self.length, 1)
        if self.min_length is not None:
            streams.whole_number("min_length", self.min_length, 1, self.length + 1)
        streams.one_of("label_at", self.label_at, get_args(LabelAt))

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        if length is not None:
            return replace(self, length=length, min_length=None)._draw(b, None, split, rng)
        most = self.length
        lengths = streams.draw_lengths(b, range(self.min_length or most, most + 1), rng)  # (b, 1)
        bits = streams.integers(0, 2, (b, most), rng)
        position = torch.arange(most, device=rng.device)
        bits = bits.masked_fill(position >= lengths - 1, 0)
        last = streams.draw_last(streams.row_hash(bits), 2, split, rng)
        bits = bits.scatter(-1, lengths - 1, last.unsqueeze(-1))
        labeled = position < lengths if self.label_at == "every" else position == lengths - 1
        return Batch(
            bits.masked_fill(position >= lengths, _PAD),
            (bits.cumsum(-1) % 2).masked_fill(~labeled, IGNORE),
        )
