"""Launches of the scan: how it is spread over programs, and the passes of both directions.

Letters: b batch, t time, d channels, n state per channel, s segments (triton_segments.py), H heads
of b/H samples each (kernels/heads.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.heads import count_heads
from bedouin.kernels.launch import (
    ceil_div,
    last_axis_contiguous,
    next_power_of_two,
)
from bedouin.kernels.scan.triton_backward import backward_kernel
from bedouin.kernels.scan.triton_forward import forward_kernel
from bedouin.kernels.scan.triton_segments import carry_kernel, segment_kernel
from bedouin.kernels.scan.types import SCAN_CHUNK, ScanOperands, ScanOptions

MOST_WARPS = 8
BACKWARD_CHANNELS = 16
"""Fewest channels of a backward program, as far as MOST_WARPS hold their states: each block of
channels has its own part of the gradients of B and C, (b, t, n) each."""
LANES = 32
"""Most channels of a forward program, one warp: with up to 16 states a thread holds all states of
one channel, and neither a sum over states nor a row of x crosses threads."""
FORWARD_PROGRAMS = 512
"""Programs wanted in a forward launch, one for each scheduler of an H100; with fewer the blocks are
halved, once, and then the sequence is cut."""
UNCUT_PROGRAMS, BACKWARD_PROGRAMS = 1024, 4096
"""The backward takes blocks of two warps where these make that many programs (on an H100, bf16,
d 1024, n 16, b x t = 64 x 256: 1.14 ms, against 1.18 with one warp and 1.31 with four). Elsewhere
one warp, cut until there are BACKWARD_PROGRAMS or the segments are at their shortest (16 x 1024 in
4 and 16 segments: 1.15 and 1.13 ms, 64 channels in 4: 1.20; 8 x 4096 in 16: 2.29 and 2.30)."""


WARP = 512
"""Elements (channels times states) of one warp, 16 in each thread."""
SEGMENT = 64
"""Fewest tokens in a segment: a cut scan reads its operands once more and writes its starts."""
BACKWARD_SEGMENT = 256
"""The same of the backward, whose programs each have a workspace of SCAN_CHUNK tokens: a sixteenth
of what all states would take."""


@dataclass(frozen=True)
class ScanPlan:
    """How one scan is spread over programs: blocks of channels, and segments of whole chunks."""

    b: int
    t: int
    d: int
    n: int
    heads: int
    block_d: int
    block_n: int
    segments: int
    segment_chunks: int

    @property
    def channel_blocks(self) -> int:
        return ceil_div(self.d, self.block_d)

    @property
    def programs(self) -> int:
        return self.b * self.segments * self.channel_blocks

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.t, self.d, self.n, self.segments, self.segment_chunks

    @property
    def head_samples(self) -> int:
        return self.b // self.heads

    @property
    def blocks(self) -> dict[str, int]:
        warps = max(1, min(MOST_WARPS, self.block_d * self.block_n // WARP))
        return {"BLOCK_D": self.block_d, "BLOCK_N": self.block_n, "num_warps": warps}


def plan_scan(
    x: Tensor,  # (b, t, d)
    n: int,
    *,
    reverse: bool,
    heads: int = 1,
) -> ScanPlan:
    """The plan of the forward kernel or, with `reverse`, of the backward kernel, for segments of
    whole chunks."""
    b, t, d = x.shape
    block_n = next_power_of_two(n)

    def programs(block_d: int) -> int:
        return b * ceil_div(d, block_d)

    if reverse:
        shortest, wanted = BACKWARD_SEGMENT, 0
        block_d = _backward_block(d, block_n, 2)
        if programs(block_d) < UNCUT_PROGRAMS:
            wanted, block_d = BACKWARD_PROGRAMS, _backward_block(d, block_n, 1)
    else:
        shortest, wanted = SEGMENT, FORWARD_PROGRAMS
        block_d = _forward_block(d, block_n)
        if programs(block_d) < wanted:
            block_d = max(1, block_d // 2)
    segments = max(1, min(ceil_div(wanted, programs(block_d)), t // shortest))
    segment_chunks = ceil_div(ceil_div(t, segments), SCAN_CHUNK)
    segments = ceil_div(t, segment_chunks * SCAN_CHUNK)
    return ScanPlan(b, t, d, n, heads, block_d, block_n, segments, segment_chunks)


def _forward_block(d: int, block_n: int) -> int:
    """Channels of one warp."""
    return min(max(1, WARP // block_n), LANES, next_power_of_two(d))


def _backward_block(d: int, block_n: int, warps: int) -> int:
    """Channels of `warps` warps, or more where BACKWARD_CHANNELS requires it."""
    least = min(BACKWARD_CHANNELS, MOST_WARPS * WARP // block_n)
    return min(max(1, warps * WARP // block_n, least), next_power_of_two(d))


def scan_forward(
    operands: ScanOperands, options: ScanOptions, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y (b, t, d), the last h (b, d, n), and h before each chunk (b, ceil(t / SCAN_CHUNK), d, n),
    which `scan_backward` needs; without `keep` of no chunk. No size may be 0."""
    A, h0, D = operands.A, operands.h0, operands.D
    x, delta, B, C = map(last_axis_contiguous, (operands.x, operands.delta, operands.B, operands.C))
    by_state, skip = A.mT.contiguous(), A if D is None else D.contiguous()
    plan = plan_scan(x, A.shape[-1], reverse=False, heads=count_heads(A))
    start = _enter_segments((x, delta, by_state, B, h0.mT.contiguous()), plan, options)
    chunks = ceil_div(x.shape[1], SCAN_CHUNK) if keep else 0
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty(h0.shape, dtype=h0.dtype, device=h0.device)
    kept = x.new_empty(x.shape[0], chunks, *A.shape[-2:], dtype=torch.float32)
    forward_kernel[(plan.programs,)](
        *(x, delta, by_state, B, C, start, skip, y, h, kept),
        *(*plan.sizes, 0),
        *_strides(x, delta, B, C),
        plan.head_samples,
        **_flags(options),
        EXCLUSIVE=options.exclusive,
        HEADS=plan.heads > 1,
        HAS_D=D is not None,
        KEEP=keep,
        CHUNK=SCAN_CHUNK,
        **plan.blocks,
    )
    return y, h, kept


def scan_backward(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    kept: Tensor,  # (b, ceil(t / SCAN_CHUNK), d, n), as `scan_forward` returns it
    operands: ScanOperands,
    options: ScanOptions,
) -> tuple[Tensor, ...]:
    """The cotangents of the operands, each in the shape and dtype of its operand, that of D empty
    without D: the adjoint of the scan, from the last token to the first. No size may be 0."""
    h0, D = operands.h0, operands.D
    grad_y, x, delta, B, C = map(
        last_axis_contiguous, (grad_y, operands.x, operands.delta, operands.B, operands.C)
    )
    A, grad_h = operands.A.contiguous(), grad_h.contiguous()
    skip = A if D is None else D.contiguous()
    plan = plan_scan(x, A.shape[-1], reverse=True, heads=count_heads(A))
    by_state = A.mT.contiguous() if plan.segments > 1 else A
    end = _enter_segments((grad_y, delta, by_state, C, grad_h), plan, options, reverse=True)
    (b, t, d), n, block = x.shape, A.shape[-1], plan.block_d * plan.block_n
    work = x.new_empty(plan.programs, SCAN_CHUNK, block, dtype=torch.float32)
    grad_x, grad_delta = (x.new_empty(x.shape, dtype=v.dtype) for v in (x, delta))
    grad_A = A.new_empty(b, plan.segments, d, n, dtype=torch.float32)
    grad_BC = x.new_empty(2, b, t, plan.channel_blocks, n, dtype=torch.float32)
    grad_h0 = torch.empty(h0.shape, dtype=h0.dtype, device=h0.device)
    grad_D = A.new_empty(b, plan.segments, d if D is not None else 0, dtype=torch.float32)
    backward_kernel[(plan.programs,)](
        *(grad_y, end, x, delta, A, B, C, skip, kept, work),
        *(grad_x, grad_delta, grad_A, *grad_BC, grad_h0, grad_D),
        *plan.sizes,
        *_strides(grad_y, x, delta, B, C),
        plan.head_samples,
        **_flags(options),
        EXCLUSIVE=options.exclusive,
        HEADS=plan.heads > 1,
        HAS_D=D is not None,
        CHUNK=SCAN_CHUNK,
        **plan.blocks,
    )
    summed_A = _sum_samples(grad_A, A)
    # One reduction for both. They are copied even without a cast, or they would share its memory.
    summed_B, summed_C = grad_BC.sum(3)
    summed_B, summed_C = summed_B.to(B.dtype, copy=True), summed_C.to(C.dtype, copy=True)
    summed_D = A.new_empty(0) if D is None else _sum_samples(grad_D, D)
    return grad_x, grad_delta, summed_A, summed_B, summed_C, grad_h0, summed_D


def _sum_samples(
    parts: Tensor,  # (b, s, ...)
    operand: Tensor,  # (...) or (H, ...)
) -> Tensor:  # as the operand
    """A gradient from its parts of samples and segments, of each head by itself."""
    if operand.dim() < parts.dim() - 1:
        summed = parts.sum((0, 1))
    else:
        summed = parts.unflatten(0, (len(operand), -1)).sum((1, 2))
    return summed.to(operand.dtype)


def _enter_segments(
    # value (b, t, d): x or the cotangent of y; delta (b, t, d); A (n, d) or (H, n, d), read if
    # there are several segments; vector (b, t, n): B or C; entry: h0 (b, n, d) or the cotangent of
    # the last h (b, d, n)
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    plan: ScanPlan,
    options: ScanOptions,
    *,
    reverse: bool = False,
) -> Tensor:
    """What enters each segment: h (b, s, n, d) from its left or, reversed, g (b, s, d, n)."""
    value, delta, A, vector, entry = operands
    if plan.segments == 1:
        return entry.unsqueeze(1)
    shape = (plan.b, plan.segments, *entry.shape[1:])
    product, local, carried = value.new_empty(3, *shape, dtype=torch.float32)
    block_d = _forward_block(plan.d, plan.block_n)
    blocks = ceil_div(plan.d, block_d)
    segment_kernel[(plan.b * blocks * (plan.segments - 1),)](
        *(value, delta, A, vector, product, local),
        *(*plan.sizes[:-1], plan.segment_chunks * SCAN_CHUNK, 0),
        *_strides(value, delta, vector),
        plan.head_samples,
        **_flags(options),
        HEADS=plan.heads > 1,
        REVERSE=reverse,
        BLOCK_D=block_d,
        BLOCK_N=plan.block_n,
        num_warps=1,
    )
    size = plan.d * plan.n
    carry_kernel[(plan.b * ceil_div(size, WARP),)](
        *(entry, product, local, carried, size, plan.segments),
        REVERSE=reverse,
        BLOCK=WARP,
        num_warps=1,
    )
    entered: Tensor = carried
    return entered


def _strides(*operands: Tensor) -> tuple[int, ...]:
    """Strides of the batch and time axes of each operand (b, t, ...)."""
    return tuple(v.stride(axis) for v in operands for axis in (0, 1))


def _flags(options: ScanOptions) -> dict[str, Any]:
    """The options of a scan as keyword arguments of a kernel."""
    return {
        "INPUT_SCALE": options.input_scale,
        "FULL": options.eigenvalues == "full",
        "FAST": not interpreter_is_on(),
    }
