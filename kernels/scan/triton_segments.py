"""What the scan's kernels share, and the first pass of a scan that is cut into segments.

Where batch and channels alone cannot fill the chip, the sequence is cut: every segment's total
decay and what it makes of zero (in parallel), a walk over the segments, and then the kernel proper,
which finds the right start of each segment. The adjoint is cut in the same way, backward in time.
Letters: b batch, t time, d channels, n state per channel, s segments.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.device.discretize import build_coupled, build_decay, input_scale
from bedouin.kernels.device.elementary import LOG2E
from bedouin.kernels.launch import ceil_div, next_power_of_two
from bedouin.kernels.scan.options import ScanOptions

SEGMENT = 64
"""Fewest tokens in a segment: a cut scan reads its operands once more and writes its starts."""
BACKWARD_SEGMENT = 256
"""Fewest tokens in a segment of the backward, whose programs each have a workspace of 16: a
sixteenth of what all states would take."""
WARP = 512
"""Elements (channels times states) of one warp: 16 in each thread."""
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


@triton.jit
def load_row(pointer, batch, t, stride_b, stride_t, offsets, end):
    """Entries `offsets` of token t; 0 from `end` on. Not converted, which would wait for them."""
    row = pointer + batch * stride_b + t * stride_t + offsets
    return tl.load(row, mask=offsets < end, other=0.0)


@triton.jit
def load_rows(pointer, stride, left, channel, d):
    """x or delta of four tokens, the first at `pointer`; 0 where fewer than four are left.

    A token of zeros leaves the memory as it is.
    """
    rows = ()
    for i in tl.static_range(4):
        end = tl.where(i < left, d, 0)
        row = tl.load(pointer + i * stride + channel, mask=channel < end, other=0.0)
        rows = rows + (row,)  # type: ignore[assignment]
    return rows


@triton.jit
def load_columns(pointer, stride, left, state, n):
    """B or C of four tokens (n, 4), the first at `pointer`; 0 where fewer than four are left."""
    token = tl.arange(0, 4)
    mask = (state < n)[:, None] & (token < left)[None, :]
    return tl.load(pointer + state[:, None] + token[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def split_columns(tile, BLOCK_N: tl.constexpr):
    """The columns of (n, 4): every thread gets its states of four tokens in one exchange."""
    even, odd = tl.split(tl.reshape(tile, (BLOCK_N, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_exponent(pointers, mask, ACC: tl.constexpr):
    """A log2(e): exp2 is the instruction of the device, exp costs four more."""
    return tl.load(pointers, mask=mask, other=0.0).to(ACC) * LOG2E


@triton.jit
def build_step(A_log2, delta, INPUT_SCALE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr):
    """lambda (n, d) of one token, and s, (n, d) if coupled, else (d,)."""
    if INPUT_SCALE == "one_minus_decay":
        return build_coupled(A_log2 * delta[None, :], FULL, FAST)
    else:
        decay = build_decay(A_log2 * delta[None, :], FULL, FAST)
        return decay, input_scale(delta, INPUT_SCALE)


@triton.jit
def write(x, s, B, INPUT_SCALE: tl.constexpr):
    """s x B^T (n, d) of one token."""
    if INPUT_SCALE == "one_minus_decay":
        written = s * (x[None, :] * B[:, None])
    else:
        written = (s * x)[None, :] * B[:, None]
    return written


@triton.jit(do_not_specialize=["T", "segment_tokens", "zero"])
def _segment_kernel(
    value_ptr,  # (b, t, d), x or the cotangent of y
    delta_ptr,  # (b, t, d)
    A_ptr,  # (n, d)
    vector_ptr,  # (b, t, n), B or C
    product_ptr,  # (b, s, n, d) or, reversed, (b, s, d, n), as the kernel proper reads its starts
    local_ptr,  # the same
    T,
    d,
    n,
    segments,
    segment_tokens,
    zero,
    value_stride_b,
    value_stride_t,
    delta_stride_b,
    delta_stride_t,
    vector_stride_b,
    vector_stride_t,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
    REVERSE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Total decay of a segment, and what it makes of zero: h at its end, or g before its start."""
    blocks = tl.cdiv(d, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    block, segment, batch = program % blocks, program // blocks, program // blocks
    # No segment follows the last one (or, reversed, the first), so that none works on it.
    segment = segment % (segments - 1) + (1 if REVERSE else 0)
    batch = batch // (segments - 1)
    channel = block.to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    state = tl.arange(0, BLOCK_N)
    in_cell = (state < n)[:, None] & (channel < d)[None, :]
    # As in `_forward_kernel`.
    lanes = state[:, None] * d + channel[None, :] + zero
    A_log2 = load_exponent(A_ptr + lanes, in_cell, ACC)
    local = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    product = tl.full((BLOCK_N, BLOCK_D), 1.0, dtype=ACC)
    total = tl.zeros((BLOCK_D,), dtype=ACC)
    start = segment * segment_tokens
    count = (tl.minimum(start + segment_tokens, T) - start).to(tl.int32)
    if REVERSE:
        start += count - 1
        value_stride_t, delta_stride_t = -value_stride_t, -delta_stride_t
        vector_stride_t = -vector_stride_t
    step = -1 if REVERSE else 1
    value_ptr += batch * value_stride_b + start * step * value_stride_t
    delta_ptr += batch * delta_stride_b + start * step * delta_stride_t
    vector_ptr += batch * vector_stride_b + start * step * vector_stride_t
    values = load_rows(value_ptr, value_stride_t, count, channel, d)
    deltas = load_rows(delta_ptr, delta_stride_t, count, channel, d)
    vectors = load_columns(vector_ptr, vector_stride_t, count, state, n)
    for done in range(0, count, 4):
        value_4, delta_4 = values, deltas
        vector_4 = split_columns(vectors.to(ACC), BLOCK_N)
        value_ptr += 4 * value_stride_t
        delta_ptr += 4 * delta_stride_t
        vector_ptr += 4 * vector_stride_t
        left = count - done - 4
        values = load_rows(value_ptr, value_stride_t, left, channel, d)
        deltas = load_rows(delta_ptr, delta_stride_t, left, channel, d)
        vectors = load_columns(vector_ptr, vector_stride_t, left, state, n)
        for i in tl.static_range(4):
            value, delta, vector = value_4[i].to(ACC), delta_4[i].to(ACC), vector_4[i]
            if REVERSE:
                decay = build_decay(A_log2 * delta[None, :], FULL, FAST)
                local = decay * (local + value[None, :] * vector[:, None])
            else:
                decay, s = build_step(A_log2, delta, INPUT_SCALE, FULL, FAST)
                local = decay * local + write(value, s, vector, INPUT_SCALE)
            if FULL:
                product *= decay
            else:
                total += delta
    if not FULL:
        product = build_decay(A_log2 * total[None, :], FULL, FAST)
    cell = channel[None, :] * n + state[:, None] if REVERSE else lanes
    out = (batch * segments + segment) * (d * n) + cell
    tl.store(product_ptr + out, product, mask=in_cell)
    tl.store(local_ptr + out, local, mask=in_cell)


@triton.jit
def _carry_kernel(
    entry_ptr,  # (b, size), h0 or the cotangent of the last h
    product_ptr,  # (b, s, size)
    local_ptr,  # (b, s, size)
    carried_ptr,  # (b, s, size), what enters each segment
    size,
    segments,
    REVERSE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(size, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    cell = (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    mask = cell < size
    carried = tl.load(entry_ptr + batch * size + cell, mask=mask, other=0.0).to(ACC)
    for i in range(segments):
        segment = segments - 1 - i if REVERSE else i
        at = (batch * segments + segment) * size + cell
        tl.store(carried_ptr + at, carried, mask=mask)
        follows = cell < tl.where(i + 1 < segments, size, 0)
        product = tl.load(product_ptr + at, mask=follows, other=0.0)
        carried = product * carried + tl.load(local_ptr + at, mask=follows, other=0.0)


def flags(options: ScanOptions) -> dict[str, Any]:
    """The options of a scan as keyword arguments of a kernel."""
    acc = tl.float64 if options.accumulator == torch.float64 else tl.float32
    return {
        "INPUT_SCALE": options.input_scale,
        "FULL": options.eigenvalues == "full",
        "FAST": acc == tl.float32 and not interpreter_is_on(),
        "ACC": acc,
    }


@dataclass(frozen=True)
class Plan:
    """How one scan is spread over programs."""

    b: int
    t: int
    d: int
    n: int
    block_d: int
    block_n: int
    segments: int
    segment_chunks: int

    @property
    def channel_blocks(self) -> int:
        blocks: int = ceil_div(self.d, self.block_d)
        return blocks

    @property
    def programs(self) -> int:
        return self.b * self.segments * self.channel_blocks

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.t, self.d, self.n, self.segments, self.segment_chunks

    @property
    def blocks(self) -> dict[str, int]:
        warps = max(1, min(MOST_WARPS, self.block_d * self.block_n // WARP))
        return {"BLOCK_D": self.block_d, "BLOCK_N": self.block_n, "num_warps": warps}


def plan(x: Tensor, n: int, chunk: int, *, reverse: bool) -> Plan:
    """Blocks of channels with all their states, and segments of whole chunks."""
    b, t, d = x.shape
    block_n = next_power_of_two(n)

    def programs(block_d: int) -> int:
        return b * ceil_div(d, block_d)

    if reverse:
        shortest, wanted, block_d = BACKWARD_SEGMENT, 0, _backward_block(d, block_n, warps=2)
        if programs(block_d) < UNCUT_PROGRAMS:
            wanted, block_d = BACKWARD_PROGRAMS, _backward_block(d, block_n, warps=1)
    else:
        shortest, wanted, block_d = SEGMENT, FORWARD_PROGRAMS, _forward_block(d, block_n)
        if programs(block_d) < wanted:
            block_d = max(1, block_d // 2)
    segments = max(1, min(ceil_div(wanted, programs(block_d)), t // shortest))
    segment_chunks = ceil_div(ceil_div(t, segments), chunk)
    segments = ceil_div(t, segment_chunks * chunk)
    return Plan(b, t, d, n, block_d, block_n, segments, segment_chunks)


def _forward_block(d: int, block_n: int) -> int:
    """Channels of one warp."""
    return min(max(1, WARP // block_n), LANES, next_power_of_two(d))


def _backward_block(d: int, block_n: int, warps: int) -> int:
    """Channels of that many warps, or more for the sake of BACKWARD_CHANNELS."""
    least = min(BACKWARD_CHANNELS, MOST_WARPS * WARP // block_n)
    return min(max(1, warps * WARP // block_n, least), next_power_of_two(d))


def rows(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands, copied only where their last axis is scattered."""
    return tuple(v if v.stride(-1) == 1 else v.contiguous() for v in operands)


def strides(*operands: Tensor) -> tuple[int, ...]:
    """Strides of the batch and time axes of each operand."""
    return tuple(v.stride(axis) for v in operands for axis in (0, 1))


def enter_segments(
    value: Tensor,  # (b, t, d), x or the cotangent of y
    delta: Tensor,  # (b, t, d)
    A: Tensor,  # (n, d), read if there are several segments
    vector: Tensor,  # (b, t, n), B or C
    entry: Tensor,  # (b, n, d), h0, or (b, d, n), the cotangent of the last h
    layout: Plan,
    chunk: int,
    options: ScanOptions,
    *,
    reverse: bool,
) -> Tensor:
    """What enters each segment: h (b, s, n, d) from its left or, reversed, g (b, s, d, n)."""
    if layout.segments == 1:
        return entry.unsqueeze(1)
    shape = (layout.b, layout.segments, *entry.shape[1:])
    product: Tensor
    local: Tensor
    carried: Tensor
    product, local, carried = value.new_empty(3, *shape, dtype=options.accumulator)
    block_d = _forward_block(layout.d, layout.block_n)
    blocks = ceil_div(layout.d, block_d)
    _segment_kernel[(layout.b * blocks * (layout.segments - 1),)](
        *(value, delta, A, vector, product, local),
        *(*layout.sizes[:-1], layout.segment_chunks * chunk, 0),
        *strides(value, delta, vector),
        **flags(options),
        REVERSE=reverse,
        BLOCK_D=block_d,
        BLOCK_N=layout.block_n,
        num_warps=1,
    )
    size = layout.d * layout.n
    _carry_kernel[(layout.b * ceil_div(size, WARP),)](
        *(entry, product, local, carried, size, layout.segments),
        REVERSE=reverse,
        ACC=flags(options)["ACC"],
        BLOCK=WARP,
        num_warps=1,
    )
    return carried
