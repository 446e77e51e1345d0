"""Channel mixing Q = I - diag(e) - U^T M U in compact form, and Householder products."""

from bedouin.kernels.householder.reference import (
    apply_complement,
    apply_complement_transposed,
    combine_rows,
    householder_product,
    rows_dot,
    unit,
    wy_factor,
)

__all__ = [
    "apply_complement",
    "apply_complement_transposed",
    "combine_rows",
    "householder_product",
    "rows_dot",
    "unit",
    "wy_factor",
]
