"""Diagonal selective scan: the public operation (checks, choice of implementation)."""

from typing import get_args

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.checks import check_sequence, check_shape, one_of
from bedouin.kernels.heads import check_heads, count_heads, per_sample
from bedouin.kernels.launch import accumulator
from bedouin.kernels.scan.reference import contract, discretize, selective_scan_reference
from bedouin.kernels.scan.registered import plain_scan, triton_scan
from bedouin.kernels.scan.types import Eigenvalues, InputScale, ScanOperands, ScanOptions

__all__ = [
    "Eigenvalues",
    "InputScale",
    "contract",
    "discretize",
    "selective_scan",
    "selective_scan_reference",
]


def selective_scan(
    x: Tensor,  # (b, t, d)
    delta: Tensor,  # (b, t, d)
    A: Tensor,  # (d, n) or (H, d, n)
    B: Tensor,  # (b, t, n)
    C: Tensor,  # (b, t, n)
    h0: Tensor | None = None,  # (b, d, n)
    D: Tensor | None = None,  # (d,) or (H, d), as A
    *,
    input_scale: InputScale = "delta",
    eigenvalues: Eigenvalues = "positive",
    exclusive: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # (b, t, d), (b, d, n)
    """The scan h_t = lambda_t * h_{t-1} + (s_t * x_t) B_t^T, y_t = h_t C_t + D * x_t.

    lambda_t = exp(A delta_t) and s_t are computed inside (`discretize`). Returns y and the last h,
    both differentiable. With `exclusive`, y_t reads memory before token t is written.
    Source: Mamba (arXiv 2312.00752), section 3; Fixed-Point RNNs (arXiv 2503.10799), section 5.
    With A (H, d, n) the batch is H groups of b/H samples, one group for each head: sample i uses
    A[i // (b/H)], and D in the same way.
    Computes in at least float32; y has the dtype of x, the last h that of h0 (without h0 at least
    float32). The Triton version is once differentiable, and so is every one under torch.compile,
    where the scan is one operation for every length.

    Raises ValueError for shapes that do not fit, a batch that is not H groups of one size, unknown
    option names, or a backend that cannot run on the device.
    """
    check_sequence("x", x)
    b, t, d = x.shape
    if A.dim() not in (2, 3) or A.shape[-2] != d:
        raise ValueError(f"A must have shape (d, n) = ({d}, n) or (H, d, n), got {tuple(A.shape)}")
    check_heads(count_heads(A), b, "A")
    n = A.shape[-1]
    check_shape("delta", delta, (b, t, d))
    check_shape("B", B, (b, t, n))
    check_shape("C", C, (b, t, n))
    check_shape("h0", h0, (b, d, n))
    check_shape("D", D, A.shape[:-1])
    one_of("input_scale", input_scale, get_args(InputScale))
    one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
    implementation = choose_backend(backend, x.device, x.dtype)
    if h0 is None:
        h0 = x.new_zeros(b, d, n, dtype=accumulator(x.dtype))
    operands = ScanOperands(x, delta, A, B, C, h0, D)
    options = ScanOptions(input_scale, eigenvalues, exclusive)
    is_empty = not (x.numel() and A.numel())
    if implementation == "triton" and not is_empty:
        keep = torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in operands)
        y, h, _ = triton_scan(*operands, *options, keep)
        return y, h
    if torch.compiler.is_compiling() and not is_empty:
        y, h = plain_scan(*operands[:6], *options)
    else:
        y, h = selective_scan_reference(
            *(x, delta, A, B, C, h0),
            input_scale=input_scale,
            eigenvalues=eigenvalues,
            exclusive=exclusive,
        )
    if D is None:
        return y, h
    skipped = (D if D.dim() == 1 else per_sample(D, b).unsqueeze(1)) * x
    return (y + skipped).to(x.dtype), h
