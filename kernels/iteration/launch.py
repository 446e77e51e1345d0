"""Launches of the fused iteration: sizes and constants of one solve, blocks and warps.

Letters: b batch, t time, d channels, n state per channel, r raw values, H heads
(kernels/heads.py).
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.heads import count_heads
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.iteration.buffers import IterationBuffers
from bedouin.kernels.iteration.triton_progress import decide_kernel, restore_kernel, settle_kernel
from bedouin.kernels.iteration.triton_scan import scan_kernel
from bedouin.kernels.iteration.triton_tokens import mix_kernel
from bedouin.kernels.iteration.types import IterationRule
from bedouin.kernels.launch import ceil_div, next_power_of_two
from bedouin.kernels.operands import Parameterization, RawLayout

FEWEST_STATES = 4
"""Fewest states of a thread of the scan, where programs would otherwise be few."""
FEWEST_CHANNELS = 8
"""Channels of a program of the scan from which on a row is read without waste."""
PROGRAMS = 1024
"""Programs wanted in the scan, of one warp each."""
AHEAD = 2
"""How many tokens the scan loads at once, as many tokens ahead. Fewer do not hide the latency of
memory, more do not stay in registers (64 x 256: 147 microseconds with 2, 156 with 4)."""
REGISTERS = 128
"""Of a thread of the scan in float32: 16 programs a multiprocessor. Without this bound it
takes 140, and the last few programs run alone (274 microseconds instead of 147)."""
CHANNELS_A_WARP = 256
"""Of the kernels that take a token a program."""
CHANNELS_AT_ONCE = 4
"""Of them, what a thread loads at a time: of float32 the widest load there is."""
RESTORERS = 4
"""Programs a sample that undo the moves of tokens that have just frozen, without feedback."""


STATES = 16
"""Most states of a thread of the scan."""
DECIDE_TILE = 8192
"""Elements of `parts` that `decide` takes at a time."""
DECIDE_TOKENS = 32
"""Fewest tokens that `decide` takes at a time."""


@dataclass(frozen=True)
class ScanTile:
    """What one program of the scan holds: groups of states of some channels, a thread each."""

    states: int  # of a thread
    groups: int
    channels: int

    @staticmethod
    def of(b: int, d: int, n: int) -> "ScanTile":
        """All states in one thread where they fit and that makes enough programs."""
        tile = ScanTile._from_states(min(STATES, next_power_of_two(n)), n, d)
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
    heads: int
    x_stride: int
    raw_stride: int
    fed_stride: int
    tile: ScanTile
    rule: IterationRule
    options: Parameterization
    feedback: bool

    @staticmethod
    def of(
        x: Tensor,  # (b, t, d)
        raw: Tensor,  # (b, t, r)
        W_y: Tensor | None,  # (r or more, d) or (H, r or more, d), its rows padded
        A: Tensor,  # (n, d) or (H, n, d)
        options: Parameterization,
        rule: IterationRule,
    ) -> "Geometry":
        """From the tensors as the kernels get them."""
        (b, t, d), n, heads = x.shape, A.shape[-2], count_heads(A)
        raw_stride = raw.stride(1)
        strides = x.stride(1), raw_stride, raw_stride if W_y is None else W_y.shape[-2]
        tile, feedback = ScanTile.of(b, d, n), W_y is not None
        return Geometry(b, t, d, n, heads, *strides, tile, rule, options, feedback)

    @property
    def layout(self) -> RawLayout:
        return self.options.known_layout()

    @property
    def k(self) -> int:
        return self.layout.num_householder

    @property
    def fast(self) -> bool:
        """Whether the instructions of the device stand for exp2 and the reciprocal."""
        return not interpreter_is_on()

    @property
    def parts(self) -> int:
        """Parts in which defect and scale of a token are found."""
        return ceil_div(self.d, self.tile.channels)

    @property
    def token_constants(self) -> dict[str, Any]:
        """Of the kernels that take a token a program."""
        layout = self.layout
        offsets = (self.raw_stride, self.fed_stride, self.d, 2 * self.n if layout.selective else 0)
        return {
            "K": layout.num_householder,
            "BLOCK_D": next_power_of_two(self.d),
            "BLOCK_N": next_power_of_two(self.n),
            "FEEDBACK": self.feedback,
            "SELECTIVE": layout.selective,
            "ALIGN": math.gcd(CHANNELS_AT_ONCE, *offsets),
        }


def mix(g: Geometry, it: IterationBuffers) -> None:
    """x~ and unit B and C of all tokens that still move."""
    mix_kernel[(g.b * g.t,)](
        *(it.x, it.raw, it.fed_back, it.y, it.kept, it.mixed, it.BC),
        *(g.b, g.t, g.x_stride, g.raw_stride, g.fed_stride, g.d, g.n, 0),
        BETA_MAX=g.layout.beta_max,
        EPS=UNIT_EPS,
        **g.token_constants,
        num_warps=_token_warps(g.d),
    )


def _token_warps(d: int) -> int:
    """Eight channels a thread."""
    return min(8, max(1, next_power_of_two(d) // CHANNELS_A_WARP))


def scan(g: Geometry, it: IterationBuffers) -> None:
    """The next iterate and the parts of defect and scale."""
    tile = g.tile
    scan_kernel[(g.b * ceil_div(g.d, tile.channels),)](
        *(it.mixed, it.raw, it.fed_back, it.BC, it.A, it.h0, it.y, it.kept),
        *(it.y_next, it.y_next if it.value is None else it.value, it.parts),
        *(g.b, g.t, g.b // g.heads, g.raw_stride, g.fed_stride, g.d, g.n),
        S=tile.states,
        GROUPS=tile.groups,
        BLOCK_D=tile.channels,
        HEADS=g.heads > 1,
        STORE_VALUE=it.value is not None,
        FEEDBACK=g.feedback,
        SELECTIVE=g.layout.selective,
        ACTIVATION=g.layout.activation,
        INPUT_SCALE=g.options.input_scale,
        FULL=g.options.eigenvalues == "full",
        DAMPING=g.rule.damping,
        EXACT=tile.states * tile.groups == g.n,
        AHEAD=AHEAD,
        EVEN=g.t % AHEAD == 0,
        WIDE=g.d % tile.channels == 0,
        FAST=g.fast,
        num_warps=tile.warps,
        **({"maxnreg": REGISTERS} if g.fast else {}),
    )


def decide(g: Geometry, it: IterationBuffers, *, count: bool) -> None:
    """Defect, scale, converged prefix and failure of every sample."""
    block_p = next_power_of_two(g.parts)
    fitting = max(DECIDE_TOKENS, DECIDE_TILE // block_p)
    block_t = min(next_power_of_two(g.t), fitting)
    decide_kernel[(g.b,)](
        *(it.parts, it.norms, it.counters, it.counters if it.lengths is None else it.lengths),
        *(g.b, g.t, g.parts),
        ATOL=g.rule.atol,
        RTOL=g.rule.rtol,
        WHOLE=g.rule.whole_sequence,
        COUNT=count,
        PADDED=it.lengths is not None,
        BLOCK_P=block_p,
        BLOCK_T=block_t,
        num_warps=8,
    )


def settle(
    g: Geometry,
    it: IterationBuffers,
    y_next: Tensor,  # (b, t, d)
) -> None:
    """Undo the last move of tokens that have just frozen; norm(y_next) of the others."""
    eps = g.options.feedback_norm_eps
    block_d = next_power_of_two(g.d)
    if not g.feedback:
        programs = min(g.t, RESTORERS)
        restore_kernel[(g.b * programs,)](
            *(it.y, y_next, it.counters, g.b, g.t, programs, g.d),
            BLOCK_D=block_d,
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
