"""Channel mixing Q = I - diag(e) - U^T M U in compact form."""

from bedouin.kernels.householder.reference import (
    apply_complement,
    apply_complement_transposed,
    combine_rows,
    mix_channels,
    rows_dot,
    times,
    unit,
    wy_factor,
    wy_factor_of,
)

__all__ = [
    "apply_complement",
    "apply_complement_transposed",
    "combine_rows",
    "mix_channels",
    "rows_dot",
    "times",
    "unit",
    "wy_factor",
    "wy_factor_of",
]
