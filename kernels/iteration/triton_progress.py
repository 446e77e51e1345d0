"""The kernels that judge a step of Picard: which tokens converge, and what they keep.

A token is one row of (b t, ...); the first `kept` tokens of each sample are frozen.
Letters: b batch, t time, d channels.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.norms import inverse_norm, larger_or_nan, max_norm


@triton.jit(do_not_specialize=["batch", "T"])
def decide_kernel(
    parts_ptr,  # (2, b, parts, t)
    norms_ptr,  # (2, b, t)
    counters_ptr,  # (5, b): kept before, kept, frozen, failed, steps
    lengths_ptr,  # (b,), where PADDED: tokens before the padding, which counts as converged
    batch,
    T,
    parts,
    ATOL: tl.constexpr,
    RTOL: tl.constexpr,
    WHOLE: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
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
    judged = T
    if PADDED:
        judged = tl.load(lengths_ptr + sample)
    # the first token that has not converged, or is not finite
    end = T
    largest = tl.full([], 0.0, norms_ptr.dtype.element_ty)
    worst = largest
    for start in range(0, T, BLOCK_T):
        t = start + cols
        at = rows[:, None] * tokens + t[None, :]
        mask = (rows < parts)[:, None] & (t < judged)[None, :]
        defect = max_norm(tl.load(parts_ptr + at, mask=mask, other=0.0), 0)
        scale = max_norm(tl.load(parts_ptr + all_parts + at, mask=mask, other=0.0), 0)
        tl.store(norms_ptr + t, defect, mask=t < T)
        tl.store(norms_ptr + all_norms + t, scale, mask=t < T)
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
            y *= inverse_norm(tl.sum(y * y, axis=0) / d, NORM_EPS)
        normed = y.to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + (token + 1) * d + cols, normed, mask=in_d)


@triton.jit(do_not_specialize=["batch", "T", "programs"])
def restore_kernel(
    y_ptr,  # (b t, d)
    next_ptr,  # (b t, d)
    counters_ptr,  # (5, b): kept before, kept, ...
    batch,
    T,
    programs,
    d,
    BLOCK_D: tl.constexpr,
):
    """`settle_kernel` without feedback, in few programs: few tokens freeze in a step."""
    sample = tl.program_id(0) // programs
    cols = tl.arange(0, BLOCK_D)
    before = tl.load(counters_ptr + sample)
    kept = tl.load(counters_ptr + batch + sample)
    for t in range(before + tl.program_id(0) % programs, kept, programs):
        at = (tl.cast(sample, tl.int64) * T + t) * d + cols
        y = tl.load(y_ptr + at, mask=cols < d, other=0.0)
        tl.store(next_ptr + at, y, mask=cols < d)
