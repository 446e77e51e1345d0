"""The output stage in plain torch: the gate's feedback, the gate and the norm.

    n_t   = norm(y_{t-1})                                      the operand of W^y
    out_t = SiLU(gate_t + fed_t + z_t) * norm(y_t + D * x_t)   fed_t = W^y n_t, the gate's rows
    out_t = (gate_t + fed_t) * SiLU(y_t + D * x_t)             the paper's, without z and norm

Letters: b batch, t time, d channels, H heads (kernels/heads.py).
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from bedouin.kernels.feedback import normalize_feedback, shifted
from bedouin.kernels.heads import per_sample, unfold
from bedouin.kernels.output.types import OutputOperands


def gated_output_reference(operands: OutputOperands, eps: float) -> Tensor:  # (b / H, t, H d), as y
    """The gated output, computed in the dtype of y; without z or weight, that of the paper."""
    y, x, D, gate, fed, z, weight = operands
    dtype = y.dtype
    gate = gate.to(dtype)
    if fed is not None:
        gate = gate + fed.to(dtype)
    v = y + _of_tokens(D, y) * x.to(dtype)
    if z is None or weight is None:
        return unfold(gate * silu(v), operands.heads)
    # torch's rms_norm would make zeros of vectors whose squares overflow
    normed = normalize_feedback(v, eps) * _of_tokens(weight, y)
    return unfold(silu(gate + z.to(dtype)) * normed, operands.heads)


def _of_tokens(
    v: Tensor,  # (d,) or (H, d)
    y: Tensor,  # (b, t, d)
) -> Tensor:  # (d,) or (b, 1, d)
    """What each token of y reads of v, in the dtype of y."""
    v = v.to(y.dtype)
    return v if v.dim() == 1 else per_sample(v, y.shape[0]).unsqueeze(1)


def shifted_norm_reference(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
) -> Tensor:  # (b, t, d), as y
    """RMSNorm of y_{t-1}, or y_{t-1} itself for eps None; y0 is the y before token 0."""
    first = torch.zeros_like(y[:, 0]) if y0 is None else y0
    return normalize_feedback(shifted(y, first), eps)
