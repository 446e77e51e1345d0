"""The output stage in Triton as operations of torch.library: once differentiable, no size may be 0.

Triton is imported when an operation runs. The operations of the gated output take the fields of
`OutputOperands` one by one, in the same order.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.operation import operation
from bedouin.kernels.output.types import OutputOperands

OPERANDS = "Tensor y, Tensor x, Tensor D, Tensor gate, Tensor? fed, Tensor? z, Tensor? weight"


@operation(
    "gated_output",
    schema=f"({OPERANDS}, float eps, ScalarType dtype) -> Tensor",
)
def gated_output_operation(*flat: Any) -> Tensor:
    """The gated output (b / H, t, H d) in `dtype`."""
    from bedouin.kernels.output.launch import output_forward

    *operands, eps, dtype = flat
    return output_forward(OutputOperands(*operands), eps, dtype)


@gated_output_operation.register_fake
def _output_fake(*flat: Any) -> Tensor:
    *operands, _, dtype = flat
    shape = OutputOperands(*operands).joined_shape
    out: Tensor = flat[0].new_empty(shape, dtype=dtype)
    return out


@operation(
    "gated_output_backward",
    schema=f"(Tensor grad, {OPERANDS}, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _output_backward(
    grad: Tensor,  # (b / H, t, H d)
    *flat: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of y, x and gate, each (b, t, d), and those of D and weight together, (2, d) or
    (2, H, d), or without weight of D alone, (1, d) or (1, H, d)."""
    from bedouin.kernels.output.launch import output_backward

    *operands, eps = flat
    return output_backward(grad, OutputOperands(*operands), eps)


@_output_backward.register_fake
def _output_backward_fake(
    grad: Tensor,  # (b / H, t, H d)
    *flat: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, x, D, gate, _, _, weight = OutputOperands(*flat[:7])
    sums = y.new_empty(1 if weight is None else 2, *D.shape)
    return y.new_empty(y.shape), x.new_empty(x.shape), gate.new_empty(gate.shape), sums


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
    _, _, D, gate, fed, z, weight = operands
    with torch.no_grad():
        grad_y, grad_x, grad_gate, sums = _output_backward(grad, *operands, ctx.eps)
        grad_D, *grad_weight = sums.to(D.dtype).unbind(0)
    # gate, fed and z are summands of one sum and have the same cotangent
    summands = [None if v is None else grad_gate.to(v.dtype) for v in (gate, fed, z)]
    last = None if weight is None else grad_weight[0].to(weight.dtype)
    grads = [grad_y, grad_x, grad_D, *summands, last]
    return *refuse_second_derivative(grads, [grad, *operands]), None, None


gated_output_operation.register_autograd(_backward_output, setup_context=_save_output)


@operation("shifted_norm")
def shifted_norm_operation(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d)
    eps: float | None,
    dtype: torch.dtype,
) -> Tensor:  # (b, t, d)
    """norm(y_{t-1}) in `dtype`."""
    from bedouin.kernels.output.launch import shifted_norm_forward

    return shifted_norm_forward(y, y0, eps, dtype)


@shifted_norm_operation.register_fake
def _shifted_norm_fake(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d)
    eps: float | None,
    dtype: torch.dtype,
) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


@operation("shifted_norm_backward")
def _shifted_norm_backward(
    grad: Tensor,  # (b, t, d)
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d)
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """Cotangents of y (b, t, d) and y0 (b, d), empty for None."""
    from bedouin.kernels.output.launch import shifted_norm_backward

    return shifted_norm_backward(grad, y, y0, eps)


@_shifted_norm_backward.register_fake
def _shifted_norm_backward_fake(
    grad: Tensor,  # (b, t, d)
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d)
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(0) if y0 is None else y0.new_empty(y0.shape)


def _save_shifted_norm(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: Tensor,  # (b, t, d)
) -> None:
    y, y0, ctx.eps, _ = inputs
    ctx.save_for_backward(y, y0)


def _backward_shifted_norm(
    ctx: Any,
    grad: Tensor,  # (b, t, d)
) -> tuple[Tensor | None, ...]:
    """Cotangents of y and y0 from that of the result (b, t, d)."""
    operands = ctx.saved_tensors
    with torch.no_grad():
        grad_y, grad_y0 = _shifted_norm_backward(grad, *operands, ctx.eps)
    grads = (grad_y, None if operands[1] is None else grad_y0)
    return *refuse_second_derivative(grads, [grad, *operands]), None, None


shifted_norm_operation.register_autograd(_backward_shifted_norm, setup_context=_save_shifted_norm)
