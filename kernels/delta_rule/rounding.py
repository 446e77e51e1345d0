"""Inputs of the gated delta rule rounded to the dtype of products.

Letters: b batch, t time, h heads, p key channels and v value channels of a head.
"""

import torch
from torch import Tensor

from bedouin.kernels.delta_rule.types import DeltaInputs
from bedouin.kernels.launch import accumulator


def rounded(inputs: DeltaInputs, dtype: torch.dtype) -> DeltaInputs:
    """Inputs whose query, key and value have `dtype`, and whose beta times the squared length of
    the key is what it was.

    A step multiplies what the memory has at the key by 1 - beta |key|^2. With beta = 2 and a length
    that rounding has made greater than 1, the memory would grow by a constant factor at every token
    that repeats the key.
    """
    query, key, value, beta, log_decay = inputs
    low = key.to(dtype)
    if low is not key:
        beta = beta * _share(key, low)
    return DeltaInputs(query.to(dtype), low, value.to(dtype), beta, log_decay)


@torch.no_grad()
def _share(
    key: Tensor,  # (b, t, 1, h, p)
    low: Tensor,  # (b, t, 1, h, p)
) -> Tensor:  # (b, t, 1, h)
    """The squared lengths of the keys divided by those of the rounded ones, which may be 0."""
    wide = accumulator(key.dtype)
    exact, found = (v.to(wide).square().sum(-1) for v in (key, low))
    return torch.where(found > 0, exact / found, 1)
