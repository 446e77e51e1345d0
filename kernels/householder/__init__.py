"""Channel mixing Q = I - diag(e) - U^T M U in compact form, and Householder products."""

from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.checks import check_shape
from bedouin.kernels.device import MAX_REFLECTIONS
from bedouin.kernels.householder.autograd import apply_product, build_factor
from bedouin.kernels.householder.reference import (
    apply_complement,
    apply_complement_transposed,
    combine_rows,
    householder_factor_reference,
    householder_product_reference,
    mix_channels,
    rows_dot,
    unit,
    unit_vjp,
    wy_factor,
    wy_factor_of,
    wy_factor_vjp,
)

__all__ = [
    "apply_complement",
    "apply_complement_transposed",
    "combine_rows",
    "householder_complement",
    "householder_factor",
    "householder_factor_reference",
    "householder_product",
    "mix_channels",
    "householder_product_reference",
    "rows_dot",
    "unit",
    "unit_vjp",
    "wy_factor",
    "wy_factor_of",
    "wy_factor_vjp",
]


def householder_product(
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    *,
    backend: Backend = "auto",
) -> Tensor:  # (..., d)
    """Q v with Q = H_1 H_2 ... H_k, H_i = I - beta_i u_i u_i^T, u_i normalized inside (`unit`).

    Source: DeltaProduct (arXiv 2502.10297); Fixed-Point RNNs (arXiv 2503.10799), section 4.
    Computes in at least float32; the result has the dtype of v. The Triton version is once
    differentiable. Raises ValueError for shapes that do not fit, or a backend that cannot run.
    """
    return _apply(v, u, beta, backend, complement=False)


def householder_complement(
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    *,
    backend: Backend = "auto",
) -> Tensor:  # (..., d)
    """(I - Q) v, without cancellation if Q is close to the identity; otherwise like
    `householder_product`."""
    return _apply(v, u, beta, backend, complement=True)


def householder_factor(
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    *,
    backend: Backend = "auto",
) -> Tensor:  # (..., k, k)
    """The upper triangular T of Q = I - U^T T U, U the normalized rows u (`wy_factor`).

    In float32, or float64 for such operands. The Triton version is once differentiable. Raises
    ValueError for shapes that do not fit, or a backend that cannot run.
    """
    _check_shapes(u, beta)
    if _choose(backend, u) == "triton":
        factor: Tensor = build_factor(u, beta)
        return factor
    return householder_factor_reference(u, beta)


def _apply(
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    backend: Backend,
    *,
    complement: bool,
) -> Tensor:  # (..., d)
    _check_shapes(u, beta)
    check_shape("v", v, (*u.shape[:-2], u.shape[-1]), "(..., d) of this u")
    if _choose(backend, u) == "triton":
        mixed: Tensor = apply_product(v, u, beta, complement)
        return mixed
    return householder_product_reference(v, u, beta, complement=complement)


def _choose(
    backend: Backend,
    u: Tensor,  # (..., k, d)
) -> Implementation:
    many = u.shape[-2] > MAX_REFLECTIONS
    unsupported = f"more than {MAX_REFLECTIONS} reflections" if many else None
    implementation = choose_backend(backend, u.device, u.dtype, unsupported)
    return implementation if u.numel() else "reference"


def _check_shapes(
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
) -> None:
    if u.dim() < 2:
        raise ValueError(f"u must have shape (..., k, d), got {tuple(u.shape)}")
    check_shape("beta", beta, u.shape[:-1], "(..., k) of this u")
