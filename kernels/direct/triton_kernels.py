"""The direct sweep and its reverse sweep as Triton kernels: one program a sample.

A launch covers the tokens [start, stop): all of them without feedback, one where W^y y stands
between two tokens. The mathematics is that of forward.py and reverse.py for Householder products,
from the raw values (`RawLayout`) and back to them. h is (b, n, d) as there.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from bedouin.kernels.direct.reference import SweepOptions
from bedouin.kernels.direct.triton_math import (
    activate,
    activate_vjp,
    decay_tile,
    diagonal,
    gram,
    input_scale,
    inverse_unipotent,
    invert,
    max_norm,
    product,
    product_left_transposed,
    sigmoid,
    solve_small,
    solve_small_transposed,
    times,
    transposed_times,
)
from bedouin.kernels.householder.reference import UNIT_EPS


@triton.jit
def _load_raw(raw_ptr, fed_back_ptr, columns, mask, FEEDBACK: tl.constexpr):
    """raw^x + W^y norm(y_{t-1}) at some columns."""
    raw = tl.load(raw_ptr + columns, mask=mask, other=0.0)
    if FEEDBACK:
        raw += tl.load(fed_back_ptr + columns, mask=mask, other=0.0).to(raw.dtype)
    return raw


@triton.jit
def _woodbury(rhs, sigma, U, T, K, inverse):
    """rhs + sigma * U^T T K^-1 U rhs."""
    a = times(T, solve_small(K, inverse, times(U, rhs)))
    return rhs + sigma * transposed_times(U, a)


@triton.jit(do_not_specialize=["start", "stop", "origin", "slots", "t_end", "batch"])
def _sweep_kernel(
    x_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_back_ptr,  # (b, r): W^y norm(y_{start-1})
    A_ptr,  # (n, d)
    h_ptr,  # (b, n, d), in place
    kept_ptr,  # (b, slots, n, d): h before tokens origin, origin + keep_every, ...
    y_ptr,  # (b, t, d): written, or with SOLVE off read
    normed_ptr,  # (b, d): norm(y) of the last token, in the dtype of W^y
    statistics_ptr,  # (4, b, t): defect, scale, magnitude, pivot
    start,
    stop,
    origin,
    keep_every,
    slots,
    batch,
    t_end,
    r,
    d,
    n,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOLVE: tl.constexpr,
    FEEDBACK: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    EIGENVALUES: tl.constexpr,
    EPS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    ks, rows, cols = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_k, in_n, in_d = ks < K, rows < n, cols < d
    i, j = ks[:, None], ks[None, :]
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    h = tl.load(h_ptr + sample * n * d + state, mask=in_state, other=0.0)
    identity = tl.where(i == j, 1.0, 0.0).to(h.dtype)
    fed_back_ptr += sample * r
    # raw is [Delta d | B n | C n | u k d | alpha k], B and C only if SELECTIVE
    u_at = d + (2 * n if SELECTIVE else 0)
    for t in range(start, stop):
        token = sample * t_end + t
        if (t - origin) % keep_every == 0:
            slot = sample * slots + (t - origin) // keep_every
            tl.store(kept_ptr + slot * n * d + state, h, mask=in_state)
        raw = raw_ptr + token * r
        delta = activate(_load_raw(raw, fed_back_ptr, cols, in_d, FEEDBACK), ACTIVATION)
        if SELECTIVE:
            B = _load_raw(raw, fed_back_ptr, d + rows, in_n, FEEDBACK)
            B *= tl.rsqrt(tl.sum(B * B, axis=0) + n * EPS)
            C = _load_raw(raw, fed_back_ptr, d + n + rows, in_n, FEEDBACK)
            C *= tl.rsqrt(tl.sum(C * C, axis=0) + n * EPS)
        else:
            B = tl.where(in_n, 1.0, 0.0).to(h.dtype)
            C = B
        in_u = in_k[:, None] & in_d[None, :]
        u = _load_raw(raw, fed_back_ptr, u_at + i * d + cols[None, :], in_u, FEEDBACK)
        alpha = _load_raw(raw, fed_back_ptr, u_at + K * d + ks, in_k, FEEDBACK)
        beta = tl.where(in_k, BETA_MAX * sigmoid(alpha), 0.0)
        x = tl.load(x_ptr + token * d + cols, mask=in_d, other=0.0)

        A = tl.load(A_ptr + state, mask=in_state, other=0.0)
        decay = decay_tile(delta, A, EIGENVALUES)
        h *= decay  # from here to the write: what has decayed

        dots = gram(u, u)
        inv = tl.rsqrt(diagonal(dots, i, j) + d * EPS)
        U = u * inv[:, None]
        G = dots * inv[:, None] * inv[None, :]
        N = tl.where(i < j, beta[:, None] * G, 0.0)
        T = inverse_unipotent(N, identity, BLOCK_K) * beta[None, :]
        if SOLVE:
            if INPUT_SCALE == "one_minus_decay":
                sigma = tl.sum((1 - tl.abs(decay)) * (B * C)[:, None], axis=0)
            else:
                sigma = input_scale(delta, INPUT_SCALE) * tl.sum(B * C, axis=0)
            S = gram(U * sigma[None, :], U)
            system = identity - product(S, T)
            inverse, pivot = invert(system, identity, K, BLOCK_K)
            Q_x = x - transposed_times(U, times(T, times(U, x)))
            rhs = transposed_times(h, C) + sigma * Q_x
            y = _woodbury(rhs, sigma, U, T, system, inverse)
            # one step of refinement, as in solve_local
            applied = y - sigma * transposed_times(U, times(T, times(U, y)))
            y += _woodbury(rhs - applied, sigma, U, T, system, inverse)
            tl.store(y_ptr + token * d + cols, y, mask=in_d)
        else:
            y = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0)
        mixed = x + transposed_times(U, times(T, times(U, y - x)))

        terms = tl.abs(x) + tl.abs(mixed)
        if INPUT_SCALE == "one_minus_decay":
            scale = 1 - tl.abs(decay)
            h += scale * mixed[None, :] * B[:, None]
            terms *= tl.max(scale, axis=0)
        else:
            s = input_scale(delta, INPUT_SCALE)
            h += (s * mixed)[None, :] * B[:, None]
            terms *= s
        if SOLVE:
            F = transposed_times(h, C)
            cell = statistics_ptr + token
            row = tl.cast(batch, tl.int64) * t_end
            tl.store(cell, max_norm(F - y))
            tl.store(cell + row, max_norm(F))
            tl.store(cell + 2 * row, max_norm(terms))
            tl.store(cell + 3 * row, pivot)
        if FEEDBACK:
            normed = y
            if NORM:
                normed = y * tl.rsqrt(tl.sum(y * y, axis=0) / d + NORM_EPS)
            normed = normed.to(normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + sample * d + cols, normed, mask=in_d)
    tl.store(h_ptr + sample * n * d + state, h, mask=in_state)


@triton.jit
def _unit_vjp(grad, unit, inv):
    """Cotangent of v (n,) for v inv = unit, inv = (|v|^2 + len eps)^(-1/2)."""
    return inv * (grad - unit * tl.sum(grad * unit, axis=0))


@triton.jit(do_not_specialize=["start", "stop", "origin", "slots", "t_end", "batch"])
def _reverse_kernel(
    grad_y_ptr,  # (b, t, d)
    pulled_ptr,  # (b, d): (W^y)^T grad_raw of token stop, the cotangent of norm(y_{stop-1})
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r), with the feedback
    A_ptr,  # (n, d)
    before_ptr,  # (b, slots, n, d): h before tokens origin, origin + 1, ...
    H_ptr,  # (b, n, d): cotangent of h_{stop-1}, in place that of h_{start-1}
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, r)
    grad_low_ptr,  # (b, r): grad_raw of token start, in the dtype of W^y
    grad_A_ptr,  # (b, n, d), added to
    statistics_ptr,  # (2, b, t): defect and scale of the adjoint equation
    start,
    stop,
    origin,
    slots,
    batch,
    t_end,
    r,
    d,
    n,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # states at a time
    ALL_N: tl.constexpr,  # the power of two from n on
    FEEDBACK: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    EIGENVALUES: tl.constexpr,
    EPS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    ks, cols = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    states, block = tl.arange(0, ALL_N), tl.arange(0, BLOCK_N)
    in_k, in_d, in_n = ks < K, cols < d, states < n
    i, j = ks[:, None], ks[None, :]
    in_u = in_k[:, None] & in_d[None, :]
    u_at = d + (2 * n if SELECTIVE else 0)
    H_ptr += sample * n * d
    grad_A_ptr += sample * n * d
    grad_low_ptr += sample * r
    for back in range(start, stop):
        t = stop - 1 - (back - start)
        token = sample * t_end + t
        raw_t, grad_raw = raw_ptr + token * r, grad_raw_ptr + token * r
        before = before_ptr + (sample * slots + (t - origin)) * n * d
        raw_delta = tl.load(raw_t + cols, mask=in_d, other=0.0)
        delta = activate(raw_delta, ACTIVATION)
        x = tl.load(x_ptr + token * d + cols, mask=in_d, other=0.0)
        y = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0)
        g = tl.load(grad_y_ptr + token * d + cols, mask=in_d, other=0.0)
        if FEEDBACK:
            pulled = tl.load(pulled_ptr + sample * d + cols, mask=in_d, other=0.0).to(g.dtype)
            if NORM:
                rms = tl.rsqrt(tl.sum(y * y, axis=0) / d + NORM_EPS)
                pulled = rms * (pulled - y * (rms * rms) * (tl.sum(pulled * y, axis=0) / d))
            g += pulled
        if SELECTIVE:
            raw_B = tl.load(raw_t + d + states, mask=in_n, other=0.0)
            raw_C = tl.load(raw_t + d + n + states, mask=in_n, other=0.0)
            inv_B = tl.rsqrt(tl.sum(raw_B * raw_B, axis=0) + n * EPS)
            inv_C = tl.rsqrt(tl.sum(raw_C * raw_C, axis=0) + n * EPS)
            BC = tl.sum(raw_B * raw_C, axis=0) * (inv_B * inv_C)
        u = tl.load(raw_t + u_at + i * d + cols[None, :], mask=in_u, other=0.0)
        alpha = tl.load(raw_t + u_at + K * d + ks, mask=in_k, other=0.0)
        gate = sigmoid(alpha)
        beta = tl.where(in_k, BETA_MAX * gate, 0.0)

        # what reaches x~_t from later memory, and for the coupled scale sigma
        from_memory = tl.zeros([BLOCK_D], dtype=g.dtype)
        sigma = tl.zeros([BLOCK_D], dtype=g.dtype)
        for n0 in range(0, n, BLOCK_N):
            rows = n0 + block
            at = rows[:, None] * d + cols[None, :]
            in_tile = (rows < n)[:, None] & in_d[None, :]
            H = tl.load(H_ptr + at, mask=in_tile, other=0.0)
            if SELECTIVE:
                B = tl.load(raw_t + d + rows, mask=rows < n, other=0.0) * inv_B
                C = tl.load(raw_t + d + n + rows, mask=rows < n, other=0.0) * inv_C
            else:
                B = tl.where(rows < n, 1.0, 0.0).to(g.dtype)
                C = B
            if INPUT_SCALE == "one_minus_decay":
                A = tl.load(A_ptr + at, mask=in_tile, other=0.0)
                scale = 1 - tl.abs(decay_tile(delta, A, EIGENVALUES))
                sigma += transposed_times(scale, B * C)
                H *= scale
            from_memory += transposed_times(H, B)
        if INPUT_SCALE != "one_minus_decay":
            s = input_scale(delta, INPUT_SCALE)
            from_memory *= s
            if SELECTIVE:
                sigma = s * BC
            else:
                sigma = s * n

        dots = gram(u, u)
        inv = tl.rsqrt(diagonal(dots, i, j) + d * EPS)
        U = u * inv[:, None]
        G = dots * inv[:, None] * inv[None, :]
        identity = tl.where(i == j, 1.0, 0.0).to(g.dtype)
        N = tl.where(i < j, beta[:, None] * G, 0.0)
        P = inverse_unipotent(N, identity, BLOCK_K)
        T = P * beta[None, :]
        system = identity - product(gram(U * sigma[None, :], U), T)
        inverse, _ = invert(system, identity, K, BLOCK_K)

        U_m = times(U, from_memory)
        rhs = g + transposed_times(U, transposed_times(T, U_m))
        a = transposed_times(T, times(U, sigma * rhs))
        w = rhs + transposed_times(U, solve_small_transposed(system, inverse, a))
        U_w = times(U, sigma * w)
        applied = rhs + transposed_times(U, transposed_times(T, U_w))
        cell = statistics_ptr + token
        tl.store(cell, max_norm(applied - w))
        tl.store(cell + tl.cast(batch, tl.int64) * t_end, max_norm(applied))

        # x~ = x + U^T T U v
        grad_mixed = from_memory + sigma * w
        U_g = U_m + U_w
        v = y - x
        U_v = times(U, v)
        T_v, T_g = times(T, U_v), transposed_times(T, U_g)
        mixed = x + transposed_times(U, T_v)
        grad_x = grad_mixed - transposed_times(U, T_g)
        tl.store(grad_x_ptr + token * d + cols, grad_x, mask=in_d)

        # T = (I + N)^-1 diag(beta), N = diag(beta) striu(G), G = U U^T
        P_grad = product_left_transposed(P, U_g[:, None] * U_v[None, :])
        grad_N = -gram(P_grad, T)
        strict = tl.where(i < j, grad_N, 0.0)
        grad_beta = diagonal(P_grad, i, j) + tl.sum(strict * G, axis=1)
        grad_alpha = grad_beta * beta * (1 - gate)
        tl.store(grad_raw + u_at + K * d + ks, grad_alpha, mask=in_k)
        grad_G = strict * beta[:, None]
        both = grad_G + tl.trans(grad_G)
        # U = u inv: the part along U falls out
        along = T_v * U_g + T_g * U_v + tl.sum(both * G, axis=1)
        grad_U = T_v[:, None] * grad_mixed[None, :] + T_g[:, None] * v[None, :]
        for row in tl.static_range(K):
            U_row = tl.sum(tl.where(i == row, U, 0.0), axis=0)
            weights = tl.sum(tl.where(j == row, both, 0.0), axis=1)
            grad_U += weights[:, None] * U_row[None, :]
        grad_u = inv[:, None] * (grad_U - U * along[:, None])
        tl.store(grad_raw + u_at + i * d + cols[None, :], grad_u, mask=in_u)

        grad_delta = tl.zeros([BLOCK_D], dtype=g.dtype)
        grad_s = tl.zeros([BLOCK_D], dtype=g.dtype)
        grad_B = tl.zeros([ALL_N], dtype=g.dtype)
        grad_C = tl.zeros([ALL_N], dtype=g.dtype)
        for n0 in range(0, n, BLOCK_N):
            rows = n0 + block
            at = rows[:, None] * d + cols[None, :]
            in_tile = (rows < n)[:, None] & in_d[None, :]
            if SELECTIVE:
                B = tl.load(raw_t + d + rows, mask=rows < n, other=0.0) * inv_B
                C = tl.load(raw_t + d + n + rows, mask=rows < n, other=0.0) * inv_C
            else:
                B = tl.where(rows < n, 1.0, 0.0).to(g.dtype)
                C = B
            A = tl.load(A_ptr + at, mask=in_tile, other=0.0)
            h = tl.load(before + at, mask=in_tile, other=0.0)
            H = tl.load(H_ptr + at, mask=in_tile, other=0.0) + C[:, None] * w[None, :]
            decay = decay_tile(delta, A, EIGENVALUES)
            grad_decay = H * h
            if INPUT_SCALE == "one_minus_decay":
                written = (1 - tl.abs(decay)) * mixed[None, :]
                grad_scale = H * mixed[None, :] * B[:, None]
                if EIGENVALUES == "full":
                    sign = tl.where(decay > 0, 1.0, tl.where(decay < 0, -1.0, 0.0))
                    grad_decay -= sign * grad_scale
                else:
                    grad_decay -= grad_scale
            else:
                written = (s * mixed)[None, :] + tl.zeros([BLOCK_N, BLOCK_D], dtype=g.dtype)
                grad_s += transposed_times(H, B) * mixed
            if SELECTIVE:
                here = states[:, None] == rows[None, :]
                in_B = tl.sum(H * written, axis=1)
                in_C = tl.sum((decay * h + written * B[:, None]) * w[None, :], axis=1)
                grad_B += tl.sum(tl.where(here, in_B[None, :], 0.0), axis=1)
                grad_C += tl.sum(tl.where(here, in_C[None, :], 0.0), axis=1)
            if EIGENVALUES == "full":
                grad_exponent = grad_decay * (decay + 1)
            else:
                grad_exponent = grad_decay * decay
            grad_delta += tl.sum(grad_exponent * A, axis=0)
            total = tl.load(grad_A_ptr + at, mask=in_tile, other=0.0)
            tl.store(grad_A_ptr + at, total + grad_exponent * delta[None, :], mask=in_tile)
            tl.store(H_ptr + at, H * decay, mask=in_tile)

        if INPUT_SCALE == "delta":
            grad_delta += grad_s
        elif INPUT_SCALE == "bounded_delta":
            grad_delta += grad_s / ((1 + delta) * (1 + delta))
        grad_delta = activate_vjp(grad_delta, raw_delta, ACTIVATION)
        tl.store(grad_raw + cols, grad_delta, mask=in_d)
        if SELECTIVE:
            grad_B = _unit_vjp(grad_B, raw_B * inv_B, inv_B)
            grad_C = _unit_vjp(grad_C, raw_C * inv_C, inv_C)
            tl.store(grad_raw + d + states, grad_B, mask=in_n)
            tl.store(grad_raw + d + n + states, grad_C, mask=in_n)
        if FEEDBACK:
            kind = grad_low_ptr.dtype.element_ty
            tl.store(grad_low_ptr + cols, grad_delta.to(kind), mask=in_d)
            tl.store(grad_low_ptr + u_at + K * d + ks, grad_alpha.to(kind), mask=in_k)
            tl.store(grad_low_ptr + u_at + i * d + cols[None, :], grad_u.to(kind), mask=in_u)
            if SELECTIVE:
                tl.store(grad_low_ptr + d + states, grad_B.to(kind), mask=in_n)
                tl.store(grad_low_ptr + d + n + states, grad_C.to(kind), mask=in_n)
        # the next token reads H and grad_A, perhaps with other threads than those that wrote
        tl.debug_barrier()


class SweepBuffers(NamedTuple):
    """Tensors of a sweep that stay where they are from launch to launch."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r)
    fed_back: Tensor | None  # (b, r), W^y norm(y_{t-1}); None: raw is all there is
    A: Tensor  # (n, d)
    h: Tensor  # (b, n, d), in place
    kept: Tensor  # (b, slots, n, d), contiguous
    y: Tensor  # (b, t, d)
    normed: Tensor  # (b, d), in the dtype of W^y
    statistics: Tensor  # (4, b, t): defect, scale, magnitude, pivot


def sweep_forward(
    buffers: SweepBuffers,
    tokens: range,
    options: SweepOptions,
    *,
    solve: bool,
    origin: int,
    keep_every: int,
) -> None:
    """Tokens in one launch; h before tokens origin, origin + keep_every, ... goes to `kept`.

    With `solve` off, y is read: the memory that a known fixed point makes.
    """
    x, raw, fed_back, A, h, kept, y, normed, statistics = buffers
    b, t_end, d = x.shape
    n = A.shape[0]
    _sweep_kernel[(b,)](
        x,
        raw,
        raw if fed_back is None else fed_back,
        A,
        h,
        kept,
        y,
        normed,
        statistics,
        tokens.start,
        tokens.stop,
        origin,
        keep_every,
        kept.shape[1],
        b,
        t_end,
        raw.shape[-1],
        d,
        n,
        BLOCK_N=triton.next_power_of_2(n),
        SOLVE=solve,
        FEEDBACK=fed_back is not None,
        num_warps=_num_warps(d),
        **_constants(d, options),
    )


class ReverseBuffers(NamedTuple):
    """Tensors of a reverse sweep that stay where they are from launch to launch."""

    grad_y: Tensor  # (b, t, d)
    pulled: Tensor | None  # (b, d), (W^y)^T grad_raw of the next token; None: no feedback
    x: Tensor  # (b, t, d)
    y: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r), with the feedback
    A: Tensor  # (n, d)
    before: Tensor  # (b, slots, n, d)
    H: Tensor  # (b, n, d), in place
    grad_x: Tensor  # (b, t, d)
    grad_raw: Tensor  # (b, t, r)
    grad_low: Tensor  # (b, r), in the dtype of W^y
    grad_A: Tensor  # (b, n, d), added to
    statistics: Tensor  # (2, b, t): defect and scale


def sweep_reverse(
    buffers: ReverseBuffers, tokens: range, options: SweepOptions, *, origin: int
) -> None:
    """The adjoint of tokens, last first, in one launch; `before` holds h before token origin + i.

    The gradient of A is summed per sample: no atomics, so that runs repeat to the bit.
    """
    grad_y, pulled, x, y, raw, A, before, H, *outputs = buffers
    b, t_end, d = x.shape
    n = A.shape[0]
    all_n = triton.next_power_of_2(n)
    _reverse_kernel[(b,)](
        grad_y,
        grad_y if pulled is None else pulled,
        x,
        y,
        raw,
        A,
        before,
        H,
        *outputs,
        tokens.start,
        tokens.stop,
        origin,
        before.shape[1],
        b,
        t_end,
        raw.shape[-1],
        d,
        n,
        # eight tiles are alive at once: more states at a time would not stay in registers
        BLOCK_N=min(all_n, max(1, REVERSE_TILE // triton.next_power_of_2(d))),
        ALL_N=all_n,
        FEEDBACK=pulled is not None,
        num_warps=_num_warps(d),
        **_constants(d, options),
    )


REVERSE_TILE = 4096
"""Most elements of a tile of memory in the reverse kernel."""


def _num_warps(d: int) -> int:
    """Two to four channels a thread."""
    return int(min(16, max(4, triton.next_power_of_2(d) // 64)))


def _constants(d: int, options: SweepOptions) -> dict[str, Any]:
    layout = options.layout
    if layout is None:
        raise ValueError("options.layout must be a RawLayout for the Triton kernels, got None")
    eps = options.feedback_norm_eps
    return {
        "K": layout.num_householder,
        "BLOCK_K": triton.next_power_of_2(layout.num_householder),
        "BLOCK_D": triton.next_power_of_2(d),
        "NORM": eps is not None,
        "NORM_EPS": 0.0 if eps is None else eps,
        "ACTIVATION": layout.activation,
        "SELECTIVE": layout.selective,
        "BETA_MAX": layout.beta_max,
        "INPUT_SCALE": options.input_scale,
        "EIGENVALUES": options.eigenvalues,
        "EPS": UNIT_EPS,
    }
