"""The reverse sweep as Triton kernels: the exact adjoint of a chunk of tokens in three launches.

`prepare_kernel` computes in parallel what the known y determines, `replay_kernel` the memory before
every token of the chunk from the one kept, and `reverse_kernel` walks back: alone, or as persistent
programs that also multiply with (W^y)^T, ordered by two counters as in triton_forward.py: `pulled`
counts the tiles of (W^y)^T grad_raw_{t+1}, `left` the samples whose grad_raw_t is written.

What a token's `small` holds, for K reflections and P = K (K + 1) / 2 packed entries:
[1 / |u_i| K | beta K | U v K | P unit upper P | S = U diag(sigma) U^T P | G = U U^T P], T = P beta.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.direct.triton_forward import (
    LOG2_E,
    announce,
    decay_rows,
    load_tile,
    tile_product,
    wait_for,
)
from bedouin.kernels.direct.triton_math import (
    activate,
    activate_vjp,
    input_scale,
    max_norm,
    sigmoid,
)
from bedouin.kernels.direct.triton_small import (
    _add2,
    add,
    combine,
    eliminate,
    local_system,
    products,
    scale,
    scale_symmetric,
    sums,
    symmetric_times,
    upper_times,
    upper_transposed_times,
    wy_upper,
)


@triton.jit
def _unit_upper(T, G, beta, K: tl.constexpr):
    """P of T = P diag(beta), packed, without a division by beta: P_:j,j = -T_:j,:j G_:j,j."""
    P = ()
    for j in tl.static_range(K):
        for i in tl.static_range(K):
            if i < j:
                total = T[i * (i + 1) // 2 + i] * G[j * (j + 1) // 2 + i]
                for m in tl.static_range(K):
                    if (m > i) and (m < j):
                        total += T[m * (m + 1) // 2 + i] * G[j * (j + 1) // 2 + m]
                P = P + (-total,)
            elif i == j:
                P = P + (tl.full([], 1.0, G[0].dtype),)
    return P


@triton.jit
def _columns_times(P, beta, K: tl.constexpr):
    """T = P diag(beta), packed."""
    T = ()
    for j in tl.static_range(K):
        for i in tl.static_range(K):
            if i <= j:
                T = T + (P[j * (j + 1) // 2 + i] * beta[j],)
    return T


@triton.jit
def _load_unit(row_ptr, fed_row_ptr, at, rows, in_n, n, FEEDBACK: tl.constexpr, EPS, ACC):
    """The raw vector (n,) at a column, and 1 / its norm."""
    v = tl.load(row_ptr + at + rows, mask=in_n, other=0.0).to(ACC)
    if FEEDBACK:
        v += tl.load(fed_row_ptr + at + rows, mask=in_n, other=0.0).to(ACC)
    return v, tl.rsqrt(tl.sum(v * v, axis=0) + n * EPS)


@triton.jit
def _load_raw(row_ptr, fed_row_ptr, at, mask, FEEDBACK: tl.constexpr, ACC: tl.constexpr):
    """raw^x + W^y norm(y_{t-1}) at some columns."""
    v = tl.load(row_ptr + at, mask=mask, other=0.0).to(ACC)
    if FEEDBACK:
        v += tl.load(fed_row_ptr + at, mask=mask, other=0.0).to(ACC)
    return v


@triton.jit(do_not_specialize=["start", "count", "t_end"])
def prepare_kernel(
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (n, d)
    mixed_ptr,  # (b, count, d): x~
    small_ptr,  # (b, count, 3 K + 3 P)
    start,
    count,
    t_end,
    d,
    n,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    sample = (tl.program_id(0) // count).to(tl.int64)
    i_token = tl.program_id(0) % count
    t = start + i_token
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    u_at = d + (2 * n if SELECTIVE else 0)
    raw = raw_ptr + sample * raw_stride_b + t * raw_stride_t
    fed = fed_ptr + sample * fed_stride_b + t * fed_stride_t
    x = tl.load(x_ptr + sample * x_stride_b + t * x_stride_t + cols, mask=in_d, other=0.0).to(ACC)
    v = tl.load(y_ptr + (sample * t_end + t) * d + cols, mask=in_d, other=0.0).to(ACC) - x
    delta = activate(_load_raw(raw, fed, cols, in_d, FEEDBACK, ACC), ACTIVATION)
    if SELECTIVE:
        B, inv_B = _load_unit(raw, fed, d, rows, in_n, n, FEEDBACK, EPS, ACC)
        C, inv_C = _load_unit(raw, fed, d + n, rows, in_n, n, FEEDBACK, EPS, ACC)
        BC = B * C * (inv_B * inv_C)
    else:
        BC = tl.where(in_n, 1.0, 0.0).to(ACC)
    if INPUT_SCALE == "one_minus_decay":
        in_state = in_n[:, None] & in_d[None, :]
        state = rows[:, None] * d + cols[None, :]
        A = tl.load(A_ptr + state, mask=in_state, other=0.0).to(ACC)
        s_rows = 1 - tl.abs(decay_rows(delta, A * LOG2_E, FULL))
        sigma = tl.sum(s_rows * BC[:, None], axis=0)
    else:
        sigma = input_scale(delta, INPUT_SCALE) * tl.sum(BC, axis=0)
    u = ()
    sigma_u = ()
    with_v = ()
    beta = ()
    for i in tl.static_range(K):
        u_i = _load_raw(raw, fed, u_at + i * d + cols, in_d, FEEDBACK, ACC)
        u = u + (u_i,)
        sigma_u = sigma_u + (sigma * u_i,)
        with_v = with_v + (u_i * v,)
        alpha = tl.load(raw + u_at + K * d + i).to(ACC)
        if FEEDBACK:
            alpha += tl.load(fed + u_at + K * d + i).to(ACC)
        beta = beta + (BETA_MAX * sigmoid(alpha),)
    PAIRS: tl.constexpr = K * (K + 1) // 2
    dots = sums(products(u, u, K) + products(sigma_u, u, K) + with_v)
    inv = ()
    for i in tl.static_range(K):
        inv = inv + (tl.rsqrt(dots[i * (i + 1) // 2 + i] + d * EPS),)
    G = scale_symmetric(dots[0:PAIRS], inv, K)
    S = scale_symmetric(dots[PAIRS : 2 * PAIRS], inv, K)
    U_v = scale(dots[2 * PAIRS : 2 * PAIRS + K], inv, K)
    T = wy_upper(G, beta, K)
    mixed = x + combine(scale(upper_times(T, U_v, K), inv, K), u, K)
    token = sample * count + i_token
    tl.store(mixed_ptr + token * d + cols, mixed, mask=in_d)
    small = inv + beta + U_v + _unit_upper(T, G, beta, K) + S + G
    for i in tl.static_range(3 * K + 3 * PAIRS):
        tl.store(small_ptr + token * (3 * K + 3 * PAIRS) + i, small[i])


@triton.jit(do_not_specialize=["start", "count", "slot", "slots"])
def replay_kernel(
    mixed_ptr,  # (b, count, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (n, d)
    kept_ptr,  # (b, slots, n, d): h before token start is at `slot`
    before_ptr,  # (b, count, n, d): h before every token, if KEEP_ALL
    last_ptr,  # (b, ..., n, d): h after the chunk, if KEEP_LAST
    start,
    count,
    slot,
    slots,
    d,
    n,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    last_stride_b,
    KEEP_ALL: tl.constexpr,
    KEEP_LAST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    A = tl.load(A_ptr + state, mask=in_state, other=0.0).to(ACC) * LOG2_E
    h = tl.load(kept_ptr + (sample * slots + slot) * n * d + state, mask=in_state, other=0.0)
    for i in range(0, count):
        if KEEP_ALL:
            tl.store(before_ptr + (sample * count + i) * n * d + state, h, mask=in_state)
        raw = raw_ptr + sample * raw_stride_b + (start + i) * raw_stride_t
        fed = fed_ptr + sample * fed_stride_b + (start + i) * fed_stride_t
        mixed = tl.load(mixed_ptr + (sample * count + i) * d + cols, mask=in_d, other=0.0)
        delta = activate(_load_raw(raw, fed, cols, in_d, FEEDBACK, ACC), ACTIVATION)
        if SELECTIVE:
            B, inv_B = _load_unit(raw, fed, d, rows, in_n, n, FEEDBACK, EPS, ACC)
            B *= inv_B
        else:
            B = tl.where(in_n, 1.0, 0.0).to(ACC)
        decay = decay_rows(delta, A, FULL)
        if INPUT_SCALE == "one_minus_decay":
            h = decay * h + (1 - tl.abs(decay)) * mixed[None, :] * B[:, None]
        else:
            h = decay * h + (input_scale(delta, INPUT_SCALE) * mixed)[None, :] * B[:, None]
    if KEEP_LAST:
        tl.store(last_ptr + sample * last_stride_b + state, h, mask=in_state)


@triton.jit
def _reverse_token(
    H,  # (BLOCK_N, BLOCK_D), cotangent of h_t
    sample,
    i_token,
    t,
    grad_y_ptr,
    pulled_ptr,
    x_ptr,
    y_ptr,
    raw_ptr,
    fed_ptr,
    A_ptr,
    mixed_ptr,
    small_ptr,
    before_ptr,
    grad_x_ptr,
    grad_raw_ptr,
    grad_A_ptr,
    statistics_ptr,
    pulled_counter_ptr,
    left_ptr,
    pulled_target,
    batch,
    t_end,
    splits,
    room,
    r,
    d,
    n,
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Cotangents of x_t and raw_t; returns that of h_{t-1}."""
    COUPLED: tl.constexpr = INPUT_SCALE == "one_minus_decay"
    PAIRS: tl.constexpr = K * (K + 1) // 2
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    u_at = d + (2 * n if SELECTIVE else 0)
    token = sample * t_end + t
    raw = raw_ptr + sample * raw_stride_b + t * raw_stride_t
    fed = fed_ptr + sample * fed_stride_b + t * fed_stride_t

    # all that the later tokens' cotangents of y do not enter, while the program waits for them
    in_chunk = sample * room + i_token
    small = ()
    for i in tl.static_range(3 * K + 3 * PAIRS):
        small = small + (tl.load(small_ptr + in_chunk * (3 * K + 3 * PAIRS) + i),)
    inv = small[0:K]
    beta = small[K : 2 * K]
    U_v = small[2 * K : 3 * K]
    P = small[3 * K : 3 * K + PAIRS]
    S = small[3 * K + PAIRS : 3 * K + 2 * PAIRS]
    G = small[3 * K + 2 * PAIRS : 3 * K + 3 * PAIRS]
    T = _columns_times(P, beta, K)
    x = tl.load(x_ptr + sample * x_stride_b + t * x_stride_t + cols, mask=in_d, other=0.0).to(ACC)
    y = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0).to(ACC)
    mixed = tl.load(mixed_ptr + in_chunk * d + cols, mask=in_d, other=0.0)
    grad_y = grad_y_ptr + sample * grad_y_stride_b + t * grad_y_stride_t
    g = tl.load(grad_y + cols, mask=in_d, other=0.0).to(ACC)
    raw_delta = _load_raw(raw, fed, cols, in_d, FEEDBACK, ACC)
    delta = activate(raw_delta, ACTIVATION)
    if SELECTIVE:
        B, inv_B = _load_unit(raw, fed, d, rows, in_n, n, FEEDBACK, EPS, ACC)
        C, inv_C = _load_unit(raw, fed, d + n, rows, in_n, n, FEEDBACK, EPS, ACC)
        B *= inv_B
        C *= inv_C
    else:
        B = tl.where(in_n, 1.0, 0.0).to(ACC)
        C = B
    BC = tl.sum(B * C, axis=0)
    u = ()
    for i in tl.static_range(K):
        u = u + (_load_raw(raw, fed, u_at + i * d + cols, in_d, FEEDBACK, ACC),)
    A = tl.load(A_ptr + state, mask=in_state, other=0.0).to(ACC)
    before = before_ptr + in_chunk * n * d + state
    h = tl.load(before, mask=in_state, other=0.0)
    decay = decay_rows(delta, A * LOG2_E, FULL)
    # h_t = decay * h + written B^T; the exponent's cotangent is (H + w C^T) * reach
    reach = h
    if COUPLED:
        s_rows = 1 - tl.abs(decay)
        sigma = tl.sum(s_rows * (B * C)[:, None], axis=0)
        from_memory = tl.sum(H * s_rows * B[:, None], axis=0)
        written = s_rows * mixed[None, :]
        if FULL:
            sign = tl.where(decay > 0, 1.0, tl.where(decay < 0, -1.0, 0.0)).to(ACC)
            reach = h - sign * mixed[None, :] * B[:, None]
        else:
            reach = h - mixed[None, :] * B[:, None]
    else:
        s = input_scale(delta, INPUT_SCALE)
        sigma = s * BC
        H_B = tl.sum(H * B[:, None], axis=0)
        from_memory = s * H_B
    if FULL:
        reach *= decay + 1
    else:
        reach *= decay
    with_H = tl.sum(H * reach * A, axis=0)
    with_C = tl.sum(C[:, None] * reach * A, axis=0)
    h *= decay
    early = ()
    for i in tl.static_range(K):
        early = early + (u[i] * from_memory,)
    if FEEDBACK and NORM:
        early = early + (y * y,)
        for i in tl.static_range(K):
            early = early + (sigma * u[i] * y,)
    early = sums(early)
    U_m = scale(early[0:K], inv, K)

    if PERSISTENT:
        wait_for(pulled_counter_ptr, pulled_target)
    if FEEDBACK:
        pulled = tl.zeros([BLOCK_D], dtype=ACC)
        for split in range(0, splits):
            at = (split * batch + sample) * d + cols
            part = tl.load(pulled_ptr + at, mask=in_d, other=0.0, cache_modifier=".cg")
            pulled += part.to(ACC)
        if NORM:
            rms = tl.rsqrt(early[K] / d + NORM_EPS)
            g += rms * pulled
        else:
            g += pulled
    late = ()
    for i in tl.static_range(K):
        late = late + (sigma * u[i] * g,)
    if FEEDBACK and NORM:
        late = sums(late + (pulled * y,))
        # the part of the cotangent along y that the norm takes out
        along_y = rms * rms * rms * late[K] / d
        g -= along_y * y
        U_g_sigma = ()
        for i in tl.static_range(K):
            U_g_sigma = U_g_sigma + ((late[i] - along_y * early[K + 1 + i]) * inv[i],)
    else:
        U_g_sigma = scale(sums(late), inv, K)

    # w = (I - (I - Q)^T diag(sigma))^-1 rhs, rhs = g + (I - Q)^T from_memory
    T_m = upper_transposed_times(T, U_m, K)
    rhs = g + combine(scale(T_m, inv, K), u, K)
    U_rhs = add(U_g_sigma, symmetric_times(S, T_m, K), K)
    a, _ = eliminate(
        local_system(S, T, True, K), upper_transposed_times(T, U_rhs, K), K
    )  # fmt: skip
    w = rhs + combine(scale(a, inv, K), u, K)
    U_w = add(U_rhs, symmetric_times(S, a, K), K)

    # x~ = x + U^T T U v
    grad_mixed = from_memory + sigma * w
    U_g = add(U_m, U_w, K)
    T_v = upper_times(T, U_v, K)
    T_g = upper_transposed_times(T, U_g, K)

    # T = (I + N)^-1 diag(beta) = P diag(beta), N = diag(beta) striu(G), G = U U^T
    left = upper_transposed_times(P, U_g, K)
    grad_raw = grad_raw_ptr + token * r
    kind: tl.constexpr = grad_raw_ptr.dtype.element_ty
    v = y - x
    for i in tl.static_range(K):
        grad_beta = left[i] * U_v[i]
        along = T_v[i] * U_g[i] + T_g[i] * U_v[i]
        grad_U = T_v[i] * grad_mixed + T_g[i] * v
        for j in tl.static_range(K):
            if j > i:
                grad_N = -left[i] * T_v[j]
                grad_beta += grad_N * G[j * (j + 1) // 2 + i]
                along += beta[i] * grad_N * G[j * (j + 1) // 2 + i]
                grad_U += (beta[i] * grad_N * inv[j]) * u[j]
            elif j < i:
                grad_G = -beta[j] * left[j] * T_v[i]
                along += grad_G * G[i * (i + 1) // 2 + j]
                grad_U += (grad_G * inv[j]) * u[j]
        # u_i enters through its direction: the part along it falls out
        grad_u = inv[i] * (grad_U - (inv[i] * along) * u[i])
        tl.store(grad_raw + u_at + i * d + cols, grad_u.to(kind), mask=in_d)
        grad_alpha = grad_beta * beta[i] * (1 - beta[i] / BETA_MAX)
        tl.store(grad_raw + u_at + K * d + i, grad_alpha.to(kind))

    grad_delta = with_H + w * with_C
    if INPUT_SCALE == "delta":
        grad_delta += mixed * (H_B + BC * w)
    elif INPUT_SCALE == "bounded_delta":
        grad_delta += mixed * (H_B + BC * w) / ((1 + delta) * (1 + delta))
    tl.store(grad_raw + cols, activate_vjp(grad_delta, raw_delta, ACTIVATION).to(kind), mask=in_d)
    H += C[:, None] * w[None, :]
    if SELECTIVE:
        if COUPLED:
            h += written * B[:, None]
            grad_B, grad_C = tl.reduce((H * written, h * w[None, :]), 1, _add2)
        else:
            h += (s * mixed)[None, :] * B[:, None]
            grad_B, grad_C = tl.reduce((H * (s * mixed)[None, :], h * w[None, :]), 1, _add2)
        # B and C are unit vectors of the raw ones
        grad_B = inv_B * (grad_B - B * tl.sum(grad_B * B, axis=0))
        grad_C = inv_C * (grad_C - C * tl.sum(grad_C * C, axis=0))
        tl.store(grad_raw + d + rows, grad_B.to(kind), mask=in_n)
        tl.store(grad_raw + d + n + rows, grad_C.to(kind), mask=in_n)
    if PERSISTENT:
        announce(left_ptr)

    grad_x = grad_mixed - combine(scale(T_g, inv, K), u, K)
    tl.store(grad_x_ptr + token * d + cols, grad_x.to(grad_x_ptr.dtype.element_ty), mask=in_d)
    checks = ()
    for i in tl.static_range(K):
        checks = checks + (sigma * u[i] * w,)
    checks = upper_transposed_times(T, scale(sums(checks), inv, K), K)
    applied = rhs + combine(scale(checks, inv, K), u, K)
    cell = statistics_ptr + token
    tl.store(cell, max_norm(applied - w))
    tl.store(cell + tl.cast(batch, tl.int64) * t_end, max_norm(applied))
    # again, rather than kept over the wait: registers are short
    A = tl.load(A_ptr + state, mask=in_state, other=0.0).to(ACC)
    h = tl.load(before, mask=in_state, other=0.0)
    decay = decay_rows(delta, A * LOG2_E, FULL)
    if COUPLED:
        if FULL:
            sign = tl.where(decay > 0, 1.0, tl.where(decay < 0, -1.0, 0.0)).to(ACC)
            h -= sign * mixed[None, :] * B[:, None]
        else:
            h -= mixed[None, :] * B[:, None]
    if FULL:
        h *= decay + 1
    else:
        h *= decay
    sum_A = grad_A_ptr + sample * n * d + state
    total = tl.load(sum_A, mask=in_state, other=0.0)
    tl.store(sum_A, total + H * h * delta[None, :], mask=in_state)
    return H * decay


@triton.jit(do_not_specialize=["start", "count", "t_end", "batch"])
def reverse_kernel(
    grad_y_ptr,  # (b, t, d)
    pulled_ptr,  # (splits, b, d): parts of (W^y)^T grad_raw of the next token, of norm(y_t)
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    W_ptr,  # (d, r), (W^y)^T
    A_ptr,  # (n, d)
    mixed_ptr,  # (b, room, d), from token start on
    small_ptr,  # (b, room, 3 K + 3 P), likewise
    before_ptr,  # (b, room, n, d), likewise
    H_ptr,  # (b, n, d): cotangent of the h after the chunk, in place that of the h before it
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, r), may be the memory of `fed`
    grad_A_ptr,  # (b, n, d), added to
    statistics_ptr,  # (2, b, t): defect and scale of the adjoint equation
    counters_ptr,  # (2,), zeros: pulled, left
    start,
    count,
    batch,
    t_end,
    splits,
    room,
    r,
    d,
    n,
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    RESIDENT: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    state = rows[:, None] * d + cols[None, :]
    in_state = (rows < n)[:, None] & (cols < d)[None, :]
    pulled_counter_ptr, left_ptr = counters_ptr, counters_ptr + 1
    own = program.to(tl.int64)
    H = tl.zeros([BLOCK_N, BLOCK_D], dtype=ACC)
    if RESIDENT:
        if program < batch:
            H = tl.load(H_ptr + own * n * d + state, mask=in_state, other=0.0)
    tiles = 0
    tiles_m = tl.cdiv(d, BLOCK_M)
    first_tile = programs - 1 - program
    if PERSISTENT:
        tiles = tiles_m * splits
        if ONE_TILE:
            m0, v0 = first_tile % tiles_m * BLOCK_M, first_tile // tiles_m * BLOCK_V
            W = load_tile(W_ptr, m0, v0, d, r, r, DOT, BLOCK_M, BLOCK_V)
    for back in range(0, count):
        i_token = count - 1 - back
        t = start + i_token
        if RESIDENT:
            if program < batch:
                H = _reverse_token(
                    H, own, i_token, t, grad_y_ptr, pulled_ptr, x_ptr, y_ptr, raw_ptr, fed_ptr,
                    A_ptr, mixed_ptr, small_ptr, before_ptr, grad_x_ptr, grad_raw_ptr, grad_A_ptr,
                    statistics_ptr, pulled_counter_ptr, left_ptr, back * tiles, batch, t_end,
                    splits, room, r, d, n, grad_y_stride_b, grad_y_stride_t, x_stride_b,
                    x_stride_t, raw_stride_b, raw_stride_t, fed_stride_b, fed_stride_t, K, BLOCK_D,
                    BLOCK_N, FEEDBACK, PERSISTENT, NORM, NORM_EPS, ACTIVATION, SELECTIVE, BETA_MAX,
                    INPUT_SCALE, FULL, EPS, ACC,
                )  # fmt: skip
        else:
            for index in range(program, batch, programs):
                sample = tl.cast(index, tl.int64)
                cotangent = H_ptr + sample * n * d + state
                H = tl.load(cotangent, mask=in_state, other=0.0)
                H = _reverse_token(
                    H, sample, i_token, t, grad_y_ptr, pulled_ptr, x_ptr, y_ptr, raw_ptr, fed_ptr,
                    A_ptr, mixed_ptr, small_ptr, before_ptr, grad_x_ptr, grad_raw_ptr, grad_A_ptr,
                    statistics_ptr, pulled_counter_ptr, left_ptr, back * tiles, batch, t_end,
                    splits, room, r, d, n, grad_y_stride_b, grad_y_stride_t, x_stride_b,
                    x_stride_t, raw_stride_b, raw_stride_t, fed_stride_b, fed_stride_t, K, BLOCK_D,
                    BLOCK_N, FEEDBACK, PERSISTENT, NORM, NORM_EPS, ACTIVATION, SELECTIVE, BETA_MAX,
                    INPUT_SCALE, FULL, EPS, ACC,
                )  # fmt: skip
                tl.store(cotangent, H, mask=in_state)
                # the next token reads H, perhaps with other threads than those that wrote it
                tl.debug_barrier()
        if PERSISTENT:
            vectors = grad_raw_ptr + tl.cast(t, tl.int64) * r
            if first_tile < tiles:
                wait_for(left_ptr, (back + 1) * batch)
            if ONE_TILE:
                if first_tile < tiles:
                    m0, v0 = first_tile % tiles_m * BLOCK_M, first_tile // tiles_m * BLOCK_V
                    out = pulled_ptr + (first_tile // tiles_m) * batch * d
                    tile_product(
                        W, vectors, out, m0, v0, batch, d, r, t_end * r, d, PRECISION, DOT, BLOCK_M,
                        BLOCK_V, BLOCK_B,
                    )  # fmt: skip
                    announce(pulled_counter_ptr)
            else:
                for tile in range(first_tile, tiles, programs):
                    m0, v0 = tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_V
                    part = load_tile(W_ptr, m0, v0, d, r, r, DOT, BLOCK_M, BLOCK_V)
                    out = pulled_ptr + (tile // tiles_m) * batch * d
                    tile_product(
                        part, vectors, out, m0, v0, batch, d, r, t_end * r, d, PRECISION, DOT, BLOCK_M,
                        BLOCK_V, BLOCK_B,
                    )  # fmt: skip
                    announce(pulled_counter_ptr)
    if RESIDENT:
        if program < batch:
            tl.store(H_ptr + own * n * d + state, H, mask=in_state)
