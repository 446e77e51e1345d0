"""What a known y alone determines: x~ and the k x k algebra of each token.

`prepare_kernel` computes the mixed input x~ = x + U^T T U (y - x), on which the memory depends, and
the k x k algebra of the token's local system, for all tokens at once.

Rows u_i of raw values are not divided by their norms: the scalars that multiply them are, by
E = diag(1 / |u_i|). The scalars of a token (`local_ptr`), with v = y - x and P = K (K + 1) / 2
packed entries of a symmetric or triangular matrix:
[E T E P | u diag(sigma) u^T P | u u^T P | E (I - S T)^-T T^T E K K | E T U v K | E^-1 c K | E r K |
E^2 K | u (sigma y) K | rms, sum B C, 1 / |B|, 1 / |C| | B n | C n] with
r_i = (U v)_i - sum over j > i of G_ij (T U v)_j and c_i = r_i (1 - beta_i / beta_max).
Each group begins at a multiple of four, so that its values are loaded by fours.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values. `how`:
`head_constants` of launch.py.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import (
    activate,
    exp2,
    input_scale,
    inverse_norm,
    load_beta,
    load_raw,
    load_unit,
    load_wide,
    one_minus_exp2,
)
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
    sums,
    upper_times,
    wy_upper,
)


@triton.constexpr_function
def local_place(k, group):
    """Where a group of a token's scalars begins: of T, S, G, N, the factors and the rest, and as
    group 6 where B begins."""
    sizes = [*3 * [k * (k + 1) // 2], k * k, 5 * k, 4]
    return sum((size + 3) // 4 * 4 for size in sizes[:group])


@triton.constexpr_function
def local_width(k, n):
    """The entries of a token's row of `local_ptr`: scalars, B and C."""
    return local_place(k, 6) + 2 * n


@triton.jit
def _store_group(row, values, K: tl.constexpr, GROUP: tl.constexpr):
    at = row + local_place(K, GROUP)
    for i in tl.static_range(len(values)):
        tl.store(at + i, values[i])


@triton.jit(do_not_specialize=["t_end", "per_head"])
def prepare_kernel(
    x_ptr,  # (H, b / H, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (H, n, d), log2(e) A
    mixed_ptr,  # (b, t, d): x~, written
    local_ptr,  # (b, t, WIDTH), written
    t_end,
    per_head,  # samples of a head
    x_strides,  # of heads, samples and tokens
    raw_strides,  # of samples and tokens
    fed_strides,  # likewise
    how: tl.constexpr,
):
    """x~ and the scalars of every token, a program each; see the module's docstring."""
    d: tl.constexpr = how.d
    n: tl.constexpr = how.n
    K: tl.constexpr = how.K
    FEEDBACK: tl.constexpr = how.FEEDBACK
    token = tl.program_id(0).to(tl.int64)
    sample = token // t_end
    t = token % t_end
    rows, cols = tl.arange(0, how.N), tl.arange(0, how.BLOCK_D)
    in_n, in_d = rows < n, cols < d
    raw = raw_ptr + sample * raw_strides[0] + t * raw_strides[1]
    fed = fed_ptr + sample * fed_strides[0] + t * fed_strides[1]
    head = sample // per_head
    x_row = x_ptr + head * x_strides[0] + sample % per_head * x_strides[1]
    x_row += t * x_strides[2]
    x, y = load_wide(x_row + cols, in_d), load_wide(y_ptr + token * d + cols, in_d)
    v = y - x
    raw_delta = load_raw(raw, fed, cols, in_d, FEEDBACK, ".cg", "")
    delta = activate(raw_delta, how.ACTIVATION)
    if how.SELECTIVE:
        B, inv_B = load_unit(raw, fed, d + rows, in_n, n, FEEDBACK, how.EPS)
        C, inv_C = load_unit(raw, fed, d + n + rows, in_n, n, FEEDBACK, how.EPS)
        B *= inv_B
        C *= inv_C
    else:
        B = tl.where(in_n, 1.0, 0.0).to(tl.float32)
        C = B
        inv_B = tl.full([], 1.0, tl.float32)
        inv_C = inv_B
    BC = B * C
    if how.INPUT_SCALE == "one_minus_decay":
        exponent = tl.load(A_ptr + head * d + cols, mask=in_d, other=0.0) * delta
        s = one_minus_exp2(exponent, exp2(exponent))
    else:
        s = input_scale(delta, how.INPUT_SCALE)
    sigma = s * tl.sum(BC, axis=0)
    u = ()
    for i in tl.static_range(K):
        u = u + (load_raw(raw, fed, how.U_AT + i * d + cols, in_d, FEEDBACK, ".cg", ""),)
    alpha_at = how.U_AT + K * d
    beta = load_beta(raw + alpha_at, fed + alpha_at, K, FEEDBACK, how.BETA_MAX)
    PAIRS: tl.constexpr = K * (K + 1) // 2
    sigma_u = rows_times(u, sigma, K)
    with_v, with_y = rows_times(u, v, K), rows_times(sigma_u, y, K)
    dots = sums(products(u, u, K) + products(sigma_u, u, K) + with_v + with_y + (y * y,))
    inv = inverse_sizes(dots, d, K, how.EPS)
    G = scale_symmetric(dots[0:PAIRS], inv, K)
    S = scale_symmetric(dots[PAIRS : 2 * PAIRS], inv, K)
    U_v = scale(dots[2 * PAIRS : 2 * PAIRS + K], inv, K)
    T = wy_upper(G, beta, K)
    T_v = upper_times(T, U_v, K)
    scaled_T_v = scale(T_v, inv, K)
    mixed = x
    if K > 0:
        mixed += combine(scaled_T_v, u, K)
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
    factors = gradient_factors(U_v, T_v, G, beta, inv, how.BETA_MAX, K)
    norm = inverse_norm(dots[2 * PAIRS + 2 * K] / d, how.NORM_EPS)
    factors = scaled_T_v + factors + dots[2 * PAIRS + K : 2 * PAIRS + 2 * K]
    row = local_ptr + token * local_width(K, n)
    _store_group(row, scale_symmetric(T, inv, K), K, 0)
    _store_group(row, dots[PAIRS : 2 * PAIRS], K, 1)
    _store_group(row, dots[0:PAIRS], K, 2)
    _store_group(row, scaled_N, K, 3)
    _store_group(row, factors, K, 4)
    _store_group(row, (norm, tl.sum(BC, axis=0), inv_B, inv_C), K, 5)
    tl.store(row + local_place(K, 6) + rows, B, mask=in_n)
    tl.store(row + local_place(K, 6) + n + rows, C, mask=in_n)
