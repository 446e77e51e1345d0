"""The coefficients of all tokens of a sweep without feedback, one program a token.

Rows u_i of raw values are not divided by their norms: the scalars that multiply them are, by
E = diag(1 / |u_i|). For q = u p + c the system (I - S T) w = E q is eliminated with row pivoting,
I - S T = L R with L including the exchanges of rows. With z = E^-1 w and Z = R E it is
Z z = L^-1 E q, and e follows as E e = E T E z. The factors are kept instead of their product,
whose rounding errors would grow with the condition of the system. With P = K (K + 1) / 2 packed
entries of a triangular matrix, the scalars of a token are

* `solver_ptr`: [c K | L^-1 E K K | Z, its diagonal inverted P | E T E P | B C 1 | ... | B n | C n],
  B at BC_AT, so that its loads are aligned,
* `factor_ptr`, for the gradients: [u u^T P | E T U v K | E^-1 a K | E r K | E^2 K | 1/|B| | 1/|C|],
  where v = y - x, r_i = (U v)_i - sum over j > i of G_ij (T U v)_j and
  a_i = r_i (1 - beta_i / beta_max).

With REVERSE c is u (sigma * g) instead of u ((sigma - 1) * x).
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import fast_activate
from bedouin.kernels.device.discretize import build_coupled, fast_scale
from bedouin.kernels.device.raw import load_beta, load_raw, load_unit
from bedouin.kernels.device.reflections import (
    combine,
    gradient_factors,
    inverse_sizes,
    local_system,
    products,
    rows_times,
    scale,
    scale_symmetric,
    store_tuple,
    sums,
    triangularize,
    upper_times,
    wy_upper,
)
from bedouin.kernels.direct.triton_bundles import matrix_of, strided_row


@triton.jit
def known_input_gain(
    delta,  # (BLOCK_D,)
    BC,  # (BLOCK_N,), B C
    A_ptr,  # (n, d), log2(e) A
    rows, cols, d: tl.constexpr, n: tl.constexpr,
    INPUT_SCALE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """sigma (BLOCK_D,), the sum over n of s B C, and the largest s of each channel."""
    if INPUT_SCALE == "one_minus_decay":
        in_state = (rows < n)[:, None] & (cols < d)[None, :]
        A_log2 = tl.load(A_ptr + rows[:, None] * d + cols[None, :], mask=in_state, other=0.0)
        _, s = build_coupled(A_log2 * delta[None, :], FULL, FAST)
        return tl.sum(s * BC[:, None], axis=0), tl.max(s, axis=0)
    else:
        s = fast_scale(delta, INPUT_SCALE, FAST)
        return s * tl.sum(BC, axis=0), s


@triton.jit
def load_raw_reflections(raw, cols, d: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr):
    """u_1 .. u_k (BLOCK_D,), not normalized."""
    u = ()
    for i in tl.static_range(K):
        u = u + (load_raw(raw, raw, i * d + cols, cols < d, False, ACC, ".cg"),)
    return u


@triton.jit
def _factors(G, S, beta, inv, K: tl.constexpr):
    """What the solves with I - S T need, as the module's docstring says, and the smallest pivot."""
    T = wy_upper(G, beta, K)
    lengths = ()
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            if i == j:
                lengths = lengths + (inv[i],)
            else:
                lengths = lengths + (tl.zeros([], dtype=inv[0].dtype),)
    matrix = local_system(S, T, False, K)
    R, left, inverses, pivot = triangularize(matrix, lengths, K, K, False)
    upper = ()
    for j in tl.static_range(K):
        for i in tl.static_range(K):
            if i < j:
                upper = upper + (R[i * K + j] * inv[j],)
            elif i == j:
                upper = upper + (inverses[i] / inv[i],)
    return left + upper + scale_symmetric(T, inv, K), T, pivot


@triton.jit(do_not_specialize=["t_end", "per_head"])
def prepare_open_loop_kernel(
    x_ptr,  # (b, t, d) or (H, b / H, t, d)
    y_ptr,  # (b, t, d), if REVERSE
    g_ptr,  # (b, t, d), cotangent of y, if REVERSE
    raw_ptr,  # (b, t, r)
    A_ptr,  # (n, d) or (H, n, d), log2(e) A
    delta_ptr,  # (b, t, d), written: Delta
    solver_ptr,  # (b, t, WIDTH), written
    pivot_ptr,  # (b, t), written unless REVERSE: the smallest pivot
    mixed_ptr,  # (b, t, d), written if REVERSE: x~
    factor_ptr,  # (b, t, P + 4 K + 2), written if REVERSE
    t_end,
    per_head,  # samples of a head; None: one head
    d: tl.constexpr,
    n: tl.constexpr,
    x_stride_h,  # None: one head
    x_stride_b,
    x_stride_t,
    g_stride_b,
    g_stride_t,
    raw_stride_b,
    raw_stride_t,
    REVERSE: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row of `solver`
    BC_AT: tl.constexpr,  # where B is in it
    K: tl.constexpr,
    BETA_MAX: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """Delta and the scalars of every token; if REVERSE, x~ = x + U^T T U (y - x), too."""
    token = tl.program_id(0).to(tl.int64)
    sample, t = token // t_end, token % t_end
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    raw = raw_ptr + tl.multiple_of(sample * raw_stride_b + t * raw_stride_t, ALIGNED)
    x_row = strided_row(x_ptr, sample, t, per_head, x_stride_h, x_stride_b, x_stride_t)
    x = tl.load(x_row + cols, mask=in_d, other=0.0).to(ACC)
    delta = fast_activate(load_raw(raw, raw, cols, in_d, False, ACC, ".cg"), ACTIVATION, FAST)
    tl.store(delta_ptr + token * d + cols, delta, mask=in_d)
    if SELECTIVE:
        B, inv_B = load_unit(raw, raw, d + rows, in_n, n, False, EPS, ACC)
        C, inv_C = load_unit(raw, raw, d + n + rows, in_n, n, False, EPS, ACC)
        B *= inv_B
        C *= inv_C
    else:
        B = tl.where(in_n, 1.0, 0.0).to(ACC)
        C = B
        inv_B = tl.full([], 1.0, ACC)
        inv_C = inv_B
    u_at = d + (2 * n if SELECTIVE else 0)
    u = load_raw_reflections(raw + u_at, cols, d, K, ACC)
    beta = load_beta(raw + u_at + K * d, raw, K, False, BETA_MAX, ACC)
    A = matrix_of(A_ptr, sample, per_head, d, n)
    sigma, _ = known_input_gain(delta, B * C, A, rows, cols, d, n, INPUT_SCALE, FULL, FAST)
    PAIRS: tl.constexpr = K * (K + 1) // 2
    sigma_u = rows_times(u, sigma, K)
    if REVERSE:
        g_row = g_ptr + sample * g_stride_b + t * g_stride_t
        g = tl.load(g_row + cols, mask=in_d, other=0.0).to(ACC)
        v = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0).to(ACC) - x
        given = rows_times(sigma_u, g, K) + rows_times(u, v, K)
    else:
        given = rows_times(u, (sigma - 1) * x, K)
    dots = sums(products(u, u, K) + products(sigma_u, u, K) + given)
    inv = inverse_sizes(dots, d, K, EPS)
    G = scale_symmetric(dots[0:PAIRS], inv, K)
    S = scale_symmetric(dots[PAIRS : 2 * PAIRS], inv, K)
    solved, T, pivot = _factors(G, S, beta, inv, K)
    c = dots[2 * PAIRS : 2 * PAIRS + K]
    SIZE: tl.constexpr = K * K + 2 * PAIRS + K + 1
    row = solver_ptr + token * WIDTH
    store_tuple(row, c + solved + (tl.sum(B * C, axis=0),), SIZE)
    tl.store(row + BC_AT + rows, B, mask=in_n)
    tl.store(row + BC_AT + n + rows, C, mask=in_n)
    if REVERSE:
        U_v = scale(dots[2 * PAIRS + K : 2 * PAIRS + 2 * K], inv, K)
        T_v = upper_times(T, U_v, K)
        scaled_T_v = scale(T_v, inv, K)
        tl.store(mixed_ptr + token * d + cols, x + combine(scaled_T_v, u, K), mask=in_d)
        factors = gradient_factors(U_v, T_v, G, beta, inv, BETA_MAX, K)
        factor = dots[0:PAIRS] + scaled_T_v + factors + (inv_B, inv_C)
        FACTOR: tl.constexpr = PAIRS + 4 * K + 2
        store_tuple(factor_ptr + token * FACTOR, factor, FACTOR)
    else:
        tl.store(pivot_ptr + token, pivot)
