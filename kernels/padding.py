"""Raw values in the padding after the tokens of a sample, where the memory passes."""

import torch

CLOSED = 1e30
"""The size of a raw value of Delta for which Delta is exactly 0, whatever the feedback adds."""


def closed_value(closed: float, dtype: torch.dtype) -> float:
    """`closed`, or what is nearest to it in a dtype of a smaller range."""
    limit = torch.finfo(dtype).max
    return min(max(closed, -limit), limit)
