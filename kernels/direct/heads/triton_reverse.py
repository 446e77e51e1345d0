"""The reverse sweep of heads that fit a multiprocessor: one program a head and a few samples.

It takes the tokens of a chunk back, the last first, from what `prepare_kernel` and
`replay_head_kernel` computed for all of them at once. The equations, and the scalars of a token's
local system, are those of `triton_reverse_token.py` and `triton_prepare.py`.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, s samples of a program.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate_vjp, fast_activate
from bedouin.kernels.device.discretize import (
    build_coupled,
    build_decay,
    coupled_reach,
    fast_scale,
)
from bedouin.kernels.device.elementary import LN2, reciprocal
from bedouin.kernels.device.reflections import (
    add,
    load_tuple,
    rows_times,
    sums,
    symmetric_times,
    upper_transposed_times,
)
from bedouin.kernels.direct.heads.device import (
    columns_of,
    combine_of_samples,
    dot_of,
    join_rows,
    rows_of,
    small_rows,
    sum_of,
)


@triton.jit
def load_transposed_weights(
    W_ptr, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr, SELECTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(W^y)^T of a head in tiles of columns: Delta, u_1 .. u_k, two and two interleaved if k is
    even, and [B | C | alpha]."""
    STATES: tl.constexpr = 2 * n if SELECTIVE else 0
    rows, cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D)
    in_d = (cols < d)[:, None]
    at = rows[None, :] * d + cols[:, None]
    inside = in_d & (rows < d)[None, :]
    tiles = (tl.load(W_ptr + at, mask=inside, other=0.0).to(DOT),)
    if K % 2 == 0:
        rows = tl.arange(0, 2 * BLOCK_D)
        within = in_d & (rows // 2 < d)[None, :]
        for i in tl.static_range(K // 2):
            at = (d + STATES + (2 * i + rows % 2) * d + rows // 2)[None, :] * d + cols[:, None]
            tiles = tiles + (tl.load(W_ptr + at, mask=within, other=0.0).to(DOT),)
    else:
        for i in tl.static_range(K):
            at = (d + STATES + i * d + rows)[None, :] * d + cols[:, None]
            tiles = tiles + (tl.load(W_ptr + at, mask=inside, other=0.0).to(DOT),)
    rows = tl.arange(0, BLOCK_S)
    at = small_rows(rows, d, n, K, SELECTIVE)[None, :] * d + cols[:, None]
    within = in_d & (rows < STATES + K)[None, :]
    return tiles + (tl.load(W_ptr + at, mask=within, other=0.0).to(DOT),)


@triton.jit
def paired(rows, S: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """Two and two of K rows (s, d) interleaved, (s, 2 d), if K is even."""
    if K % 2 == 0:
        pairs = ()
        for i in tl.static_range(K // 2):
            pairs = pairs + (join_rows(rows[2 * i : 2 * i + 2], S, 2, BLOCK_D),)
        return pairs
    else:
        return rows


@triton.jit
def transposed_product(
    W, grads, S: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr
):
    """(W^y)^T times the cotangents of the raw values, (d, COLUMNS).

    Differences, because the compiler turns a sum of products into one chain of accumulations, in
    which every step waits for the one before it.
    """
    v = columns_of(grads[0].to(DOT), S, grads[0].shape[1], COLUMNS)
    total = tl.dot(W[0], v, input_precision=PRECISION)
    for i in tl.static_range(1, len(W)):
        v = columns_of(-grads[i].to(DOT), S, grads[i].shape[1], COLUMNS)
        total -= tl.dot(W[i], v, input_precision=PRECISION)
    return total


@triton.jit
def load_token(
    x_row, y_row, grad_y_row, mixed_row, raw_row, fed_row, h_row,  # pointers (s,)
    inside, d: tl.constexpr, n: tl.constexpr, u_at: tl.constexpr, K: tl.constexpr,
    BLOCK_D: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """x, y, grad_y, x~, the raw values of Delta and u, their feedback, and h before the token."""
    cols = tl.arange(0, BLOCK_D)
    x = tl.load(x_row[:, None] + cols[None, :], mask=inside, other=0.0)
    y = tl.load(y_row[:, None] + cols[None, :], mask=inside, other=0.0)
    g = tl.load(grad_y_row[:, None] + cols[None, :], mask=inside, other=0.0)
    mixed = tl.load(mixed_row[:, None] + cols[None, :], mask=inside, other=0.0)
    raw = ()
    fed = ()
    for i in tl.static_range(K + 1):
        at = (0 if i == 0 else u_at + (i - 1) * d) + cols[None, :]
        raw = raw + (tl.load(raw_row[:, None] + at, mask=inside, other=0.0),)
        if FEEDBACK:
            fed = fed + (tl.load(fed_row[:, None] + at, mask=inside, other=0.0),)
    h = ()
    for i in tl.static_range(n):
        h = h + (tl.load(h_row[:, None] + i * d + cols[None, :], mask=inside, other=0.0),)
    return x, y, g, mixed, raw, fed, h


@triton.jit(do_not_specialize=["start", "count", "t_end", "per_head"])
def reverse_head_kernel(
    grad_y_ptr,  # (b, t, d)
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r or more)
    W_ptr,  # (H, r, d), W^y
    A_ptr,  # (H, n, d), log2(e) A
    mixed_ptr,  # (b, count, d): x~
    local_ptr,  # (b, count, 3 P + K K + 5 K + 4 + 2 n)
    replayed_ptr,  # (b, count, n, d): h before the tokens of the chunk
    H_ptr,  # (b, n, d): cotangent of h after the chunk, in place that before it
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, r or more), may be the memory of `fed`
    grad_A_ptr,  # (b, n, d), added to
    statistics_ptr,  # (2, b, t): defect and scale of the adjoint equation
    scratch_ptr,  # (programs, S, 2, BLOCK_L): the scalars of a token, in turn in two places
    start,
    count,
    t_end,
    per_head,  # samples of a head, b / H
    d: tl.constexpr,
    n: tl.constexpr,
    r,  # of a row of grad_raw
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    K: tl.constexpr,
    S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEEDBACK: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROUND: tl.constexpr,
):
    """The adjoint of the tokens of a chunk of S samples of one head, the last first."""
    blocks = tl.cdiv(per_head, S)
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)
    local = program % blocks * S + tl.arange(0, S)
    here = local < per_head
    sample = head * per_head + local
    cols = tl.arange(0, BLOCK_D)
    small = tl.arange(0, BLOCK_S)
    STATES: tl.constexpr = 2 * n if SELECTIVE else 0
    u_at: tl.constexpr = d + STATES
    inside = here[:, None] & (cols < d)[None, :]
    COUPLED: tl.constexpr = INPUT_SCALE == "one_minus_decay"
    PAIRS: tl.constexpr = K * (K + 1) // 2
    SIZE: tl.constexpr = 3 * PAIRS + K * K + 5 * K + 4
    kind: tl.constexpr = grad_raw_ptr.dtype.element_ty
    in_small = here[:, None] & (small < STATES + K)[None, :]
    small_at = small_rows(small, d, n, K, SELECTIVE)
    A_row = A_ptr + head * n * d + cols
    # the cotangents of the raw values of the token after the chunk
    grads = ()
    if FEEDBACK:
        W = load_transposed_weights(
            W_ptr + head * (d + STATES + K * (d + 1)) * d,
            d, n, K, SELECTIVE, BLOCK_D, BLOCK_S, DOT,
        )  # fmt: skip
        after = (sample * t_end + start + count) * r
        more = here & (0 * local + start + count < t_end)  # whether there is such a token
        known = more[:, None] & (cols < d)[None, :]
        rows = ()
        for i in tl.static_range(K):
            at = after[:, None] + u_at + i * d + cols[None, :]
            rows = rows + (tl.load(grad_raw_ptr + at, mask=known, other=0.0).to(ROUND),)
        at = after[:, None] + cols[None, :]
        grads = (tl.load(grad_raw_ptr + at, mask=known, other=0.0).to(ROUND),)
        grads = grads + paired(rows, S, K, BLOCK_D)
        known = more[:, None] & in_small
        at = after[:, None] + small_at[None, :]
        grads = grads + (tl.load(grad_raw_ptr + at, mask=known, other=0.0).to(ROUND),)
    H = ()
    grad_A = ()
    for i in tl.static_range(n):
        at = (sample[:, None] * n + i) * d + cols[None, :]
        H = H + (tl.load(H_ptr + at, mask=inside, other=0.0),)
        grad_A = grad_A + (tl.load(grad_A_ptr + at, mask=inside, other=0.0),)
    x_row = x_ptr + sample * x_stride_b
    y_row = y_ptr + sample * t_end * d
    grad_y_row = grad_y_ptr + sample * grad_y_stride_b
    raw_row = raw_ptr + sample * raw_stride_b
    fed_row = fed_ptr + sample * fed_stride_b
    mixed_row = mixed_ptr + sample * count * d
    local_row = local_ptr + sample * count * (SIZE + 2 * n)
    h_row = replayed_ptr + sample * count * n * d
    last = (start + count - 1).to(tl.int64)
    # loads of a token are issued while the one after it is taken back
    loaded = load_token(
        x_row + last * x_stride_t, y_row + last * d, grad_y_row + last * grad_y_stride_t,
        mixed_row + (count - 1) * d, raw_row + last * raw_stride_t, fed_row + last * fed_stride_t,
        h_row + (count - 1) * n * d, inside, d, n, u_at, K, BLOCK_D, FEEDBACK,
    )  # fmt: skip
    entries = tl.arange(0, BLOCK_L)
    in_local = here[:, None] & (entries < SIZE + 2 * n)[None, :]
    scalars_at = local_row + (count - 1) * (SIZE + 2 * n)
    scalars = tl.load(scalars_at[:, None] + entries[None, :], mask=in_local, other=0.0)
    near = scratch_ptr + (program.to(tl.int64) * S + tl.arange(0, S)) * 2 * BLOCK_L
    for back in range(0, count):
        i_token = count - 1 - back
        t = (start + i_token).to(tl.int64)
        token = sample * t_end + t
        # the scalars of a token are read one by one: first from where they are near
        row = near + back % 2 * BLOCK_L
        tl.store(row[:, None] + entries[None, :], scalars, mask=in_local)
        tl.debug_barrier()
        BC = tl.load(row + SIZE - 3)
        if FEEDBACK:
            # (W^y)^T grad_raw_{t+1}, the cotangent of norm(y_t)
            product = transposed_product(W, grads, S, COLUMNS, PRECISION, DOT)
        x, y, g, mixed, raw, fed, h = loaded
        x = x.to(tl.float32)
        y = y.to(tl.float32)
        g = g.to(tl.float32)
        raw_delta = raw[0].to(tl.float32)
        if FEEDBACK:
            raw_delta += fed[0].to(tl.float32)
        delta = fast_activate(raw_delta, ACTIVATION, FAST)
        u = ()
        for i in tl.static_range(K):
            if FEEDBACK:
                u = u + (raw[i + 1].to(tl.float32) + fed[i + 1].to(tl.float32),)
            else:
                u = u + (raw[i + 1].to(tl.float32),)
        # h_t = decayed + written B^T; the cotangent of the exponent is (H + w C^T) * reach
        decayed = ()
        reaches = ()
        with_B = ()
        with_BC = ()
        with_H = ()
        with_C = ()
        for i in tl.static_range(n):
            # (s, d), because a load of (d,) would be followed by a change of its layout
            A_at = (A_row + i * d)[None, :] + 0 * local[:, None]
            A = tl.load(A_at, mask=inside, other=0.0)
            B_i = tl.load(row + SIZE + i)
            C_i = tl.load(row + SIZE + n + i)
            if COUPLED:
                decay, s_i = build_coupled(A * delta, FULL, FAST)
                with_BC = with_BC + (s_i * (B_i * C_i)[:, None],)
                with_B = with_B + (H[i] * s_i * B_i[:, None],)
                if FULL:
                    sign = tl.where(decay > 0, 1.0, tl.where(decay < 0, -1.0, 0.0))
                    reach = h[i] - sign * mixed * B_i[:, None]
                else:
                    reach = h[i] - mixed * B_i[:, None]
                reach *= coupled_reach(decay, s_i, FULL)
            else:
                decay = build_decay(A * delta, FULL, FAST)
                with_B = with_B + (H[i] * B_i[:, None],)
                if FULL:
                    reach = h[i] * (decay + 1)
                else:
                    reach = h[i] * decay
            decayed = decayed + (decay * h[i],)
            reaches = reaches + (reach,)
            exponent = reach * A
            with_H = with_H + (H[i] * exponent,)
            with_C = with_C + (C_i[:, None] * exponent,)
        from_memory = sum_of(with_B, n)
        # the cotangent of Delta is linear in w
        grad_delta = LN2 * sum_of(with_H, n)
        grad_delta_w = LN2 * sum_of(with_C, n)
        if COUPLED:
            sigma = sum_of(with_BC, n)
        else:
            s = fast_scale(delta, INPUT_SCALE, FAST)
            sigma = s * BC[:, None]
            if INPUT_SCALE == "delta":
                grad_delta += mixed * from_memory
                grad_delta_w += mixed * BC[:, None]
            else:
                inverse = reciprocal(1 + delta, FAST)
                slope = mixed * (inverse * inverse)
                grad_delta += slope * from_memory
                grad_delta_w += slope * BC[:, None]
            from_memory *= s
        grad_delta = activate_vjp(grad_delta, raw_delta, ACTIVATION)
        grad_delta_w = activate_vjp(grad_delta_w, raw_delta, ACTIVATION)
        # w = g + U^T T^T U (from_memory + sigma w), so T^T U (...) = (I - T^T S)^-1 T^T q
        if FEEDBACK:
            grad_normed = rows_of(product, S, BLOCK_D, COLUMNS)
            if NORM:
                rms = tl.load(row + SIZE - 4)
                g += rms[:, None] * grad_normed
            else:
                g += grad_normed
        q = rows_times(u, from_memory + sigma * g, K)
        if FEEDBACK and NORM:
            dots = sums(q + (grad_normed * y,), 1)
            # the norm does not depend on the length of y: the part along y vanishes
            along_y = rms * rms * rms * dots[K] / d
            g -= along_y[:, None] * y
            q = ()
            for i in tl.static_range(K):
                q = q + (dots[i] - along_y * tl.load(row + 3 * PAIRS + K * K + 4 * K + i),)
        else:
            q = sums(q, 1)
        T_g = ()
        for i in tl.static_range(K):
            total = tl.load(row + 3 * PAIRS + i * K) * q[0]
            for j in tl.static_range(K):
                if j > 0:
                    total += tl.load(row + 3 * PAIRS + i * K + j) * q[j]
            T_g = T_g + (total,)
        w = g + combine_of_samples(T_g, u, K)

        # x~ = x + U^T T U v, one reflection after the other
        U_g = add(q, symmetric_times(load_tuple(row + PAIRS, PAIRS), T_g, K), K)
        grad_mixed = from_memory + sigma * w
        G = load_tuple(row + 2 * PAIRS, PAIRS)
        T_v = load_tuple(row + 3 * PAIRS + K * K, K)
        c = load_tuple(row + 3 * PAIRS + K * K + K, K)
        rest = load_tuple(row + 3 * PAIRS + K * K + 2 * K, K)
        squares = load_tuple(row + 3 * PAIRS + K * K + 3 * K, K)
        v = y - x
        for i in tl.static_range(1, K):
            v -= T_v[i][:, None] * u[i]
        small_grads = tl.zeros([S, BLOCK_S], tl.float32)
        rows = ()
        grad_row = grad_raw_ptr + token * r
        for i in tl.static_range(K):
            if i > 0:
                v += T_v[i][:, None] * u[i]
            along = U_g[i]
            for j in tl.static_range(K):
                if j < i:
                    along -= T_g[j] * G[i * (i + 1) // 2 + j]
            along = squares[i] * T_v[i] * along + T_g[i] * rest[i]
            # only the direction of u_i matters: the part of the cotangent along u_i vanishes
            grad_u = T_v[i][:, None] * grad_mixed + T_g[i][:, None] * v - along[:, None] * u[i]
            grad_u = grad_u.to(kind)
            tl.store(grad_row[:, None] + u_at + i * d + cols[None, :], grad_u, mask=inside)
            rows = rows + (grad_u.to(ROUND),)
            here_i = (small == STATES + i)[None, :]
            small_grads = tl.where(here_i, (T_g[i] * c[i])[:, None], small_grads)
            grad_mixed -= T_g[i][:, None] * u[i]
        # what remains of it is the cotangent of x
        to_delta = (grad_delta + w * grad_delta_w).to(kind)
        tl.store(grad_row[:, None] + cols[None, :], to_delta, mask=inside)
        # cotangents of h_t, of the unit B and C, and of the raw ones
        new_H = ()
        new_A = ()
        to_B = ()
        to_C = ()
        for i in tl.static_range(n):
            # A, B and C are read, and the decay is computed, again: kept since the first loop over
            # states they would take so many registers that loads could not run ahead
            C_i = tl.load(row + SIZE + n + i)
            total = H[i] + C_i[:, None] * w
            A_at = (A_row + i * d)[None, :] + 0 * local[:, None]
            A = tl.load(A_at, mask=inside, other=0.0)
            if COUPLED:
                decay, s_i = build_coupled(A * delta, FULL, FAST)
                written = s_i * mixed
            else:
                decay = build_decay(A * delta, FULL, FAST)
                written = s * mixed
            h_i = decayed[i] + written * tl.load(row + SIZE + i)[:, None]
            to_B = to_B + (total * written,)
            to_C = to_C + (h_i * w,)
            new_H = new_H + (total * decay,)
            new_A = new_A + (grad_A[i] + total * reaches[i] * delta,)
        H = new_H
        grad_A = new_A
        if SELECTIVE:
            to_B = sums(to_B, 1)
            to_C = sums(to_C, 1)
            B = load_tuple(row + SIZE, n)
            C = load_tuple(row + SIZE + n, n)
            along_B = dot_of(to_B, B, n)
            along_C = dot_of(to_C, C, n)
            inv_B = tl.load(row + SIZE - 2)
            inv_C = tl.load(row + SIZE - 1)
            for i in tl.static_range(n):
                grad_B = inv_B * (to_B[i] - B[i] * along_B)
                grad_C = inv_C * (to_C[i] - C[i] * along_C)
                small_grads = tl.where((small == i)[None, :], grad_B[:, None], small_grads)
                small_grads = tl.where((small == n + i)[None, :], grad_C[:, None], small_grads)
        small_grads = small_grads.to(kind)
        tl.store(grad_row[:, None] + small_at[None, :], small_grads, mask=in_small)
        if FEEDBACK:
            grads = (to_delta.to(ROUND),)
            grads = grads + paired(rows, S, K, BLOCK_D)
            grads = grads + (small_grads.to(ROUND),)
        x_at = grad_x_ptr + token[:, None] * d + cols[None, :]
        tl.store(x_at, grad_mixed.to(grad_x_ptr.dtype.element_ty), mask=inside)
        # defect and scale of the adjoint equation
        checks = sums(rows_times(u, from_memory + sigma * w, K), 1)
        T = load_tuple(row, PAIRS)
        applied = g + combine_of_samples(upper_transposed_times(T, checks, K), u, K)
        finite = 0 * checks[0]
        defect = tl.max(tl.abs(applied - w), axis=1) + finite
        size = tl.max(tl.abs(applied), axis=1) + finite
        values = tl.where(cols[None, :] == 0, defect[:, None], size[:, None])
        row_of = per_head.to(tl.int64) * (tl.num_programs(0) // blocks) * t_end
        statistic = statistics_ptr + token[:, None] + row_of * cols[None, :]
        tl.store(statistic, values, mask=here[:, None] & (cols < 2)[None, :])
        i_next = tl.maximum(i_token - 1, 0)
        t_next = (start + i_next).to(tl.int64)
        loaded = load_token(
            x_row + t_next * x_stride_t, y_row + t_next * d, grad_y_row + t_next * grad_y_stride_t,
            mixed_row + i_next * d, raw_row + t_next * raw_stride_t,
            fed_row + t_next * fed_stride_t, h_row + i_next * n * d,
            inside, d, n, u_at, K, BLOCK_D, FEEDBACK,
        )  # fmt: skip
        scalars_at = local_row + i_next * (SIZE + 2 * n)
        scalars = tl.load(scalars_at[:, None] + entries[None, :], mask=in_local, other=0.0)
    for i in tl.static_range(n):
        at = (sample[:, None] * n + i) * d + cols[None, :]
        tl.store(H_ptr + at, H[i], mask=inside)
        tl.store(grad_A_ptr + at, grad_A[i], mask=inside)


@triton.jit(do_not_specialize=["start", "count", "slots", "per_head"])
def replay_head_kernel(
    mixed_ptr,  # (b, count, d): x~
    local_ptr,  # (b, count, 3 P + K K + 5 K + 4 + 2 n)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r or more)
    A_ptr,  # (H, n, d), log2(e) A
    h0_ptr,  # (b, n, d): h before token 0
    kept_ptr,  # (b, slots, n, d): h before tokens KEEP, 2 KEEP, ...
    replayed_ptr,  # (b, count, n, d): h before the tokens of the chunk, written
    start,  # a multiple of KEEP
    count,
    slots,
    per_head,
    d: tl.constexpr,
    n: tl.constexpr,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
):
    """h before every token of a chunk, from the kept ones: a program for KEEP tokens of a sample.

    h_t = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T.
    """
    sample = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * KEEP
    head = sample // per_head
    SIZE: tl.constexpr = 3 * (K * (K + 1) // 2) + K * K + 5 * K + 4
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    state = rows[:, None] * d + cols[None, :]
    inside = (rows < n)[:, None] & (cols < d)[None, :]
    A = tl.load(A_ptr + head * n * d + state, mask=inside, other=0.0)
    slot = (start + first) // KEEP
    h_ptr = kept_ptr + (sample * slots + slot - 1) * n * d
    if slot == 0:
        h_ptr = h0_ptr + sample * h0_stride_b
    h = tl.load(h_ptr + state, mask=inside, other=0.0)
    for i in range(first, tl.minimum(first + KEEP, count)):
        tl.store(replayed_ptr + (sample * count + i) * n * d + state, h, mask=inside)
        raw_at = raw_ptr + sample * raw_stride_b + (start + i).to(tl.int64) * raw_stride_t
        delta = tl.load(raw_at + cols, mask=cols < d, other=0.0).to(tl.float32)
        if FEEDBACK:
            fed_at = fed_ptr + sample * fed_stride_b + (start + i).to(tl.int64) * fed_stride_t
            delta += tl.load(fed_at + cols, mask=cols < d, other=0.0).to(tl.float32)
        delta = fast_activate(delta, ACTIVATION, FAST)
        mixed = tl.load(mixed_ptr + (sample * count + i) * d + cols, mask=cols < d, other=0.0)
        at = local_ptr + (sample * count + i) * (SIZE + 2 * n) + SIZE + rows
        B = tl.load(at, mask=rows < n, other=0.0)
        if INPUT_SCALE == "one_minus_decay":
            decay, s_rows = build_coupled(A * delta[None, :], FULL, FAST)
            h = decay * h + s_rows * mixed[None, :] * B[:, None]
        else:
            decay = build_decay(A * delta[None, :], FULL, FAST)
            h = decay * h + (fast_scale(delta, INPUT_SCALE, FAST) * mixed)[None, :] * B[:, None]
