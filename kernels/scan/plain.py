"""The plain scan as an operation of torch.library, which torch.compile does not write out over t.

Letters: b batch, t time, d channels, n state per channel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from bedouin.kernels.once import refuse_second_derivative
from bedouin.kernels.scan.reference import Eigenvalues, InputScale, selective_scan_reference


@torch.library.custom_op("bedouin::plain_scan", mutates_args=())
def plain_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    input_scale: str,
    eigenvalues: str,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """y and the last h; shapes as in `selective_scan_reference`. No size may be 0."""
    y, h = _reference(input_scale, eigenvalues, exclusive)(x, delta, A, B, C, h0)
    return y.contiguous(), h.contiguous()


@plain_scan.register_fake
def _plain_scan_fake(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h0: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), h0.new_empty(h0.shape)


@torch.library.custom_op("bedouin::plain_scan_backward", mutates_args=())
def _plain_scan_backward(
    grad_y: Tensor,
    grad_h: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    input_scale: str,
    eigenvalues: str,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    scan = _reference(input_scale, eigenvalues, exclusive)
    # the forward runs again: nothing but its operands is saved
    pulled = torch.func.vjp(scan, x, delta, A, B, C, h0)[1]((grad_y, grad_h))
    grad_x, grad_delta, grad_A, grad_B, grad_C, grad_h0 = (grad.contiguous() for grad in pulled)
    return grad_x, grad_delta, grad_A, grad_B, grad_C, grad_h0


@_plain_scan_backward.register_fake
def _plain_scan_backward_fake(
    grad_y: Tensor,
    grad_h: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    first = x.new_empty(x.shape), delta.new_empty(delta.shape), A.new_empty(A.shape)
    return *first, B.new_empty(B.shape), C.new_empty(C.shape), h0.new_empty(h0.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _pull(ctx: Any, grad_y: Tensor, grad_h: Tensor) -> tuple[Tensor | None, ...]:
    operands = ctx.saved_tensors
    with torch.no_grad():
        grads = _plain_scan_backward(grad_y, grad_h, *operands, *ctx.options)
    return *refuse_second_derivative(grads, [grad_y, grad_h, *operands]), None, None, None


plain_scan.register_autograd(_pull, setup_context=_save)


def _reference(
    input_scale: str, eigenvalues: str, exclusive: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    return partial(
        selective_scan_reference,
        input_scale=cast(InputScale, input_scale),
        eigenvalues=cast(Eigenvalues, eigenvalues),
        exclusive=exclusive,
    )
