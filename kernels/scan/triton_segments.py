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

from bedouin.kernels.scan.options import ScanOptions

PROGRAMS = 1024
"""Programs wanted in one launch; with fewer the sequence is cut, in the forward after blocks have
become smaller. The backward's blocks stay: each writes a part of the cotangents of B and C."""
SEGMENT = 64
"""Fewest tokens in a segment: a cut scan reads its operands once more and writes its starts."""
WARP = 512
"""Elements (channels times states) of one warp: 16 in each thread."""
FORWARD_BLOCK, BACKWARD_BLOCK = WARP, 2 * WARP
"""Elements of one program: one warp sums over states without a barrier."""


LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def load_row(pointer, batch, t, stride_b, stride_t, offsets, end):
    """Entries `offsets` of token t; 0 from `end` on. Not converted, which would wait for them."""
    row = pointer + batch * stride_b + t * stride_t + offsets
    return tl.load(row, mask=offsets < end, other=0.0)


@triton.jit
def load_exponent(pointers, mask, ACC: tl.constexpr):
    """A log2(e): exp2 is the instruction of the device, exp costs four more."""
    return tl.load(pointers, mask=mask, other=0.0).to(ACC) * LOG2E


@triton.jit
def build_decay(delta, A_log2, FULL: tl.constexpr):
    """lambda (block, n); a token past the end has delta = 0, so lambda = 1 and s = 0."""
    decay = tl.exp2(delta[:, None] * A_log2)
    if FULL:
        decay = 2 * decay - 1
    return decay


@triton.jit
def build_scale(delta, decay, INPUT_SCALE: tl.constexpr):
    """s: (block, n) for the coupled scale, else (block, 1)."""
    if INPUT_SCALE == "one_minus_decay":
        s = 1 - tl.abs(decay)
    elif INPUT_SCALE == "bounded_delta":
        s = (delta / (1 + delta))[:, None]
    else:
        s = delta[:, None]
    return s


@triton.jit
def _segment_kernel(
    value_ptr,  # (b, t, d), x or the cotangent of y
    delta_ptr,  # (b, t, d)
    A_ptr,  # (d, n)
    vector_ptr,  # (b, t, n), B or C
    product_ptr,  # (b, s, d, n)
    local_ptr,  # (b, s, d, n)
    T,
    d,
    n,
    segments,
    segment_tokens,
    value_stride_b,
    value_stride_t,
    delta_stride_b,
    delta_stride_t,
    vector_stride_b,
    vector_stride_t,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
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
    # Offsets inside one (d, n) fit into 32 bits, which saves registers; bases are 64 bits wide.
    channel = block.to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    state = tl.arange(0, BLOCK_N)
    in_d, in_n = channel < d, state < n
    cell, in_cell = channel[:, None] * n + state[None, :], in_d[:, None] & in_n[None, :]

    A_log2 = load_exponent(A_ptr + cell, in_cell, ACC)
    local = tl.zeros((BLOCK_D, BLOCK_N), dtype=ACC)
    product = tl.full((BLOCK_D, BLOCK_N), 1.0, dtype=ACC)
    total = tl.zeros((BLOCK_D,), dtype=ACC)
    first = segment * segment_tokens
    last = tl.minimum(first + segment_tokens, T)
    # The next token, then the one after it: from the first forward, or from the last backward.
    step = -1 if REVERSE else 1
    t = last - 1 if REVERSE else first
    value_0 = load_row(value_ptr, batch, t, value_stride_b, value_stride_t, channel, d)
    delta_0 = load_row(delta_ptr, batch, t, delta_stride_b, delta_stride_t, channel, d)
    vector_0 = load_row(vector_ptr, batch, t, vector_stride_b, vector_stride_t, state, n)
    t += step
    end = tl.where((t >= first) & (t < last), d, 0)
    value_1 = load_row(value_ptr, batch, t, value_stride_b, value_stride_t, channel, end)
    delta_1 = load_row(delta_ptr, batch, t, delta_stride_b, delta_stride_t, channel, end)
    for _ in range(last - first):
        value, delta, vector = value_0.to(ACC), delta_0.to(ACC), vector_0.to(ACC)
        value_0, delta_0 = value_1, delta_1
        end_n = tl.where((t >= first) & (t < last), n, 0)
        vector_0 = load_row(vector_ptr, batch, t, vector_stride_b, vector_stride_t, state, end_n)
        t += step
        end = tl.where((t >= first) & (t < last), d, 0)
        value_1 = load_row(value_ptr, batch, t, value_stride_b, value_stride_t, channel, end)
        delta_1 = load_row(delta_ptr, batch, t, delta_stride_b, delta_stride_t, channel, end)

        decay = build_decay(delta, A_log2, FULL)
        if REVERSE:
            local = decay * (local + value[:, None] * vector[None, :])
        else:
            scaled = build_scale(delta, decay, INPUT_SCALE) * value[:, None]
            local = decay * local + scaled * vector[None, :]
        if FULL:
            product *= decay
        else:
            total += delta
    if not FULL:
        product = build_decay(total, A_log2, FULL)
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
        blocks: int = triton.cdiv(self.d, self.block_d)
        return blocks

    @property
    def programs(self) -> int:
        return self.b * self.segments * self.channel_blocks

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.t, self.d, self.n, self.segments, self.segment_chunks

    @property
    def blocks(self) -> dict[str, int]:
        warps = max(1, min(8, self.block_d * self.block_n // WARP))
        return {"BLOCK_D": self.block_d, "BLOCK_N": self.block_n, "num_warps": warps}


def plan(x: Tensor, n: int, chunk: int, *, reverse: bool) -> Plan:
    """Blocks of channels with all their states, and segments of whole chunks."""
    b, t, d = x.shape
    block_n = triton.next_power_of_2(n)
    block = BACKWARD_BLOCK if reverse else FORWARD_BLOCK
    block_d = min(max(1, block // block_n), triton.next_power_of_2(d))
    smallest = block_d if reverse else max(1, block_d // 4)
    while block_d > smallest and b * triton.cdiv(d, block_d) < PROGRAMS:
        block_d //= 2
    wanted = triton.cdiv(PROGRAMS, b * triton.cdiv(d, block_d))
    segments = max(1, min(wanted, t // SEGMENT))
    segment_chunks = triton.cdiv(triton.cdiv(t, segments), chunk)
    segments = triton.cdiv(t, segment_chunks * chunk)
    return Plan(b, t, d, n, block_d, block_n, segments, segment_chunks)


def rows(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands, copied only where their last axis is scattered."""
    return tuple(v if v.stride(-1) == 1 else v.contiguous() for v in operands)


def strides(*operands: Tensor) -> tuple[int, ...]:
    """Strides of the batch and time axes of each operand."""
    return tuple(v.stride(axis) for v in operands for axis in (0, 1))


def enter_segments(
    value: Tensor,  # (b, t, d), x or the cotangent of y
    delta: Tensor,  # (b, t, d)
    A: Tensor,  # (d, n)
    vector: Tensor,  # (b, t, n), B or C
    entry: Tensor,  # (b, d, n), h0 or the cotangent of the last h
    layout: Plan,
    chunk: int,
    options: ScanOptions,
    *,
    reverse: bool,
) -> Tensor:
    """What enters each segment (b, s, d, n): h from its left or, reversed, g from its right."""
    if layout.segments == 1:
        return entry.unsqueeze(1)
    shape = (layout.b, layout.segments, layout.d, layout.n)
    product: Tensor
    local: Tensor
    carried: Tensor
    product, local, carried = value.new_empty(3, *shape, dtype=options.accumulator)
    _segment_kernel[(layout.programs // layout.segments * (layout.segments - 1),)](
        *(value, delta, A, vector, product, local),
        *layout.sizes[:-1],
        layout.segment_chunks * chunk,
        *strides(value, delta, vector),
        **flags(options),
        REVERSE=reverse,
        **layout.blocks,
    )
    size = layout.d * layout.n
    _carry_kernel[(layout.b * triton.cdiv(size, WARP),)](
        *(entry, product, local, carried, size, layout.segments),
        REVERSE=reverse,
        ACC=flags(options)["ACC"],
        BLOCK=WARP,
        num_warps=1,
    )
    return carried
