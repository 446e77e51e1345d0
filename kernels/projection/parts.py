"""The parts of the projected input.

Letters: p channels of a head, r raw values of a head, q those with a bias, c convolved channels,
H heads.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from bedouin.kernels.launch import next_power_of_two

X, GATE = -1, -2
"""The places of x and of the gate, beside those of parts of the raw values."""

MAX_VALUES = 1024
"""Most values of a part, rounded up to a power of two, times the width of its convolution: a
program holds 16 tokens of them, and of more, many would be spilled."""

MAX_SAMPLES = 65535
"""Most samples: of a CUDA grid along its third axis."""


class Part(NamedTuple):
    """A part of the projected input: H times `size` columns after those of the part before it."""

    size: int
    place: int  # X, GATE, or where it begins in the raw values of a head
    convolved: bool
    biased: int = 0  # how many of its values have a bias, the last; none of X and GATE


def takes_split(
    parts: Iterable[Part],
    width: int,  # of the convolution
    samples: int,
) -> bool:
    """Whether the kernel of the split is made for such parts."""
    widths = [next_power_of_two(size) * (width if acts else 1) for size, _, acts, _ in parts]
    return max(widths) <= MAX_VALUES and samples <= MAX_SAMPLES


class Placed(NamedTuple):
    """A part, its first column, its first convolved channel, and its first bias of a head's."""

    part: Part
    column: int
    channel: int
    bias: int


class Parts(NamedTuple):
    """All parts of a layer's projected input."""

    placed: tuple[Placed, ...]
    p: int
    r: int
    c: int
    q: int
    widest: int  # the size of the widest part

    @staticmethod
    @lru_cache(maxsize=256)
    def of(flat: tuple[int, ...], num_heads: int) -> "Parts":
        """From the fields of all parts one after the other."""
        fields = zip(*(flat[i :: len(Part._fields)] for i in range(len(Part._fields))), strict=True)
        parts = [
            Part(size, place, bool(convolved), biased) for size, place, convolved, biased in fields
        ]
        placed = tuple(_place(parts, num_heads))
        p = next(part.size for part in parts if part.place == X)
        r = sum(part.size for part in parts if part.place >= 0)
        c = num_heads * sum(part.size for part in parts if part.convolved)
        q, widest = sum(part.biased for part in parts), max(part.size for part in parts)
        return Parts(placed, p, r, c, q, widest)


def _place(parts: list[Part], num_heads: int) -> Iterator[Placed]:
    column, channel = 0, 0
    for part in parts:
        if part.size:
            # the biases are in the order of the raw values
            bias = sum(other.biased for other in parts if other.place < part.place)
            yield Placed(part, column, channel, bias)
        column += num_heads * part.size
        channel += num_heads * part.size if part.convolved else 0
