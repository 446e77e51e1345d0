"""The kernel of a step of Picard that takes one token a program: the mixing.

A token is one row of (b t, ...); the first `kept` tokens of each sample are frozen and skipped.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.raw import load_beta, load_unit
from bedouin.kernels.device.reflections import sums


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
        mixed = x
        if K > 0:
            mixed += _reflect(u, beta, v, d, K, EPS)
        tl.store(mixed_ptr + token * d + cols, mixed, mask=in_d)
        if SELECTIVE:
            B, inv_B = load_unit(raw_row, fed_row, d + states, in_n, n, FEEDBACK, EPS)
            C, inv_C = load_unit(raw_row, fed_row, d + n + states, in_n, n, FEEDBACK, EPS)
            out = BC_ptr + token * 2 * n + states
            tl.store(out, B * inv_B, mask=in_n)
            tl.store(out + n, C * inv_C, mask=in_n)
