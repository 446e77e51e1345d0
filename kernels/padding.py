"""Padding after the tokens of a sample, where the memory passes and no statistic counts.

Letters: b batch, t time, p channels of a head, r raw values; b' = H b folded samples.
"""

import torch
from torch import Tensor

CLOSED = 1e30
"""The size of a raw value of Delta for which Delta is exactly 0, whatever the feedback adds."""


def closed_value(closed: float, dtype: torch.dtype) -> float:
    """`closed`, or what is nearest to it in a dtype of a smaller range."""
    limit = torch.finfo(dtype).max
    return min(max(closed, -limit), limit)


def hold_memory_(
    raw: Tensor,  # (b', t, at least p), of which the first p are those of Delta
    padded: Tensor,  # (b, t) bool, True after the last token of a sample
    p: int,
    closed: float,
) -> None:
    """Make the raw values of Delta `closed` in the padding."""
    delta = raw[..., :p].unflatten(0, (-1, len(padded)))
    delta.masked_fill_(padded.unsqueeze(-1), closed_value(closed, raw.dtype))


def ignore_padding_(
    statistics: Tensor,  # (4, b', t): defect, scale, magnitude, pivot
    padded: Tensor,  # (b, t) bool
) -> None:
    """Zero defect, scale and magnitude in the padding; pivots there are 1, the largest value."""
    statistics[:3].unflatten(1, (-1, len(padded))).masked_fill_(padded, 0.0)
