"""The walk through the tokens of a sweep without feedback, one program a sample.

The state is in registers: h, or with REVERSE its cotangent. Every token needs one reduction, of k
numbers over the channels. What the next token reads is loaded before it, and the decay between the
two is independent of the reduction, whose latency it can fill.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_coupled, build_decay, fast_scale
from bedouin.kernels.device.elementary import exp2, exp2_of_negative
from bedouin.kernels.device.reflections import (
    add,
    combine,
    load_tuple,
    rows_times,
    store_tuple,
    sums,
    upper_times,
    upper_transposed_times,
)
from bedouin.kernels.direct.triton_bundles import matrix_of, strided_row


@triton.jit
def solve_row(q, row, K: tl.constexpr):
    """E e = E N E q, by the scalars of a token as in triton_prepare.py."""
    PAIRS: tl.constexpr = K * (K + 1) // 2
    left, Z = load_tuple(row + K, K * K), load_tuple(row + K + K * K, PAIRS)
    z = ()
    for step in tl.static_range(K):
        total = left[(K - 1 - step) * K] * q[0]
        for j in tl.static_range(K):
            if j > 0:
                total += left[(K - 1 - step) * K + j] * q[j]
        for j in tl.static_range(K):
            if j < step:
                total -= Z[(K - 1 - j) * (K - j) // 2 + K - 1 - step] * z[step - 1 - j]
        z = (total * Z[(K - 1 - step) * (K - step) // 2 + K - 1 - step],) + z
    return upper_times(load_tuple(row + K + K * K + PAIRS, PAIRS), z, K)


@triton.jit
def solve_row_transposed(q, row, K: tl.constexpr):
    """E f = E N^T E q, likewise."""
    PAIRS: tl.constexpr = K * (K + 1) // 2
    left, Z = load_tuple(row + K, K * K), load_tuple(row + K + K * K, PAIRS)
    q = upper_transposed_times(load_tuple(row + K + K * K + PAIRS, PAIRS), q, K)
    z = ()
    for i in tl.static_range(K):
        total = q[i]
        for j in tl.static_range(K):
            if j < i:
                total -= Z[i * (i + 1) // 2 + j] * z[j]
        z = z + (total * Z[i * (i + 1) // 2 + i],)
    out = ()
    for j in tl.static_range(K):
        total = left[j] * z[0]
        for i in tl.static_range(K):
            if i > 0:
                total += left[i * K + j] * z[i]
        out = out + (total,)
    return out


@triton.jit
def load_rows(raw, at, in_d, d: tl.constexpr, K: tl.constexpr):
    """u_1 .. u_k (BLOCK_D,), not converted, which would wait for them."""
    u = ()
    for i in tl.static_range(K):
        row = tl.load(raw + i * d + at, mask=in_d, other=0.0, cache_modifier=".cg")
        u = u + (row,)
    return u


@triton.jit
def decay_of(
    delta, A_log2, rows, WHOLE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """lambda (n, d); in float32 3 of 16 states by arithmetic, so that the instruction `ex2` and the
    others take equally long. If WHOLE, the rows of a thread, and which way each takes, are
    constants for the compiler."""
    exponent = A_log2 * delta[None, :]
    if WHOLE and exponent.dtype == tl.float32:
        power = tl.where((rows % 5 == 3)[:, None], exp2_of_negative(exponent), exp2(exponent, FAST))
        return 2 * power - 1 if FULL else power
    else:
        return build_decay(exponent, FULL, FAST)


@triton.jit
def read_memory(
    h, vector, delta, A_log2,
    REVERSE: tl.constexpr, INPUT_SCALE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """h C; if REVERSE (s * h) B."""
    if REVERSE and INPUT_SCALE == "one_minus_decay":
        _, s = build_coupled(A_log2 * delta[None, :], FULL, FAST)
        return tl.sum(h * s * vector[:, None], axis=0)
    elif REVERSE:
        return fast_scale(delta, INPUT_SCALE, FAST) * tl.sum(h * vector[:, None], axis=0)
    else:
        return tl.sum(h * vector[:, None], axis=0)


@triton.jit(do_not_specialize=["t_end", "every", "slots", "per_head"])
def walk_kernel(
    given_ptr,  # (b, t, d) or (H, b / H, t, d): x, or if REVERSE the cotangent of y
    raw_ptr,  # (b, t, r)
    delta_ptr,  # (b, t, d), Delta
    solver_ptr,  # (b, t, WIDTH), as in triton_prepare.py
    A_ptr,  # (n, d) or (H, n, d), log2(e) A
    h_ptr,  # (b, n, d): the first memory, overwritten by the last; or the cotangent of the last,
    # overwritten by that of the first
    out_ptr,  # (b, t, d), written: y, or v
    e_ptr,  # (b, t, K), written unless REVERSE: E e
    kept_ptr,  # (b, slots, n, d), written: h before tokens every, 2 every, ...; or the cotangents
    # of h after tokens every - 1, 2 every - 1, ..., and of the last
    t_end,
    every,
    slots,
    per_head,  # samples of a head; None: one head
    d: tl.constexpr,
    n: tl.constexpr,
    given_stride_h,  # None: one head
    given_stride_b,
    given_stride_t,
    raw_stride_b,
    raw_stride_t,
    REVERSE: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row of `solver`
    BC_AT: tl.constexpr,  # where B is in it
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RESIDENT: tl.constexpr,  # A stays in registers
    WHOLE: tl.constexpr,  # a thread has all states of its channels
    SELECTIVE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """y and h of all tokens, or v and the cotangents of h, as the package's docstring says."""
    COUPLED: tl.constexpr = INPUT_SCALE == "one_minus_decay"
    PAIRS: tl.constexpr = K * (K + 1) // 2
    SIZE: tl.constexpr = K * K + 2 * PAIRS + K + 1
    READ: tl.constexpr = BC_AT if REVERSE else BC_AT + n
    WRITTEN: tl.constexpr = BC_AT + n if REVERSE else BC_AT
    U_AT: tl.constexpr = d + (2 * n if SELECTIVE else 0)
    sample = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    A_at = matrix_of(A_ptr, sample, per_head, d, n) + state
    A_log2 = tl.load(A_at, mask=in_state, other=0.0)
    h_at = h_ptr + sample * n * d + state
    h = tl.load(h_at, mask=in_state, other=0.0)
    # the next slot, and the tokens until it is written
    slot, until = slots * 0, every
    kept = kept_ptr + sample * slots * n * d
    if REVERSE:
        slot, until = slots - 2, (t_end - 1) % every + 1
        last_slot = kept + (slots - 1).to(tl.int64) * (n * d)
        tl.store(last_slot + state, h, mask=in_state)
    end = tl.cast(t_end, tl.int64) - 1
    first = end if REVERSE else end * 0
    last = end - first
    step = -1 if REVERSE else 1
    raw = raw_ptr + tl.multiple_of(sample * raw_stride_b, ALIGNED) + U_AT
    given = strided_row(
        given_ptr, sample, 0, per_head, given_stride_h, given_stride_b, given_stride_t
    )
    deltas = delta_ptr + sample * t_end * d + cols
    solvers = solver_ptr + sample * t_end * WIDTH
    offset = tl.multiple_of(first * raw_stride_t, ALIGNED)
    u_next = load_rows(raw + offset, cols, in_d, d, K)
    value_next = tl.load(given + first * given_stride_t + cols, mask=in_d, other=0.0)
    delta = tl.load(deltas + first * d, mask=in_d, other=0.0)
    if not REVERSE:
        h *= decay_of(delta, A_log2, rows, WHOLE, FULL, FAST)
    vector = tl.load(solvers + first * WIDTH + READ + rows, mask=in_n, other=0.0)
    read = read_memory(h, vector, delta, A_log2, REVERSE, INPUT_SCALE, FULL, FAST)
    c_next = load_tuple(solvers + first * WIDTH, K)
    ahead = tl.where(t_end > 1, first + step, last)
    delta_next = tl.load(deltas + ahead * d, mask=in_d, other=0.0)
    for i in range(0, t_end):
        t = first + step * i
        ahead = tl.where(i + 1 < t_end, t + step, last)
        further = tl.where(i + 2 < t_end, t + 2 * step, last)
        row = solvers + t * WIDTH
        u = ()
        for j in tl.static_range(K):
            u = u + (u_next[j].to(ACC),)
        value = value_next.to(ACC)
        offset = tl.multiple_of(ahead * raw_stride_t, ALIGNED)
        u_next = load_rows(raw + offset, cols, in_d, d, K)
        value_next = tl.load(given + ahead * given_stride_t + cols, mask=in_d, other=0.0)
        delta_further = tl.load(deltas + further * d, mask=in_d, other=0.0)
        vector = tl.load(solvers + ahead * WIDTH + READ + rows, mask=in_n, other=0.0)
        written = tl.load(row + WRITTEN + rows, mask=in_n, other=0.0)
        if not RESIDENT:
            A_log2 = tl.load(A_at, mask=in_state, other=0.0)

        c = c_next
        # with `vector` these touch each line of cache of the next row
        c_next = load_tuple(solvers + ahead * WIDTH, K)
        q = add(sums(rows_times(u, read, K)), c, K)
        if REVERSE:
            weights = solve_row_transposed(q, row, K)
        else:
            weights = solve_row(q, row, K)
        value += combine(weights, u, K)
        out = out_ptr + (sample * t_end + t) * d + cols
        until -= 1
        stores = (until == 0) & (i + 1 < t_end)
        slot_ptr = kept + slot.to(tl.int64) * (n * d)
        if REVERSE:
            tl.store(out, value.to(out_ptr.dtype.element_ty), mask=in_d)
            h += value[None, :] * written[:, None]
            h *= decay_of(delta, A_log2, rows, WHOLE, FULL, FAST)
            read = read_memory(h, vector, delta_next, A_log2, True, INPUT_SCALE, FULL, FAST)
        else:
            store_tuple(e_ptr + (sample * t_end + t) * K, weights, K)
            if COUPLED:
                _, s = build_coupled(A_log2 * delta[None, :], FULL, FAST)
                more = s * value[None, :] * written[:, None]
                C = tl.load(row + READ + rows, mask=in_n, other=0.0)
                y = read + tl.sum(more * C[:, None], axis=0)
                h += more
            else:
                value *= fast_scale(delta, INPUT_SCALE, FAST)
                y = read + tl.load(row + SIZE - 1) * value
                h += value[None, :] * written[:, None]
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask=in_d)
            if stores:
                tl.store(slot_ptr + state, h, mask=in_state)
            # after the last token the memory stays as it is
            delta_next = tl.where(i + 1 < t_end, delta_next, 0.0)
            h *= decay_of(delta_next, A_log2, rows, WHOLE, FULL, FAST)
            read = read_memory(h, vector, delta_next, A_log2, False, INPUT_SCALE, FULL, FAST)
        if stores:
            if REVERSE:
                tl.store(slot_ptr + state, h, mask=in_state)
            slot += step
            until = every
        delta, delta_next = delta_next, delta_further
    tl.store(h_at, h, mask=in_state)
