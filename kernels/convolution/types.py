"""Which channels of a convolution get unit length."""

from typing import NamedTuple


class Groups(NamedTuple):
    """The first `number` groups of `size` channels each, with `eps` under the root of the norm."""

    number: int
    size: int
    eps: float
