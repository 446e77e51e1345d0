"""The kernels of the phases, and the compile-time constants that a call determines.

Letters as in `launch.py`.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.buffers import CHUNK
from bedouin.kernels.direct.phases.limits import Sizes
from bedouin.kernels.direct.phases.triton_gradients import gradient_kernel
from bedouin.kernels.direct.phases.triton_prepare import (
    explicit_statistics_kernel,
    finish_phases_kernel,
    prepare_phases_kernel,
)
from bedouin.kernels.direct.phases.triton_reflections import (
    finish_reflections_kernel,
    prepare_reflections_kernel,
    solved_statistics_kernel,
)
from bedouin.kernels.direct.phases.triton_reverse import phase_reverse_kernel
from bedouin.kernels.direct.phases.triton_sweep import phase_sweep_kernel
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import Operands, Parameterization
from bedouin.kernels.plans import KEPT_CONSTANTS, Constants, PlannedKernel

LANES = 2
"""Lanes of a warp that share the states of a channel in phases S and R; the others have other
channels, at least. Two programs then share a multiprocessor; with four lanes one program takes all
of it, and S with 64 states 1.8 instead of 1.1 ms at 64x256 on an H100."""

STATES_OF_SWEEP, STATES_OF_REVERSE = 32, 16
"""States of a channel that a thread of phases S and R holds, R with more values of each, if that
takes no more than `MOST_LANES`."""

MOST_LANES = 4
"""With eight, a head of 64 channels and 128 states has 16 warps, and a thread of R 128 registers:
forward and backward 29.6 instead of 21.3 ms at 192x256 on an H200."""

CHANNELS = 8
"""Channels of a thread of phase G, which has two states of each of them."""

STATES = 16
"""States of a program of phase G: small programs, so that several share a multiprocessor."""

TOKENS = 16
"""Tokens of a program of phase P and of its adjoint."""

PROGRAMS = 8
"""Programs of phase G for each multiprocessor, at least."""

PREPARE, FINISH = map(PlannedKernel, (prepare_phases_kernel, finish_phases_kernel))
SWEEP, REVERSE, GRADIENTS = (
    PlannedKernel(kernel, coalesces=False)
    for kernel in (phase_sweep_kernel, phase_reverse_kernel, gradient_kernel)
)
STATISTICS = PlannedKernel(explicit_statistics_kernel)
PREPARE_REFLECTIONS, SOLVED_STATISTICS, FINISH_REFLECTIONS = map(
    PlannedKernel, (prepare_reflections_kernel, solved_statistics_kernel, finish_reflections_kernel)
)


class LaunchSpec(NamedTuple):
    """What the compile-time constants of a call depend on."""

    sizes: tuple[int, ...]  # those of `Sizes` without b and t
    feeds: bool  # whether Delta has feedback
    options: Parameterization
    keeps: bool = True  # whether there may be a backward pass
    starts: bool = False  # whether h0 or y0 is given
    ends: bool = False  # whether the cotangent of the last h is

    @staticmethod
    def of(
        sizes: Sizes,
        operands: Operands,
        options: Parameterization,
        *,
        keeps: bool,
        ends: bool = False,
    ) -> "LaunchSpec":
        starts = operands.h0 is not None or operands.y0 is not None
        return LaunchSpec(sizes[2:], operands.W_y is not None, options, keeps, starts, ends)


@lru_cache(maxsize=KEPT_CONSTANTS)
def phase_constants(kernel: PlannedKernel, spec: LaunchSpec) -> Constants:
    """The constants of a kernel: those of its parameters' names, and its launch options."""
    (d, n, P, N, V, factors, k), feeds, options, keeps, starts, ends = spec
    layout, eps = options.known_layout(), options.feedback_norm_eps
    states = STATES_OF_REVERSE if kernel is REVERSE else STATES_OF_SWEEP
    lanes = max(LANES, min(MOST_LANES, N // states))
    r = layout.size(d, n)
    every: dict[str, Any] = {
        **{"d": d, "n": n, "P": P, "N": N, "V": V, "K": k, "FACTORS": factors, "LOW": V == 4},
        **{"NL": lanes, "PL": P // CHANNELS, "TOKENS": TOKENS, "EPS": UNIT_EPS},
        **{"S": min(N, STATES), "KEEP": CHUNK if keeps else 0, "KEEP_ROWS": keeps or k > 0},
        **{"START": starts, "LAST": ends, "FEEDS": feeds},
        **{"NORM": eps is not None, "NORM_EPS": eps or 0.0},
        **{"ACTIVATION": layout.activation, "INPUT_SCALE": options.input_scale},
        **{"FULL": options.eigenvalues == "full", "FAST": not interpreter_is_on()},
        **{"BETA_MAX": layout.beta_max, "SCALARS": 1 + k * (k + 3), "WIDE": r + padding(r)},
    }
    # a thread has one channel in phases S and R
    by_channels = dict.fromkeys((SWEEP, REVERSE), P * lanes // 32)
    gradient_warps = P // CHANNELS * min(N, STATES) // 2 // 32
    warps = {**by_channels, GRADIENTS: gradient_warps, PREPARE_REFLECTIONS: max(4, P // 16)}
    one_warp = kernel in (SOLVED_STATISTICS, FINISH_REFLECTIONS)
    every["num_warps"] = max(1, warps.get(kernel, 1 if one_warp else 4))
    every["num_stages"] = 1
    return Constants.of(kernel, every)
