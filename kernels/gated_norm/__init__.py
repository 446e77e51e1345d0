"""The output of a memory of several heads: the norm of each head times a gate.

Letters: b batch, t time, h heads, v value channels of a head, r = b t h rows.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.checks import check_shape
from bedouin.kernels.gated_norm.registered import gated_norm_operation
from bedouin.kernels.launch import accumulator

__all__ = ["gated_norm", "gated_norm_reference"]

MAX_CHANNELS = 4096
"""Most channels of a head, which a program of the Triton kernels holds."""


def gated_norm(
    o: Tensor,  # (b, t, h, v)
    gate: Tensor,  # (b, t, h v)
    weight: Tensor,  # (v,)
    eps: float,
    *,
    backend: Backend = "auto",
) -> Tensor:  # (b, t, h v), as gate
    """rms_norm(o) * weight * SiLU(gate), where the norm is that of each head by itself.

    Computes in at least float32. The Triton version is once differentiable and saves its operands
    alone. Raises ValueError for shapes that do not fit, or a backend that cannot run.
    """
    b, t, h, v = o.shape
    check_shape("gate", gate, (b, t, h * v), "(b, t, h v)")
    check_shape("weight", weight, (v,), "(v,)")
    unfit = f"heads of {v} channels (at most {MAX_CHANNELS})" if v > MAX_CHANNELS else None
    dtype = torch.float64 if torch.float64 in (o.dtype, gate.dtype, weight.dtype) else gate.dtype
    if o.numel() and choose_backend(backend, o.device, dtype, unfit) == "triton":
        out: Tensor = gated_norm_operation(o, gate, weight, eps)
        return out
    return gated_norm_reference(o, gate, weight, eps)


def gated_norm_reference(
    o: Tensor,  # (b, t, h, v)
    gate: Tensor,  # (b, t, h v)
    weight: Tensor,  # (v,)
    eps: float,
) -> Tensor:  # (b, t, h v), as gate
    """`gated_norm` in plain torch: the specification."""
    dtype = accumulator(o.dtype, gate.dtype)
    normed = F.rms_norm(o.to(dtype), o.shape[-1:], None, eps) * weight.to(dtype)
    return (normed.flatten(-2) * F.silu(gate.to(dtype))).to(gate.dtype)
