"""The gated norm in Triton as an operation of torch.library, once differentiable.

Triton is imported when an operation runs.
Letters: b batch, t time, h heads, v value channels of a head.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.operation import operation


@operation("gated_norm")
def gated_norm_operation(
    o: Tensor,  # (b, t, h, v)
    gate: Tensor,  # (b, t, h v)
    weight: Tensor,  # (v,)
    eps: float,
) -> Tensor:  # (b, t, h v)
    """The result, as gate."""
    from bedouin.kernels.gated_norm.launch import launch_forward

    return launch_forward(o, gate, weight, eps)


@gated_norm_operation.register_fake
def _fake(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Shapes as in `gated_norm_operation`."""
    return gate.new_empty(gate.shape)


@operation("gated_norm_backward")
def _backward(
    grad: Tensor,  # (b, t, h v)
    o: Tensor,  # (b, t, h, v)
    gate: Tensor,  # (b, t, h v)
    weight: Tensor,  # (v,)
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of o, gate and weight."""
    from bedouin.kernels.gated_norm.launch import launch_backward

    return launch_backward(grad, o, gate, weight, eps)


@_backward.register_fake
def _backward_fake(
    grad: Tensor,  # (b, t, h v)
    o: Tensor,  # (b, t, h, v)
    gate: Tensor,  # (b, t, h v)
    weight: Tensor,  # (v,)
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return o.new_empty(o.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *operands, ctx.eps = inputs
    ctx.save_for_backward(*operands)


def _gradients(
    ctx: Any,
    grad: Tensor,  # (b, t, h v)
) -> tuple[Tensor | None, ...]:
    operands = ctx.saved_tensors
    with torch.no_grad():
        grads = _backward(grad, *operands, ctx.eps)
    return *refuse_second_derivative(grads, [grad, *operands]), None


gated_norm_operation.register_autograd(_gradients, setup_context=_save)
