"""Types of the gated delta rule.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head.
"""

from typing import Literal, NamedTuple

from torch import Tensor

DeltaBackend = Literal["auto", "torch", "triton", "fla"]


CHUNK = 64
"""Householder steps of a chunk, as in flash-linear-attention."""


class DeltaInputs(NamedTuple):
    """What a token contributes. The keys have length 1 or 0; a log_decay of None is no decay."""

    query: Tensor  # (b, t, h, p)
    key: Tensor  # (b, t, k, h, p)
    value: Tensor  # (b, t, k, h, v)
    beta: Tensor  # (b, t, k, h), in [0, 2]
    log_decay: Tensor | None  # (b, t, h), <= 0
