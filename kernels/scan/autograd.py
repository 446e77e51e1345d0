"""The Triton scan as operations of torch.library, so that torch.compile keeps whole graphs.

The operations import Triton when they run: registering them costs nothing where it is not chosen.
"""

from typing import Any, cast

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.scan.options import CHUNK, Cotangents, ScanOptions
from bedouin.kernels.scan.reference import Eigenvalues, InputScale, accumulator


@torch.library.custom_op("bedouin::selective_scan", mutates_args=())
def _scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    D: Tensor | None,
    input_scale: str,
    eigenvalues: str,
    exclusive: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, last h, and h at every CHUNK-th token (none unless `keep`)."""
    from bedouin.kernels.scan.triton_kernels import scan_forward

    options = _options(x, input_scale, eigenvalues, exclusive)
    y, h, kept = scan_forward(x, delta, A, B, C, h0, D, options, keep=keep)
    return y, h, kept


@_scan.register_fake
def _scan_fake(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    D: Tensor | None,
    input_scale: str,
    eigenvalues: str,
    exclusive: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    b, t, _ = x.shape
    chunks = (t + CHUNK - 1) // CHUNK if keep else 0
    kept = x.new_empty(b, chunks, *A.shape, dtype=accumulator(x.dtype))
    return x.new_empty(x.shape), h0.new_empty(h0.shape), kept


@torch.library.custom_op("bedouin::selective_scan_backward", mutates_args=())
def _scan_backward(
    grad_y: Tensor,
    grad_h: Tensor,
    kept: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    D: Tensor | None,
    input_scale: str,
    eigenvalues: str,
    exclusive: bool,
) -> Cotangents:
    from bedouin.kernels.scan.triton_kernels import scan_backward

    options = _options(x, input_scale, eigenvalues, exclusive)
    return scan_backward(grad_y, grad_h, kept, x, delta, A, B, C, h0, D, options=options)


@_scan_backward.register_fake
def _scan_backward_fake(
    grad_y: Tensor,
    grad_h: Tensor,
    kept: Tensor,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    D: Tensor | None,
    input_scale: str,
    eigenvalues: str,
    exclusive: bool,
) -> Cotangents:
    first = x.new_empty(x.shape), delta.new_empty(delta.shape), A.new_empty(A.shape)
    then = B.new_empty(B.shape), C.new_empty(C.shape), h0.new_empty(h0.shape)
    return *first, *then, A.new_empty(0) if D is None else D.new_empty(D.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, input_scale, eigenvalues, exclusive, keep = inputs
    if not keep:
        raise ValueError("keep must be True where gradients are recorded, got False")
    kept = output[2]
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)  # that of `kept` would be written for nothing
    ctx.save_for_backward(kept, *operands)
    ctx.options = input_scale, eigenvalues, exclusive


def _backward(
    ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None, unused: None
) -> tuple[Tensor | None, ...]:
    kept, *operands = ctx.saved_tensors
    x, *_, h0, D = operands
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y
    grad_h = torch.zeros_like(h0) if grad_h is None else grad_h
    with torch.no_grad():
        *grads, grad_D = _scan_backward(grad_y, grad_h, kept, *operands, *ctx.options)
    every = [*grads, None if D is None else grad_D]
    once = refuse_second_derivative(every, [grad_y, grad_h, *operands])
    return (*once, None, None, None, None)


_scan.register_autograd(_backward, setup_context=_setup_context)


def selective_scan_triton(
    x: Tensor,  # (b, t, d)
    delta: Tensor,  # (b, t, d)
    A: Tensor,  # (d, n)
    B: Tensor,  # (b, t, n)
    C: Tensor,  # (b, t, n)
    h0: Tensor,  # (b, d, n)
    D: Tensor | None,  # (d,)
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
    *,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """y and the last h, as `selective_scan_reference` with D * x added. Once differentiable.

    No size may be 0.
    """
    operands = (x, delta, A, B, C, h0, D)
    keep = torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in operands)
    y, h, _ = _scan(*operands, input_scale, eigenvalues, exclusive, keep)
    return y, h


def _options(x: Tensor, input_scale: str, eigenvalues: str, exclusive: bool) -> ScanOptions:
    scales = cast(InputScale, input_scale), cast(Eigenvalues, eigenvalues)
    return ScanOptions(*scales, exclusive, accumulator(x.dtype))
