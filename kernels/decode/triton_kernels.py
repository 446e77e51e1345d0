"""One decoded token as a Triton kernel: one program a sample.

Letters: b batch, d channels, n state per channel, k reflections, r raw values, f fed-back ones.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bedouin.kernels.decode.arguments import StepOperands, StepOptions, StepParameters
from bedouin.kernels.direct.triton_math import (
    activate,
    decay_tile,
    diagonal,
    gram,
    input_scale,
    inverse_unipotent,
    invert,
    max_norm,
    product,
    sigmoid,
    softplus,
    solve_small,
    times,
    transposed_times,
)
from bedouin.kernels.householder.reference import UNIT_EPS


@triton.jit
def _part(raw_ptr, bias_ptr, fed_ptr, at, mask, kind, BIAS: tl.constexpr, FED: tl.constexpr):
    """raw^x + bias + W^y norm(y_{t-1}) at some columns of a part; the pointers stand at it."""
    raw = tl.load(raw_ptr + at, mask=mask, other=0.0).to(kind)
    if BIAS:
        raw += tl.load(bias_ptr + at, mask=mask, other=0.0).to(kind)
    if FED:
        raw += tl.load(fed_ptr + at, mask=mask, other=0.0).to(kind)
    return raw


@triton.jit
def _decay(
    decay_ptr, delta, rows, cols, mask, n,
    DECAY: tl.constexpr, SHARPNESS: tl.constexpr, EIGENVALUES: tl.constexpr,
):  # fmt: skip
    """lambda (n, d) from Delta (d,) and the parameter (d, n) behind A."""
    if DECAY == "one":
        A = tl.where(mask, -1.0, 0.0).to(delta.dtype)
    else:
        at = cols[None, :] * n + rows[:, None]
        A = tl.load(decay_ptr + at, mask=mask, other=0.0).to(delta.dtype)
        if DECAY == "exp":
            A = -tl.exp(A)
        else:
            A = -SHARPNESS * softplus(A)
    return decay_tile(delta, A, EIGENVALUES)


@triton.jit
def _woodbury(rhs, sigma, U, T, system, inverse):
    """rhs + sigma * U^T T system^-1 U rhs."""
    a = times(T, solve_small(system, inverse, times(U, rhs)))
    return rhs + sigma * transposed_times(U, a)


@triton.jit(do_not_specialize=["x_row", "drive_row", "z_row", "raw_row", "fed_row"])
def _token_kernel(
    x_ptr,  # (b, d)
    drive_ptr,  # (b, d)
    z_ptr,  # (b, d)
    raw_ptr,  # (b, r + d)
    fed_ptr,  # (b, f + d)
    decay_ptr,  # (d, n)
    delta_bias_ptr,  # (d,)
    raw_bias_ptr,  # (r,)
    D_ptr,  # (d,)
    norm_ptr,  # (d,)
    h_ptr,  # (b, n, d), in place
    y_ptr,  # (b, d)
    normed_ptr,  # (b, d)
    hidden_ptr,  # (b, d)
    residual_ptr,  # (b,)
    pivot_ptr,  # (b,)
    converged_ptr,  # (b,)
    held_ptr,  # (b,)
    x_row,
    drive_row,
    z_row,
    raw_row,
    fed_row,
    d,
    n,
    fed_B_at,
    fed_C_at,
    fed_u_at,
    fed_gate_at,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    EIGENVALUES: tl.constexpr,
    DECAY: tl.constexpr,
    SHARPNESS: tl.constexpr,
    BIAS: tl.constexpr,
    FED_DELTA: tl.constexpr,
    FED_B: tl.constexpr,
    FED_C: tl.constexpr,
    FED_U: tl.constexpr,
    FED_GATE: tl.constexpr,
    FEEDBACK_NORM: tl.constexpr,
    FEEDBACK_NORM_EPS: tl.constexpr,
    OUTPUT_NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ROUNDING: tl.constexpr,
    EPS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    ks, rows, cols = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_k, in_n, in_d = ks < K, rows < n, cols < d
    i, j = ks[:, None], ks[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    kind = h_ptr.dtype.element_ty
    h_ptr += sample * n * d
    raw_ptr += sample * raw_row
    fed_ptr += sample * fed_row

    # raw is [Delta d | B n | C n | u k d | alpha k | gate d], B and C only if SELECTIVE
    raw = _part(raw_ptr, delta_bias_ptr, fed_ptr, cols, in_d, kind, True, FED_DELTA)
    delta = activate(raw, ACTIVATION)
    at = d
    if SELECTIVE:
        B = _part(
            raw_ptr + at, raw_bias_ptr + at - d, fed_ptr + fed_B_at, rows, in_n, kind, BIAS, FED_B
        )
        B *= tl.rsqrt(tl.sum(B * B, axis=0) + n * EPS)
        at += n
        C = _part(
            raw_ptr + at, raw_bias_ptr + at - d, fed_ptr + fed_C_at, rows, in_n, kind, BIAS, FED_C
        )
        C *= tl.rsqrt(tl.sum(C * C, axis=0) + n * EPS)
        at += n
    else:
        B = tl.where(in_n, 1.0, 0.0).to(kind)
        C = B
    u_raw, u_bias, u_fed = raw_ptr + at, raw_bias_ptr + at - d, fed_ptr + fed_u_at
    in_u = in_k[:, None] & in_d[None, :]
    u = _part(u_raw, u_bias, u_fed, i * d + cols[None, :], in_u, kind, BIAS, FED_U)
    alpha = _part(u_raw, u_bias, u_fed, K * d + ks, in_k, kind, BIAS, FED_U)
    beta = tl.where(in_k, BETA_MAX * sigmoid(alpha), 0.0)
    identity = tl.where(i == j, 1.0, 0.0).to(kind)
    dots = gram(u, u)
    inv = tl.rsqrt(diagonal(dots, i, j) + d * EPS)
    U = u * inv[:, None]
    N = tl.where(i < j, beta[:, None] * dots * inv[:, None] * inv[None, :], 0.0)
    T = inverse_unipotent(N, identity, BLOCK_K) * beta[None, :]
    gate_at = at + K * (d + 1)
    drive = tl.load(drive_ptr + sample * drive_row + cols, mask=in_d, other=0.0).to(kind)

    BC = tl.where(in_n, B * C, 0.0)
    if INPUT_SCALE == "one_minus_decay":
        decay = _decay(decay_ptr, delta, rows, cols, in_state, n, DECAY, SHARPNESS, EIGENVALUES)
        sigma = tl.sum((1 - tl.abs(decay)) * BC[:, None], axis=0)
    else:
        sigma = input_scale(delta, INPUT_SCALE) * tl.sum(BC, axis=0)
    system = identity - product(gram(U * sigma[None, :], U), T)
    inverse, pivot = invert(system, identity, K, BLOCK_K)
    # the (n, d) tiles come as late as they can: fewer registers are held meanwhile
    if INPUT_SCALE != "one_minus_decay":
        decay = _decay(decay_ptr, delta, rows, cols, in_state, n, DECAY, SHARPNESS, EIGENVALUES)
    h = tl.load(h_ptr + rows[:, None] * d + cols[None, :], mask=in_state, other=0.0)
    h *= decay  # from here to the write: what has decayed
    Q_drive = drive - transposed_times(U, times(T, times(U, drive)))
    rhs = transposed_times(h, C) + sigma * Q_drive
    y = _woodbury(rhs, sigma, U, T, system, inverse)
    # one step of refinement, as in the plain local solve
    applied = y - sigma * transposed_times(U, times(T, times(U, y)))
    y += _woodbury(rhs - applied, sigma, U, T, system, inverse)
    mixed = drive + transposed_times(U, times(T, times(U, y - drive)))

    terms = tl.abs(drive) + tl.abs(mixed)
    if INPUT_SCALE == "one_minus_decay":
        scale = 1 - tl.abs(decay)
        h += scale * mixed[None, :] * B[:, None]
        terms *= tl.max(tl.where(in_state, scale, 0.0), axis=0)
    else:
        s = input_scale(delta, INPUT_SCALE)
        h += (s * mixed)[None, :] * B[:, None]
        terms *= s
    tl.store(h_ptr + rows[:, None] * d + cols[None, :], h, mask=in_state)
    tl.store(y_ptr + sample * d + cols, y, mask=in_d)

    F = transposed_times(h, C)
    defect = max_norm(tl.where(in_d, F - y, 0.0))
    size = max_norm(tl.where(in_d, F, 0.0))
    magnitude = max_norm(tl.where(in_d, terms, 0.0))
    ratio = tl.where(defect == 0, defect, defect / size)
    # Inf - Inf is NaN: a ratio that is not finite comes out as NaN
    tl.store(residual_ptr + sample, ratio + (ratio - ratio))
    tl.store(pivot_ptr + sample, tl.where(pivot == pivot, pivot, float("inf")))
    largest = tl.maximum(size, magnitude)
    # a comparison with NaN is false; Inf - Inf is NaN
    finite = (size - size == 0) & (magnitude - magnitude == 0)
    converged = (finite & (defect <= ROUNDING * largest)).to(tl.uint8)
    tl.store(converged_ptr + sample, converged)
    held = tl.load(held_ptr + sample)
    tl.store(held_ptr + sample, held & converged)

    normed = y
    if FEEDBACK_NORM:
        normed = y * tl.rsqrt(tl.sum(y * y, axis=0) / d + FEEDBACK_NORM_EPS)
    normed = normed.to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + sample * d + cols, normed, mask=in_d)

    x = tl.load(x_ptr + sample * x_row + cols, mask=in_d, other=0.0).to(kind)
    gate = _part(
        raw_ptr + gate_at,
        raw_bias_ptr + gate_at - d,
        fed_ptr + fed_gate_at,
        cols,
        in_d,
        kind,
        BIAS,
        FED_GATE,
    )
    v = y + tl.load(D_ptr + cols, mask=in_d, other=0.0).to(kind) * x
    if OUTPUT_NORM:
        z = tl.load(z_ptr + sample * z_row + cols, mask=in_d, other=0.0).to(kind)
        weight = tl.load(norm_ptr + cols, mask=in_d, other=0.0).to(kind)
        gate += z
        hidden = gate * sigmoid(gate) * v * tl.rsqrt(tl.sum(v * v, axis=0) / d + NORM_EPS) * weight
    else:
        hidden = gate * v * sigmoid(v)
    hidden = hidden.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + sample * d + cols, hidden, mask=in_d)


def launch_decode_token(
    operands: StepOperands, parameters: StepParameters, options: StepOptions
) -> None:
    """One launch; what is None is passed as a tensor that the kernel does not read."""
    o, p, layout = operands, parameters, options.layout
    (b, n, d), k = o.h.shape, options.layout.num_householder
    z, fed = _or(o.z, o.x), _or(o.fed, o.raw)
    has_feedback = o.fed is not None
    offsets, is_fed = _fed_offsets(d, n, options)
    _token_kernel[(b,)](
        o.x,
        o.drive,
        z,
        o.raw,
        fed,
        _or(p.decay, o.h),
        p.delta_bias,
        _or(p.raw_bias, o.raw),
        p.D,
        _or(p.norm, p.D),
        *o[5:],
        *(tensor.stride(0) for tensor in (o.x, o.drive, z, o.raw, fed)),
        d,
        n,
        *offsets,
        K=k,
        BLOCK_K=triton.next_power_of_2(k),
        BLOCK_D=triton.next_power_of_2(d),
        BLOCK_N=triton.next_power_of_2(n),
        ACTIVATION=layout.activation,
        SELECTIVE=layout.selective,
        BETA_MAX=layout.beta_max,
        INPUT_SCALE=options.input_scale,
        EIGENVALUES=options.eigenvalues,
        DECAY="one" if p.decay is None else options.decay,
        SHARPNESS=options.sharpness,
        BIAS=p.raw_bias is not None,
        FED_DELTA=has_feedback and is_fed[0],
        FED_B=has_feedback and is_fed[1],
        FED_C=has_feedback and is_fed[2],
        FED_U=has_feedback and is_fed[3],
        FED_GATE=has_feedback,
        FEEDBACK_NORM=options.feedback_norm_eps is not None,
        FEEDBACK_NORM_EPS=options.feedback_norm_eps or 0.0,
        OUTPUT_NORM=options.norm_eps is not None,
        NORM_EPS=options.norm_eps or 0.0,
        ROUNDING=options.rounding * torch.finfo(o.h.dtype).eps,
        EPS=UNIT_EPS,
        # two to four channels a thread: a batch of one must be quick, not thrifty
        num_warps=min(16, max(4, triton.next_power_of_2(d) // 64)),
    )


def _or(tensor: Tensor | None, unread: Tensor) -> Tensor:
    return unread if tensor is None else tensor


def _fed_offsets(d: int, n: int, options: StepOptions) -> tuple[list[int], tuple[bool, ...]]:
    """Where B, C, the reflections and the gate begin among the fed-back values."""
    offsets, at = [], 0
    for size, is_fed in zip(options.part_sizes(d, n), options.fed, strict=True):
        at += size if is_fed else 0
        offsets.append(at)
    return offsets, options.fed
