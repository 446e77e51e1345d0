"""Diagonal selective scan: the public operation (checks, choice of implementation)."""

from typing import get_args

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.scan.autograd import selective_scan_triton
from bedouin.kernels.scan.plain import plain_scan
from bedouin.kernels.scan.reference import (
    Eigenvalues,
    InputScale,
    accumulator,
    contract,
    discretize,
    discretize_vjp,
    selective_scan_reference,
)

__all__ = [
    "Eigenvalues",
    "InputScale",
    "contract",
    "discretize",
    "discretize_vjp",
    "selective_scan",
    "selective_scan_reference",
]


def selective_scan(
    x: Tensor,  # (b, t, d)
    delta: Tensor,  # (b, t, d)
    A: Tensor,  # (d, n)
    B: Tensor,  # (b, t, n)
    C: Tensor,  # (b, t, n)
    h0: Tensor | None = None,  # (b, d, n)
    D: Tensor | None = None,  # (d,)
    *,
    input_scale: InputScale = "delta",
    eigenvalues: Eigenvalues = "positive",
    exclusive: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # (b, t, d), (b, d, n)
    """h_t = lambda_t * h_{t-1} + (s_t * x_t) B_t^T, y_t = h_t C_t + D * x_t.

    lambda_t = exp(A delta_t) and s_t are built inside (`discretize`). Returns y and the last h,
    both differentiable. With `exclusive`, y_t reads memory before token t is written.
    Source: Mamba (arXiv 2312.00752), section 3; Fixed-Point RNNs (arXiv 2503.10799), section 5.
    Computes in at least float32; y has the dtype of x, the last h that of h0 (without h0 at least
    float32). The Triton version is once differentiable, and so is every one under torch.compile,
    where the scan is one operation for every length.

    Raises ValueError for shapes that do not fit, unknown option names, or a backend that cannot
    run on the device.
    """
    _check_shapes(x, delta, A, B, C, h0, D)
    _check_name("input_scale", input_scale, get_args(InputScale))
    _check_name("eigenvalues", eigenvalues, get_args(Eigenvalues))
    implementation = choose_backend(backend, x.device, x.dtype)
    if h0 is None:
        h0 = x.new_zeros(x.shape[0], *A.shape, dtype=accumulator(x.dtype))
    if implementation == "triton" and x.numel() and A.numel():
        scales = input_scale, eigenvalues
        return selective_scan_triton(x, delta, A, B, C, h0, D, *scales, exclusive=exclusive)
    if torch.compiler.is_compiling() and x.numel() and A.numel():
        y, h = plain_scan(x, delta, A, B, C, h0, input_scale, eigenvalues, exclusive)
    else:
        y, h = selective_scan_reference(
            *(x, delta, A, B, C, h0),
            input_scale=input_scale,
            eigenvalues=eigenvalues,
            exclusive=exclusive,
        )
    return (y if D is None else y + D * x), h


def _check_name(argument: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{argument} must be one of {valid}, got {value!r}")


def _check_shapes(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h0: Tensor | None, D: Tensor | None
) -> None:
    if x.dim() != 3:
        raise ValueError(f"x must have shape (b, t, d), got {tuple(x.shape)}")
    b, t, d = x.shape
    if A.dim() != 2 or A.shape[0] != d:
        raise ValueError(f"A must have shape (d, n) = ({d}, n), got {tuple(A.shape)}")
    n = A.shape[1]
    expected: dict[str, tuple[Tensor, tuple[int, ...]]]
    expected = {"delta": (delta, (b, t, d)), "B": (B, (b, t, n)), "C": (C, (b, t, n))}
    if h0 is not None:
        expected["h0"] = (h0, (b, d, n))
    if D is not None:
        expected["D"] = (D, (d,))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
