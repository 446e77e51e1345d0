"""The output stage of layers: the gate's feedback, the gate and the norm.

The Triton versions are operations of torch.library: once differentiable, no size may be 0. Those of
the gated output take the fields of `OutputOperands` one by one, in the same order. Triton is
imported when an operation runs.
Letters: b batch, t time, d channels, H heads (kernels/heads.py).
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.checks import check_sequence, check_shapes
from bedouin.kernels.heads import check_heads
from bedouin.kernels.launch import accumulator, ceil_div, evenly_spaced, next_power_of_two
from bedouin.kernels.operation import empty_like, operation
from bedouin.kernels.output.reference import (
    OutputOperands,
    gated_output_reference,
    shifted_norm_reference,
)

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
    check_sequence("y", y)
    if (z is None) != (weight is None):
        raise ValueError(
            "z and weight must be given together, or neither for the paper's output, got "
            f"{'z' if weight is None else 'weight'} alone"
        )
    check_shapes(y.shape, "(b, t, d)", x=x, gate=gate, fed=fed, z=z)
    if D.dim() == 2:
        check_shapes((len(D), y.shape[-1]), "(H, d)", D=D)
        check_heads(len(D), y.shape[0], "D")
        check_shapes(D.shape, "(H, d)", weight=weight)
    else:
        check_shapes(y.shape[-1:], "(d,)", D=D, weight=weight)
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
    check_shapes((b, t, h * v), "(b, t, h v)", gate=gate)
    check_shapes((v,), "(v,)", weight=weight)
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
    check_shapes((y.shape[0], y.shape[2]), "(b, d)", y0=y0)
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


OPERANDS = "Tensor y, Tensor? x, Tensor? D, Tensor gate, Tensor? weight, float eps"

TILE = 1024
"""Fewest elements of a program's tile where there are as many: four warps, 8 elements a thread."""
MAX_WARPS = 16
PROGRAMS = 1024
"""Most programs of the backward, up to a rounding to whole heads: eight on each multiprocessor of
an H100, and few enough that their parts of the sums are small. The same on every device, so that
the sums are."""


def _blocks(tokens: int, d: int) -> dict[str, Any]:
    """How many tokens one program takes at a time, with all their channels, and launch options."""
    block_d = next_power_of_two(d)
    taken = max(1, min(next_power_of_two(tokens), TILE // block_d))
    warps = max(1, min(MAX_WARPS, taken * block_d // 256))
    return {"TOKENS": taken, "BLOCK_D": block_d, "num_warps": warps, "enable_fp_fusion": True}


def _launch_arguments(
    operands: OutputOperands,
    joined: Tensor,  # (b / H, t, H d), the output or its cotangent
    eps: float,
) -> tuple[OutputOperands, tuple[int, ...], tuple[int, int], dict[str, Any]]:
    """The operands as the kernels read them, and the distances of the rows of y, x and gate; the
    tokens and channels of a head; constants."""
    y, x, D, gate, weight = operands
    tokens, d = joined.shape[:2].numel(), joined.shape[-1] // operands.heads
    y, gate = evenly_spaced(y), evenly_spaced(gate)
    x = None if x is None else evenly_spaced(x)
    D, weight = (None if v is None else v.contiguous() for v in (D, weight))
    distances = tuple(0 if v is None else v.stride(1) for v in (y, x, gate))
    read = OutputOperands(y, x, D, gate, weight)
    return read, distances, (tokens, d), {"EPS": eps} | _blocks(tokens, d)


def _output_like(*flat: Any) -> Tensor:
    *fields, _, dtype = flat
    operands = OutputOperands(*fields)
    (b, t, d), heads = operands.y.shape, 1 if operands.D is None else operands.heads
    out: Tensor = operands.y.new_empty(b // heads, t, heads * d, dtype=dtype)
    return out


@operation("gated_output", f"({OPERANDS}, ScalarType dtype) -> Tensor", _output_like)
def gated_output_operation(*flat: Any) -> Tensor:
    """The gated output (b / H, t, H d) in `dtype`."""
    from bedouin.kernels.output.triton_kernels import output_kernel

    *fields, eps, _ = flat
    operands, out = OutputOperands(*fields), _output_like(*flat)
    *read, sizes, constants = _launch_arguments(operands, out, eps)
    grid = ceil_div(sizes[0], constants["TOKENS"]), operands.heads
    output_kernel[grid](*read, out, *sizes, **constants)
    return out


@gated_output_operation.register_vjp()
def _output_backward(
    grad: Tensor,  # (b / H, t, H d)
    *flat: Any,
) -> tuple[Tensor, ...]:
    """Cotangents of y, x, D, gate and weight."""
    from bedouin.kernels.output.triton_kernels import output_backward_kernel

    *fields, eps, _ = flat
    operands, grad = OutputOperands(*fields), evenly_spaced(grad)
    grads = of_y, of_x, of_D, of_gate, of_weight = empty_like(*operands)
    *read, (tokens, d), constants = _launch_arguments(operands, grad, eps)
    heads = operands.heads
    programs = min(ceil_div(tokens, constants["TOKENS"]), ceil_div(PROGRAMS, heads))
    sums = grad.new_empty(programs, 2, heads, d, dtype=torch.float32)
    output_backward_kernel[(programs, heads)](
        *(*read, grad, grad.stride(1), OutputOperands(*grads), sums, tokens, d), **constants
    )
    if operands.D is None:
        # of a memory, all heads have one weight
        of_weight = sums[:, 1].sum((0, 1)).to(of_weight.dtype)
    else:
        total = sums.sum(0)
        of_D = total[0].view_as(of_D).to(of_D.dtype)
        if operands.weight is not None:
            # a copy also without a cast: an operation must not return two views of one tensor
            of_weight = total[1].view_as(of_weight).to(of_weight.dtype, copy=True)
    return of_y, of_x, of_D, of_gate, of_weight


def _norm_like(*given: Any) -> Tensor:
    y, _, _, dtype = given
    out: Tensor = y.new_empty(y.shape, dtype=dtype)
    return out


@operation(
    "shifted_norm", "(Tensor y, Tensor? y0, float? eps, ScalarType dtype) -> Tensor", _norm_like
)
def shifted_norm_operation(*given: Any) -> Tensor:
    """norm(y_{t-1}) (b, t, d) in `dtype`."""
    from bedouin.kernels.output.triton_kernels import shifted_norm_kernel

    out = _norm_like(*given)
    b, t, d = out.shape
    y, y0, constants = _norm_arguments(*given[:3])
    shifted_norm_kernel[(ceil_div(b * t, constants["TOKENS"]),)](
        *(y, y0, out, b * t, t, d, y.stride(1)), **constants
    )
    return out


@shifted_norm_operation.register_vjp()
def _norm_backward(
    grad: Tensor,  # (b, t, d)
    *given: Any,
) -> tuple[Tensor, ...]:
    """Cotangents of y (b, t, d) and y0 (b, d), empty for None."""
    from bedouin.kernels.output.triton_kernels import shifted_norm_backward_kernel

    grads, grad, (b, t, d) = empty_like(*given[:2]), evenly_spaced(grad), grad.shape
    y, y0, constants = _norm_arguments(*given[:3])
    shifted_norm_backward_kernel[(ceil_div(b * (t + 1), constants["TOKENS"]),)](
        *(grad, y, y0, *grads, b * (t + 1), t, d, grad.stride(1), y.stride(1)), **constants
    )
    return grads


def _norm_arguments(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """y and y0 as the kernels read them; constants."""
    y0 = None if y0 is None else y0.contiguous()
    return evenly_spaced(y), y0, {"EPS": eps} | _blocks(y.shape[:2].numel(), y.shape[2])
