"""Sizes of the tracker's kernels, and all constants that a measurement may change; free of Triton.

Letters: b batch, t time, H heads, c channels and n states of a head; P and N: c and n rounded up to
powers of two, at least 16; f = b H folded samples, each one head of one sample.
"""

from typing import NamedTuple

import torch

from bedouin.kernels.launch import ceil_div, next_power_of_two

MAX_CHANNELS, MAX_STATES = 64, 128
"""One program holds W_y of Delta and x and the memory of a head in registers."""

CHUNK = 16
"""Tokens between two kept memories, which the backward computes again from them."""

STATES, LEAST_LANES, MOST_LANES = 16, 2, 4
"""Most states of a channel that a thread of the sweeps holds, and lanes of a warp that share those
of a channel, of which there may be too few for that."""

GRADIENT_STATES = 16
"""States of a program of the gradients of A, B and C, which is one warp."""

PART = 8
"""Chunks of such a program, whose part of the gradient of A is added to that of the others."""

TOKENS, FINISH_TOKENS = 16, 32
"""Tokens of a program of the preparation, and of what ends the backward."""


def unfit(c: int, n: int) -> str | None:
    """What the kernels do not support of heads of these sizes, as a part of a message."""
    if c <= MAX_CHANNELS and n <= MAX_STATES:
        return None
    most = f"at most {MAX_CHANNELS} channels with {MAX_STATES} states"
    return f"heads of {c} channels with {n} states ({most})"


class Sizes(NamedTuple):
    b: int
    t: int
    H: int
    c: int
    n: int
    P: int
    N: int
    V: int  # values of a word: 4 bfloat16 or 2 float32

    @staticmethod
    def of(b: int, t: int, H: int, c: int, n: int, dtype: torch.dtype) -> "Sizes":
        """The sizes of a call whose inputs have `dtype`."""
        P, N = (max(16, next_power_of_two(size)) for size in (c, n))
        return Sizes(b, t, H, c, n, P, N, 4 if dtype == torch.bfloat16 else 2)

    @property
    def f(self) -> int:
        return self.b * self.H

    @property
    def chunks(self) -> int:
        return ceil_div(self.t, CHUNK)

    @property
    def lanes(self) -> int:
        return max(LEAST_LANES, min(MOST_LANES, self.N // STATES))
