"""The scan as operations of torch.library, so that torch.compile keeps whole graphs.

`triton_scan` calls the kernels, `plain_scan` the reference, which torch.compile would otherwise
unroll over t. All four registered operations take the operands and options of a scan one by one, in
the order of `ScanOperands` and `ScanOptions`. Triton is imported when an operation runs:
registering costs nothing where it is not used.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.launch import ceil_div
from bedouin.kernels.operation import operation, recording
from bedouin.kernels.scan.reference import selective_scan_reference
from bedouin.kernels.scan.types import SCAN_CHUNK, ScanOperands, ScanOptions

TENSORS = "Tensor x, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor h0"
OPTIONS = "str input_scale, str eigenvalues, bool exclusive"
COTANGENTS = "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"

# The Triton scan


@operation(
    "selective_scan",
    schema=f"({TENSORS}, Tensor? D, {OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor)",
)
def triton_scan(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    """y (b, t, d) with D * x, the last h (b, d, n), and with `keep` h before every chunk. Once
    differentiable. No size may be 0."""
    from bedouin.kernels.scan.launch import scan_forward

    return scan_forward(ScanOperands(*flat[:7]), ScanOptions(*flat[7:10]), keep=flat[10])


@triton_scan.register_fake
def _scan_fake(*flat: Any) -> tuple[Tensor, ...]:
    x, _, A, _, _, h0, _ = ScanOperands(*flat[:7])
    chunks = ceil_div(x.shape[1], SCAN_CHUNK) if flat[10] else 0
    kept = x.new_empty(x.shape[0], chunks, *A.shape[-2:], dtype=torch.float32)
    return *_empty_like(x, h0), kept


@operation(
    "selective_scan_backward",
    schema=(
        f"(Tensor grad_y, Tensor grad_h, Tensor kept, {TENSORS}, Tensor? D, {OPTIONS}) "
        f"-> ({COTANGENTS}, Tensor)"
    ),
)
def _scan_backward(grad_y: Tensor, grad_h: Tensor, kept: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    """Shapes as in `scan_backward`."""
    from bedouin.kernels.scan.launch import scan_backward

    operands, options = ScanOperands(*flat[:7]), ScanOptions(*flat[7:])
    return scan_backward(grad_y, grad_h, kept, operands, options)


@_scan_backward.register_fake
def _scan_backward_fake(
    grad_y: Tensor, grad_h: Tensor, kept: Tensor, *flat: Any
) -> tuple[Tensor, ...]:
    *operands, D = ScanOperands(*flat[:7])
    grad_D = grad_y.new_empty(0) if D is None else D.new_empty(D.shape)
    return *_empty_like(*operands), grad_D


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *flat, keep = inputs
    if not keep:
        raise ValueError("keep must be True where gradients are recorded, got False")
    kept = output[2]
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)  # zeros for `kept` would be written and not read
    ctx.save_for_backward(kept, *flat[:7])
    ctx.options = flat[7:]


def _backward(
    ctx: Any,
    grad_y: Tensor | None,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n)
    grad_kept: None,
) -> tuple[Tensor | None, ...]:
    kept, *flat = ctx.saved_tensors
    operands = ScanOperands(*flat)
    x, h0, D = operands.x, operands.h0, operands.D
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    grad_h = torch.zeros_like(h0) if grad_h is None else grad_h
    with torch.no_grad():
        *grads, grad_D = _scan_backward(grad_y, grad_h, kept, *operands, *ctx.options)
    every = [*grads, None if D is None else grad_D]
    once = refuse_second_derivative(every, [grad_y, grad_h, *operands])
    return (*once, None, None, None, None)


triton_scan.register_autograd(_backward, setup_context=_save)


# The plain scan


@operation("plain_scan", schema=f"({TENSORS}, {OPTIONS}) -> (Tensor, Tensor)")
def plain_scan(*flat: Any) -> tuple[Tensor, Tensor]:
    """y (b, t, d) without D * x, and the last h (b, d, n). No size may be 0."""
    options = ScanOptions(*flat[6:])
    y, h = selective_scan_reference(*flat[:6], **options._asdict())
    return y.contiguous(), h.contiguous()


@plain_scan.register_fake
def _plain_scan_fake(*flat: Any) -> tuple[Tensor, ...]:
    return _empty_like(flat[0], flat[5])


@operation(
    "plain_scan_backward",
    schema=(f"(Tensor grad_y, Tensor grad_h, {TENSORS}, {OPTIONS}) -> ({COTANGENTS})"),
)
def _plain_scan_backward(grad_y: Tensor, grad_h: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    """Cotangents of x to h0 from those of y (b, t, d) and of the last h (b, d, n)."""
    with recording():
        leaves = [v.detach().requires_grad_() for v in flat[:6]]
        found = selective_scan_reference(*leaves, **ScanOptions(*flat[6:])._asdict())
        grads = torch.autograd.grad(found, leaves, (grad_y, grad_h), materialize_grads=True)
    return tuple(grad.contiguous() for grad in grads)


@_plain_scan_backward.register_fake
def _plain_scan_backward_fake(grad_y: Tensor, grad_h: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    return _empty_like(*flat[:6])


def _save_plain(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _backward_plain(
    ctx: Any,
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
) -> tuple[Tensor | None, ...]:
    operands = ctx.saved_tensors
    with torch.no_grad():
        grads = _plain_scan_backward(grad_y, grad_h, *operands, *ctx.options)
    return *refuse_second_derivative(grads, [grad_y, grad_h, *operands]), None, None, None


plain_scan.register_autograd(_backward_plain, setup_context=_save_plain)


def _empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors of the same shapes and dtypes."""
    return tuple(v.new_empty(v.shape) for v in tensors)
