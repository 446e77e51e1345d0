"""The feedback W^y norm(y_{t-1}) in plain torch, and its derivative.

Letters: b batch, t time, d channels, r raw values, H heads (kernels/heads.py); leading axes are
free.
"""

import torch
from torch import Tensor

from bedouin.kernels.linear import apply_weight
from bedouin.kernels.operands import Operands


def normalize_feedback(
    y: Tensor,  # (..., d)
    eps: float | None,
) -> Tensor:  # (..., d)
    """RMSNorm of y over channels (no weight: W^y absorbs it), or y itself for eps None."""
    return y if eps is None else y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)


def normalize_feedback_vjp(
    grad: Tensor,  # (..., d), the cotangent of norm(y)
    y: Tensor,  # (..., d)
    eps: float | None,
) -> Tensor:  # (..., d)
    """The cotangent of y, in the dtype of y."""
    if eps is None:
        return grad
    rms = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return rms * (grad - y * rms.square() * (grad * y).mean(-1, keepdim=True))


def project_feedback(
    y: Tensor,  # (b, ..., d)
    W_y: Tensor,  # (r, d) or (H, r, d)
    eps: float | None,
) -> Tensor:  # (b, ..., r)
    """W^y norm(y): the product is computed in the dtype of W^y, the result has that of y."""
    return apply_weight(normalize_feedback(y, eps).to(W_y.dtype), W_y).to(y.dtype)


def shifted(
    y: Tensor,  # (b, t, d)
    y0: Tensor,  # (b, d)
) -> Tensor:  # (b, t, d)
    """y_{t-1} for every t, where y0 is the output before the first token."""
    return torch.cat([y0.unsqueeze(1), y[:, :-1]], dim=1) if y.shape[1] else y


def raw_with_feedback(
    y: Tensor,  # (b, t, d)
    operands: Operands,
    eps: float | None,
) -> Tensor:  # (b, t, r)
    """raw^x + W^y norm(y_{t-1}) of all tokens at once; `operands` as `Operands.wide` gives them."""
    if operands.W_y is None or not y.shape[1]:
        return operands.raw
    assert operands.y0 is not None
    return operands.raw + project_feedback(shifted(y, operands.y0), operands.W_y, eps)
