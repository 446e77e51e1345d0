"""The kernels of the phases, and the compile-time constants that a call determines.

Letters as in `launch.py`.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.buffers import CHUNK
from bedouin.kernels.direct.phases.limits import Sizes, fed_vectors, feeds_all_heads
from bedouin.kernels.direct.phases.triton_all_heads import (
    feed_kernel,
    replay_chunk_kernel,
)
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
from bedouin.kernels.launch import Device, ceil_div
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

TILES = 16, 32
"""Samples of a program of the product with a W^y that reads all heads: for up to 16, and for
more."""

READ = 256
"""Channels that such a program reads at once."""

SPLITS = 4
"""Programs among which the heads that it reads are split, at most."""

PREPARE, FINISH = map(PlannedKernel, (prepare_phases_kernel, finish_phases_kernel))
SWEEP, REVERSE, GRADIENTS, REPLAY = (
    PlannedKernel(kernel, coalesces=False)
    for kernel in (phase_sweep_kernel, phase_reverse_kernel, gradient_kernel, replay_chunk_kernel)
)
STATISTICS = PlannedKernel(explicit_statistics_kernel)
FEED, FEED_ADJOINT = PlannedKernel(feed_kernel), PlannedKernel(feed_kernel)
PREPARE_REFLECTIONS, SOLVED_STATISTICS, FINISH_REFLECTIONS = map(
    PlannedKernel, (prepare_reflections_kernel, solved_statistics_kernel, finish_reflections_kernel)
)


class LaunchSpec(NamedTuple):
    """What the compile-time constants of a call depend on."""

    sizes: tuple[int, ...]  # those of `Sizes` without b and t
    fed: tuple[bool, bool]  # whether Delta and x are
    options: Parameterization
    keeps: bool = True  # whether there may be a backward pass
    starts: bool = False  # whether h0 or y0 is given
    ends: bool = False  # whether the cotangent of the last h is
    tile: int = 0  # samples of a program of `feed_kernel`; 0: S and R hold W^y
    each: int = 0  # heads that it reads
    splits: int = 0  # sums of its products
    overlaps: bool = False  # whether launches of tokens overlap

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
        fed = fed_vectors(operands, options)
        if operands.W_y is not None and feeds_all_heads(operands):
            heads = len(operands.A)
            tile = min(TILES) if sizes.b // heads <= min(TILES) else max(TILES)
            group = heads_at_once(sizes.P)
            each = ceil_div(ceil_div(heads, SPLITS), group) * group
            products = tile, each, ceil_div(heads, each), Device.of(operands.x.device).overlaps
            return LaunchSpec(sizes[2:], fed, options, keeps, True, True, *products)
        return LaunchSpec(sizes[2:], fed, options, keeps, starts, ends)

    @property
    def by_token(self) -> bool:
        """Whether S and R are launched for each token, and the product with W^y beside them."""
        return self.tile > 0


def heads_at_once(P: int) -> int:
    """Heads that a program of `feed_kernel` reads at once."""
    return max(1, READ // P)


@lru_cache(maxsize=KEPT_CONSTANTS)
def phase_constants(kernel: PlannedKernel, spec: LaunchSpec) -> Constants:
    """The constants of a kernel: those of its parameters' names, and its launch options."""
    (d, n, P, N, V, factors, k), fed, options, keeps, starts, ends, tile, _, splits, overlaps = spec
    by_token, (feeds_delta, feeds_x) = spec.by_token, fed
    vectors = feeds_delta + feeds_x
    chunk = CHUNK if keeps and not (by_token and kernel is SWEEP) else 0
    layout, eps = options.known_layout(), options.feedback_norm_eps
    states = STATES_OF_REVERSE if kernel in (REVERSE, REPLAY) else STATES_OF_SWEEP
    lanes = max(LANES, min(MOST_LANES, N // states))
    r = layout.size(d, n)
    every: dict[str, Any] = {
        **{"d": d, "n": n, "P": P, "N": N, "V": V, "K": k, "FACTORS": factors, "LOW": V == 4},
        **{"NL": lanes, "PL": P // CHANNELS, "TOKENS": TOKENS, "EPS": UNIT_EPS},
        **{"S": min(N, STATES), "ROW": d * max(vectors, 1)},
        **{"KEEP": chunk, "KEEP_ROWS": keeps or k > 0},
        **{"START": starts, "LAST": ends, "SPLITS": splits * (vectors if kernel is REVERSE else 1)},
        **{"VECTORS": vectors, "SAMPLES": tile, "GROUP": heads_at_once(P)},
        **{"OF_DELTA": int(feeds_delta), "OF_X": int(feeds_x), "FEEDS": vectors},
        **{"BOUNDED": int(feeds_x and options.bounded_heads > 0)},
        **{"EARLIER": kernel is FEED, "OVERLAP": overlaps},
        **{"NORM": eps is not None and kernel is not FEED_ADJOINT, "NORM_EPS": eps or 0.0},
        **{"ACTIVATION": layout.activation, "INPUT_SCALE": options.input_scale},
        **{"FULL": options.eigenvalues == "full", "FAST": not interpreter_is_on()},
        **{
            "ERASE": int(layout.erase > 0),
            "ERASE_MAX": layout.erase,
            "ERASE_AT": r - (layout.erase > 0),
        },
        **{"BETA_MAX": layout.beta_max, "SCALARS": 2 + k * (k + 3), "WIDE": r + padding(r)},
    }
    # a thread has one channel in phases S and R
    by_channels = dict.fromkeys((SWEEP, REVERSE, REPLAY), P * lanes // 32)
    gradient_warps = P // CHANNELS * min(N, STATES) // 2 // 32
    warps = {**by_channels, GRADIENTS: gradient_warps, FEED: 8, FEED_ADJOINT: 8}
    warps[PREPARE_REFLECTIONS] = max(4, P // 16)
    one_warp = kernel in (SOLVED_STATISTICS, FINISH_REFLECTIONS)
    every["num_warps"] = max(1, warps.get(kernel, 1 if one_warp else 4))
    # pipelined, the transposed product of all heads took more than twice as long
    every["num_stages"] = 1
    if overlaps and "OVERLAP" in kernel.kernel.arg_names:
        every["launch_pdl"] = True
    return Constants.of(kernel, every)
