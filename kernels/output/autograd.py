"""The output stage in Triton, registered with torch.library; Triton is imported on a run."""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative


@torch.library.custom_op("bedouin::gated_output", mutates_args=())
def apply_output(
    y: Tensor,
    x: Tensor,
    D: Tensor,
    gate: Tensor,
    fed: Tensor | None,
    z: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gated output in `dtype`; shapes as in `gated_output_reference`."""
    from bedouin.kernels.output.triton_kernels import output_forward

    return output_forward(y, x, D, gate, fed, z, weight, eps, dtype)


@apply_output.register_fake
def _apply_output_fake(
    y: Tensor,
    x: Tensor,
    D: Tensor,
    gate: Tensor,
    fed: Tensor | None,
    z: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


@torch.library.custom_op("bedouin::gated_output_backward", mutates_args=())
def _output_backward(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    D: Tensor,
    gate: Tensor,
    fed: Tensor | None,
    z: Tensor | None,
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of y, x and gate, and of D and weight (2, d), or of D alone (1, d)."""
    from bedouin.kernels.output.triton_kernels import output_backward

    return output_backward(grad, y, x, D, gate, fed, z, weight, eps)


@_output_backward.register_fake
def _output_backward_fake(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    D: Tensor,
    gate: Tensor,
    fed: Tensor | None,
    z: Tensor | None,
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = y.new_empty(1 if weight is None else 2, *D.shape)
    return y.new_empty(y.shape), x.new_empty(x.shape), gate.new_empty(gate.shape), sums


def _save_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, ctx.eps, _ = inputs
    ctx.save_for_backward(*operands)


def _pull_output(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    operands = ctx.saved_tensors
    _, _, D, gate, fed, z, weight = operands
    with torch.no_grad():
        grad_y, grad_x, grad_gate, sums = _output_backward(grad, *operands, ctx.eps)
        grad_D, *grad_weight = sums.to(D.dtype).unbind(0)
    # one tensor serves the three summands of the gate
    summands = [None if v is None else grad_gate.to(v.dtype) for v in (gate, fed, z)]
    last = None if weight is None else grad_weight[0].to(weight.dtype)
    grads = [grad_y, grad_x, grad_D, *summands, last]
    return *refuse_second_derivative(grads, [grad, *operands]), None, None


apply_output.register_autograd(_pull_output, setup_context=_save_output)


@torch.library.custom_op("bedouin::shifted_norm", mutates_args=())
def apply_shifted_norm(
    y: Tensor, y0: Tensor | None, eps: float | None, dtype: torch.dtype
) -> Tensor:
    """norm(y_{t-1}) in `dtype`; shapes as in `shifted_norm_reference`."""
    from bedouin.kernels.output.triton_kernels import shifted_norm_forward

    return shifted_norm_forward(y, y0, eps, dtype)


@apply_shifted_norm.register_fake
def _apply_shifted_norm_fake(
    y: Tensor, y0: Tensor | None, eps: float | None, dtype: torch.dtype
) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


@torch.library.custom_op("bedouin::shifted_norm_backward", mutates_args=())
def _shifted_norm_backward(
    grad: Tensor, y: Tensor, y0: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    from bedouin.kernels.output.triton_kernels import shifted_norm_backward

    return shifted_norm_backward(grad, y, y0, eps)


@_shifted_norm_backward.register_fake
def _shifted_norm_backward_fake(
    grad: Tensor, y: Tensor, y0: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(0) if y0 is None else y0.new_empty(y0.shape)


def _save_shifted_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, y0, ctx.eps, _ = inputs
    ctx.save_for_backward(y, y0)


def _pull_shifted_norm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    operands = ctx.saved_tensors
    with torch.no_grad():
        grad_y, grad_y0 = _shifted_norm_backward(grad, *operands, ctx.eps)
    grads = (grad_y, None if operands[1] is None else grad_y0)
    return *refuse_second_derivative(grads, [grad, *operands]), None, None


apply_shifted_norm.register_autograd(_pull_shifted_norm, setup_context=_save_shifted_norm)
