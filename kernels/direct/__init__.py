"""The exact solve: local equation, direct sweep, reverse sweep."""

from bedouin.kernels.direct.autograd import direct_sweep
from bedouin.kernels.direct.local import (
    LocalFactors,
    factor_local,
    smallest_pivot,
    solve_local,
    solve_local_transposed,
)
from bedouin.kernels.direct.reference import (
    ROUNDING,
    Activation,
    Coefficients,
    RawLayout,
    Sweep,
    SweepOptions,
    direct_sweep_reference,
    gain_gap,
    input_gain,
    project_feedback,
    start_tensors,
    write_memory,
)

__all__ = [
    "ROUNDING",
    "Activation",
    "Coefficients",
    "LocalFactors",
    "RawLayout",
    "Sweep",
    "SweepOptions",
    "direct_sweep",
    "direct_sweep_reference",
    "factor_local",
    "gain_gap",
    "input_gain",
    "project_feedback",
    "smallest_pivot",
    "solve_local",
    "solve_local_transposed",
    "start_tensors",
    "write_memory",
]
