"""Channel mixing Q = I - diag(e) - U^T M U in compact form, and Householder products."""

from bedouin.kernels.householder.reference import (
    apply_complement,
    apply_complement_transposed,
    householder_product,
    unit,
    wy_factor,
)

__all__ = [
    "apply_complement",
    "apply_complement_transposed",
    "householder_product",
    "unit",
    "wy_factor",
]
