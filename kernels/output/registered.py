"""The output stage in Triton as operations of torch.library: once differentiable, no size may be 0.

Triton is imported when an operation runs. The operations of the gated output take the fields of
`OutputOperands` one by one, in the same order.
Letters: b batch, t time, d channels, H heads (kernels/heads.py).
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.launch import ceil_div, evenly_spaced, next_power_of_two
from bedouin.kernels.operation import empty_like, operation
from bedouin.kernels.output.reference import OutputOperands

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
) -> tuple[list[Tensor], list[int], dict[str, Any]]:
    """The operands in the order of the kernels, their tokens rows at one distance; the tokens and
    channels of a head and the distances of rows; constants."""
    y, x, D, gate, weight = operands
    tokens, d = joined.shape[:2].numel(), joined.shape[-1] // operands.heads
    y, gate = evenly_spaced(y), evenly_spaced(gate)
    # a kernel does not read what stands for an absent operand
    x = y if x is None else evenly_spaced(x)
    D, weight = (y if v is None else v.contiguous() for v in (D, weight))
    strides = [v.stride(1) for v in (y, x, gate, joined)]
    flags = {"BESIDE": operands.D is None, "NORM": operands.weight is not None, "EPS": eps}
    return [y, x, D, gate, weight], [tokens, d, *strides], flags | _blocks(tokens, d)


@operation("gated_output", f"({OPERANDS}, ScalarType dtype) -> Tensor")
def gated_output_operation(*flat: Any) -> Tensor:
    """The gated output (b / H, t, H d) in `dtype`."""
    from bedouin.kernels.output.triton_kernels import output_kernel

    *fields, eps, _ = flat
    operands, out = OutputOperands(*fields), _output_fake(*flat)
    tensors, numbers, constants = _launch_arguments(operands, out, eps)
    grid = ceil_div(numbers[0], constants["TOKENS"]), operands.heads
    output_kernel[grid](*tensors, out, *numbers, **constants)
    return out


@gated_output_operation.register_fake
def _output_fake(*flat: Any) -> Tensor:
    *fields, _, dtype = flat
    out: Tensor = flat[0].new_empty(OutputOperands(*fields).joined_shape, dtype=dtype)
    return out


@operation(
    "gated_output_backward",
    f"(Tensor grad, {OPERANDS}, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _output_backward(
    grad: Tensor,  # (b / H, t, H d)
    *flat: Any,
) -> tuple[Tensor, ...]:
    """Cotangents of y, x, D, gate and weight."""
    from bedouin.kernels.output.triton_kernels import output_backward_kernel

    *fields, eps, _ = flat
    operands, grad = OutputOperands(*fields), evenly_spaced(grad)
    of_y, of_x, of_D, of_gate, of_weight = empty_like(*operands)
    tensors, numbers, constants = _launch_arguments(operands, grad, eps)
    heads, (tokens, d) = operands.heads, numbers[:2]
    programs = min(ceil_div(tokens, constants["TOKENS"]), ceil_div(PROGRAMS, heads))
    sums = grad.new_empty(programs, 2, heads, d, dtype=torch.float32)
    output_backward_kernel[(programs, heads)](
        *(grad, *tensors, of_y, of_x, of_gate, sums, *numbers), **constants
    )
    if operands.D is None:
        # of a memory, all heads have one weight
        of_weight = sums[:, 1].sum((0, 1)).to(of_weight.dtype)
    elif operands.weight is None:
        of_D = sums[:, 0].sum(0).view_as(of_D).to(of_D.dtype)
    else:
        total = sums.sum(0)
        of_D = total[0].view_as(of_D).to(of_D.dtype)
        # copied also without a cast, because an operation must not return two views of one tensor
        of_weight = total[1].view_as(of_weight).to(of_weight.dtype, copy=True)
    return of_y, of_x, of_D, of_gate, of_weight


_output_backward.register_fake(lambda grad, *flat: empty_like(*flat[:5]))
gated_output_operation.register_vjp(_output_backward)


NORM_OPERANDS = "Tensor y, Tensor? y0, float? eps, ScalarType dtype"


@operation("shifted_norm", f"({NORM_OPERANDS}) -> Tensor")
def shifted_norm_operation(*given: Any) -> Tensor:
    """norm(y_{t-1}) (b, t, d) in `dtype`."""
    from bedouin.kernels.output.triton_kernels import shifted_norm_kernel

    out = _norm_fake(*given)
    b, t, d = out.shape
    y, y0, constants = _norm_arguments(*given[:3])
    shifted_norm_kernel[(ceil_div(b * t, constants["TOKENS"]),)](
        *(y, y0, out, b * t, t, d, y.stride(1)), **constants
    )
    return out


@shifted_norm_operation.register_fake
def _norm_fake(*given: Any) -> Tensor:
    y, _, _, dtype = given
    out: Tensor = y.new_empty(y.shape, dtype=dtype)
    return out


@operation("shifted_norm_backward", f"(Tensor grad, {NORM_OPERANDS}) -> (Tensor, Tensor)")
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


_norm_backward.register_fake(lambda grad, y, y0, eps, dtype: empty_like(y, y0))
shifted_norm_operation.register_vjp(_norm_backward)


def _norm_arguments(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """y and y0 as the kernels read them, y in the place of a y0 that is absent; constants."""
    y = evenly_spaced(y)
    norm = {"START": y0 is not None, "NORM": eps is not None, "EPS": eps or 0.0}
    y0 = y if y0 is None else y0.contiguous()
    return y, y0, norm | _blocks(y.shape[:2].numel(), y.shape[2])
