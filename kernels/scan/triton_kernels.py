"""Diagonal selective scan in Triton: forward kernel, backward kernel, launchers.

One program walks one segment of the sequence for one batch element and one block of channels, with
the memory (block, n) in registers. Memory is kept at every CHUNK-th token; the backward replays
CHUNK tokens at a time into a workspace and walks back over them. No atomics: what is summed over
programs is written in parts and summed by torch, so that results repeat bit for bit.
Letters: b batch, t time, d channels, n state per channel, s segments (triton_segments.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bedouin.kernels.device.discretize import (
    build_coupled,
    build_decay,
    coupled_reach,
    input_scale,
)
from bedouin.kernels.device.elementary import LN2
from bedouin.kernels.launch import ceil_div
from bedouin.kernels.scan.options import CHUNK, Cotangents, ScanOptions
from bedouin.kernels.scan.triton_segments import (
    build_step,
    enter_segments,
    flags,
    load_columns,
    load_exponent,
    load_row,
    load_rows,
    plan,
    rows,
    split_columns,
    strides,
    write,
)


@triton.jit(do_not_specialize=["T", "segment_chunks", "zero"])
def _forward_kernel(
    x_ptr,  # (b, t, d)
    delta_ptr,  # (b, t, d)
    A_ptr,  # (n, d)
    B_ptr,  # (b, t, n)
    C_ptr,  # (b, t, n)
    start_ptr,  # (b, s, n, d), h before each segment
    D_ptr,  # (d,)
    y_ptr,  # (b, t, d)
    end_ptr,  # (b, d, n), h after the last token
    kept_ptr,  # (b, ceil(t / CHUNK), d, n), h before each chunk
    T,
    d,
    n,
    segments,
    segment_chunks,
    zero,
    x_stride_b,
    x_stride_t,
    delta_stride_b,
    delta_stride_t,
    B_stride_b,
    B_stride_t,
    C_stride_b,
    C_stride_t,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    HAS_D: tl.constexpr,
    KEEP: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    blocks = tl.cdiv(d, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    block, segment, batch = program % blocks, program // blocks % segments, program // blocks
    batch = batch // segments
    # Offsets inside one (d, n) fit into 32 bits, which saves registers; bases are 64 bits wide.
    channel = block.to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    state = tl.arange(0, BLOCK_N)
    in_cell = (state < n)[:, None] & (channel < d)[None, :]
    # Neighbours in memory belong to neighbouring threads. `zero`, of which the compiler knows no
    # alignment, keeps it from giving a thread four of them: then a thread would hold few states of
    # several channels, and every sum over states would be an exchange between threads. An unknown
    # stride does not do: Triton 3.6 then spreads the states over threads, 3.9 the channels.
    lanes = state[:, None] * d + channel[None, :] + zero
    cell = state[:, None] + channel[None, :] * n
    size, chunks = d * n, tl.cdiv(T, CHUNK)

    A_log2 = load_exponent(A_ptr + lanes, in_cell, ACC)
    start_ptr += (batch * segments + segment) * size
    h = tl.load(start_ptr + lanes, mask=in_cell, other=0.0).to(ACC)
    if HAS_D:
        D = tl.load(D_ptr + channel, mask=channel < d, other=0.0).to(ACC)
    first = segment * segment_chunks * CHUNK
    count = (tl.minimum(first + segment_chunks * CHUNK, T) - first).to(tl.int32)
    x_ptr += batch * x_stride_b + first * x_stride_t
    delta_ptr += batch * delta_stride_b + first * delta_stride_t
    B_ptr += batch * B_stride_b + first * B_stride_t
    C_ptr += batch * C_stride_b + first * C_stride_t
    y_ptr += (batch * T + first) * d
    kept_ptr += (batch * chunks + segment * segment_chunks) * size
    # Four tokens at a time, while the next four are on their way. One token at a time a warp waits
    # for the exchange of B and C more than it computes.
    xs = load_rows(x_ptr, x_stride_t, count, channel, d)
    deltas = load_rows(delta_ptr, delta_stride_t, count, channel, d)
    Bs = load_columns(B_ptr, B_stride_t, count, state, n)
    Cs = load_columns(C_ptr, C_stride_t, count, state, n)
    for done in range(0, count, 4):
        if KEEP:
            if done % CHUNK == 0:
                tl.store(kept_ptr + cell, h, mask=in_cell)
                kept_ptr += size
        x_4, delta_4 = xs, deltas
        B_4, C_4 = split_columns(Bs.to(ACC), BLOCK_N), split_columns(Cs.to(ACC), BLOCK_N)
        x_ptr += 4 * x_stride_t
        delta_ptr += 4 * delta_stride_t
        B_ptr += 4 * B_stride_t
        C_ptr += 4 * C_stride_t
        left = count - done - 4
        xs = load_rows(x_ptr, x_stride_t, left, channel, d)
        deltas = load_rows(delta_ptr, delta_stride_t, left, channel, d)
        Bs = load_columns(B_ptr, B_stride_t, left, state, n)
        Cs = load_columns(C_ptr, C_stride_t, left, state, n)
        for i in tl.static_range(4):
            x, delta = x_4[i].to(ACC), delta_4[i].to(ACC)
            decay, s = build_step(A_log2, delta, INPUT_SCALE, FULL, FAST)
            h *= decay
            if EXCLUSIVE:
                y = tl.sum(h * C_4[i][:, None], axis=0)
                h += write(x, s, B_4[i], INPUT_SCALE)
            else:
                h += write(x, s, B_4[i], INPUT_SCALE)
                y = tl.sum(h * C_4[i][:, None], axis=0)
            if HAS_D:
                y += D * x
            end = tl.where(done + i < count, d, 0)
            tl.store(y_ptr + channel, y.to(y_ptr.dtype.element_ty), mask=channel < end)
            y_ptr += d
    end = tl.where(segment == segments - 1, d, 0)
    in_cell = (state < n)[:, None] & (channel < end)[None, :]
    tl.store(end_ptr + batch * size + cell, h.to(end_ptr.dtype.element_ty), mask=in_cell)


@triton.jit
def _build_rows(A_log2, delta, INPUT_SCALE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr):
    """lambda (d, n) and s, (d, n) for the coupled scale, else (d, 1)."""
    if INPUT_SCALE == "one_minus_decay":
        return build_coupled(delta[:, None] * A_log2, FULL, FAST)
    else:
        decay = build_decay(delta[:, None] * A_log2, FULL, FAST)
        return decay, input_scale(delta, INPUT_SCALE)[:, None]


@triton.jit
def _backward_kernel(
    grad_y_ptr,  # (b, t, d)
    grad_end_ptr,  # (b, s, d, n), cotangent of h after each segment
    x_ptr,  # (b, t, d)
    delta_ptr,  # (b, t, d)
    A_ptr,  # (d, n)
    B_ptr,  # (b, t, n)
    C_ptr,  # (b, t, n)
    D_ptr,  # (d,)
    kept_ptr,  # (b, ceil(t / CHUNK), d, n)
    work_ptr,  # (programs, CHUNK, BLOCK_D, BLOCK_N)
    grad_x_ptr,  # (b, t, d)
    grad_delta_ptr,  # (b, t, d)
    grad_A_ptr,  # (b, s, d, n)
    grad_B_ptr,  # (b, t, blocks, n)
    grad_C_ptr,  # (b, t, blocks, n)
    grad_h0_ptr,  # (b, d, n)
    grad_D_ptr,  # (b, s, d)
    T,
    d,
    n,
    segments,
    segment_chunks,
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    delta_stride_b,
    delta_stride_t,
    B_stride_b,
    B_stride_t,
    C_stride_b,
    C_stride_t,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    HAS_D: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    blocks = tl.cdiv(d, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    block, segment, batch = program % blocks, program // blocks % segments, program // blocks
    batch = batch // segments
    # Offsets inside one (d, n) fit into 32 bits, which saves registers; bases are 64 bits wide.
    channel = block.to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    state = tl.arange(0, BLOCK_N)
    in_d, in_n = channel < d, state < n
    cell, in_cell = channel[:, None] * n + state[None, :], in_d[:, None] & in_n[None, :]
    size, chunks = d * n, tl.cdiv(T, CHUNK)
    slot = tl.arange(0, BLOCK_D)[:, None] * BLOCK_N + state[None, :]
    slots = work_ptr + program * (CHUNK * BLOCK_D * BLOCK_N) + slot
    own = batch * segments + segment

    A_log2 = load_exponent(A_ptr + cell, in_cell, ACC)
    g = tl.load(grad_end_ptr + own * size + cell, mask=in_cell, other=0.0).to(ACC)
    grad_A = tl.zeros((BLOCK_D, BLOCK_N), dtype=ACC)
    if HAS_D:
        D = tl.load(D_ptr + channel, mask=in_d, other=0.0).to(ACC)
        grad_D = tl.zeros((BLOCK_D,), dtype=ACC)
    first = segment * segment_chunks
    last = tl.minimum(first + segment_chunks, chunks)
    for back in range(last - first):
        chunk = last - 1 - back
        kept = kept_ptr + (batch * chunks + chunk) * size + cell
        h = tl.load(kept, mask=in_cell, other=0.0).to(ACC)
        # The last chunk's walk has read what is overwritten here.
        tl.debug_barrier()
        t = chunk * CHUNK
        x_0 = load_row(x_ptr, batch, t, x_stride_b, x_stride_t, channel, d)
        delta_0 = load_row(delta_ptr, batch, t, delta_stride_b, delta_stride_t, channel, d)
        B_0 = load_row(B_ptr, batch, t, B_stride_b, B_stride_t, state, n)
        end = tl.where(t + 1 < T, d, 0)
        x_1 = load_row(x_ptr, batch, t + 1, x_stride_b, x_stride_t, channel, end)
        delta_1 = load_row(delta_ptr, batch, t + 1, delta_stride_b, delta_stride_t, channel, end)
        for i in range(CHUNK):
            t = chunk * CHUNK + i
            x, delta, B = x_0.to(ACC), delta_0.to(ACC), B_0.to(ACC)
            x_0, delta_0 = x_1, delta_1
            end_d, end_n = tl.where(t + 2 < T, d, 0), tl.where(t + 1 < T, n, 0)
            x_1 = load_row(x_ptr, batch, t + 2, x_stride_b, x_stride_t, channel, end_d)
            delta_1 = load_row(
                delta_ptr, batch, t + 2, delta_stride_b, delta_stride_t, channel, end_d
            )
            B_0 = load_row(B_ptr, batch, t + 1, B_stride_b, B_stride_t, state, end_n)
            tl.store(slots + i * (BLOCK_D * BLOCK_N), h)
            decay, s = _build_rows(A_log2, delta, INPUT_SCALE, FULL, FAST)
            h = decay * h + s * x[:, None] * B[None, :]
        tl.debug_barrier()
        t = chunk * CHUNK + CHUNK - 1
        end_d, end_n = tl.where(t < T, d, 0), tl.where(t < T, n, 0)
        before_0 = tl.load(slots + (CHUNK - 1) * (BLOCK_D * BLOCK_N))
        grad_y_0 = load_row(grad_y_ptr, batch, t, grad_y_stride_b, grad_y_stride_t, channel, end_d)
        x_0 = load_row(x_ptr, batch, t, x_stride_b, x_stride_t, channel, end_d)
        delta_0 = load_row(delta_ptr, batch, t, delta_stride_b, delta_stride_t, channel, end_d)
        B_0 = load_row(B_ptr, batch, t, B_stride_b, B_stride_t, state, end_n)
        C_0 = load_row(C_ptr, batch, t, C_stride_b, C_stride_t, state, end_n)
        for back_i in range(CHUNK):
            i = CHUNK - 1 - back_i
            t = chunk * CHUNK + i
            before, grad_y = before_0, grad_y_0.to(ACC)
            x, delta, B, C = x_0.to(ACC), delta_0.to(ACC), B_0.to(ACC), C_0.to(ACC)
            ahead = tl.maximum(i - 1, 0)
            before_0 = tl.load(slots + ahead * (BLOCK_D * BLOCK_N))
            t_0 = chunk * CHUNK + ahead
            end_d, end_n = tl.where(t_0 < T, d, 0), tl.where(t_0 < T, n, 0)
            grad_y_0 = load_row(
                grad_y_ptr, batch, t_0, grad_y_stride_b, grad_y_stride_t, channel, end_d
            )
            x_0 = load_row(x_ptr, batch, t_0, x_stride_b, x_stride_t, channel, end_d)
            delta_0 = load_row(
                delta_ptr, batch, t_0, delta_stride_b, delta_stride_t, channel, end_d
            )
            B_0 = load_row(B_ptr, batch, t_0, B_stride_b, B_stride_t, state, end_n)
            C_0 = load_row(C_ptr, batch, t_0, C_stride_b, C_stride_t, state, end_n)

            decay, s = _build_rows(A_log2, delta, INPUT_SCALE, FULL, FAST)
            decayed = decay * before
            written = s * x[:, None]
            read = decayed if EXCLUSIVE else decayed + written * B[None, :]
            through = g + grad_y[:, None] * C[None, :]
            g_written = g if EXCLUSIVE else through
            grad_C = tl.sum(grad_y[:, None] * read, axis=0)
            grad_B = tl.sum(g_written * written, axis=0)
            g_scaled = g_written * B[None, :]

            # As `discretize_vjp`: d lambda / d(A delta) is lambda, or lambda + 1 for "full".
            if INPUT_SCALE == "one_minus_decay":
                grad_x = tl.sum(g_scaled * s, axis=1)
                sign = tl.where(decay > 0, 1.0, tl.where(decay < 0, -1.0, 0.0)).to(ACC)
                grad_s = g_scaled * x[:, None]
                grad_exponent = (through * before - sign * grad_s) * coupled_reach(decay, s, FULL)
            else:
                grad_exponent = through * (decayed + before if FULL else decayed)
            grad_A += grad_exponent * delta[:, None]
            grad_delta = tl.sum(grad_exponent * A_log2, axis=1) * LN2
            if INPUT_SCALE == "delta":
                pulled = tl.sum(g_scaled, axis=1)
                grad_x = pulled * delta
                grad_delta += pulled * x
            if INPUT_SCALE == "bounded_delta":
                pulled = tl.sum(g_scaled, axis=1) / (1 + delta)
                grad_x = pulled * delta
                grad_delta += pulled * x / (1 + delta)
            if HAS_D:
                grad_x += D * grad_y
                grad_D += grad_y * x
            g = decay * through

            token = batch * T + t
            out = token * d + channel
            end_d, end_n = tl.where(t < T, d, 0), tl.where(t < T, n, 0)
            tl.store(grad_x_ptr + out, grad_x.to(grad_x_ptr.dtype.element_ty), mask=channel < end_d)
            tl.store(
                grad_delta_ptr + out,
                grad_delta.to(grad_delta_ptr.dtype.element_ty),
                mask=channel < end_d,
            )
            part = (token * blocks + block) * n + state
            tl.store(grad_B_ptr + part, grad_B, mask=state < end_n)
            tl.store(grad_C_ptr + part, grad_C, mask=state < end_n)
    tl.store(grad_A_ptr + own * size + cell, grad_A, mask=in_cell)
    if HAS_D:
        tl.store(grad_D_ptr + own * d + channel, grad_D, mask=in_d)
    in_d = channel < tl.where(segment == 0, d, 0)
    grad_h0 = g.to(grad_h0_ptr.dtype.element_ty)
    tl.store(grad_h0_ptr + batch * size + cell, grad_h0, mask=in_d[:, None] & in_n[None, :])


class ScanResult(NamedTuple):
    """What the forward launcher returns."""

    y: Tensor  # (b, t, d)
    h: Tensor  # (b, d, n), after the last token
    kept: Tensor  # (b, ceil(t / CHUNK), d, n), empty unless asked for


def scan_forward(
    x: Tensor,  # (b, t, d)
    delta: Tensor,  # (b, t, d)
    A: Tensor,  # (d, n)
    B: Tensor,  # (b, t, n)
    C: Tensor,  # (b, t, n)
    h0: Tensor,  # (b, d, n)
    D: Tensor | None,  # (d,)
    options: ScanOptions,
    *,
    keep: bool,
) -> ScanResult:
    """One pass over the sequence; `keep` keeps what `scan_backward` needs. No size may be 0."""
    x, delta, B, C = rows(x, delta, B, C)
    by_state, skip = A.mT.contiguous(), A if D is None else D.contiguous()
    layout, acc = plan(x, A.shape[1], CHUNK, reverse=False), options.accumulator
    entry = h0.mT.contiguous()
    start = enter_segments(x, delta, by_state, B, entry, layout, CHUNK, options, reverse=False)
    chunks = ceil_div(x.shape[1], CHUNK) if keep else 0
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty(h0.shape, dtype=h0.dtype, device=h0.device)
    kept = x.new_empty(x.shape[0], chunks, *A.shape, dtype=acc)
    _forward_kernel[(layout.programs,)](
        *(x, delta, by_state, B, C, start, skip, y, h, kept),
        *(*layout.sizes, 0),
        *strides(x, delta, B, C),
        **flags(options),
        EXCLUSIVE=options.exclusive,
        HAS_D=D is not None,
        KEEP=keep,
        CHUNK=CHUNK,
        **layout.blocks,
    )
    return ScanResult(y, h, kept)


def scan_backward(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    kept: Tensor,  # (b, ceil(t / CHUNK), d, n)
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    D: Tensor | None,
    *,
    options: ScanOptions,
) -> Cotangents:
    """One pass from the last token to the first. No size may be 0."""
    grad_y, x, delta, B, C = rows(grad_y, x, delta, B, C)
    A, grad_h, skip = A.contiguous(), grad_h.contiguous(), A if D is None else D.contiguous()
    layout, acc = plan(x, A.shape[1], CHUNK, reverse=True), options.accumulator
    by_state = A.mT.contiguous() if layout.segments > 1 else A
    end = enter_segments(grad_y, delta, by_state, C, grad_h, layout, CHUNK, options, reverse=True)
    (b, t, d), n, block = x.shape, A.shape[1], layout.block_d * layout.block_n
    work = x.new_empty(layout.programs, CHUNK, block, dtype=acc)
    grad_x, grad_delta = (x.new_empty(x.shape, dtype=v.dtype) for v in (x, delta))
    grad_A = A.new_empty(b, layout.segments, d, n, dtype=acc)
    grad_BC = x.new_empty(2, b, t, layout.channel_blocks, n, dtype=acc)
    grad_h0 = torch.empty(h0.shape, dtype=h0.dtype, device=h0.device)
    grad_D = A.new_empty(b, layout.segments, d if D is not None else 0, dtype=acc)
    _backward_kernel[(layout.programs,)](
        *(grad_y, end, x, delta, A, B, C, skip, kept, work),
        *(grad_x, grad_delta, grad_A, *grad_BC, grad_h0, grad_D),
        *layout.sizes,
        *strides(grad_y, x, delta, B, C),
        **flags(options),
        EXCLUSIVE=options.exclusive,
        HAS_D=D is not None,
        CHUNK=CHUNK,
        **layout.blocks,
    )
    summed_A = grad_A.sum((0, 1)).to(A.dtype)
    # One reduction for both; without a cast to copy them they would share its memory.
    summed_B, summed_C = grad_BC.sum(3)
    summed_B, summed_C = summed_B.to(B.dtype, copy=True), summed_C.to(C.dtype, copy=True)
    summed_D = A.new_empty(0) if D is None else grad_D.sum((0, 1)).to(D.dtype)
    return grad_x, grad_delta, summed_A, summed_B, summed_C, grad_h0, summed_D
