"""Launches of the fused iteration: sizes and constants of one solve, blocks and warps.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.reference import SweepOptions
from bedouin.kernels.householder.reference import UNIT_EPS
from bedouin.kernels.iteration.triton_kernels import (
    decide_kernel,
    finish_kernel,
    mix_kernel,
    scan_kernel,
    settle_kernel,
)

if TYPE_CHECKING:
    from bedouin.kernels.iteration.fused import FusedIteration, IterationInputs, IterationRule

TILE = 512
"""Elements of h of one program of the scan: one warp, 16 a thread."""
UNROLL = 4
"""Tokens of one pass of the scan's loop: unrolled, what is loaded ahead is renamed, not moved."""
PROGRAMS = 1024
"""Programs wanted in the scan; with fewer, blocks of channels become smaller."""
DECIDE_TILE, SMALLEST_DECIDE = 8192, 32
"""Elements of parts that `decide` takes at a time, and the fewest tokens."""


@dataclass(frozen=True)
class Geometry:
    """Sizes, strides and constants of all launches of one solve."""

    b: int
    t: int
    d: int
    n: int
    x_stride: int
    raw_stride: int
    r: int
    block_d: int  # of the scan
    rule: "IterationRule"
    options: SweepOptions
    feedback: bool
    dtype: torch.dtype

    @staticmethod
    def of(inputs: "IterationInputs", options: SweepOptions, rule: "IterationRule") -> "Geometry":
        """From x, raw and A (n, d) as the kernels get them."""
        (b, t, d), n = inputs.x.shape, inputs.A.shape[0]
        strides = inputs.x.stride(1), inputs.raw.stride(1), inputs.raw.shape[-1]
        feedback, block = inputs.W_y is not None, _scan_block(b, d, n)
        return Geometry(b, t, d, n, *strides, block, rule, options, feedback, inputs.A.dtype)

    @property
    def jacobi(self) -> bool:
        return self.rule.method == "jacobi"

    @property
    def stores_gain(self) -> bool:
        """Whether the scan leaves sigma, which needs all decays, to the local solve."""
        return self.jacobi and self.options.input_scale == "one_minus_decay"

    @property
    def parts(self) -> int:
        """Parts in which defect and scale of a token are found."""
        parts: int = 1 if self.jacobi else triton.cdiv(self.d, self.block_d)
        return parts

    @property
    def token_constants(self) -> dict[str, Any]:
        """Of the kernels that take a token a program."""
        layout = self.options.layout
        assert layout is not None
        offsets = (self.raw_stride, self.r, self.d, 2 * self.n if layout.selective else 0)
        return {
            "K": layout.num_householder,
            "BLOCK_D": triton.next_power_of_2(self.d),
            "BLOCK_N": triton.next_power_of_2(self.n),
            "FEEDBACK": self.feedback,
            "SELECTIVE": layout.selective,
            "BETA_MAX": layout.beta_max,
            "EPS": UNIT_EPS,
            "ALIGN": math.gcd(16, *offsets),
            "ACC": self.accumulator,
        }

    @property
    def accumulator(self) -> Any:
        return tl.float64 if self.dtype == torch.float64 else tl.float32


def _scan_block(b: int, d: int, n: int) -> int:
    """Channels a program of the scan."""
    block_n = triton.next_power_of_2(n)
    block = min(max(1, TILE // block_n), triton.next_power_of_2(d))
    smallest = min(block, max(8, 32 // block_n))
    while block > smallest and b * triton.cdiv(d, block) < PROGRAMS:
        block //= 2
    return int(block)


def mix(it: "FusedIteration") -> None:
    """x~ and unit B and C of all tokens that still move."""
    g, i = it.geometry, it.inputs
    mix_kernel[(g.b * g.t,)](
        *(i.x, i.raw, it.fed_back, it.y, it.kept, it.mixed, it.BC),
        *(g.t, g.x_stride, g.raw_stride, g.r, g.d, g.n),
        **g.token_constants,
        num_warps=_mix_warps(g.d),
    )


def _mix_warps(d: int) -> int:
    """Eight channels a thread."""
    return int(min(8, max(1, triton.next_power_of_2(d) // 256)))


def scan(it: "FusedIteration") -> None:
    """Picard: the next iterate and the parts of defect and scale; Jacobi: p, in its place."""
    g, i = it.geometry, it.inputs
    layout, block_n = g.options.layout, triton.next_power_of_2(g.n)
    assert layout is not None
    scan_kernel[(g.b * triton.cdiv(g.d, g.block_d),)](
        *(it.mixed, i.raw, it.fed_back, it.BC, i.A, i.h0, it.y, it.kept),
        *(it.y_next, it.gain, it.parts),
        *(g.b, g.t, g.raw_stride, g.r, g.d, g.n, 0),
        BLOCK_D=g.block_d,
        BLOCK_N=block_n,
        EXCLUSIVE=g.jacobi,
        STORE_GAIN=g.stores_gain,
        FEEDBACK=g.feedback,
        SELECTIVE=layout.selective,
        ACTIVATION=layout.activation,
        INPUT_SCALE=g.options.input_scale,
        FULL=g.options.eigenvalues == "full",
        DAMPING=g.rule.damping,
        EXACT=block_n == g.n,
        UNROLL=UNROLL,
        FAST=g.dtype == torch.float32 and not interpreter_is_on(),
        ACC=g.accumulator,
        num_warps=max(1, min(8, g.block_d * block_n // TILE)),
    )


def finish(it: "FusedIteration") -> None:
    """Jacobi: the local solve of all tokens that still move, defect, scale and pivot."""
    g, i = it.geometry, it.inputs
    layout = g.options.layout
    assert layout is not None
    finish_kernel[(g.b * g.t,)](
        *(i.x, i.raw, it.fed_back, it.BC, it.gain, it.y, it.kept),
        *(it.y_next, it.parts, it.pivots),
        *(g.b, g.t, g.x_stride, g.raw_stride, g.r, g.d, g.n),
        EXACT=triton.next_power_of_2(g.n) == g.n,
        ACTIVATION=layout.activation,
        INPUT_SCALE=g.options.input_scale,
        **g.token_constants,
        num_warps=_finish_warps(g.d),
    )


def _finish_warps(d: int) -> int:
    """Eight channels a thread."""
    return int(min(8, max(1, triton.next_power_of_2(d) // 256)))


def decide(it: "FusedIteration", *, count: bool) -> None:
    """Defect, scale, converged prefix and failure of every sample."""
    g = it.geometry
    block_p = triton.next_power_of_2(g.parts)
    block_t = min(triton.next_power_of_2(g.t), max(SMALLEST_DECIDE, DECIDE_TILE // block_p))
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
    block_d = triton.next_power_of_2(g.d)
    settle_kernel[(g.b * g.t,)](
        *(it.y, y_next, it.normed, it.counters, g.b, g.t, g.d),
        BLOCK_D=block_d,
        FEEDBACK=g.feedback,
        NORM=eps is not None,
        NORM_EPS=0.0 if eps is None else eps,
        num_warps=int(min(8, max(1, block_d // 256))),
    )
