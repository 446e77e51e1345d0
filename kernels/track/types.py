"""What the operations of the tracker take and give; free of Triton.

Letters: b batch, t time, H heads, c channels and n states of a head; f, P, N, V as in `Sizes`.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.track.limits import Sizes

ROWS: Final = 7
"""Fields of `TrackInputs` with a row for each token, which come first."""


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
    def sizes(self) -> Sizes:
        b, t, H = self.erase.shape
        return Sizes.of(b, t, H, self.W.shape[-1], self.A_log.shape[-1], self.x.dtype)


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
        like: Tensor,  # of any shape, on the device
        sizes: Sizes,
        keep: bool,
    ) -> "Kept":
        f, t, P, N, words = sizes.f, sizes.t, sizes.P, sizes.N, sizes.N // sizes.V
        B, C = (like.new_empty(f, t, words, dtype=torch.int64) for _ in range(2))
        scalars = like.new_empty(f, t, 2, dtype=torch.float32)
        chunks, tokens = (sizes.chunks, t) if keep else (0, 0)
        rows, fed, past = (like.new_empty(f, tokens, P, dtype=torch.int64) for _ in range(3))
        states = like.new_empty(f, chunks, N, P, dtype=torch.float32)
        return Kept(B, C, scalars, rows, fed, past, states)
