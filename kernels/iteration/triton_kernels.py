"""The kernels of a step of Picard or Jacobi; fused.py says which does what, and why.

Memory and A are (n, d) here, so that a warp's threads are channels and sums over the n states stay
inside a thread. A token is one row of (b t, ...); `kept` tokens at the start of each sample are
frozen and left alone.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import fast_activate
from bedouin.kernels.device.discretize import fast_scale
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
def _larger(a, b):
    return tl.where((a > b) | (a != a), a, b)


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
    ACC: tl.constexpr,
):
    """u_1 .. u_k, not yet unit.

    Read once a launch: what the next launch reads had better stay in the cache.
    """
    u = ()
    for i in tl.static_range(K):
        at = tl.multiple_of(u_at + i * d + cols, ALIGN)
        value = tl.load(raw_ptr + at, cols < d, 0.0, eviction_policy="evict_first").to(ACC)
        if FEEDBACK:
            fed_back = tl.load(fed_back_ptr + at, cols < d, 0.0, eviction_policy="evict_first")
            value += fed_back.to(ACC)
        u = u + (value,)
    return u


@triton.jit
def _token_of(program, batch, T):
    """Sample and time of a program: last tokens first.

    The scan goes forward in time. What it wrote last is still in the cache for the launch that
    follows, and what that launch wrote last for the next scan.
    """
    return program % batch, T - 1 - (program // batch).to(tl.int32)


@triton.jit
def _load_x(row, cols, d, zero, ALIGN: tl.constexpr, ACC: tl.constexpr):
    """x of a token.

    `zero`, of which the compiler knows nothing, keeps a thread's part of x as wide as that of u:
    otherwise they are spread over the threads in two ways, and x is moved between them.
    """
    return tl.load(row + ALIGN * zero + cols, mask=cols < d, other=0.0).to(ACC)


@triton.jit
def _reflect(u, beta, v, d, K: tl.constexpr, EPS: tl.constexpr):
    """(I - H_1 ... H_k) v, the last reflection first: k products less than by way of T."""
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
    ACC: tl.constexpr,
):
    sample, t = _token_of(tl.program_id(0), batch, T)
    if t >= tl.load(kept_ptr + sample):
        token = sample.to(tl.int64) * T + t
        cols, states = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        in_d, in_n = cols < d, states < n
        raw_row = raw_ptr + tl.multiple_of(token * raw_stride, ALIGN)
        fed_row = fed_back_ptr + tl.multiple_of(token * fed_stride, ALIGN)
        x = _load_x(x_ptr + token * x_stride, cols, d, zero, ALIGN, ACC)
        v = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0) - x
        u_at = d + (2 * n if SELECTIVE else 0)
        u = _load_reflections(raw_row, fed_row, u_at, cols, d, K, FEEDBACK, ALIGN, ACC)
        alpha_at = u_at + K * d
        beta = load_beta(raw_row + alpha_at, fed_row + alpha_at, K, FEEDBACK, BETA_MAX, ACC)
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
            B, inv_B = load_unit(raw_row, fed_row, d + states, in_n, n, FEEDBACK, EPS, ACC)
            C, inv_C = load_unit(raw_row, fed_row, d + n + states, in_n, n, FEEDBACK, EPS, ACC)
            out = BC_ptr + token * 2 * n + states
            tl.store(out, B * inv_B, mask=in_n)
            tl.store(out + n, C * inv_C, mask=in_n)


@triton.jit
def _load_vector(
    BC_ptr, states, end, SELECTIVE: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr
):
    """B or C of a token; 0 from `end` on, and 1 before it without selection.

    EXACT: `end` is the length of `states`. Without a mask nothing is zeroed before each load.
    """
    if SELECTIVE and EXACT:
        return tl.load(BC_ptr + states)
    elif SELECTIVE:
        return tl.load(BC_ptr + states, mask=states < end, other=0.0)
    else:
        return tl.where(states < end, 1.0, 0.0).to(ACC)


@triton.jit(do_not_specialize=["batch", "T", "zero"])
def finish_kernel(
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
    ACC: tl.constexpr,
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
            raw_delta = load_raw(raw_row, fed_row, cols, in_d, FEEDBACK, ACC, "")
            B = _load_vector(BC_ptr + token * 2 * n, states, n, SELECTIVE, EXACT, ACC)
            C = _load_vector(BC_ptr + token * 2 * n + n, states, n, SELECTIVE, EXACT, ACC)
            s = fast_scale(fast_activate(raw_delta, ACTIVATION, FAST), INPUT_SCALE, FAST)
            sigma = s * tl.sum(B * C, axis=0)
        u_at = d + (2 * n if SELECTIVE else 0)
        u = _load_reflections(raw_row, fed_row, u_at, cols, d, K, FEEDBACK, ALIGN, ACC)
        x = _load_x(x_ptr + token * x_stride, cols, d, zero, ALIGN, ACC)
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


@triton.jit(do_not_specialize=["batch", "T"])
def decide_kernel(
    parts_ptr,  # (2, b, parts, t)
    norms_ptr,  # (2, b, t)
    counters_ptr,  # (5, b): kept before, kept, frozen, failed, steps
    batch,
    T,
    parts,
    ATOL: tl.constexpr,
    RTOL: tl.constexpr,
    WHOLE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    counters_ptr += sample
    kept = tl.load(counters_ptr + batch)
    frozen = tl.load(counters_ptr + 2 * batch)
    failed = tl.load(counters_ptr + 3 * batch)
    rows, cols = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_T)
    tokens = tl.cast(T, tl.int64)
    all_norms = tl.cast(batch, tl.int64) * tokens
    all_parts = all_norms * parts
    parts_ptr += sample * parts * tokens
    norms_ptr += sample * tokens
    # the first token that has not converged, or is not finite
    end = T
    largest = tl.full([], 0.0, norms_ptr.dtype.element_ty)
    worst = largest
    for start in range(0, T, BLOCK_T):
        t = start + cols
        at = rows[:, None] * tokens + t[None, :]
        mask = (rows < parts)[:, None] & (t < T)[None, :]
        defect = max_norm(tl.load(parts_ptr + at, mask=mask, other=0.0), 0)
        scale = max_norm(tl.load(parts_ptr + all_parts + at, mask=mask, other=0.0), 0)
        tl.store(norms_ptr + t, defect, mask=t < T)
        tl.store(norms_ptr + all_norms + t, scale, mask=t < T)
        if WHOLE:
            # a token that is not finite, and all after it, must not keep the ones before it going
            finite = (scale < float("inf")) | (t >= T)
            end = tl.minimum(end, tl.min(tl.where(finite, T, t), axis=0))
            worst = _larger(worst, max_norm(tl.where(t < end, defect, 0.0), 0))
            largest = _larger(largest, max_norm(tl.where(t < end, scale, 0.0), 0))
        else:
            running = _larger(tl.associative_scan(scale, 0, _larger), largest)
            largest = _larger(largest, max_norm(scale, 0))
            small = (defect < ATOL + RTOL * running) | (t < frozen) | (t >= T)
            end = tl.minimum(end, tl.min(tl.where(small, T, t), axis=0))
    if WHOLE:
        end = tl.where(worst < ATOL + RTOL * largest, tl.maximum(end, frozen), frozen)
    at = all_parts + rows * tokens + tl.minimum(end, T - 1)
    scale = max_norm(tl.load(parts_ptr + at, mask=rows < parts, other=0.0), 0)
    fails = (failed != 0) | ((end < T) & ((scale < float("inf")) == 0))
    tl.store(counters_ptr, kept)
    tl.store(counters_ptr + batch, tl.where(fails, T, end))
    tl.store(counters_ptr + 2 * batch, end)
    tl.store(counters_ptr + 3 * batch, fails.to(tl.int32))
    if COUNT:
        active = (frozen < T) & (failed == 0)
        steps = tl.load(counters_ptr + 4 * batch)
        tl.store(counters_ptr + 4 * batch, steps + active.to(tl.int32))


@triton.jit(do_not_specialize=["batch", "T"])
def settle_kernel(
    y_ptr,  # (b t, d)
    next_ptr,  # (b t, d)
    normed_ptr,  # (b t, d), in the dtype of W^y
    counters_ptr,  # (5, b): kept before, kept, ...
    batch,
    T,
    d,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    t, sample = token % T, token // T
    cols = tl.arange(0, BLOCK_D)
    before = tl.load(counters_ptr + sample)
    kept = tl.load(counters_ptr + batch + sample)
    if (t >= before) & (t < kept):
        in_d = cols < d
        y = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0)
        tl.store(next_ptr + token * d + cols, y, mask=in_d)
    if (t >= kept) & (t + 1 < T):
        in_d = cols < d
        y = tl.load(next_ptr + token * d + cols, mask=in_d, other=0.0)
        if NORM:
            y *= tl.rsqrt(tl.sum(y * y, axis=0) / d + NORM_EPS)
        normed = y.to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + (token + 1) * d + cols, normed, mask=in_d)


@triton.jit(do_not_specialize=["batch", "T", "programs"])
def restore_kernel(
    y_ptr,  # (b t, d)
    next_ptr,  # (b t, d)
    mixed_ptr,  # (b t, d)
    mixed_next_ptr,  # (b t, d)
    counters_ptr,  # (5, b): kept before, kept, ...
    batch,
    T,
    programs,
    d,
    BLOCK_D: tl.constexpr,
    MIXED: tl.constexpr,
):
    """`settle` without feedback: mostly nothing, so few programs, each for some tokens.

    MIXED: x~ goes back, too.
    """
    sample = tl.program_id(0) // programs
    cols = tl.arange(0, BLOCK_D)
    before = tl.load(counters_ptr + sample)
    kept = tl.load(counters_ptr + batch + sample)
    for t in range(before + tl.program_id(0) % programs, kept, programs):
        at = (tl.cast(sample, tl.int64) * T + t) * d + cols
        y = tl.load(y_ptr + at, mask=cols < d, other=0.0)
        tl.store(next_ptr + at, y, mask=cols < d)
        if MIXED:
            mixed = tl.load(mixed_ptr + at, mask=cols < d, other=0.0)
            tl.store(mixed_next_ptr + at, mixed, mask=cols < d)
