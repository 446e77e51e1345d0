"""The output stage in plain torch: the gate's feedback, the gate and the norm.

    n_t   = norm(y_{t-1})                               the operand of W^y
    out_t = SiLU(gate_t) * norm(y_t + D * x_t)          with all parts of the gate
    out_t = gate_t * SiLU(y_t + D * x_t)                the paper's, without norm

Letters: b batch, t time, d channels, H heads (kernels/heads.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from bedouin.kernels.feedback import normalize_feedback, shifted
from bedouin.kernels.heads import per_sample, unfold


class OutputOperands(NamedTuple):
    """The tensors of the gated output, of which the gate is a sum of all its parts.

    Those of a memory have no x and no D, and all heads of a sample side by side in the d channels
    of y and gate; they have the norm's weight in common.
    """

    y: Tensor  # (b, t, d)
    x: Tensor | None  # (b, t, d)
    D: Tensor | None  # (d,) or (H, d)
    gate: Tensor  # (b, t, d)
    weight: Tensor | None  # (d,) or (H, d), as D, of the norm; of a memory (d / H,)

    @property
    def heads(self) -> int:
        """H."""
        if self.D is None:
            return self.y.shape[-1] // (self.y if self.weight is None else self.weight).shape[-1]
        return len(self.D) if self.D.dim() == 2 else 1


def gated_output_reference(operands: OutputOperands, eps: float) -> Tensor:  # (b / H, t, H d), as y
    """The gated output, computed in the dtype of y; without weight, that of the paper."""
    y, x, D, gate, weight = operands
    gate, heads = gate.to(y.dtype), 1 if D is None else operands.heads
    v = y if x is None or D is None else y + _of_tokens(D, y) * x.to(y.dtype)
    if weight is None:
        return unfold(gate * silu(v), heads)
    # torch's rms_norm would make zeros of vectors whose squares overflow
    return unfold(silu(gate) * (normalize_feedback(v, eps) * _of_tokens(weight, y)), heads)


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
