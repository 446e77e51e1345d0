"""Diagonal selective scan, the sequence mixing of a Bedouin layer: the specification.

Letters: b batch, t time, d channels, n state per channel, H heads (kernels/heads.py).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.heads import per_sample
from bedouin.kernels.launch import accumulator

InputScale = Literal["delta", "bounded_delta", "one_minus_decay"]
Eigenvalues = Literal["positive", "full"]

SCAN_CHUNK = 16
"""Tokens between two memories that the forward kernel stores, and in the backward's workspace."""


class ScanOptions(NamedTuple):
    """What describes a scan besides its tensors."""

    input_scale: InputScale
    eigenvalues: Eigenvalues
    exclusive: bool


def discretize(
    delta: Tensor,  # (..., d)
    A: Tensor,  # (d, n), or one for each leading index, (..., d, n); negative
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
) -> tuple[Tensor, Tensor]:
    """Decay and input scale of each token: lambda (..., d, n), s (..., d, 1) or (..., d, n).

    lambda = exp(A delta); "full" eigenvalues map it to 2 lambda - 1 in [-1, 1].
    s = delta, delta / (1 + delta), or 1 - |lambda| (the coupled scale, gain at most 1), which keeps
    its relative accuracy where lambda is near 1 or -1.
    """
    exponent = delta.unsqueeze(-1) * A
    power = torch.exp(exponent)
    decay = 2 * power - 1 if eigenvalues == "full" else power
    if input_scale == "one_minus_decay":
        # 1 - power cancels near exponent 0, and far from it the derivative of expm1, which is
        # its value + 1
        rest = torch.where(exponent > -1, -torch.expm1(exponent), 1 - power)
        return decay, 2 * torch.minimum(power, rest) if eigenvalues == "full" else rest
    if input_scale == "bounded_delta":
        delta = delta / (1 + delta)
    return decay, delta.unsqueeze(-1)


def contract(
    h: Tensor,  # (..., d, n)
    C: Tensor,  # (..., n)
) -> Tensor:  # (..., d)
    """The read-out h C, a contraction over the state axis."""
    return (h @ C.unsqueeze(-1)).squeeze(-1)


def selective_scan_reference(
    x: Tensor,  # (b, t, d)
    delta: Tensor,  # (b, t, d)
    A: Tensor,  # (d, n) or (H, d, n)
    B: Tensor,  # (b, t, n)
    C: Tensor,  # (b, t, n)
    h0: Tensor,  # (b, d, n)
    *,
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:  # (b, t, d), (b, d, n)
    """The read-outs and the last h of h_t = lambda_t * h_{t-1} + (s_t * x_t) B_t^T.

    The read-out is h_t C_t, or with `exclusive` that of the memory before token t is written,
    p_t = (lambda_t * h_{t-1}) C_t. Computes in float32 or float64; y has the dtype of x, the last h
    that of h0.
    """
    dtype, y_dtype, h_dtype = accumulator(x.dtype), x.dtype, h0.dtype
    x, delta, A, B, C, h = (v.to(dtype) for v in (x, delta, A, B, C, h0))
    if A.dim() == 3:
        A = per_sample(A, x.shape[0])
    outputs = []
    for t in range(x.shape[1]):
        decay, s = discretize(delta[:, t], A, input_scale, eigenvalues)
        decayed = decay * h
        h = decayed + s * x[:, t].unsqueeze(-1) * B[:, t].unsqueeze(-2)
        outputs.append(contract(decayed if exclusive else h, C[:, t]))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)
    return y.to(y_dtype), h.to(h_dtype)
