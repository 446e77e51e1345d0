"""The first pass of a scan whose sequence is cut into segments.

Where batch and channels alone do not make enough programs, the sequence is cut. `segment_kernel`
computes, for all segments in parallel, the product of a segment's decays and its last memory from a
memory of zeros; `carry_kernel` composes them from segment to segment into the memory at the start
of each, from which the kernel proper works on all segments in parallel. The adjoint recurrence is
cut in the same way, backward in time.
Letters: b batch, t time, d channels, n state per channel, s segments, H heads of b/H samples each
(kernels/heads.py).
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_decay
from bedouin.kernels.scan.triton_tokens import (
    build_step,
    load_columns,
    load_exponent,
    load_scan_rows,
    split_columns,
    write,
)


@triton.jit(do_not_specialize=["T", "segment_tokens", "zero", "head_samples"])
def segment_kernel(
    value_ptr,  # (b, t, d), x or the cotangent of y
    delta_ptr,  # (b, t, d)
    A_ptr,  # (H, n, d)
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
    head_samples,  # b/H
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
    HEADS: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Product of a segment's decays, and from zeros h after it or, reversed, g before it."""
    blocks = tl.cdiv(d, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    block, segment, batch = program % blocks, program // blocks, program // blocks
    # No segment follows the last one (or, reversed, the first), so that none works on it.
    segment = segment % (segments - 1) + (1 if REVERSE else 0)
    batch = batch // (segments - 1)
    channel = block.to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    state = tl.arange(0, BLOCK_N)
    in_cell = (state < n)[:, None] & (channel < d)[None, :]
    # As in `forward_kernel`.
    lanes = state[:, None] * d + channel[None, :] + zero
    if HEADS:
        A_ptr += batch // head_samples * (d * n)
    A_log2 = load_exponent(A_ptr + lanes, in_cell)
    local = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    product = tl.full((BLOCK_N, BLOCK_D), 1.0, dtype=tl.float32)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
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
    values = load_scan_rows(value_ptr, value_stride_t, count, channel, d)
    deltas = load_scan_rows(delta_ptr, delta_stride_t, count, channel, d)
    vectors = load_columns(vector_ptr, vector_stride_t, count, state, n)
    for done in range(0, count, 4):
        value_4, delta_4 = values, deltas
        vector_4 = split_columns(vectors.to(tl.float32), BLOCK_N)
        value_ptr += tl.cast(value_stride_t, tl.int64) * 4
        delta_ptr += tl.cast(delta_stride_t, tl.int64) * 4
        vector_ptr += tl.cast(vector_stride_t, tl.int64) * 4
        left = count - done - 4
        values = load_scan_rows(value_ptr, value_stride_t, left, channel, d)
        deltas = load_scan_rows(delta_ptr, delta_stride_t, left, channel, d)
        vectors = load_columns(vector_ptr, vector_stride_t, left, state, n)
        for i in tl.static_range(4):
            value, delta, vector = value_4[i].to(tl.float32), delta_4[i].to(tl.float32), vector_4[i]
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
def carry_kernel(
    entry_ptr,  # (b, size), h0 or the cotangent of the last h
    product_ptr,  # (b, s, size)
    local_ptr,  # (b, s, size)
    carried_ptr,  # (b, s, size), what enters each segment
    size,
    segments,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(size, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    cell = (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    mask = cell < size
    carried = tl.load(entry_ptr + batch * size + cell, mask=mask, other=0.0).to(tl.float32)
    for i in range(segments):
        segment = segments - 1 - i if REVERSE else i
        at = (batch * segments + segment) * size + cell
        tl.store(carried_ptr + at, carried, mask=mask)
        follows = cell < tl.where(i + 1 < segments, size, 0)
        product = tl.load(product_ptr + at, mask=follows, other=0.0)
        carried = product * carried + tl.load(local_ptr + at, mask=follows, other=0.0)
