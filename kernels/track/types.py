"""What the operations of the tracker take and give, sizes of its kernels, and all constants that a
measurement may change; free of Triton.

Letters: b batch, t time, H heads, c channels and n states of a head; P and N: c and n rounded up to
powers of two, at least 16; f = b H folded samples, each one head of one sample; V as in `Layout`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

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


class Layout(NamedTuple):
    """Sizes of a head; kernels take them as one tuple of constants."""

    c: int
    n: int
    P: int
    N: int
    NL: int  # lanes of a warp that share the states of a channel
    V: int  # values of a word: 4 bfloat16 or 2 float32
    WORDS: int  # of a row of N values
    SIZE: int  # values of a memory

    @staticmethod
    def of(c: int, n: int, dtype: torch.dtype) -> "Layout":
        """That of a call whose inputs have `dtype`."""
        P, N = (max(16, next_power_of_two(size)) for size in (c, n))
        lanes = max(LEAST_LANES, min(MOST_LANES, N // STATES))
        V = 4 if dtype == torch.bfloat16 else 2
        return Layout(c, n, P, N, lanes, V, N // V, P * N)


class TrackInputs(NamedTuple):
    """The tensors of a call. The first seven may be views whose last axis is contiguous."""

    x: Tensor  # (b, t, H c), of the recurrence
    B: Tensor  # (b, t, H n), of any length
    C: Tensor  # (b, t, H n), likewise
    delta: Tensor  # (b, t, H c), raw, without its bias
    erase: Tensor  # (b, t, H), raw, without its bias
    gate: Tensor  # (b, t, H c)
    skip: Tensor  # (b, t, H c), of which D times is added to y
    dt_bias: Tensor  # (H c,)
    erase_bias: Tensor  # (H,)
    A_log: Tensor  # (H c, n) or (H, c, n): A = -exp(A_log)
    D: Tensor  # (H c,)
    weight: Tensor  # (H c,), of the norm
    W_y: Tensor  # (H, 3 c, c), the rows of Delta, of x and of the gate
    h0: Tensor | None  # (b, H c, n); None: zeros
    y0: Tensor | None  # (b, H c); None: zeros

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """b, t, H, c, n."""
        b, t, H = self.erase.shape
        return b, t, H, self.W_y.shape[-1], self.A_log.shape[-1]


class Tracked(NamedTuple):
    """What `track` returns: the outputs before the last projection, the memory and the states."""

    hidden: Tensor  # (b, t, H c), in the dtype of x
    h: Tensor  # (b, H c, n), after the last token
    y: Tensor  # (b, t, H c), in the dtype of h


class Recurrence(NamedTuple):
    """The fields of `TrackInputs` that the recurrence reads; W has the rows of Delta and of x."""

    x: Tensor  # (b, t, H c)
    B: Tensor  # (b, t, H n)
    C: Tensor  # (b, t, H n)
    delta: Tensor  # (b, t, H c)
    erase: Tensor  # (b, t, H)
    dt_bias: Tensor  # (H c,)
    erase_bias: Tensor  # (H,)
    A_log: Tensor  # (H c, n) or (H, c, n)
    W: Tensor  # (H, 2 c, c)
    h0: Tensor | None  # (b, H c, n)
    y0: Tensor | None  # (b, H c)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.W.shape[-1], self.A_log.shape[-1], self.x.dtype)


class Kept(NamedTuple):
    """What the backward reads besides the inputs; the last four empty without it."""

    B: Tensor  # (f, t, N / V) int64, words of the unit vectors
    C: Tensor  # likewise
    scalars: Tensor  # (f, t, 2): B C and beta
    rows: Tensor  # (f, t, P) int64: pairs of Delta and what is written
    fed: Tensor  # (f, t, P) int64: pairs of what is fed back to Delta and x
    past: Tensor  # (f, t, P) int64: pairs of y_{t-1} and 1 / rms of it
    states: Tensor  # (f, chunks, N, P): h before each chunk

    @staticmethod
    def empty(
        erase: Tensor,  # (b, t, H)
        layout: Layout,
        keep: bool,
    ) -> "Kept":
        (b, t, H), P = erase.shape, layout.P
        f = b * H
        B, C = (erase.new_empty(f, t, layout.WORDS, dtype=torch.int64) for _ in range(2))
        scalars = erase.new_empty(f, t, 2, dtype=torch.float32)
        chunks, tokens = (ceil_div(t, CHUNK), t) if keep else (0, 0)
        rows, fed, past = (erase.new_empty(f, tokens, P, dtype=torch.int64) for _ in range(3))
        states = erase.new_empty(f, chunks, layout.N, P, dtype=torch.float32)
        return Kept(B, C, scalars, rows, fed, past, states)
