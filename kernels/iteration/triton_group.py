"""A whole step of Picard or Jacobi in one launch: raw comes from memory once.

A group of programs has a sample, a program of it a block of channels, all tokens, with the memory
in registers. It takes TOKENS tokens at a time: inner products over its channels, which the group
adds up by way of device memory; x~ into a workspace; the scan over these tokens, which leaves F(y)
or p there; defects and, for Jacobi, the local solve, whose inner products travel together with
those of the next tokens. All programs of a group must run at the same time, and several on one
multiprocessor, so that one scans while another waits.

Sums over programs are taken in one order: runs repeat bit for bit.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

import triton
import triton.language as tl

from bedouin.kernels.direct.triton_forward import announce, wait_for
from bedouin.kernels.direct.triton_math import activate, input_scale, sigmoid
from bedouin.kernels.direct.triton_small import (
    eliminate,
    local_system,
    products,
    scale,
    scale_symmetric,
    sums,
    upper_times,
    wy_upper,
)
from bedouin.kernels.iteration.triton_kernels import inverse_sizes, load_raw, max_norm, rows_times
from bedouin.kernels.scan.triton_segments import build_decay, load_exponent


@triton.jit
def _load_columns(
    raw, fed, first, tokens, cols, raw_stride, r, mask, FEEDBACK: tl.constexpr,
    ALIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """raw^x + W^y norm(y_{t-1}) of some tokens, at columns from `first` on, (TOKENS, columns)."""
    at = tl.multiple_of(tokens[:, None] * raw_stride + (first + cols)[None, :], [1, ALIGN])
    values = tl.load(raw + at, mask=mask, other=0.0).to(ACC)
    if FEEDBACK:
        at = tl.multiple_of(tokens[:, None] * r + (first + cols)[None, :], [1, ALIGN])
        values += tl.load(fed + at, mask=mask, other=0.0).to(ACC)
    return values


@triton.jit
def _load_u(
    raw, fed, u_at, tokens, cols, d, raw_stride, r, mask, K: tl.constexpr, FEEDBACK: tl.constexpr,
    ALIGN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """u_1 .. u_k, not yet unit."""
    u = ()
    for i in tl.static_range(K):
        first = u_at + i * d
        row = _load_columns(
            raw, fed, first, tokens, cols, raw_stride, r, mask, FEEDBACK, ALIGN, ACC
        )
        u = u + (row,)
    return u


@triton.jit
def _combine(weights, rows, K: tl.constexpr):
    """sum over i of weights_i (TOKENS,) rows_i (TOKENS, columns)."""
    total = weights[0][:, None] * rows[0]
    for i in tl.static_range(1, K):
        total += weights[i][:, None] * rows[i]
    return total


@triton.jit
def _store_sums(values, pointer, tokens, stride, N: tl.constexpr):
    """Sums over the channels of the program, where the group finds them."""
    values = sums(values, 1)
    for i in tl.static_range(N):
        tl.store(pointer + i * stride + tokens, values[i])


@triton.jit
def _load_sums(pointer, tokens, parts, TOKENS: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """Sums over all channels."""
    part = tl.arange(0, PARTS)
    at = part[:, None] * TOKENS + tokens[None, :]
    mask = (part < parts)[:, None] & (tokens < TOKENS)[None, :]
    values = ()
    for i in tl.static_range(N):
        # written by other multiprocessors: not from the cache of this one
        value = tl.load(
            pointer + i * parts * TOKENS + at, mask=mask, other=0.0, cache_modifier=".cg"
        )
        values = values + (value,)
    return sums(values, 0)


@triton.jit(do_not_specialize=["batch", "T", "groups", "zero"])
def step_kernel(
    x_ptr,  # (b t, d)
    raw_ptr,  # (b t, r)
    fed_back_ptr,  # (b t, r)
    A_ptr,  # (n, d)
    h0_ptr,  # (b, n, d)
    y_ptr,  # (b t, d)
    kept_ptr,  # (b,)
    out_ptr,  # (b t, d): the next iterate
    parts_ptr,  # (2, b, blocks, t)
    pivots_ptr,  # (b t,)
    counters_ptr,  # (b,), zeros
    sums_ptr,  # (b, 2, values, blocks, TOKENS)
    work_ptr,  # (programs, size)
    batch,
    T,
    groups,
    x_stride,
    raw_stride,
    r,
    d,
    n,
    zero,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    WORK: tl.constexpr,
    JACOBI: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SELECTIVE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    BETA_MAX: tl.constexpr,
    DAMPING: tl.constexpr,
    EPS: tl.constexpr,
    ALIGN: tl.constexpr,
    FAST: tl.constexpr,
    COMPILED: tl.constexpr,
    ACC: tl.constexpr,
):
    PAIRS: tl.constexpr = K * (K + 1) // 2
    MIX: tl.constexpr = PAIRS + K
    VALUES: tl.constexpr = 2 * MIX if JACOBI else MIX
    COUPLED: tl.constexpr = INPUT_SCALE == "one_minus_decay"
    TILE: tl.constexpr = TOKENS * BLOCK_D
    blocks = tl.cdiv(d, BLOCK_D)
    program = tl.program_id(0)
    block = program % blocks
    tokens, states = tl.arange(0, TOKENS), tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_D)
    cols = block * BLOCK_D + lanes
    in_n = states < n
    u_at = d + (2 * n if SELECTIVE else 0)
    # workspace: Delta, s x~ and then F or p, sigma if COUPLED; B, C; T, sizes and B^T C of a token
    work_ptr += program.to(tl.int64) * WORK
    tile = tokens[:, None] * BLOCK_D + lanes[None, :]
    BC_work = work_ptr + (3 if COUPLED and JACOBI else 2) * TILE
    small_work = BC_work + 2 * TOKENS * BLOCK_N
    BC_tile = tokens[:, None] * BLOCK_N + states[None, :]
    # Neighbours in memory belong to neighbouring threads. `zero`, of which the compiler knows no
    # alignment, keeps it from giving a thread four of them: then a thread would hold few states of
    # several channels, and every sum over states would be an exchange between threads.
    cells = states[:, None] * d + cols[None, :] + zero
    in_cells = in_n[:, None] & (cols < d)[None, :]
    channels = lanes + zero
    A_log2 = load_exponent(A_ptr + cells, in_cells, ACC)

    for index in range(program // blocks, batch, groups):
        sample = tl.cast(index, tl.int64)
        kept = tl.load(kept_ptr + sample)
        if kept < T:
            counter = counters_ptr + sample
            shared = sums_ptr + sample * 2 * VALUES * blocks * TOKENS
            h = tl.load(h0_ptr + sample * n * d + cells, mask=in_cells, other=0.0)
            # before the first tokens come -1: nothing to scan there, nor to solve
            for step in range(0, tl.cdiv(T, TOKENS) + 1):
                start = (step - 1) * TOKENS
                slot = shared + (step & 1) * VALUES * blocks * TOKENS
                own_slot = slot + block * TOKENS

                # the scan of these tokens
                count = tl.where(step > 0, tl.minimum(TOKENS, T - start), 0)
                x_t = work_ptr + TILE + channels
                delta_t = work_ptr + channels
                BC_t = BC_work + states
                if count > 0:
                    value_next, delta_next = tl.load(x_t), tl.load(delta_t)
                    B_next, C_next = tl.load(BC_t), tl.load(BC_t + TOKENS * BLOCK_N)
                    for t in range(count):
                        value, delta, B, C = value_next, delta_next, B_next, C_next
                        more = tl.where(t + 1 < count, 1, 0)
                        own = x_t
                        x_t += more * BLOCK_D
                        delta_t += more * BLOCK_D
                        BC_t += more * BLOCK_N
                        value_next, delta_next = tl.load(x_t), tl.load(delta_t)
                        B_next, C_next = tl.load(BC_t), tl.load(BC_t + TOKENS * BLOCK_N)
                        decay = build_decay(A_log2 * delta[None, :], FULL, FAST)
                        h *= decay
                        if JACOBI:
                            tl.store(own, tl.sum(h * C[:, None], axis=0))
                        if COUPLED:
                            s = 1 - tl.abs(decay)
                            h += s * (value[None, :] * B[:, None])
                            if JACOBI:
                                tl.store(own + TILE, tl.sum(s * (B * C)[:, None], axis=0))
                        else:
                            h += value[None, :] * B[:, None]
                        if not JACOBI:
                            tl.store(own, tl.sum(h * C[:, None], axis=0))
                tl.debug_barrier()

                # inner products of these tokens and of the next, on their way to the group
                first = sample * T + start
                in_t = (tokens >= -start) & (tokens < T - start)
                own_mask = in_t[:, None] & (cols < d)[None, :]
                if JACOBI:
                    if step > 0:
                        raw = raw_ptr + tl.multiple_of(first * raw_stride, ALIGN)
                        fed = fed_back_ptr + tl.multiple_of(first * r, ALIGN)
                        u = _load_u(
                            raw, fed, u_at, tokens, cols, d, raw_stride, r, own_mask, K, FEEDBACK,
                            ALIGN, ACC,
                        )  # fmt: skip
                        at = first * x_stride + tokens[:, None] * x_stride + cols[None, :]
                        x = tl.load(x_ptr + at, mask=own_mask, other=0.0).to(ACC)
                        if COUPLED:
                            sigma = tl.load(work_ptr + 2 * TILE + tile)
                        else:
                            s = input_scale(tl.load(work_ptr + tile), INPUT_SCALE)
                            sigma = s * tl.load(small_work + MIX * TOKENS + tokens)[:, None]
                        p = tl.load(work_ptr + TILE + tile)
                        rest = tl.where(own_mask, p + sigma * x - x, 0.0)
                        dots = products(rows_times(u, sigma, K), u, K) + rows_times(u, rest, K)
                        _store_sums(
                            dots, own_slot + MIX * blocks * TOKENS, tokens, blocks * TOKENS, MIX
                        )
                after = start + TOKENS
                if after < T:
                    first_after = first + TOKENS
                    mask = (tokens < T - after)[:, None] & (cols < d)[None, :]
                    raw = raw_ptr + tl.multiple_of(first_after * raw_stride, ALIGN)
                    fed = fed_back_ptr + tl.multiple_of(first_after * r, ALIGN)
                    u = _load_u(
                        raw, fed, u_at, tokens, cols, d, raw_stride, r, mask, K, FEEDBACK, ALIGN,
                        ACC,
                    )  # fmt: skip
                    at = first_after * x_stride + tokens[:, None] * x_stride + cols[None, :]
                    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(ACC)
                    at = first_after * d + tokens[:, None] * d + cols[None, :]
                    v = tl.load(y_ptr + at, mask=mask, other=0.0) - x
                    dots = products(u, u, K) + rows_times(u, v, K)
                    _store_sums(dots, own_slot, tokens, blocks * TOKENS, MIX)
                if (after < T) | JACOBI:
                    announce(counter)

                # what this program can do alone, meanwhile
                y_at = first * d + tokens[:, None] * d + cols[None, :]
                part = parts_ptr + (sample * blocks + block) * T + start + tokens
                size_part = part + tl.cast(batch, tl.int64) * blocks * T
                moves = ((tokens >= kept - start) & in_t)[:, None] & (cols < d)[None, :]
                if not JACOBI:
                    if step > 0:
                        before = tl.load(y_ptr + y_at, mask=own_mask, other=0.0)
                        F = tl.load(work_ptr + TILE + tile, mask=own_mask, other=0.0)
                        tl.store(part, max_norm(F - before, 1), mask=in_t)
                        tl.store(size_part, max_norm(F, 1), mask=in_t)
                        if DAMPING != 1:
                            F = before + DAMPING * (F - before)
                        tl.store(out_ptr + y_at, F, mask=moves)
                if (after < T) | JACOBI:
                    wait_for(counter, (step + 1) * blocks, COMPILED)

                # y_t = rest + sigma U^T e, e = T U (y - x), so (I - S T) U (y - x) = U (rest - x)
                if JACOBI:
                    if step > 0:
                        dots = _load_sums(
                            slot + MIX * blocks * TOKENS, tokens, blocks, TOKENS, MIX, PARTS
                        )
                        T_u = ()
                        inv = ()
                        for i in tl.static_range(PAIRS):
                            T_u = T_u + (tl.load(small_work + i * TOKENS + tokens),)
                        for i in tl.static_range(K):
                            inv = inv + (tl.load(small_work + (PAIRS + i) * TOKENS + tokens),)
                        S = scale_symmetric(dots[0:PAIRS], inv, K)
                        q = scale(dots[PAIRS:MIX], inv, K)
                        e, pivot = eliminate(local_system(S, T_u, False, K), q, K, 1)
                        weights = scale(upper_times(T_u, e, K), inv, K)
                        if block == 0:
                            tl.store(pivots_ptr + first + tokens, pivot, mask=in_t)
                        raw = raw_ptr + tl.multiple_of(first * raw_stride, ALIGN)
                        fed = fed_back_ptr + tl.multiple_of(first * r, ALIGN)
                        u = _load_u(
                            raw, fed, u_at, tokens, cols, d, raw_stride, r, own_mask, K, FEEDBACK,
                            ALIGN, ACC,
                        )  # fmt: skip
                        at = first * x_stride + tokens[:, None] * x_stride + cols[None, :]
                        x = tl.load(x_ptr + at, mask=own_mask, other=0.0).to(ACC)
                        if COUPLED:
                            sigma = tl.load(work_ptr + 2 * TILE + tile)
                        else:
                            s = input_scale(tl.load(work_ptr + tile), INPUT_SCALE)
                            sigma = s * tl.load(small_work + MIX * TOKENS + tokens)[:, None]
                        p = tl.load(work_ptr + TILE + tile)
                        y = tl.where(own_mask, p + sigma * (x + _combine(weights, u, K)), 0.0)
                        before = tl.load(y_ptr + y_at, mask=own_mask, other=0.0)
                        tl.store(part, max_norm(y - before, 1), mask=in_t)
                        tl.store(size_part, max_norm(y, 1), mask=in_t)
                        tl.store(out_ptr + y_at, y, mask=moves)
                        # the workspace is written again below
                        tl.debug_barrier()

                # x~ of the next tokens
                if after < T:
                    first_after = first + TOKENS
                    in_after = tokens < T - after
                    mask = in_after[:, None] & (cols < d)[None, :]
                    raw = raw_ptr + tl.multiple_of(first_after * raw_stride, ALIGN)
                    fed = fed_back_ptr + tl.multiple_of(first_after * r, ALIGN)
                    dots = _load_sums(slot, tokens, blocks, TOKENS, MIX, PARTS)
                    inv = inverse_sizes(dots, d, K, EPS)
                    beta = ()
                    for i in tl.static_range(K):
                        at = u_at + K * d + i
                        alpha = load_raw(
                            raw + tokens * raw_stride, fed + tokens * r, at, in_after, FEEDBACK, ACC
                        )
                        beta = beta + (BETA_MAX * sigmoid(alpha),)
                    T_u = wy_upper(scale_symmetric(dots[0:PAIRS], inv, K), beta, K)
                    e = upper_times(T_u, scale(dots[PAIRS:MIX], inv, K), K)
                    if JACOBI:
                        for i in tl.static_range(PAIRS):
                            tl.store(small_work + i * TOKENS + tokens, T_u[i])
                        for i in tl.static_range(K):
                            tl.store(small_work + (PAIRS + i) * TOKENS + tokens, inv[i])
                    u = _load_u(
                        raw, fed, u_at, tokens, cols, d, raw_stride, r, mask, K, FEEDBACK, ALIGN,
                        ACC,
                    )  # fmt: skip
                    at = first_after * x_stride + tokens[:, None] * x_stride + cols[None, :]
                    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(ACC)
                    value = x + _combine(scale(e, inv, K), u, K)
                    raw_delta = _load_columns(
                        raw, fed, 0, tokens, cols, raw_stride, r, mask, FEEDBACK, ALIGN, ACC
                    )
                    delta = activate(raw_delta, ACTIVATION)
                    if not COUPLED:
                        value *= input_scale(delta, INPUT_SCALE)
                    tl.store(work_ptr + tile, delta)
                    tl.store(work_ptr + TILE + tile, value)
                    in_BC = in_after[:, None] & in_n[None, :]
                    if SELECTIVE:
                        B = _load_columns(
                            raw, fed, d, tokens, states, raw_stride, r, in_BC, FEEDBACK, 1, ACC
                        )
                        C = _load_columns(
                            raw, fed, d + n, tokens, states, raw_stride, r, in_BC, FEEDBACK, 1, ACC
                        )
                        B *= tl.rsqrt(tl.sum(B * B, axis=1) + n * EPS)[:, None]
                        C *= tl.rsqrt(tl.sum(C * C, axis=1) + n * EPS)[:, None]
                    else:
                        B = tl.where(in_BC, 1.0, 0.0).to(ACC)
                        C = B
                    tl.store(BC_work + BC_tile, B)
                    tl.store(BC_work + TOKENS * BLOCK_N + BC_tile, C)
                    if JACOBI:
                        tl.store(small_work + MIX * TOKENS + tokens, tl.sum(B * C, axis=1))
                    tl.debug_barrier()
