"""The kernels of a step of Picard beside the scan: the mixing, and what judges and settles tokens.

A token is one row of (b t, ...); the first `kept` tokens of each sample are frozen and not mixed.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import (
    activate,
    inverse_norm,
    larger_or_nan,
    load_beta,
    load_raw,
    load_unit,
    max_norm,
)
from bedouin.kernels.device.reflections import sums


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


@triton.jit(do_not_specialize=["batch", "T"])
def mix_kernel(
    x_ptr,  # (b t, d)
    raw_ptr,  # (b t, r)
    fed_back_ptr,  # (b t, r)
    y_ptr,  # (b t, d)
    kept_ptr,  # (b,)
    mixed_ptr,  # (b t, d), written
    delta_ptr,  # (b t, d), written
    BC_ptr,  # (b t, 2, n), written where SELECTIVE
    batch,
    T,
    distances,  # of the rows of x, raw and fed_back
    d,
    n,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SELECTIVE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETA_MAX: tl.constexpr,
    EPS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """x~, Delta, and unit B and C of a token, last tokens first: what the scan, which goes forward
    in time, has written last is still in the cache, and so is for the next scan what is written
    last here."""
    program = tl.program_id(0)
    sample, t = program % batch, T - 1 - (program // batch).to(tl.int32)
    if t >= tl.load(kept_ptr + sample):
        token = sample.to(tl.int64) * T + t
        cols, states = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        in_d, in_n = cols < d, states < n
        # rows of one alignment have one layout: otherwise threads would exchange them
        raw_row = raw_ptr + tl.multiple_of(token * distances[1], ALIGN)
        fed_row = fed_back_ptr + tl.multiple_of(token * distances[2], ALIGN)
        x_row = x_ptr + tl.multiple_of(token * distances[0], ALIGN)
        at = tl.multiple_of(token * d, ALIGN) + cols
        x = tl.load(x_row + cols, mask=in_d, other=0.0).to(tl.float32)
        v = tl.load(y_ptr + at, mask=in_d, other=0.0) - x
        u_at = d + (2 * n if SELECTIVE else 0)
        u = ()
        for i in tl.static_range(K):
            # read once a launch, so evicted first: the cache keeps what the next launch reads
            at_u = tl.multiple_of(u_at + i * d + cols, ALIGN)
            u = u + (load_raw(raw_row, fed_row, at_u, in_d, FEEDBACK, "", "evict_first"),)
        alpha_at = u_at + K * d
        beta = load_beta(raw_row + alpha_at, fed_row + alpha_at, K, FEEDBACK, BETA_MAX)
        mixed = x
        if K > 0:
            mixed += _reflect(u, beta, v, d, K, EPS)
        tl.store(mixed_ptr + at, mixed, mask=in_d)
        raw = load_raw(raw_row, fed_row, cols, in_d, FEEDBACK, "", "")
        tl.store(delta_ptr + at, activate(raw, ACTIVATION), mask=in_d)
        if SELECTIVE:
            B, inv_B = load_unit(raw_row, fed_row, d + states, in_n, n, FEEDBACK, EPS)
            C, inv_C = load_unit(raw_row, fed_row, d + n + states, in_n, n, FEEDBACK, EPS)
            out = BC_ptr + token * 2 * n + states
            tl.store(out, B * inv_B, mask=in_n)
            tl.store(out + n, C * inv_C, mask=in_n)


@triton.jit(do_not_specialize=["batch", "T"])
def judge_kernel(
    y_ptr,  # (b t, d)
    F_ptr,  # (b t, d): F(y), then the next iterate
    value_ptr,  # (b t, d), written: the last evaluation of each token; or None
    kept_ptr,  # (b,)
    norms_ptr,  # (2, b, t), written: defect and scale
    batch,
    T,
    d,
    DAMPING: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The norms of a token, and where it moves, or for a frozen one where it is."""
    token = tl.program_id(0).to(tl.int64)
    sample, cols = token // T, tl.arange(0, BLOCK_D)
    at, in_d = token * d + cols, cols < d
    y = tl.load(y_ptr + at, mask=in_d, other=0.0)
    F = tl.load(F_ptr + at, mask=in_d, other=0.0)
    tl.store(norms_ptr + token, max_norm(F - y, 0))
    tl.store(norms_ptr + tl.cast(batch, tl.int64) * T + token, max_norm(F, 0))
    moves = token % T >= tl.load(kept_ptr + sample)
    if value_ptr is not None:
        tl.store(value_ptr + at, F, mask=cols < tl.where(moves, d, 0))
    if DAMPING != 1:
        tl.store(F_ptr + at, tl.where(moves, y + DAMPING * (F - y), y), mask=in_d)
    else:
        tl.store(F_ptr + at, y, mask=cols < tl.where(moves, 0, d))


@triton.jit(do_not_specialize=["batch", "T"])
def decide_kernel(
    norms_ptr,  # (2, b, t)
    counters_ptr,  # (5, b): kept before, kept, frozen, failed, steps
    lengths_ptr,  # (b,): tokens before the padding, which counts as converged; or None
    batch,
    T,
    ATOL: tl.constexpr,
    RTOL: tl.constexpr,
    WHOLE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    counters_ptr += sample
    kept = tl.load(counters_ptr + batch)
    frozen = tl.load(counters_ptr + 2 * batch)
    failed = tl.load(counters_ptr + 3 * batch)
    cols = tl.arange(0, BLOCK_T)
    norms_ptr += sample * T
    scales_ptr = norms_ptr + tl.cast(batch, tl.int64) * T
    judged = T
    if lengths_ptr is not None:
        judged = tl.load(lengths_ptr + sample)
    # the first token that has not converged, or is not finite
    end = T
    largest = tl.full([], 0.0, norms_ptr.dtype.element_ty)
    worst = largest
    for start in range(0, T, BLOCK_T):
        t = start + cols
        defect = tl.load(norms_ptr + t, mask=t < judged, other=0.0)
        scale = tl.load(scales_ptr + t, mask=t < judged, other=0.0)
        if lengths_ptr is not None:
            tl.store(norms_ptr + t, defect, mask=t < T)
            tl.store(scales_ptr + t, scale, mask=t < T)
        if WHOLE:
            # tokens from the first one that is not finite on must not prevent convergence before it
            finite = (scale < float("inf")) | (t >= judged)
            end = tl.minimum(end, tl.min(tl.where(finite, T, t), axis=0))
            worst = larger_or_nan(worst, max_norm(tl.where(t < end, defect, 0.0), 0))
            largest = larger_or_nan(largest, max_norm(tl.where(t < end, scale, 0.0), 0))
        else:
            running = larger_or_nan(tl.associative_scan(scale, 0, larger_or_nan), largest)
            largest = larger_or_nan(largest, max_norm(scale, 0))
            small = (defect < ATOL + RTOL * running) | (t < frozen) | (t >= judged)
            end = tl.minimum(end, tl.min(tl.where(small, T, t), axis=0))
    if WHOLE:
        converges = (worst < ATOL + RTOL * largest) | (judged == 0)
        end = tl.where(converges, tl.maximum(end, frozen), frozen)
    scale = tl.load(scales_ptr + tl.minimum(end, T - 1))
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
    normed_ptr,  # (b t, d), in the dtype of W^y, or None
    counters_ptr,  # (5, b): kept before, kept, ...
    batch,
    T,
    d,
    BLOCK_D: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    """The last move of a token that has just frozen is undone; with feedback norm(y) of the others,
    one token on."""
    token = tl.program_id(0).to(tl.int64)
    t, sample = token % T, token // T
    cols = tl.arange(0, BLOCK_D)
    before = tl.load(counters_ptr + sample)
    kept = tl.load(counters_ptr + batch + sample)
    if (t >= before) & (t < kept):
        y = tl.load(y_ptr + token * d + cols, mask=cols < d, other=0.0)
        tl.store(next_ptr + token * d + cols, y, mask=cols < d)
    if normed_ptr is not None:
        if (t >= kept) & (t + 1 < T):
            y = tl.load(next_ptr + token * d + cols, mask=cols < d, other=0.0)
            if NORM_EPS is not None:
                y *= inverse_norm(tl.sum(y * y, axis=0) / d, NORM_EPS)
            normed = y.to(normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + (token + 1) * d + cols, normed, mask=cols < d)
