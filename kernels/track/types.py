"""What the operation of the tracker takes; free of Triton.

Letters: b batch, t time, H heads, c channels and n states of a head.
"""

from typing import NamedTuple

from torch import Tensor


class TrackInputs(NamedTuple):
    """The tensors of a call. The first six may be views whose last axis is contiguous."""

    x: Tensor  # (b, t, H c)
    B: Tensor  # (b, t, H n), of any length
    C: Tensor  # (b, t, H n), likewise
    delta: Tensor  # (b, t, H c), raw, without its bias
    erase: Tensor  # (b, t, H), raw, without its bias
    gate: Tensor  # (b, t, H c)
    dt_bias: Tensor  # (H c,)
    erase_bias: Tensor  # (H,)
    A: Tensor  # (H c, n) or (H, c, n), the negative rates
    D: Tensor  # (H c,)
    weight: Tensor  # (H c,), of the norm
    W_y: Tensor  # (H, 3 c, c), the rows of Delta, of x and of the gate
    h0: Tensor | None  # (b, H c, n); None: zeros
    y0: Tensor | None  # (b, H c); None: zeros

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """b, t, H, c, n."""
        b, t, H = self.erase.shape
        return b, t, H, self.W_y.shape[-1], self.A.shape[-1]


class Tracked(NamedTuple):
    hidden: Tensor  # (b, t, H c), in the dtype of x
    h: Tensor  # (b, H c, n), after the last token
    y: Tensor  # (b, t, H c), in the dtype of h
