"""The short convolution in Triton as an operation of torch.library, once differentiable.

Triton is imported when an operation runs.
Letters: b batch, t time, c channels, w width, a channels to which something is added.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.operation import operation

_OPERANDS = "Tensor x, Tensor weight, Tensor window, Tensor? added, SymInt count, SymInt size"


@operation("short_convolution", f"({_OPERANDS}, float eps) -> (Tensor, Tensor)")
def short_convolution_operation(*given: Any) -> tuple[Tensor, Tensor]:
    """The result (b, t, c + a), as x, and the window (b, w - 1, c) after the last token."""
    from bedouin.kernels.convolution.launch import launch_forward

    return launch_forward(*given)


@short_convolution_operation.register_fake
def _fake(*given: Any) -> tuple[Tensor, Tensor]:
    x, _, window, added = given[:4]
    (b, t, c), a = x.shape, 0 if added is None else added.shape[-1]
    return x.new_empty(b, t, c + a), window.new_empty(window.shape)


@operation(
    "short_convolution_backward",
    f"(Tensor grad, {_OPERANDS}, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(*given: Any) -> tuple[Tensor, ...]:
    """Cotangents of x (b, t, c), weight (c, w), window (b, w - 1, c) and added (b, t, a), which is
    empty where there is none."""
    from bedouin.kernels.convolution.launch import launch_backward

    return launch_backward(*given)


@_backward.register_fake
def _backward_fake(*given: Any) -> tuple[Tensor, ...]:
    _, x, weight, window, added = given[:5]
    rest = x.new_empty(0) if added is None else added.new_empty(added.shape)
    return *(v.new_empty(v.shape) for v in (x, weight, window)), rest


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # the window after is rarely differentiated
    *operands, ctx.count, ctx.size, ctx.eps = inputs
    ctx.shape = output[0].shape
    ctx.save_for_backward(*operands)


def _gradients(
    ctx: Any,
    grad: Tensor | None,  # (b, t, c + a)
    grad_after: Tensor | None,  # (b, w - 1, c)
) -> tuple[Tensor | None, ...]:
    operands = ctx.saved_tensors
    grad = operands[0].new_zeros(ctx.shape) if grad is None else grad
    with torch.no_grad():
        grads = list(_backward(grad, *operands, ctx.count, ctx.size, ctx.eps))
        if grad_after is not None:
            t, count = grad.shape[1], grad_after.shape[1]
            inside = min(t, count)
            grads[0][:, t - inside :] += grad_after[:, count - inside :]
            grads[2][:, t:] += grad_after[:, : count - inside]
    if operands[3] is None:
        grads[3] = None
    return *refuse_second_derivative(grads, [grad, grad_after, *operands]), None, None, None


short_convolution_operation.register_autograd(_gradients, setup_context=_save)
