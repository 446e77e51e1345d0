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
from bedouin.kernels.iteration.triton_group import step_kernel
from bedouin.kernels.iteration.triton_kernels import (
    decide_kernel,
    finish_kernel,
    mix_kernel,
    restore_kernel,
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
RESTORERS = 4
"""Programs a sample that undo the moves of tokens that have just frozen, without feedback."""
FEWEST_GROUPED, GROUPED_A_PROCESSOR = 256, 4
"""Programs from which on a step is one launch, and how many of them a multiprocessor runs."""
GROUP_CHANNELS, GROUP_TOKENS, GROUP_REGISTERS = 128, 16, 128
"""Channels of such a program, a thread each, tokens at a time, registers a thread."""
GROUP_STATES, GROUP_REFLECTIONS = 16, 4
"""Sizes up to which the registers suffice."""
SMALLEST_PRODUCT = 32
"""Fewest channels of a program whose inner products are matrix products."""


@dataclass(frozen=True)
class Group:
    """How the samples are spread over groups of programs when a step is one launch."""

    groups: int
    blocks: int  # programs of a group
    block_d: int

    @staticmethod
    def of(inputs: "IterationInputs", options: SweepOptions) -> "Group | None":
        """None: in several launches."""
        (b, _, d), n, layout = inputs.x.shape, inputs.A.shape[0], options.layout
        assert layout is not None
        block_d = min(GROUP_CHANNELS, triton.next_power_of_2(d))
        blocks = triton.cdiv(d, block_d)
        together = _together(inputs.x.device)
        if n > GROUP_STATES or layout.num_householder > GROUP_REFLECTIONS:
            return None
        if inputs.A.dtype == torch.float64 and not interpreter_is_on():
            return None
        if b * blocks < FEWEST_GROUPED or blocks > together:
            return None
        return Group(min(b, together // blocks), blocks, block_d)

    def sums(self, y: Tensor, k: int, *, jacobi: bool) -> Tensor:
        """Where a group adds up inner products: two exchanges of every sample."""
        return y.new_zeros(y.shape[0], 2, self.blocks, (2 if jacobi else 1) * _sums_size(k))

    def work(self, y: Tensor, n: int, k: int) -> Tensor:
        """The workspaces of the programs."""
        size = 3 * self.block_d + 2 * triton.next_power_of_2(n) + k * (k + 1) // 2 + 2 * k
        programs = self.groups * self.blocks
        return y.new_empty(programs, size * GROUP_TOKENS + 2 * _sums_size(k))


def _sums_size(k: int) -> int:
    """Inner products of the tokens that a program takes at a time."""
    rows: int = triton.next_power_of_2(k)
    return rows * (rows + 1) * GROUP_TOKENS


def _together(device: torch.device) -> int:
    """Programs of a step in one launch that run at the same time."""
    if interpreter_is_on():
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return int(processors) * GROUPED_A_PROCESSOR


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
    group: Group | None

    @staticmethod
    def of(inputs: "IterationInputs", options: SweepOptions, rule: "IterationRule") -> "Geometry":
        """From x, raw and A (n, d) as the kernels get them."""
        (b, t, d), n = inputs.x.shape, inputs.A.shape[0]
        strides = inputs.x.stride(1), inputs.raw.stride(1), inputs.raw.shape[-1]
        group = Group.of(inputs, options)
        block = _scan_block(b, d, n) if group is None else group.block_d
        feedback, dtype = inputs.W_y is not None, inputs.A.dtype
        return Geometry(b, t, d, n, *strides, block, rule, options, feedback, dtype, group)

    @property
    def k(self) -> int:
        assert self.options.layout is not None
        return self.options.layout.num_householder

    @property
    def fast(self) -> bool:
        """Whether the instructions of the device stand for exp2 and the reciprocal."""
        return self.dtype == torch.float32 and not interpreter_is_on()

    @property
    def jacobi(self) -> bool:
        return self.rule.method == "jacobi"

    @property
    def stores_gain(self) -> bool:
        """Whether the scan leaves sigma, which needs all decays, to the local solve."""
        coupled = self.options.input_scale == "one_minus_decay"
        return self.jacobi and coupled and self.group is None

    @property
    def parts(self) -> int:
        """Parts in which defect and scale of a token are found."""
        one = self.jacobi and self.group is None
        parts: int = 1 if one else triton.cdiv(self.d, self.block_d)
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
    def step_constants(self) -> dict[str, Any]:
        """Of a step in one launch."""
        constants, layout = self.token_constants, self.options.layout
        assert layout is not None
        changes = {
            "BLOCK_D": self.block_d,
            # four channels a thread in all tiles: with another number here and there the compiler
            # would compute what they share twice
            "ALIGN": math.gcd(4, constants["ALIGN"], self.x_stride),
            "ACTIVATION": layout.activation,
            "INPUT_SCALE": self.options.input_scale,
            "FULL": self.options.eigenvalues == "full",
        }
        return constants | changes

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


def step(it: "FusedIteration") -> None:
    """The next iterate and the parts of defect and scale, for Jacobi the pivots, in one launch."""
    g, i, layout = it.geometry, it.inputs, it.geometry.options.layout
    assert layout is not None and g.group is not None and it.sums is not None
    assert it.work is not None
    device: dict[str, Any] = {"launch_cooperative_grid": True, "maxnreg": GROUP_REGISTERS}
    step_kernel[(g.group.groups * g.group.blocks,)](
        *(i.x, i.raw, it.fed_back, i.A, i.h0, it.y, it.kept, it.y_next, it.parts, it.pivots),
        *(it.counters[-1], it.sums, it.work),
        *(g.b, g.t, g.group.groups, 0, g.x_stride, g.raw_stride, g.r, g.d, g.n),
        **g.step_constants,
        K_ROWS=triton.next_power_of_2(g.k),
        TOKENS=GROUP_TOKENS,
        UNROLL=UNROLL,
        PARTS=triton.next_power_of_2(g.group.blocks),
        SUMS=it.sums.shape[-1],
        WORK=it.work.shape[-1],
        PIECES=_pieces(i.raw.dtype, feedback=g.feedback, width=g.block_d),
        JACOBI=g.jacobi,
        DAMPING=g.rule.damping,
        FAST=g.fast,
        COMPILED=not interpreter_is_on(),
        num_warps=max(1, g.group.block_d // 32),
        **({} if interpreter_is_on() else device),
    )


def _pieces(dtype: torch.dtype, *, feedback: bool, width: int) -> int:
    """Into how many numbers of bfloat16 the products take a u apart; 0: they are sums instead."""
    if dtype not in (torch.bfloat16, torch.float16) or width < SMALLEST_PRODUCT:
        return 0
    return 2 if feedback or dtype == torch.float16 else 1


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
        FAST=g.fast,
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
        FAST=g.fast,
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
    warps = int(min(8, max(1, block_d // 256)))
    if not g.feedback:
        programs = min(g.t, RESTORERS)
        restore_kernel[(g.b * programs,)](
            *(it.y, y_next, it.counters, g.b, g.t, programs, g.d),
            BLOCK_D=block_d,
            num_warps=warps,
        )
        return
    settle_kernel[(g.b * g.t,)](
        *(it.y, y_next, it.normed, it.counters, g.b, g.t, g.d),
        BLOCK_D=block_d,
        NORM=eps is not None,
        NORM_EPS=0.0 if eps is None else eps,
        num_warps=warps,
    )
