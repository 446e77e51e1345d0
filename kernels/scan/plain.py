"""The plain scan as an operation of torch.library, which torch.compile does not write out over t.

Letters: b batch, t time, d channels, n state per channel.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.scan.reference import (
    Eigenvalues,
    InputScale,
    accumulator,
    discretize,
    discretize_vjp,
    selective_scan_reference,
)


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
    operands = x, delta, A, B, C, h0
    wide = [v.to(accumulator(x.dtype)) for v in operands]
    read, last = (v.to(wide[0].dtype) for v in (grad_y, grad_h))
    scales = cast(InputScale, input_scale), cast(Eigenvalues, eigenvalues)
    pairs = zip(_scan_vjp(read, last, wide, *scales, exclusive), operands, strict=True)
    grad_x, grad_delta, grad_A, grad_B, grad_C, grad_h0 = (
        grad.to(v.dtype).contiguous() for grad, v in pairs
    )
    return grad_x, grad_delta, grad_A, grad_B, grad_C, grad_h0


def _scan_vjp(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    operands: Sequence[Tensor],  # of one dtype
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of x, delta, A, B, C and h0, by the adjoint recurrence: autograd is off inside of
    an operation. The memories are computed again, nothing but the operands is saved."""
    x, delta, A, B, C, h0 = operands
    before, scales = [h0], []
    for t in range(x.shape[1]):
        decay, s = discretize(delta[:, t], A, input_scale, eigenvalues)
        written = s * x[:, t].unsqueeze(-1) * B[:, t].unsqueeze(-2)
        before.append(decay * before[-1] + written)
        scales.append((decay, s))
    H, grad_A, tokens = grad_h, torch.zeros_like(A), []
    for t in reversed(range(x.shape[1])):
        (decay, s), drive, B_t = scales[t], x[:, t].unsqueeze(-1), B[:, t].unsqueeze(-2)
        read = grad_y[:, t].unsqueeze(-1) * C[:, t].unsqueeze(-2)
        # what writes the token sees the read-out only where that comes after it
        G = H if exclusive else H + read
        seen = decay * before[t] if exclusive else before[t + 1]
        grad_C = (seen * grad_y[:, t].unsqueeze(-1)).sum(-2)
        grad_s = (G * drive * B_t).sum_to_size(s.shape)
        H = H + read
        grad_delta, one = discretize_vjp(
            H * before[t], grad_s, decay, delta[:, t], A, input_scale, eigenvalues
        )
        grad_A = grad_A + one
        tokens.append(((G * s * B_t).sum(-1), grad_delta, (G * s * drive).sum(-2), grad_C))
        H = H * decay
    grad_x, grad_delta, grad_B, grad_C = (
        torch.stack(values[::-1], 1) for values in zip(*tokens, strict=True)
    )
    return grad_x, grad_delta, grad_A, grad_B, grad_C, H


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
