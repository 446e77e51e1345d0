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
from bedouin.kernels.iteration.triton_fast import fast_activate, fast_scale
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
    """sum over i of weights_i (TOKENS, 1) rows_i (TOKENS, columns)."""
    total = weights[0] * rows[0]
    for i in tl.static_range(1, K):
        total += weights[i] * rows[i]
    return total


@triton.jit
def _upper_half(v, COMPILED: tl.constexpr):
    """float32 v in bfloat16, cut off and not rounded."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [v], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        bits = v.to(tl.int32, bitcast=True)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _pieces(v, N: tl.constexpr, COMPILED: tl.constexpr):
    """float32 v as a sum of N bfloat16, 8 bits each."""
    out = ()
    for i in tl.static_range(N):
        out = out + (_upper_half(v, COMPILED),)
        if i + 1 < N:
            v -= (v.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return out


@triton.jit
def _products_of_pieces(
    a, b, M: tl.constexpr, N: tl.constexpr, COMPILED: tl.constexpr, ACC: tl.constexpr
):
    """a b^T of two tuples of pieces, to the precision of three."""
    # the interpreter would multiply the bits of bfloat16
    DOT: tl.constexpr = tl.bfloat16 if COMPILED else tl.float32
    total = tl.zeros([M, N], dtype=ACC)
    for i in tl.static_range(len(a)):
        for j in tl.static_range(len(b)):
            if i + j < 3:
                total = tl.dot(a[i].to(DOT), tl.trans(b[j].to(DOT)), total)
    return total


@triton.jit
def _load_u_rows(
    raw, fed, u_at, rows, cols, d, raw_stride, r, mask, K_ROWS: tl.constexpr, PIECES: tl.constexpr,
    FEEDBACK: tl.constexpr, ALIGN: tl.constexpr, COMPILED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """u_1 .. u_k of all tokens, (TOKENS K_ROWS, columns), in pieces."""
    token, i = rows // K_ROWS, rows % K_ROWS
    at = (token * raw_stride + u_at + i * d)[:, None] + cols[None, :]
    u = tl.load(raw + tl.multiple_of(at, [1, ALIGN]), mask=mask, other=0.0)
    if PIECES == 1:
        return (u,)
    else:
        u = u.to(ACC)
        if FEEDBACK:
            at = (token * r + u_at + i * d)[:, None] + cols[None, :]
            at = tl.multiple_of(at, [1, ALIGN])
            u += tl.load(fed + at, mask=mask, other=0.0).to(ACC)
        return _pieces(u, PIECES, COMPILED)


@triton.jit
def _whole(pieces, ACC: tl.constexpr):
    """The sum of pieces."""
    total = pieces[0].to(ACC)
    for i in tl.static_range(1, len(pieces)):
        total += pieces[i].to(ACC)
    return total


@triton.jit
def _spread(values, scratch, tokens, K: tl.constexpr, TOKENS: tl.constexpr):
    """The values, of which a thread has those of one token, for all channels.

    By way of memory: otherwise the compiler has every thread compute them for many tokens.
    """
    for i in tl.static_range(K):
        tl.store(scratch + i * TOKENS + tokens, values[i])
    tl.debug_barrier()
    out = ()
    for i in tl.static_range(K):
        out = out + (tl.load(scratch + i * TOKENS + tokens[:, None]),)
    return out


@triton.jit
def _store_vector_sums(
    u, v, pointer, rows, K_ROWS: tl.constexpr, TOKENS: tl.constexpr, COMPILED: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """U v of every token: what is not of the same token in U v^T goes."""
    tokens = tl.arange(0, TOKENS)
    dots = _products_of_pieces(u, _pieces(v, 3, COMPILED), TOKENS * K_ROWS, TOKENS, COMPILED, ACC)
    same = (rows // K_ROWS)[:, None] == tokens[None, :]
    tl.store(pointer + rows, tl.sum(tl.where(same, dots, 0.0), axis=1))


@triton.jit
def _store_matrix_sums(
    u, w, pointer, rows, K_ROWS: tl.constexpr, TOKENS: tl.constexpr, COMPILED: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """U W^T of every token, (TOKENS, K_ROWS, K_ROWS)."""
    ROWS: tl.constexpr = TOKENS * K_ROWS
    dots = _products_of_pieces(u, w, ROWS, ROWS, COMPILED, ACC)
    dots = tl.reshape(dots, (ROWS, TOKENS, K_ROWS))
    same = (rows // K_ROWS)[:, None, None] == tl.arange(0, TOKENS)[None, :, None]
    dots = tl.sum(tl.where(same, dots, 0.0), axis=1)
    tl.store(pointer + rows[:, None] * K_ROWS + tl.arange(0, K_ROWS)[None, :], dots)


@triton.jit
def _store_sums(
    values, pointer, tokens, K: tl.constexpr, K_ROWS: tl.constexpr, TOKENS: tl.constexpr
):
    """The same from products over the channels: packed matrices, then vectors."""
    values = sums(values, 1)
    PAIRS: tl.constexpr = K * (K + 1) // 2
    for j in tl.static_range(K):
        for i in tl.static_range(K):
            if i <= j:
                at = (tokens * K_ROWS + i) * K_ROWS + j
                tl.store(pointer + at, values[j * (j + 1) // 2 + i])
        at = TOKENS * K_ROWS * K_ROWS + tokens * K_ROWS + j
        tl.store(pointer + at, values[PAIRS + j])


@triton.jit
def _add_up(pointer, out, stride, parts, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Sums over all channels, for this program."""
    at = tl.arange(0, SIZE)
    # written by other multiprocessors: not from the cache of this one
    total = tl.load(pointer + at, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        end = tl.where(part < parts, SIZE, 0)
        total += tl.load(
            pointer + part * stride + at, mask=at < end, other=0.0, cache_modifier=".cg"
        )
    tl.store(out + at, total)


@triton.jit
def _load_small(small, tokens, K: tl.constexpr, K_ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """The matrices, packed, and then the vectors of all tokens."""
    out = ()
    for j in tl.static_range(K):
        for i in tl.static_range(K):
            if i <= j:
                out = out + (tl.load(small + (tokens * K_ROWS + i) * K_ROWS + j),)
    for j in tl.static_range(K):
        out = out + (tl.load(small + TOKENS * K_ROWS * K_ROWS + tokens * K_ROWS + j),)
    return out


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
    sums_ptr,  # (b, 2, blocks, sums)
    work_ptr,  # (programs, work)
    batch,
    T,
    groups,
    zero,
    x_stride: tl.constexpr,
    raw_stride: tl.constexpr,
    r: tl.constexpr,
    d: tl.constexpr,
    n: tl.constexpr,
    K: tl.constexpr,
    K_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    SUMS: tl.constexpr,
    WORK: tl.constexpr,
    PIECES: tl.constexpr,
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
    COUPLED: tl.constexpr = INPUT_SCALE == "one_minus_decay"
    TILE: tl.constexpr = TOKENS * BLOCK_D
    MATRICES: tl.constexpr = TOKENS * K_ROWS * K_ROWS
    BOTH: tl.constexpr = MATRICES + TOKENS * K_ROWS
    u_at: tl.constexpr = d + (2 * n if SELECTIVE else 0)
    blocks: tl.constexpr = (d + BLOCK_D - 1) // BLOCK_D
    EVEN: tl.constexpr = d % BLOCK_D == 0
    program = tl.program_id(0)
    block = program % blocks
    tokens, states = tl.arange(0, TOKENS), tl.arange(0, BLOCK_N)
    rows, lanes = tl.arange(0, TOKENS * K_ROWS), tl.arange(0, BLOCK_D)
    cols = block * BLOCK_D + lanes
    in_d, in_n = (cols < d) | EVEN, states < n
    # workspace: Delta, s x~ and then F or p, sigma; B, C; sums; weights; T and sizes
    work_ptr += program.to(tl.int64) * WORK
    tile = tokens[:, None] * BLOCK_D + lanes[None, :]
    BC_work = work_ptr + 3 * TILE
    mix_work = BC_work + 2 * TOKENS * BLOCK_N
    spread_work = mix_work + SUMS
    small_work = spread_work + K * TOKENS + tokens
    # Neighbours in memory belong to neighbouring threads. `zero`, of which the compiler knows no
    # alignment, keeps it from giving a thread four of them: then a thread would hold few states of
    # several channels, and every sum over states would be an exchange between threads. Channels
    # come first because the other tiles, (TOKENS, BLOCK_D), may have the shape of this one turned,
    # and get a layout in common with all memory operations of that shape.
    cells = cols[:, None] + states[None, :] * d + zero
    in_cells = in_d[:, None] & in_n[None, :]
    channels = lanes + zero
    A_log2 = load_exponent(A_ptr + cells, in_cells, ACC)

    for index in range(program // blocks, batch, groups):
        sample = tl.cast(index, tl.int64)
        kept = tl.load(kept_ptr + sample)
        if kept < T:
            counter = counters_ptr + sample
            h = tl.load(h0_ptr + sample * n * d + cells, mask=in_cells, other=0.0)
            # before the first tokens come -1: nothing to scan there, nor to solve
            for step in range(0, tl.cdiv(T, TOKENS) + 1):
                start = (step - 1) * TOKENS
                slot = sums_ptr + (sample * 2 + (step & 1)) * blocks * SUMS
                own_slot = slot + block * SUMS

                # the scan of these tokens
                x_t = work_ptr + TILE + channels
                delta_t = work_ptr + channels
                BC_t = BC_work + states
                if step > 0:
                    value_next, delta_next = tl.load(x_t), tl.load(delta_t)
                    B_next, C_next = tl.load(BC_t), tl.load(BC_t + TOKENS * BLOCK_N)
                    # tokens after the last one, too: memory is not wanted any more
                    for _ in range(TOKENS // UNROLL):
                        for i in tl.static_range(UNROLL):
                            value, delta, B, C = value_next, delta_next, B_next, C_next
                            # after the last token of these what follows in the workspace
                            value_next = tl.load(x_t + (i + 1) * BLOCK_D)
                            delta_next = tl.load(delta_t + (i + 1) * BLOCK_D)
                            B_next = tl.load(BC_t + (i + 1) * BLOCK_N)
                            C_next = tl.load(BC_t + (TOKENS + i + 1) * BLOCK_N)
                            decay = build_decay(A_log2 * delta[:, None], FULL, FAST)
                            h *= decay
                            own = x_t + i * BLOCK_D
                            if JACOBI:
                                tl.store(own, tl.sum(h * C[None, :], axis=1))
                            if COUPLED:
                                s = 1 - tl.abs(decay)
                                h += s * (value[:, None] * B[None, :])
                                if JACOBI:
                                    tl.store(own + TILE, tl.sum(s * (B * C)[None, :], axis=1))
                            else:
                                h += value[:, None] * B[None, :]
                            if not JACOBI:
                                tl.store(own, tl.sum(h * C[None, :], axis=1))
                        x_t += UNROLL * BLOCK_D
                        delta_t += UNROLL * BLOCK_D
                        BC_t += UNROLL * BLOCK_N
                tl.debug_barrier()

                # inner products of these tokens and of the next, on their way to the group
                first = sample * T + start
                raw = raw_ptr + tl.multiple_of(first * raw_stride, ALIGN)
                fed = fed_back_ptr + tl.multiple_of(first * r, ALIGN)
                raw_after = raw + TOKENS * raw_stride
                fed_after = fed + TOKENS * r
                x_at = first * x_stride + tl.multiple_of(
                    tokens[:, None] * x_stride + cols[None, :], [1, ALIGN]
                )
                y_at = first * d + tokens[:, None] * d + cols[None, :]
                after = start + TOKENS
                in_t = (tokens >= -start) & (tokens < T - start)
                in_after = tokens < T - after
                mask = in_t[:, None] & in_d[None, :]
                mask_after = in_after[:, None] & in_d[None, :]
                row_token = rows // K_ROWS
                is_row = (rows % K_ROWS < K) & (row_token < T - after)
                if JACOBI:
                    if step > 0:
                        x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(ACC)
                        p = tl.load(work_ptr + TILE + tile)
                        sigma = tl.load(work_ptr + 2 * TILE + tile)
                        rest = p + sigma * x - x
                        if PIECES == 0:
                            u = _load_u(
                                raw, fed, u_at, tokens, cols, d, raw_stride, r, mask, K, FEEDBACK,
                                ALIGN, ACC,
                            )  # fmt: skip
                            dots = products(rows_times(u, sigma, K), u, K) + rows_times(u, rest, K)
                            _store_sums(dots, own_slot + BOTH, tokens, K, K_ROWS, TOKENS)
                        else:
                            is_own = (rows % K_ROWS < K) & (row_token < T - start)
                            u = _load_u_rows(
                                raw, fed, u_at, rows, cols, d, raw_stride, r,
                                is_own[:, None] & in_d[None, :], K_ROWS, PIECES, FEEDBACK, ALIGN,
                                COMPILED, ACC,
                            )  # fmt: skip
                            _store_vector_sums(
                                u,
                                rest,
                                own_slot + BOTH + MATRICES,
                                rows,
                                K_ROWS,
                                TOKENS,
                                COMPILED,
                                ACC,
                            )
                            at = row_token[:, None] * BLOCK_D + lanes[None, :]
                            w = tl.load(work_ptr + 2 * TILE + at) * _whole(u, ACC)
                            _store_matrix_sums(
                                u,
                                _pieces(w, 2, COMPILED),
                                own_slot + BOTH,
                                rows,
                                K_ROWS,
                                TOKENS,
                                COMPILED,
                                ACC,
                            )
                if after < T:
                    x = tl.load(x_ptr + x_at + TOKENS * x_stride, mask=mask_after, other=0.0)
                    v = tl.load(y_ptr + y_at + TOKENS * d, mask=mask_after, other=0.0) - x.to(ACC)
                    if PIECES == 0:
                        u = _load_u(
                            raw_after, fed_after, u_at, tokens, cols, d, raw_stride, r, mask_after,
                            K, FEEDBACK, ALIGN, ACC,
                        )  # fmt: skip
                        dots = products(u, u, K) + rows_times(u, v, K)
                        _store_sums(dots, own_slot, tokens, K, K_ROWS, TOKENS)
                    else:
                        u = _load_u_rows(
                            raw_after, fed_after, u_at, rows, cols, d, raw_stride, r,
                            is_row[:, None] & in_d[None, :], K_ROWS, PIECES, FEEDBACK, ALIGN,
                            COMPILED, ACC,
                        )  # fmt: skip
                        _store_vector_sums(
                            u, v, own_slot + MATRICES, rows, K_ROWS, TOKENS, COMPILED, ACC
                        )
                        _store_matrix_sums(u, u, own_slot, rows, K_ROWS, TOKENS, COMPILED, ACC)
                if (after < T) | JACOBI:
                    announce(counter)

                # what this program can do alone, meanwhile
                part = parts_ptr + (sample * blocks + block) * T + start + tokens
                size_part = part + tl.cast(batch, tl.int64) * blocks * T
                moves = ((tokens >= kept - start) & in_t)[:, None] & in_d[None, :]
                if not JACOBI:
                    if step > 0:
                        before = tl.load(y_ptr + y_at, mask=mask, other=0.0)
                        F = tl.load(work_ptr + TILE + tile)
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
                        _add_up(slot + BOTH, mix_work, SUMS, blocks, MATRICES, PARTS)
                        _add_up(
                            slot + BOTH + MATRICES, mix_work + MATRICES, SUMS, blocks,
                            TOKENS * K_ROWS, PARTS,
                        )  # fmt: skip
                        tl.debug_barrier()
                        dots = _load_small(mix_work, tokens, K, K_ROWS, TOKENS)
                        T_u = ()
                        inv = ()
                        for i in tl.static_range(PAIRS):
                            T_u = T_u + (tl.load(small_work + i * TOKENS),)
                        for i in tl.static_range(K):
                            inv = inv + (tl.load(small_work + (PAIRS + i) * TOKENS),)
                        S = scale_symmetric(dots[0:PAIRS], inv, K)
                        q = scale(dots[PAIRS : PAIRS + K], inv, K)
                        e, pivot = eliminate(local_system(S, T_u, False, K), q, K, 1)
                        weights = scale(upper_times(T_u, e, K), inv, K)
                        weights = _spread(weights, spread_work, tokens, K, TOKENS)
                        if block == 0:
                            tl.store(pivots_ptr + first + tokens, pivot, mask=in_t)
                        u = _load_u(
                            raw, fed, u_at, tokens, cols, d, raw_stride, r, mask, K, FEEDBACK,
                            ALIGN, ACC,
                        )  # fmt: skip
                        x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(ACC)
                        p = tl.load(work_ptr + TILE + tile)
                        sigma = tl.load(work_ptr + 2 * TILE + tile)
                        y = p + sigma * (x + _combine(weights, u, K))
                        before = tl.load(y_ptr + y_at, mask=mask, other=0.0)
                        tl.store(part, max_norm(y - before, 1), mask=in_t)
                        tl.store(size_part, max_norm(y, 1), mask=in_t)
                        tl.store(out_ptr + y_at, y, mask=moves)
                        # the workspace is written again below
                        tl.debug_barrier()

                # x~ of the next tokens
                if after < T:
                    _add_up(slot, mix_work, SUMS, blocks, MATRICES, PARTS)
                    _add_up(
                        slot + MATRICES, mix_work + MATRICES, SUMS, blocks, TOKENS * K_ROWS, PARTS
                    )
                    tl.debug_barrier()
                    dots = _load_small(mix_work, tokens, K, K_ROWS, TOKENS)
                    inv = inverse_sizes(dots, d, K, EPS)
                    beta = ()
                    for i in tl.static_range(K):
                        alpha = load_raw(
                            raw_after + tokens * raw_stride, fed_after + tokens * r,
                            u_at + K * d + i, in_after, FEEDBACK, ACC,
                        )  # fmt: skip
                        beta = beta + (BETA_MAX * fast_activate(alpha, "sigmoid", FAST),)
                    T_u = wy_upper(scale_symmetric(dots[0:PAIRS], inv, K), beta, K)
                    e = upper_times(T_u, scale(dots[PAIRS : PAIRS + K], inv, K), K)
                    if JACOBI:
                        for i in tl.static_range(PAIRS):
                            tl.store(small_work + i * TOKENS, T_u[i])
                        for i in tl.static_range(K):
                            tl.store(small_work + (PAIRS + i) * TOKENS, inv[i])
                    weights = _spread(scale(e, inv, K), spread_work, tokens, K, TOKENS)
                    u = _load_u(
                        raw_after, fed_after, u_at, tokens, cols, d, raw_stride, r, mask_after, K,
                        FEEDBACK, ALIGN, ACC,
                    )  # fmt: skip
                    x = tl.load(x_ptr + x_at + TOKENS * x_stride, mask=mask_after, other=0.0)
                    value = x.to(ACC) + _combine(weights, u, K)
                    raw_delta = _load_columns(
                        raw_after, fed_after, 0, tokens, cols, raw_stride, r, mask_after, FEEDBACK,
                        ALIGN, ACC,
                    )  # fmt: skip
                    delta = fast_activate(raw_delta, ACTIVATION, FAST)
                    tl.store(work_ptr + tile, delta)
                    in_BC = in_after[:, None] & in_n[None, :]
                    if SELECTIVE:
                        B = _load_columns(
                            raw_after, fed_after, d, tokens, states, raw_stride, r, in_BC, FEEDBACK,
                            1, ACC,
                        )  # fmt: skip
                        C = _load_columns(
                            raw_after, fed_after, d + n, tokens, states, raw_stride, r, in_BC,
                            FEEDBACK, 1, ACC,
                        )  # fmt: skip
                        B *= tl.rsqrt(tl.sum(B * B, axis=1) + n * EPS)[:, None]
                        C *= tl.rsqrt(tl.sum(C * C, axis=1) + n * EPS)[:, None]
                    else:
                        B = tl.where(in_BC, 1.0, 0.0).to(ACC)
                        C = B
                    BC_tile = tokens[:, None] * BLOCK_N + states[None, :]
                    tl.store(BC_work + BC_tile, B)
                    tl.store(BC_work + TOKENS * BLOCK_N + BC_tile, C)
                    if not COUPLED:
                        s = fast_scale(delta, INPUT_SCALE, FAST)
                        value *= s
                        if JACOBI:
                            tl.store(work_ptr + 2 * TILE + tile, s * tl.sum(B * C, axis=1)[:, None])
                    tl.store(work_ptr + TILE + tile, value)
                    tl.debug_barrier()
