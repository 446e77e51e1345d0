"""What the phases compute for reflections beside S and R: T, statistics, gradients, by token.

    x~ = x + U^T e,  e = T U (y - x),  I - Q = U^T T U

The defect of the local equation is sigma U^T (T U (y - x) - e), and that of the adjoint equation
U^T (T^T U (s written_) - f), with the e and f that the sweeps have used.
Letters as in `triton_sweep.py`; k reflections.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import input_scale
from bedouin.kernels.device.elementary import sigmoid
from bedouin.kernels.device.norms import max_norm
from bedouin.kernels.device.reflections import (
    combine,
    gradient_factors,
    inverse_sizes,
    load_tuple,
    products,
    reflections_vjp,
    reflections_vjp_scalars,
    rows_times,
    scale,
    scale_symmetric,
    subtract,
    sums,
    upper_times,
    upper_transposed_times,
    wy_upper,
)
from bedouin.kernels.direct.phases.device import load_reflections, row_of, unit_vectors


@triton.jit(do_not_specialize=["count", "t_end"])
def prepare_reflections_kernel(
    raw_ptr,  # (b, t, r)
    scalars_ptr,  # (b, t, SCALARS), of which 1 / |u|, T, G and beta are written
    count,  # b t
    t_end,
    raw_stride_b,
    raw_stride_t,
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    BETA_MAX: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    PAIRS: tl.constexpr = K * (K + 1) // 2
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here, p = token < count, tl.arange(0, P)[None, :]
    row = raw_ptr + token // t_end * raw_stride_b + token % t_end * raw_stride_t + d + 2 * n
    u = ()
    beta = ()
    for i in tl.static_range(K):
        v = tl.load(row[:, None] + i * d + p, mask=here[:, None] & (p < d), other=0.0)
        u = u + (v.to(tl.float32),)
        alpha = tl.load(row + K * d + i, mask=here, other=0.0).to(tl.float32)
        beta = beta + (BETA_MAX * sigmoid(alpha),)
    G = sums(products(u, u, K), 1)
    inv = inverse_sizes(G, d, K, EPS)
    G = scale_symmetric(G, inv, K)
    found = inv + wy_upper(G, beta, K) + G + beta
    to = scalars_ptr + token * (1 + 2 * (K + PAIRS)) + 1
    for i in tl.static_range(2 * (K + PAIRS)):
        tl.store(to + i, found[i], mask=here)


@triton.jit(do_not_specialize=["t_end", "count"])
def solved_statistics_kernel(
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    scalars_ptr,  # (b, t, SCALARS)
    solved_ptr,  # (b, t, K + 1 + PAIRS)
    kept_ptr,  # (b, t, 2, P)
    statistics_ptr,  # (4, b, t), written: defect, scale, magnitude, pivot
    count,  # b t
    t_end,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
):
    PAIRS: tl.constexpr = K * (K + 1) // 2
    token, p = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    sample, time = token // t_end, token % t_end
    scalars = scalars_ptr + token * (1 + 2 * (K + PAIRS))
    solved = solved_ptr + token * (K + 1 + PAIRS)
    kept = kept_ptr + token * (2 * P)
    x = row_of(x_ptr + sample * x_stride_b + time * x_stride_t, p, d, P)
    v = row_of(y_ptr + token * d, p, d, P) - x
    raw = raw_ptr + sample * raw_stride_b + time * raw_stride_t + d + 2 * n
    u, inverse, T = load_reflections(raw, scalars, p, d, P, K)
    u = unit_vectors(u, inverse, K)
    s = input_scale(tl.load(kept + p), INPUT_SCALE, False)
    e = load_tuple(solved, K)
    rest = subtract(upper_times(T, sums(rows_times(u, v, K)), K), e, K)
    defect = s * tl.load(scalars) * combine(rest, u, K)
    mixed = x + combine(e, u, K)
    size = s * (tl.abs(x) + tl.abs(mixed))
    to = statistics_ptr + token
    tl.store(to, max_norm(defect, 0))
    tl.store(to + count, max_norm(v + x + defect, 0))
    tl.store(to + 2 * tl.cast(count, tl.int64), max_norm(tl.where(p < d, size, 0.0), 0))
    tl.store(to + 3 * tl.cast(count, tl.int64), tl.load(solved + K))


@triton.jit(do_not_specialize=["t_end", "count"])
def finish_reflections_kernel(
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    scalars_ptr,  # (b, t, SCALARS)
    f_ptr,  # (b, t, K)
    kept_ptr,  # (b, t, 2, P)
    adjoint_ptr,  # (b, t, 2, P), whose last row is the cotangent of `written`
    grad_raw_ptr,  # (b, t, WIDE), written where u and alpha are
    statistics_ptr,  # (2, b, t), written: defect and scale of the adjoint equation
    count,
    t_end,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    BETA_MAX: tl.constexpr,
):
    PAIRS: tl.constexpr = K * (K + 1) // 2
    token, p = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    sample, time = token // t_end, token % t_end
    scalars = scalars_ptr + token * (1 + 2 * (K + PAIRS)) + 1
    kept = kept_ptr + token * (2 * P)
    x = row_of(x_ptr + sample * x_stride_b + time * x_stride_t, p, d, P)
    v = row_of(y_ptr + token * d, p, d, P) - x
    raw = raw_ptr + sample * raw_stride_b + time * raw_stride_t + d + 2 * n
    u = ()
    for i in tl.static_range(K):
        u = u + (row_of(raw + i * d, p, d, P),)
    inv, T = load_tuple(scalars, K), load_tuple(scalars + K, PAIRS)
    G, beta = load_tuple(scalars + K + PAIRS, PAIRS), load_tuple(scalars + K + 2 * PAIRS, K)
    s = input_scale(tl.load(kept + p), INPUT_SCALE, False)
    w = tl.load(adjoint_ptr + token * (2 * P) + p)
    grad_mixed = s * tl.load(adjoint_ptr + token * (2 * P) + P + p)
    dots = sums(rows_times(u, v, K) + rows_times(u, grad_mixed, K) + products(u, u, K))
    U_v, U_g = scale(dots[0:K], inv, K), dots[K : 2 * K]
    T_v, T_g = upper_times(T, U_v, K), upper_transposed_times(T, scale(U_g, inv, K), K)
    rest = subtract(T_g, load_tuple(f_ptr + token * K, K), K)
    defect = combine(scale(rest, inv, K), u, K)
    tl.store(statistics_ptr + token, max_norm(defect, 0))
    tl.store(statistics_ptr + count + token, max_norm(w + defect, 0))
    factors = gradient_factors(U_v, T_v, G, beta, inv, BETA_MAX, K)
    # for u that are not normalized
    T_v, T_g = scale(T_v, inv, K), scale(T_g, inv, K)
    G = dots[2 * K :]
    along, grad_alpha = reflections_vjp_scalars(U_g, T_g, T_v, G, factors, K)
    to = grad_raw_ptr + token * WIDE + d + 2 * n
    reflections_vjp(grad_mixed, v, u, T_g, T_v, along, to, p, d, K)
    for i in tl.static_range(K):
        tl.store(to + K * d + i, grad_alpha[i].to(grad_raw_ptr.dtype.element_ty))
