"""What a known y alone determines: x~ and the k x k algebra of each token, and the memory.

`prepare_kernel` computes the mixed input x~ = x + U^T T U (y - x), on which the memory depends, and
the k x k algebra of the token's local system, for many tokens at once; `memory_kernel` the memory.

Rows u_i of raw values are not divided by their norms: the scalars that multiply them are, by
E = diag(1 / |u_i|). The scalars of a token (`local_ptr`), with v = y - x and P = K (K + 1) / 2
packed entries of a symmetric or triangular matrix:
[E T E P | u diag(sigma) u^T P | u u^T P | E (I - S T)^-T T^T E K K | E T U v K | E^-1 c K | E r K |
E^2 K | u (sigma y) K | rms, sum B C, 1 / |B|, 1 / |C| | B n | C n] with
r_i = (U v)_i - sum over j > i of G_ij (T U v)_j and c_i = r_i (1 - beta_i / beta_max).
A row has WIDTH entries, the first up to three of which are unused: B is loaded by fours.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import input_scale
from bedouin.kernels.device.elementary import exp2, one_minus_exp2
from bedouin.kernels.device.norms import inverse_norm
from bedouin.kernels.device.raw import load_beta, load_raw, load_unit
from bedouin.kernels.device.reflections import (
    combine,
    eliminate,
    gradient_factors,
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


@triton.constexpr_function
def local_size(k):
    """The scalars of a token's local system."""
    return 3 * (k * (k + 1) // 2) + k * k + 5 * k + 4


@triton.constexpr_function
def local_padding(k):
    """The unused entries before them: then B begins at a multiple of four."""
    return -local_size(k) % 4


@triton.constexpr_function
def local_width(k, n):
    """The entries of a token's row of `local_ptr`: padding, scalars, B and C."""
    return local_padding(k) + local_size(k) + 2 * n


@triton.jit
def _row(ptr, sample, t, stride_b, stride_t, ALIGNED: tl.constexpr):
    """Pointer to the entries of token t of (b, t, width), at an offset that ALIGNED divides, so
    that loads are wide. In 64 bits: 32 do not hold the offsets of long sequences."""
    return ptr + tl.multiple_of(sample * stride_b + tl.cast(t, tl.int64) * stride_t, ALIGNED)


@triton.jit(do_not_specialize=["start", "count", "t_end", "per_head"])
def prepare_kernel(
    x_ptr,  # (H, b / H, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (H, n, d), log2(e) A
    mixed_ptr,  # (b, count, d): x~, written
    local_ptr,  # (b, count, WIDTH), written
    start,
    count,
    t_end,
    per_head,  # samples of a head
    d: tl.constexpr,
    n: tl.constexpr,
    x_stride_h,
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
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
):
    """x~ and the scalars of the local system of every token of a chunk, a program each:

    x~ = x + U^T T U (y - x), and those that the module's docstring lists.
    """
    index = tl.program_id(0)
    sample = (index // count).to(tl.int64)
    i_token = index % count
    t = start + i_token
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    u_at = d + (2 * n if SELECTIVE else 0)
    raw = _row(raw_ptr, sample, t, raw_stride_b, raw_stride_t, ALIGNED)
    fed = _row(fed_ptr, sample, t, fed_stride_b, fed_stride_t, ALIGNED)
    head = sample // per_head
    x_row = x_ptr + head * x_stride_h + sample % per_head * x_stride_b
    x_row += tl.cast(t, tl.int64) * x_stride_t
    x = tl.load(x_row + cols, mask=in_d, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + (sample * t_end + t) * d + cols, mask=in_d, other=0.0).to(tl.float32)
    v = y - x
    raw_delta = load_raw(raw, fed, cols, in_d, FEEDBACK, ".cg")
    delta = activate(raw_delta, ACTIVATION, FAST)
    if SELECTIVE:
        B, inv_B = load_unit(raw, fed, d + rows, in_n, n, FEEDBACK, EPS)
        C, inv_C = load_unit(raw, fed, d + n + rows, in_n, n, FEEDBACK, EPS)
        B *= inv_B
        C *= inv_C
    else:
        B = tl.where(in_n, 1.0, 0.0).to(tl.float32)
        C = B
        inv_B = tl.full([], 1.0, tl.float32)
        inv_C = inv_B
    BC = B * C
    if INPUT_SCALE == "one_minus_decay":
        exponent = tl.load(A_ptr + head * d + cols, mask=in_d, other=0.0) * delta
        s = one_minus_exp2(exponent, exp2(exponent, FAST))
    else:
        s = input_scale(delta, INPUT_SCALE, FAST)
    sigma = s * tl.sum(BC, axis=0)
    u = ()
    for i in tl.static_range(K):
        u = u + (load_raw(raw, fed, u_at + i * d + cols, in_d, FEEDBACK, ".cg"),)
    alpha_at = u_at + K * d
    beta = load_beta(raw + alpha_at, fed + alpha_at, K, FEEDBACK, BETA_MAX)
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
    mixed = x
    if K > 0:
        mixed += combine(scaled_T_v, u, K)
    token = sample * count + i_token
    tl.store(mixed_ptr + token * d + cols, mixed, mask=in_d)

    T_rows = ()
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            if j <= i:
                T_rows = T_rows + (T[i * (i + 1) // 2 + j],)
            else:
                T_rows = T_rows + (tl.zeros([], dtype=tl.float32),)
    if K > 0:
        N, _ = eliminate(local_system(S, T, True, K), T_rows, K, K, False)
    scaled_N = ()
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            scaled_N = scaled_N + (N[i * K + j] * inv[i] * inv[j],)
    factors = gradient_factors(U_v, T_v, G, beta, inv, BETA_MAX, K)
    norm = inverse_norm(dots[2 * PAIRS + 2 * K] / d, NORM_EPS)
    local = scale_symmetric(T, inv, K) + dots[PAIRS : 2 * PAIRS] + dots[0:PAIRS] + scaled_N
    local = local + scaled_T_v + factors + dots[2 * PAIRS + K : 2 * PAIRS + 2 * K]
    local = local + (norm, tl.sum(BC, axis=0), inv_B, inv_C)
    SIZE: tl.constexpr = local_size(K)
    row = local_ptr + token * local_width(K, n) + local_padding(K)
    store_tuple(row, local, SIZE)
    tl.store(row + SIZE + rows, B, mask=in_n)
    tl.store(row + SIZE + n + rows, C, mask=in_n)


@triton.jit(do_not_specialize=["start", "count", "t_end", "per_head"])
def memory_kernel(
    mixed_ptr,  # (b, count, d)
    local_ptr,  # (b, count, WIDTH)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (H, n, d), log2(e) A
    h_ptr,  # (b, n, d): h before the tokens, replaced by that after them
    kept_ptr,  # (b, ceil(t / KEEP) - 1, n, d), written: h before tokens KEEP, 2 KEEP, ...
    start,
    count,
    t_end,
    per_head,  # samples of a head
    d: tl.constexpr,
    n: tl.constexpr,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
):
    """The memory of `count` tokens from `start` on, a program for each sample:

    h_t = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T.
    """
    sample = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    A = tl.load(A_ptr + sample // per_head * (n * d) + state, mask=in_state, other=0.0)
    h = tl.load(h_ptr + sample * (n * d) + state, mask=in_state, other=0.0)
    # loads of a token are issued while the one before it is computed
    WIDTH: tl.constexpr = local_width(K, n)
    token = sample * count
    mixed_row = mixed_ptr + token * d + cols
    B_row = local_ptr + token * WIDTH + (WIDTH - 2 * n) + rows
    raw_row = _row(raw_ptr, sample, start, raw_stride_b, raw_stride_t, ALIGNED)
    fed_row = _row(fed_ptr, sample, start, fed_stride_b, fed_stride_t, ALIGNED)
    mixed_next = tl.load(mixed_row, mask=in_d, other=0.0)
    delta_next = load_raw(raw_row, fed_row, cols, in_d, FEEDBACK, ".cg")
    B_next = tl.load(B_row, mask=in_n, other=0.0)
    slots = tl.cdiv(t_end, KEEP) - 1
    for i in range(0, count):
        mixed, delta, B = mixed_next, activate(delta_next, ACTIVATION, FAST), B_next
        step = tl.minimum(i + 1, count - 1).to(tl.int64)
        mixed_next = tl.load(mixed_row + step * d, mask=in_d, other=0.0)
        raw = raw_row + tl.multiple_of(step * raw_stride_t, ALIGNED)
        fed = fed_row + tl.multiple_of(step * fed_stride_t, ALIGNED)
        delta_next = load_raw(raw, fed, cols, in_d, FEEDBACK, ".cg")
        B_next = tl.load(B_row + step * WIDTH, mask=in_n, other=0.0)
        t = start + i
        if (t % KEEP == 0) & (t > 0):
            slot = sample * slots + t // KEEP - 1
            tl.store(kept_ptr + slot * (n * d) + state, h, mask=in_state)
        exponent = A * delta[None, :]
        decay = exp2(exponent, FAST)
        if INPUT_SCALE == "one_minus_decay":
            s = one_minus_exp2(exponent, decay)
        else:
            s = input_scale(delta, INPUT_SCALE, FAST)[None, :]
        h = decay * h + s * mixed[None, :] * B[:, None]
    tl.store(h_ptr + sample * (n * d) + state, h, mask=in_state)
