"""The output stage in Triton as operations of torch.library: once differentiable, no size may be 0.

Triton is imported when an operation runs. The operations of the gated output take the fields of
`OutputOperands` one by one, in the same order.
Letters: b batch, t time, d channels, H heads (kernels/heads.py).
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.launch import (
    ceil_div,
    evenly_spaced,
    last_axis_contiguous,
    next_power_of_two,
)
from bedouin.kernels.operation import empty_like, operation
from bedouin.kernels.output.reference import OutputOperands

OPERANDS = "Tensor y, Tensor? x, Tensor? D, Tensor gate, Tensor? fed, Tensor? z, Tensor? weight"

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
    y, x, D, gate, fed, z, weight = operands
    tokens, d = joined.shape[:2].numel(), joined.shape[-1] // operands.heads
    y = evenly_spaced(y)
    # a kernel does not read what stands for an absent operand
    x, gate, fed, z = (y if v is None else evenly_spaced(v) for v in (x, gate, fed, z))
    D, weight = (y if v is None else v.contiguous() for v in (D, weight))
    # the stride of an axis of size 1 says nothing
    strides = [v.stride(1) if v.shape[1] > 1 else v.stride(0) for v in (y, x, gate, fed, z, joined)]
    constants = {
        **{"BESIDE": operands.D is None, "SKIP": operands.D is not None, "EPS": eps},
        **{"FED": operands.fed is not None, "Z": operands.z is not None},
        "NORM": operands.weight is not None,
    }
    numbers = [tokens, d, *strides]
    return [y, x, D, gate, fed, z, weight], numbers, constants | _blocks(tokens, d)


@operation("gated_output", f"({OPERANDS}, float eps, ScalarType dtype) -> Tensor")
def gated_output_operation(*flat: Any) -> Tensor:
    """The gated output (b / H, t, H d) in `dtype`."""
    from bedouin.kernels.output.triton_kernels import output_kernel

    *fields, eps, dtype = flat
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
    f"(Tensor grad, {OPERANDS}, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _output_backward(
    grad: Tensor,  # (b / H, t, H d)
    *flat: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of y, x (empty without D) and gate, each (b, t, d), and of D and weight, as far as
    they are there: (2, d), (1, d), (2, H, d) or (1, H, d)."""
    from bedouin.kernels.output.triton_kernels import output_backward_kernel

    *fields, eps = flat
    operands, grad = OutputOperands(*fields), evenly_spaced(grad)
    *grads, total = _output_backward_fake(grad, *flat)
    tensors, numbers, constants = _launch_arguments(operands, grad, eps)
    heads, (tokens, d) = operands.heads, numbers[:2]
    programs = min(ceil_div(tokens, constants["TOKENS"]), ceil_div(PROGRAMS, heads))
    sums = grad.new_empty(programs, len(total), heads, d, dtype=torch.float32)
    output_backward_kernel[(programs, heads)](
        *(grad, *tensors, *grads, sums, *numbers), **constants
    )
    # of a memory, all heads have one weight
    axes = (0, 2) if operands.D is None else 0
    return grads[0], grads[1], grads[2], sums.sum(axes).view_as(total)


@_output_backward.register_fake
def _output_backward_fake(
    grad: Tensor,  # (b / H, t, H d)
    *flat: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, x, D, gate, _, _, weight = OutputOperands(*flat[:7])
    parameters = [v for v in (D, weight) if v is not None]
    sums = y.new_empty(len(parameters), *parameters[0].shape, dtype=torch.float32)
    grad_x = y.new_empty(0) if x is None else x.new_empty(x.shape)
    return y.new_empty(y.shape), grad_x, gate.new_empty(gate.shape), sums


def _save_output(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: Tensor,  # (b / H, t, H d)
) -> None:
    *operands, ctx.eps, _ = inputs
    ctx.save_for_backward(*operands)


def _backward_output(
    ctx: Any,
    grad: Tensor,  # (b / H, t, H d)
) -> tuple[Tensor | None, ...]:
    """Cotangents of all operands from that of the output."""
    operands = OutputOperands(*ctx.saved_tensors)
    _, x, D, gate, fed, z, weight = operands
    with torch.no_grad():
        grad_y, grad_x, grad_gate, sums = _output_backward(grad, *operands, ctx.eps)
        of_parameters = iter(sums)
        grad_D, grad_weight = (
            None if v is None else next(of_parameters).to(v.dtype) for v in (D, weight)
        )
    # gate, fed and z are summands of one sum and have the same cotangent
    summands = [None if v is None else grad_gate.to(v.dtype) for v in (gate, fed, z)]
    grads = [grad_y, None if x is None else grad_x, grad_D, *summands, grad_weight]
    return *refuse_second_derivative(grads, [grad, *operands]), None, None


gated_output_operation.register_autograd(_backward_output, setup_context=_save_output)


NORM_OPERANDS = "Tensor y, Tensor? y0, float? eps, ScalarType dtype"


@operation("shifted_norm", f"({NORM_OPERANDS}) -> Tensor")
def shifted_norm_operation(*given: Any) -> Tensor:
    """norm(y_{t-1}) (b, t, d) in `dtype`."""
    from bedouin.kernels.output.triton_kernels import shifted_norm_kernel

    out = _norm_fake(*given)
    y, first, strides, constants = _norm_arguments(*given[:3])
    b, t, d = y.shape
    shifted_norm_kernel[(ceil_div(b * t, constants["TOKENS"]),)](
        *(y, first, out, b * t, t, d, *strides), **constants
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

    grads, grad = empty_like(*given[:2]), last_axis_contiguous(grad)
    y, first, strides, constants = _norm_arguments(*given[:3])
    b, t, d = y.shape
    shifted_norm_backward_kernel[(ceil_div(b * (t + 1), constants["TOKENS"]),)](
        *(grad, y, first, *grads, b * (t + 1), t, d, *grad.stride()[:2], *strides), **constants
    )
    return grads


_norm_backward.register_fake(lambda grad, y, y0, eps, dtype: empty_like(y, y0))
shifted_norm_operation.register_vjp(_norm_backward)


def _norm_arguments(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
) -> tuple[Tensor, Tensor, tuple[int, ...], dict[str, Any]]:
    """y and y0 as the kernels read them, y in the place of a y0 that is absent; the distances of
    their rows; constants."""
    y = last_axis_contiguous(y)
    first = y if y0 is None else last_axis_contiguous(y0)
    norm = {"START": y0 is not None, "NORM": eps is not None, "EPS": eps or 0.0}
    constants = norm | _blocks(y.shape[:2].numel(), y.shape[2])
    return y, first, (*y.stride()[:2], first.stride(0)), constants
