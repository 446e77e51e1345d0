"""The kernels of a step of Picard or Jacobi that take one token a program: mixing, local solve.

A token is one row of (b t, ...); the first `kept` tokens of each sample are frozen and skipped.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import input_scale
from bedouin.kernels.device.norms import max_norm
from bedouin.kernels.device.raw import load_beta, load_raw, load_unit
from bedouin.kernels.device.reflections import (
    combine,
    eliminate,
    inverse_sizes,
    load_tuple,
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


@triton.jit
def _load_reflections(
    raw_ptr,
    fed_back_ptr,
    u_at,
    cols,
    d,
    K: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """u_1 .. u_k, not yet normalized.

    Read once a launch, so evicted first: the cache keeps what the next launch reads.
    """
    u = ()
    for i in tl.static_range(K):
        at = tl.multiple_of(u_at + i * d + cols, ALIGN)
        value = tl.load(raw_ptr + at, cols < d, 0.0, eviction_policy="evict_first").to(tl.float32)
        if FEEDBACK:
            fed_back = tl.load(fed_back_ptr + at, cols < d, 0.0, eviction_policy="evict_first")
            value += fed_back.to(tl.float32)
        u = u + (value,)
    return u


@triton.jit
def _token_of(program, batch, T):
    """Sample and time of a program, last tokens first.

    The scan goes forward in time. What it wrote last is still in the cache for the launch that
    follows, and what that launch wrote last is still there for the next scan.
    """
    return program % batch, T - 1 - (program // batch).to(tl.int32)


@triton.jit
def _load_x(row, cols, d, zero, ALIGN: tl.constexpr):
    """x of a token.

    `zero`, which is no constant for the compiler, keeps a thread's part of x as wide as that of u:
    otherwise the two have different layouts, and x is exchanged between threads.
    """
    return tl.load(row + ALIGN * zero + cols, mask=cols < d, other=0.0).to(tl.float32)


@triton.jit
def _reflect(u, beta, v, d, K: tl.constexpr, EPS: tl.constexpr):
    """(I - H_1 ... H_k) v, the last reflection first: k products fewer than with T."""
    squares = ()
    for i in tl.static_range(K):
        squares = squares + (u[i] * u[i],)
    sizes = sums(squares)
    total = tl.zeros_like(v)
    for i in tl.static_range(K):
        dot = tl.sum(u[K - 1 - i] * v, axis=0)
        step = (beta[K - 1 - i] * dot / (sizes[K - 1 - i] + d * EPS)) * u[K - 1 - i]
        total += step
        v -= step
    return total


@triton.jit(do_not_specialize=["batch", "T", "zero"])
def mix_kernel(
    x_ptr,  # (b t, d)
    raw_ptr,  # (b t, r), rows `raw_stride` apart
    fed_back_ptr,  # (b t, r), rows `fed_stride` apart
    y_ptr,  # (b t, d)
    kept_ptr,  # (b,)
    mixed_ptr,  # (b t, d)
    BC_ptr,  # (b t, 2, n)
    WY_ptr,  # (b t, k (k + 1) / 2 + k): T, packed, and 1 / |u_i|
    batch,
    T,
    x_stride,
    raw_stride,
    fed_stride,
    d,
    n,
    zero,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    EPS: tl.constexpr,
    ALIGN: tl.constexpr,
    STORE_WY: tl.constexpr,
):
    sample, t = _token_of(tl.program_id(0), batch, T)
    if t >= tl.load(kept_ptr + sample):
        token = sample.to(tl.int64) * T + t
        cols, states = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        in_d, in_n = cols < d, states < n
        raw_row = raw_ptr + tl.multiple_of(token * raw_stride, ALIGN)
        fed_row = fed_back_ptr + tl.multiple_of(token * fed_stride, ALIGN)
        x = _load_x(x_ptr + token * x_stride, cols, d, zero, ALIGN)
        v = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0) - x
        u_at = d + (2 * n if SELECTIVE else 0)
        u = _load_reflections(raw_row, fed_row, u_at, cols, d, K, FEEDBACK, ALIGN)
        alpha_at = u_at + K * d
        beta = load_beta(raw_row + alpha_at, fed_row + alpha_at, K, FEEDBACK, BETA_MAX)
        if STORE_WY:
            PAIRS: tl.constexpr = K * (K + 1) // 2
            dots = sums(products(u, u, K) + rows_times(u, v, K))
            inv = inverse_sizes(dots, d, K, EPS)
            upper = wy_upper(scale_symmetric(dots[0:PAIRS], inv, K), beta, K)
            U_v = scale(dots[PAIRS : PAIRS + K], inv, K)
            mixed = x + combine(scale(upper_times(upper, U_v, K), inv, K), u, K)
            WY_row = WY_ptr + token * (PAIRS + K)
            store_tuple(WY_row, upper, PAIRS)
            store_tuple(WY_row + PAIRS, inv, K)
        else:
            mixed = x + _reflect(u, beta, v, d, K, EPS)
        tl.store(mixed_ptr + token * d + cols, mixed, mask=in_d)
        if SELECTIVE:
            B, inv_B = load_unit(raw_row, fed_row, d + states, in_n, n, FEEDBACK, EPS)
            C, inv_C = load_unit(raw_row, fed_row, d + n + states, in_n, n, FEEDBACK, EPS)
            out = BC_ptr + token * 2 * n + states
            tl.store(out, B * inv_B, mask=in_n)
            tl.store(out + n, C * inv_C, mask=in_n)


@triton.jit
def _load_vector(BC_ptr, states, end, SELECTIVE: tl.constexpr, EXACT: tl.constexpr):
    """B or C of a token; 0 from `end` on, and 1 before it without selection.

    EXACT: `end` is the length of `states`. Without a mask nothing is zeroed before each load.
    """
    if SELECTIVE and EXACT:
        return tl.load(BC_ptr + states)
    elif SELECTIVE:
        return tl.load(BC_ptr + states, mask=states < end, other=0.0)
    else:
        return tl.where(states < end, 1.0, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["batch", "T", "zero"])
def finish_iteration_kernel(
    x_ptr,  # (b t, d)
    raw_ptr,  # (b t, r), rows `raw_stride` apart
    fed_back_ptr,  # (b t, r), rows `fed_stride` apart
    BC_ptr,  # (b t, 2, n)
    WY_ptr,  # (b t, k (k + 1) / 2 + k)
    gain_ptr,  # (b t, d)
    y_ptr,  # (b t, d)
    kept_ptr,  # (b,)
    out_ptr,  # (b t, d): p, replaced by the next iterate
    mixed_ptr,  # (b t, d): with MIX x~ of the next iterate
    parts_ptr,  # (2, b t)
    pivots_ptr,  # (b t,)
    batch,
    T,
    x_stride,
    raw_stride,
    fed_stride,
    d,
    n,
    zero,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SELECTIVE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    ALIGN: tl.constexpr,
    EXACT: tl.constexpr,
    MIX: tl.constexpr,
    FAST: tl.constexpr,
):
    sample, t = _token_of(tl.program_id(0), batch, T)
    if t >= tl.load(kept_ptr + sample):
        token = sample.to(tl.int64) * T + t
        cols, states = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        in_d = cols < d
        raw_row = raw_ptr + tl.multiple_of(token * raw_stride, ALIGN)
        fed_row = fed_back_ptr + tl.multiple_of(token * fed_stride, ALIGN)
        if INPUT_SCALE == "one_minus_decay":
            sigma = tl.load(gain_ptr + token * d + cols, mask=in_d, other=0.0)
        else:
            raw_delta = load_raw(raw_row, fed_row, cols, in_d, FEEDBACK, "")
            B = _load_vector(BC_ptr + token * 2 * n, states, n, SELECTIVE, EXACT)
            C = _load_vector(BC_ptr + token * 2 * n + n, states, n, SELECTIVE, EXACT)
            s = input_scale(activate(raw_delta, ACTIVATION, FAST), INPUT_SCALE, FAST)
            sigma = s * tl.sum(B * C, axis=0)
        u_at = d + (2 * n if SELECTIVE else 0)
        u = _load_reflections(raw_row, fed_row, u_at, cols, d, K, FEEDBACK, ALIGN)
        x = _load_x(x_ptr + token * x_stride, cols, d, zero, ALIGN)
        memory = tl.load(out_ptr + token * d + cols, mask=in_d, other=0.0)
        before = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0)
        rest = memory + sigma * x

        PAIRS: tl.constexpr = K * (K + 1) // 2
        upper = load_tuple(WY_ptr + token * (PAIRS + K), PAIRS)
        inv = load_tuple(WY_ptr + token * (PAIRS + K) + PAIRS, K)
        dots = sums(products(rows_times(u, sigma, K), u, K) + rows_times(u, rest - x, K))
        S = scale_symmetric(dots[0:PAIRS], inv, K)
        q = scale(dots[PAIRS : PAIRS + K], inv, K)
        # y = rest + sigma U^T e, e = T U (y - x), so (I - S T) U (y - x) = U (rest - x)
        U_v, pivot = eliminate(local_system(S, upper, False, K), q, K, 1)
        moved = combine(scale(upper_times(upper, U_v, K), inv, K), u, K)
        y = rest + sigma * moved
        tl.store(out_ptr + token * d + cols, y, mask=in_d)
        if MIX:
            # the same U^T T U (y - x)
            tl.store(mixed_ptr + token * d + cols, x + moved, mask=in_d)
        tl.store(parts_ptr + token, max_norm(y - before, 0))
        tl.store(parts_ptr + tl.cast(batch, tl.int64) * T + token, max_norm(y, 0))
        tl.store(pivots_ptr + token, pivot)
