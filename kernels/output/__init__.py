"""The output stage of layers: the gate's feedback, the gate and the norm."""

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.checks import check_sequence, check_shape
from bedouin.kernels.heads import check_heads
from bedouin.kernels.launch import accumulator
from bedouin.kernels.output.reference import (
    OutputOperands,
    gated_output_reference,
    shifted_norm_reference,
)
from bedouin.kernels.output.registered import gated_output_operation, shifted_norm_operation

__all__ = [
    "gated_norm",
    "gated_output",
    "gated_output_reference",
    "shifted_norm",
    "shifted_norm_reference",
]

MAX_CHANNELS = 16384
"""The Triton kernels hold all channels of a token in one program's registers."""


def gated_output(
    y: Tensor,  # (b, t, d)
    x: Tensor,  # (b, t, d)
    D: Tensor,  # (d,) or (H, d)
    gate: Tensor,  # (b, t, d)
    fed: Tensor | None = None,  # (b, t, d)
    z: Tensor | None = None,  # (b, t, d)
    weight: Tensor | None = None,  # (d,) or (H, d), as D
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:  # (b / H, t, H d)
    """SiLU(gate + fed + z) * rms_norm(y + D x) * weight, or (gate + fed) * SiLU(y + D x).

    The first with z and weight; the second, the paper's, without both. Computes in the dtype of y;
    the other operands may have a lower one. The result has `dtype`, by default that of y.
    With D (H, d) the batch is H groups of b/H samples, one group for each head: sample i uses
    D[i // (b/H)], and weight in the same way. The result has the heads of a sample side by side.
    Source: Fixed-Point RNNs (arXiv 2503.10799), section 5. The Triton version is once
    differentiable and saves only its operands.

    Raises ValueError for shapes that do not fit, a batch that is not H groups of one size, z
    without weight, or a backend that cannot run.
    """
    _check_output(y, x, D, gate, fed, z, weight)
    for part in (fed, z):
        gate = gate if part is None else gate + part
    operands = OutputOperands(y, x, D, gate, weight)
    dtype = y.dtype if dtype is None else dtype
    if _choose(backend, y, y.dtype) == "triton":
        out: Tensor = gated_output_operation(*operands, eps, dtype)
        return out
    return gated_output_reference(operands, eps).to(dtype)


def gated_norm(
    o: Tensor,  # (b, t, h, v), h heads of v channels
    gate: Tensor,  # (b, t, h v)
    weight: Tensor,  # (v,)
    eps: float,
    *,
    backend: Backend = "auto",
) -> Tensor:  # (b, t, h v), as gate
    """rms_norm(o) * weight * SiLU(gate), the output of a memory, with the norm of each head.

    Computes in at least float32. The Triton version is once differentiable and saves its operands
    alone. Raises ValueError for shapes that do not fit, or a backend that cannot run.
    """
    b, t, h, v = o.shape
    check_shape("gate", gate, (b, t, h * v), "(b, t, h v)")
    check_shape("weight", weight, (v,), "(v,)")
    wide = torch.float64 in (o.dtype, gate.dtype, weight.dtype)
    if _choose(backend, o, torch.float64 if wide else gate.dtype) == "triton":
        operands = OutputOperands(o.flatten(-2), None, None, gate, weight)
        out: Tensor = gated_output_operation(*operands, eps, gate.dtype)
        return out
    o, gates = o.to(accumulator(o.dtype, gate.dtype)), gate.unflatten(-1, (h, v))
    operands = OutputOperands(o, None, None, gates, weight)
    return gated_output_reference(operands, eps).flatten(-2).to(gate.dtype)


def shifted_norm(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
    *,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:  # (b, t, d)
    """RMSNorm of y_{t-1} over channels, or y_{t-1} itself for eps None; y0 is the y before token 0.

    Computes in the dtype of y; the result has `dtype`, by default that of y. The Triton version is
    once differentiable and saves only its operands.

    Raises ValueError for shapes that do not fit, or a backend that cannot run.
    """
    check_sequence("y", y)
    check_shape("y0", y0, (y.shape[0], y.shape[2]), "(b, d)")
    dtype = y.dtype if dtype is None else dtype
    if _choose(backend, y, y.dtype) == "triton":
        normed: Tensor = shifted_norm_operation(y, y0, eps, dtype)
        return normed
    return shifted_norm_reference(y, y0, eps).to(dtype) if y.shape[1] else y.to(dtype)


def _choose(
    backend: Backend,
    y: Tensor,  # (..., d)
    dtype: torch.dtype,
) -> Implementation:
    d = y.shape[-1]
    unsupported = f"{d} channels (at most {MAX_CHANNELS})" if d > MAX_CHANNELS else None
    implementation = choose_backend(backend, y.device, dtype, unsupported)
    return implementation if y.numel() else "reference"


def _check_output(
    y: Tensor,  # as all of them in `gated_output`
    x: Tensor,
    D: Tensor,
    gate: Tensor,
    fed: Tensor | None,
    z: Tensor | None,
    weight: Tensor | None,
) -> None:
    check_sequence("y", y)
    if (z is None) != (weight is None):
        raise ValueError(
            "z and weight must be given together, or neither for the paper's output, got "
            f"{'z' if weight is None else 'weight'} alone"
        )
    for name, tensor in {"x": x, "gate": gate, "fed": fed, "z": z}.items():
        check_shape(name, tensor, y.shape, "(b, t, d)")
    if D.dim() == 2:
        check_shape("D", D, (D.shape[0], y.shape[-1]), "(H, d)")
        check_heads(D.shape[0], y.shape[0], "D")
        check_shape("weight", weight, D.shape, "(H, d)")
    else:
        check_shape("D", D, y.shape[-1:], "(d,)")
        check_shape("weight", weight, y.shape[-1:], "(d,)")
