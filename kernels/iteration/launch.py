"""Launches of the fused iteration: sizes and constants of one solve, blocks and warps.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.reference import SweepOptions
from bedouin.kernels.householder.reference import UNIT_EPS
from bedouin.kernels.iteration.triton_progress import decide_kernel, restore_kernel, settle_kernel
from bedouin.kernels.iteration.triton_scan import scan_kernel
from bedouin.kernels.iteration.triton_tokens import finish_kernel, mix_kernel
from bedouin.kernels.launch import ceil_div, next_power_of_two, triton_dtype

if TYPE_CHECKING:
    from bedouin.kernels.iteration.fused import FusedIteration, IterationInputs, IterationRule

STATES, FEWEST_STATES = 16, 4
"""States of a thread of the scan in float32, and how few they become where programs are few."""
FEWEST_CHANNELS = 8
"""Channels of a program of the scan from which on a row is read without waste."""
PROGRAMS = 1024
"""Programs wanted in the scan, of one warp each."""
AHEAD = {"picard": 2, "jacobi": 4}
"""How many tokens the scan asks for at once, as many tokens ahead; Picard asks for y, too. Less
would not hide the latency of memory, more does not stay in registers (64 x 256, microseconds:
Picard 147 with 2, 156 with 4; Jacobi 165 and 123)."""
REGISTERS = 128
"""Of a thread of the scan in float32: 16 programs a multiprocessor. Compiled freely, Picard's would
take 140, and a last few programs would run alone (274 microseconds for 147)."""
DECIDE_TILE, SMALLEST_DECIDE = 8192, 32
"""Elements of parts that `decide` takes at a time, and the fewest tokens."""
CHANNELS_A_WARP = 256
"""Of the kernels that take a token a program."""
CHANNELS_AT_ONCE = 4
"""Of them, what a thread loads at a time: of float32 the widest load there is. Twice as many, the
widest load of bfloat16, make Jacobi's local solve 3 % slower."""
RESTORERS = 4
"""Programs a sample that undo the moves of tokens that have just frozen, without feedback."""


@dataclass(frozen=True)
class ScanTile:
    """What one program of the scan holds: groups of states of some channels, a thread each."""

    states: int  # of a thread
    groups: int
    channels: int

    @staticmethod
    def of(b: int, d: int, n: int, dtype: torch.dtype) -> "ScanTile":
        """All states in one thread where they fit and that makes enough programs."""
        most = STATES * 4 // dtype.itemsize
        tile = ScanTile._from_states(min(most, next_power_of_two(n)), n, d)
        while tile._may_be_halved and b * ceil_div(d, tile.channels) < PROGRAMS:
            tile = ScanTile._from_states(tile.states // 2, n, d)
        return tile

    @staticmethod
    def _from_states(states: int, n: int, d: int) -> "ScanTile":
        groups = next_power_of_two(n) // states
        return ScanTile(states, groups, min(max(1, 32 // groups), next_power_of_two(d)))

    @property
    def _may_be_halved(self) -> bool:
        return self.states > FEWEST_STATES and self.channels > FEWEST_CHANNELS

    @property
    def warps(self) -> int:
        return max(1, min(8, self.groups * self.channels // 32))


@dataclass(frozen=True)
class Geometry:
    """Sizes, strides and constants of all launches of one solve."""

    b: int
    t: int
    d: int
    n: int
    x_stride: int
    raw_stride: int
    fed_stride: int
    tile: ScanTile
    rule: "IterationRule"
    options: SweepOptions
    feedback: bool
    dtype: torch.dtype

    @staticmethod
    def of(inputs: "IterationInputs", options: SweepOptions, rule: "IterationRule") -> "Geometry":
        """From x, raw, A (n, d) and W^y, its rows padded, as the kernels get them."""
        (b, t, d), n = inputs.x.shape, inputs.A.shape[0]
        W_y, dtype = inputs.W_y, inputs.A.dtype
        raw_stride = inputs.raw.stride(1)
        strides = inputs.x.stride(1), raw_stride, raw_stride if W_y is None else W_y.shape[0]
        tile = ScanTile.of(b, d, n, dtype)
        return Geometry(b, t, d, n, *strides, tile, rule, options, W_y is not None, dtype)

    @property
    def k(self) -> int:
        assert self.options.layout is not None
        return self.options.layout.num_householder

    @property
    def fast(self) -> bool:
        """Whether the instructions of the device stand for exp2 and the reciprocal."""
        return self.dtype == torch.float32 and not interpreter_is_on()

    @property
    def ahead(self) -> int:
        """Tokens that the scan asks for at once."""
        return AHEAD[self.rule.method]

    @property
    def jacobi(self) -> bool:
        return self.rule.method == "jacobi"

    @property
    def stores_gain(self) -> bool:
        """Whether the scan leaves sigma, which needs all decays, to the local solve."""
        coupled = self.options.input_scale == "one_minus_decay"
        return self.jacobi and coupled

    @property
    def mixes_ahead(self) -> bool:
        """Whether the local solve mixes its result, too: without feedback nothing is missing."""
        return self.jacobi and not self.feedback

    @property
    def parts(self) -> int:
        """Parts in which defect and scale of a token are found."""
        return 1 if self.jacobi else ceil_div(self.d, self.tile.channels)

    @property
    def token_constants(self) -> dict[str, Any]:
        """Of the kernels that take a token a program."""
        layout = self.options.layout
        assert layout is not None
        offsets = (self.raw_stride, self.fed_stride, self.d, 2 * self.n if layout.selective else 0)
        return {
            "K": layout.num_householder,
            "BLOCK_D": next_power_of_two(self.d),
            "BLOCK_N": next_power_of_two(self.n),
            "FEEDBACK": self.feedback,
            "SELECTIVE": layout.selective,
            "ALIGN": math.gcd(CHANNELS_AT_ONCE, *offsets),
            "ACC": self.accumulator,
        }

    @property
    def accumulator(self) -> Any:
        return triton_dtype(self.dtype)


def mix(it: "FusedIteration") -> None:
    """x~ and unit B and C of all tokens that still move, for Jacobi T and 1 / |u_i|."""
    g, i, layout = it.geometry, it.inputs, it.geometry.options.layout
    assert layout is not None
    mix_kernel[(g.b * g.t,)](
        *(i.x, i.raw, it.fed_back, it.y, it.kept, it.mixed, it.BC, it.WY),
        *(g.b, g.t, g.x_stride, g.raw_stride, g.fed_stride, g.d, g.n, 0),
        BETA_MAX=layout.beta_max,
        EPS=UNIT_EPS,
        STORE_WY=g.jacobi,
        **g.token_constants,
        num_warps=_token_warps(g.d),
    )


def _token_warps(d: int) -> int:
    """Eight channels a thread."""
    return min(8, max(1, next_power_of_two(d) // CHANNELS_A_WARP))


def scan(it: "FusedIteration") -> None:
    """Picard: the next iterate and the parts of defect and scale; Jacobi: p, in its place."""
    g, i, tile = it.geometry, it.inputs, it.geometry.tile
    layout = g.options.layout
    assert layout is not None
    scan_kernel[(g.b * ceil_div(g.d, tile.channels),)](
        *(it.mixed, i.raw, it.fed_back, it.BC, i.A, i.h0, it.y, it.kept),
        *(it.y_next, it.y_next if it.value is None else it.value, it.gain, it.parts),
        *(g.b, g.t, g.raw_stride, g.fed_stride, g.d, g.n),
        S=tile.states,
        GROUPS=tile.groups,
        BLOCK_D=tile.channels,
        EXCLUSIVE=g.jacobi,
        STORE_GAIN=g.stores_gain,
        STORE_VALUE=it.value is not None,
        FEEDBACK=g.feedback,
        SELECTIVE=layout.selective,
        ACTIVATION=layout.activation,
        INPUT_SCALE=g.options.input_scale,
        FULL=g.options.eigenvalues == "full",
        DAMPING=g.rule.damping,
        EXACT=tile.states * tile.groups == g.n,
        AHEAD=g.ahead,
        EVEN=g.t % g.ahead == 0,
        WIDE=g.d % tile.channels == 0,
        FAST=g.fast,
        ACC=g.accumulator,
        num_warps=tile.warps,
        **({"maxnreg": REGISTERS} if g.fast else {}),
    )


def finish(it: "FusedIteration") -> None:
    """Jacobi: the local solve of all tokens that still move, defect, scale and pivot."""
    g, i = it.geometry, it.inputs
    layout = g.options.layout
    assert layout is not None
    finish_kernel[(g.b * g.t,)](
        *(i.x, i.raw, it.fed_back, it.BC, it.WY, it.gain, it.y, it.kept),
        *(it.y_next, it.mixed_next, it.parts, it.pivots),
        *(g.b, g.t, g.x_stride, g.raw_stride, g.fed_stride, g.d, g.n, 0),
        EXACT=next_power_of_two(g.n) == g.n,
        MIX=g.mixes_ahead,
        FAST=g.fast,
        ACTIVATION=layout.activation,
        INPUT_SCALE=g.options.input_scale,
        **g.token_constants,
        num_warps=_token_warps(g.d),
    )


def decide(it: "FusedIteration", *, count: bool) -> None:
    """Defect, scale, converged prefix and failure of every sample."""
    g = it.geometry
    block_p = next_power_of_two(g.parts)
    block_t = min(next_power_of_two(g.t), max(SMALLEST_DECIDE, DECIDE_TILE // block_p))
    decide_kernel[(g.b,)](
        *(it.parts, it.norms, it.counters, g.b, g.t, g.parts),
        ATOL=g.rule.atol,
        RTOL=g.rule.rtol,
        WHOLE=g.rule.whole_sequence,
        COUNT=count,
        BLOCK_P=block_p,
        BLOCK_T=block_t,
        num_warps=8,
    )


def settle(it: "FusedIteration", y_next: Tensor) -> None:
    """Undo the last move of tokens that have just frozen; norm(y_next) of the others."""
    g = it.geometry
    eps = g.options.feedback_norm_eps
    block_d = next_power_of_two(g.d)
    if not g.feedback:
        programs = min(g.t, RESTORERS)
        restore_kernel[(g.b * programs,)](
            *(it.y, y_next, it.mixed, it.mixed_next, it.counters, g.b, g.t, programs, g.d),
            BLOCK_D=block_d,
            MIXED=g.mixes_ahead,
            num_warps=_token_warps(g.d),
        )
        return
    settle_kernel[(g.b * g.t,)](
        *(it.y, y_next, it.normed, it.counters, g.b, g.t, g.d),
        BLOCK_D=block_d,
        NORM=eps is not None,
        NORM_EPS=0.0 if eps is None else eps,
        num_warps=_token_warps(g.d),
    )
