"""The feedback W^y norm(y_{t-1}) in plain torch, and its derivative.

Letters: b batch, t time, d channels of a head, r raw values, H heads (kernels/heads.py); leading
axes are free.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.kernels.heads import apply_weight, padding, weight_gradient
from bedouin.kernels.householder import inverse_norm
from bedouin.kernels.operands import Operands, Parameterization


def normalize_feedback(
    y: Tensor,  # (..., d)
    eps: float | None,
) -> Tensor:  # (..., d)
    """RMSNorm of y over channels (no weight: W^y absorbs it), or y itself for eps None. NaN where
    |y|^2 overflows."""
    return y if eps is None else y * inverse_norm(y.square().mean(-1, keepdim=True), eps)


def normalize_feedback_vjp(
    grad: Tensor,  # (..., d), the cotangent of norm(y)
    y: Tensor,  # (..., d)
    eps: float | None,
) -> Tensor:  # (..., d)
    """The cotangent of y, in the dtype of y."""
    if eps is None:
        return grad
    rms = inverse_norm(y.square().mean(-1, keepdim=True), eps)
    return rms * (grad - y * rms.square() * (grad * y).mean(-1, keepdim=True))


def project_feedback(
    y: Tensor,  # (b, ..., d)
    W_y: Tensor,  # (r, d) or (H, r, d)
    eps: float | None,
) -> Tensor:  # (b, ..., r)
    """W^y norm(y): the product is computed in the dtype of W^y, the result has that of y."""
    return apply_weight(normalize_feedback(y, eps).to(W_y.dtype), W_y).to(y.dtype)


def feedback_weight_gradient(
    grad: Tensor,  # (b, t, r), the cotangent of W^y norm(y)
    normed: Tensor,  # (b, t, d), norm(y)
    W_y: Tensor,  # (r, d) or (H, r, d)
) -> Tensor:  # as W_y
    """The gradient of W^y, computed in its dtype."""
    return weight_gradient(grad.to(W_y.dtype), normed.to(W_y.dtype), W_y)


def project_feedback_vjp(
    grad: Tensor,  # (b, ..., r), the cotangent of W^y norm(y)
    y: Tensor,  # (b, ..., d)
    W_y: Tensor,  # (r, d) or (H, r, d)
    eps: float | None,
) -> Tensor:  # (b, ..., d)
    """The cotangent of y."""
    normed = apply_weight(grad.to(W_y.dtype), W_y.mT).to(y.dtype)
    return normalize_feedback_vjp(normed, y, eps)


def aligned_rows(
    W_y: Tensor,  # (r, d) or (H, r, d)
) -> Tensor:  # (r + padding(r), d) or (H, r + padding(r), d)
    """W^y with rows of zeros behind, so that cuBLAS is fast."""
    missing = padding(W_y.shape[-2])
    return pad(W_y, (0, 0, 0, missing)) if missing else W_y


def shifted(
    y: Tensor,  # (b, t, d)
    y0: Tensor,  # (b, d)
) -> Tensor:  # (b, t, d)
    """y_{t-1} for every t, where y0 is the output before the first token."""
    # joined before the last token is cut off, because torch.export would make a case of t - 1 = 1
    return torch.cat([y0.unsqueeze(1), y], dim=1)[:, :-1]


def with_feedback(
    y: Tensor,  # (b, t, d)
    operands: Operands,
    parameterization: Parameterization,
) -> Tensor:  # (b, t, r)
    """raw^x + W^y norm(y_{t-1}) of all tokens at once; `operands` as `Operands.wide` gives them."""
    _, raw, W_y, _, _, y0 = operands
    if W_y is None or not y.shape[1]:
        return raw
    assert y0 is not None
    return raw + project_feedback(shifted(y, y0), W_y, parameterization.feedback_norm_eps)
