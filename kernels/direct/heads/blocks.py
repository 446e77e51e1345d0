"""Block sizes of the kernels of heads, and the shared memory that they need.

Letters: d channels of a head, n state per channel, k reflections, r raw values.
"""

from typing import NamedTuple

from bedouin.kernels.launch import next_power_of_two

SCRATCH = 8192
"""Bytes of shared memory that a sweep may need beside W^y, which stays there if it fits."""

REVERSE_ALPHA = 32
"""Rows of W^y for alpha in the reverse sweep: every thread of a warp holds one of its values."""


class HeadBlocks(NamedTuple):
    """Sizes rounded up: sides of tiles are powers of two, and at least 16 in a product."""

    channels: int
    states: int
    small: int  # B, C and, if `alpha` is 0, alpha in the forward sweep
    alpha: int
    rows: int  # of W^y in shared memory, of the sweep that holds more of them
    rows_of_tile: int  # of its largest tile that is read anew for each token

    def streams(self, itemsize: int, shared_memory: int) -> bool:
        """Whether W^y, with entries of `itemsize` bytes, does not fit beside what else is there."""
        return SCRATCH + self.rows * self.channels * itemsize > shared_memory

    def fits(self, itemsize: int, shared_memory: int) -> bool:
        """Whether at least its tiles fit, one after the other."""
        return SCRATCH + self.rows_of_tile * self.channels * itemsize <= shared_memory


def head_blocks(d: int, n: int, k: int, selective: bool) -> HeadBlocks:
    channels, states = max(16, next_power_of_two(d)), next_power_of_two(n)
    both = 2 * n if selective else 0
    # one tile for B, C and alpha, unless that would almost double a large one
    apart = both > 32
    small = max(16, next_power_of_two(both if apart else both + k))
    alpha = 16 if small < both + k else 0
    reverse = max(2 * states, min(32, channels)) + REVERSE_ALPHA if selective else REVERSE_ALPHA
    rows = (k + 1) * channels + max(small + alpha, reverse)
    return HeadBlocks(channels, states, small, alpha, rows, max(channels, small, reverse))
