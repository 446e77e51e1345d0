"""What the reverse sweep needs of a chunk of tokens, from the y that is known; all tokens at once.

`prepare_kernel` computes the mixed input x~ and the k x k algebra of every token, `replay_kernel`
the memory before every token of the chunk from the one that was kept.

Rows u_i of raw values are not made unit: the scalars that stand beside them are scaled instead, by
E = diag(1 / |u_i|). What a token's `small` holds (v = y - x, P = K (K + 1) / 2 packed entries):
[E T E P | u diag(sigma) u^T P | u u^T P | E (I - S T)^-T T^T E K K | E T U v K | E^-1 c K | E r K |
E^2 K | u (sigma y) K | rms, sum B C, 1 / |B|, 1 / |C| | B n | C n] with
r_i = (U v)_i - sum over j > i of G_ij (T U v)_j and c_i = r_i (1 - beta_i / beta_max).
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import build_coupled, build_decay, input_scale
from bedouin.kernels.device.raw import load_beta, load_raw, load_unit
from bedouin.kernels.device.reflections import (
    combine,
    eliminate,
    inverse_sizes,
    local_system,
    products,
    rows_times,
    scale,
    scale_symmetric,
    store_tuple,
    sums,
    upper_times,
    wy_upper,
)


@triton.jit(do_not_specialize=["first", "start", "count", "t_end"])
def prepare_kernel(
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (n, d), log2(e) A
    mixed_ptr,  # (b, count, d): x~
    small_ptr,  # (b, count, 3 P + K K + 5 K + 4 + 2 n)
    first,  # of all samples' tokens of the chunk, that of program 0
    start,
    count,
    t_end,
    d: tl.constexpr,
    n: tl.constexpr,
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
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """`mixed` and `small` of a token of the chunk; reverse_kernel calls it, too."""
    index = first + tl.program_id(0)
    sample = (index // count).to(tl.int64)
    i_token = index % count
    t = start + i_token
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    u_at = d + (2 * n if SELECTIVE else 0)
    raw = raw_ptr + tl.multiple_of(sample * raw_stride_b + t * raw_stride_t, ALIGNED)
    fed = fed_ptr + tl.multiple_of(sample * fed_stride_b + t * fed_stride_t, ALIGNED)
    x = tl.load(x_ptr + sample * x_stride_b + t * x_stride_t + cols, mask=in_d, other=0.0).to(ACC)
    y = tl.load(y_ptr + (sample * t_end + t) * d + cols, mask=in_d, other=0.0).to(ACC)
    v = y - x
    delta = activate(load_raw(raw, fed, cols, in_d, FEEDBACK, ACC, ".cg"), ACTIVATION)
    if SELECTIVE:
        B, inv_B = load_unit(raw, fed, d + rows, in_n, n, FEEDBACK, EPS, ACC)
        C, inv_C = load_unit(raw, fed, d + n + rows, in_n, n, FEEDBACK, EPS, ACC)
        B *= inv_B
        C *= inv_C
    else:
        B = tl.where(in_n, 1.0, 0.0).to(ACC)
        C = B
        inv_B = tl.full([], 1.0, ACC)
        inv_C = inv_B
    BC = B * C
    if INPUT_SCALE == "one_minus_decay":
        in_state = in_n[:, None] & in_d[None, :]
        state = rows[:, None] * d + cols[None, :]
        A_log2 = tl.load(A_ptr + state, mask=in_state, other=0.0)
        _, s_rows = build_coupled(A_log2 * delta[None, :], FULL, FAST)
        sigma = tl.sum(s_rows * BC[:, None], axis=0)
    else:
        sigma = input_scale(delta, INPUT_SCALE) * tl.sum(BC, axis=0)
    u = ()
    for i in tl.static_range(K):
        u = u + (load_raw(raw, fed, u_at + i * d + cols, in_d, FEEDBACK, ACC, ".cg"),)
    alpha_at = u_at + K * d
    beta = load_beta(raw + alpha_at, fed + alpha_at, K, FEEDBACK, BETA_MAX, ACC)
    PAIRS: tl.constexpr = K * (K + 1) // 2
    sigma_u = rows_times(u, sigma, K)
    with_v, with_y = rows_times(u, v, K), rows_times(sigma_u, y, K)
    dots = sums(products(u, u, K) + products(sigma_u, u, K) + with_v + with_y + (y * y,))
    inv = inverse_sizes(dots, d, K, EPS)
    G = scale_symmetric(dots[0:PAIRS], inv, K)
    S = scale_symmetric(dots[PAIRS : 2 * PAIRS], inv, K)
    U_v = scale(dots[2 * PAIRS : 2 * PAIRS + K], inv, K)
    T = wy_upper(G, beta, K)
    T_v = upper_times(T, U_v, K)
    scaled_T_v = scale(T_v, inv, K)
    mixed = x + combine(scaled_T_v, u, K)
    token = sample * count + i_token
    tl.store(mixed_ptr + token * d + cols, mixed, mask=in_d)

    T_rows = ()
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            if j <= i:
                T_rows = T_rows + (T[i * (i + 1) // 2 + j],)
            else:
                T_rows = T_rows + (tl.zeros([], dtype=ACC),)
    N, _ = eliminate(local_system(S, T, True, K), T_rows, K, K)
    scaled_N = ()
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            scaled_N = scaled_N + (N[i * K + j] * inv[i] * inv[j],)
    c = ()
    r = ()
    squares = ()
    for i in tl.static_range(K):
        r_i = U_v[i]
        for j in tl.static_range(K):
            if j > i:
                r_i -= G[j * (j + 1) // 2 + i] * T_v[j]
        c = c + (r_i * (1 - beta[i] / BETA_MAX) / inv[i],)
        r = r + (r_i * inv[i],)
        squares = squares + (inv[i] * inv[i],)
    norm = tl.rsqrt(dots[2 * PAIRS + 2 * K] / d + NORM_EPS)
    small = scale_symmetric(T, inv, K) + dots[PAIRS : 2 * PAIRS] + dots[0:PAIRS] + scaled_N
    small = small + scaled_T_v + c + r + squares + dots[2 * PAIRS + K : 2 * PAIRS + 2 * K]
    small = small + (norm, tl.sum(BC, axis=0), inv_B, inv_C)
    SIZE: tl.constexpr = 3 * PAIRS + K * K + 5 * K + 4
    row = small_ptr + token * (SIZE + 2 * n)
    store_tuple(row, small, SIZE)
    tl.store(row + SIZE + rows, B, mask=in_n)
    tl.store(row + SIZE + n + rows, C, mask=in_n)


@triton.jit
def chunk_memory(h0_ptr, h0_stride_b, kept_ptr, sample, slot, slots, d, n):
    """Where h before the first token of a chunk stands: given, or kept."""
    memory = h0_ptr + sample * h0_stride_b
    if slot > 0:
        memory = kept_ptr + (sample * slots + slot - 1) * n * d
    return memory


@triton.jit
def token_memory(
    h0_ptr, h0_stride_b, kept_ptr, before_ptr, sample, i_token, count, slot, slots, d, n
):
    """Where h before a token of a chunk stands: given, kept, or replayed."""
    memory = before_ptr + (sample * (count - 1) + i_token - 1) * n * d
    if i_token == 0:
        memory = chunk_memory(h0_ptr, h0_stride_b, kept_ptr, sample, slot, slots, d, n)
    return memory


@triton.jit(do_not_specialize=["first", "start", "count", "slot", "slots"])
def replay_kernel(
    mixed_ptr,  # (b, count, d)
    small_ptr,  # (b, count, 3 P + K K + 5 K + 4 + 2 n)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (n, d), log2(e) A
    h0_ptr,  # (b, n, d): h before the first token of all
    kept_ptr,  # (b, slots, n, d): h before the first token of every chunk but the first
    before_ptr,  # (b, count - 1, n, d): h before the other tokens of the chunk, if KEEP_ALL
    last_ptr,  # (b, ..., n, d): h after the chunk, if KEEP_LAST
    first,  # of all samples' blocks, that of program 0
    start,
    count,
    slot,
    slots,
    d: tl.constexpr,
    n: tl.constexpr,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    last_stride_b,
    K: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    KEEP_LAST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """The memory of a block of channels through the chunk; reverse_kernel calls it, too."""
    index = first + tl.program_id(0)
    blocks = tl.cdiv(d, BLOCK_D)
    sample = (index // blocks).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_N), index % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    A_log2 = tl.load(A_ptr + state, mask=in_state, other=0.0)
    memory = chunk_memory(h0_ptr, h0_stride_b, kept_ptr, sample, slot, slots, d, n)
    h = tl.load(memory + state, mask=in_state, other=0.0)
    # what a token needs is on its way while the one before it is computed
    SIZE: tl.constexpr = 3 * (K * (K + 1) // 2) + K * K + 5 * K + 4
    mixed_row = mixed_ptr + sample * count * d + cols
    B_row = small_ptr + sample * count * (SIZE + 2 * n) + SIZE + rows
    raw_row = raw_ptr + tl.multiple_of(sample * raw_stride_b + start * raw_stride_t, ALIGNED)
    fed_row = fed_ptr + tl.multiple_of(sample * fed_stride_b + start * fed_stride_t, ALIGNED)
    mixed_next = tl.load(mixed_row, mask=in_d, other=0.0)
    delta_next = load_raw(raw_row, fed_row, cols, in_d, FEEDBACK, ACC, ".cg")
    B_next = tl.load(B_row, mask=in_n, other=0.0)
    for i in range(0, count):
        mixed, delta, B = mixed_next, activate(delta_next, ACTIVATION), B_next
        step = tl.minimum(i + 1, count - 1)
        mixed_next = tl.load(mixed_row + step * d, mask=in_d, other=0.0)
        raw = raw_row + tl.multiple_of(step * raw_stride_t, ALIGNED)
        fed = fed_row + tl.multiple_of(step * fed_stride_t, ALIGNED)
        delta_next = load_raw(raw, fed, cols, in_d, FEEDBACK, ACC, ".cg")
        B_next = tl.load(B_row + step * (SIZE + 2 * n), mask=in_n, other=0.0)
        if KEEP_ALL:
            at = (sample * (count - 1) + i - 1) * n * d + state
            tl.store(before_ptr + at, h, mask=in_state & (i > 0))
        if INPUT_SCALE == "one_minus_decay":
            decay, s_rows = build_coupled(A_log2 * delta[None, :], FULL, FAST)
            h = decay * h + s_rows * mixed[None, :] * B[:, None]
        else:
            decay = build_decay(A_log2 * delta[None, :], FULL, FAST)
            h = decay * h + (input_scale(delta, INPUT_SCALE) * mixed)[None, :] * B[:, None]
    if KEEP_LAST:
        tl.store(last_ptr + sample * last_stride_b + state, h, mask=in_state)
