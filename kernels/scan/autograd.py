"""The Triton scan as one differentiable operation. Imports Triton: only where that was chosen."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bedouin.kernels.once import refuse_second_derivative
from bedouin.kernels.scan.reference import Eigenvalues, InputScale, accumulator
from bedouin.kernels.scan.triton_kernels import scan_backward, scan_forward
from bedouin.kernels.scan.triton_segments import ScanOptions


class _SelectiveScan(torch.autograd.Function):
    """y, last h, kept h; saves its operands and h at every 16th token."""

    @staticmethod
    def forward(
        options: ScanOptions,
        keep: bool,
        x: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        h0: Tensor,
        D: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return scan_forward(x, delta, A, B, C, h0, D, options, keep=keep)

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        options, _, *operands = inputs
        kept = output[2]
        ctx.mark_non_differentiable(kept)
        ctx.save_for_backward(kept, *operands)
        ctx.options = options  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_h: Tensor, unused: Tensor) -> tuple[Any, ...]:
        kept, *operands = ctx.saved_tensors
        with torch.no_grad():
            grads = scan_backward(grad_y, grad_h, kept, *operands, options=ctx.options)
        return (None, None, *refuse_second_derivative(grads, [grad_y, grad_h, *operands]))


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
    options = ScanOptions(input_scale, eigenvalues, exclusive, accumulator(x.dtype))
    operands = (x, delta, A, B, C, h0, D)
    keep = torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in operands)
    y, h, _ = _SelectiveScan.apply(options, keep, *operands)  # type: ignore[no-untyped-call]
    return y, h
