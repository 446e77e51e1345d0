"""The Triton kernel of one decoded token, and its launch: one program a sample and head.

Letters: b batch, d channels, n state per channel, k reflections, r raw values, f fed-back ones, H
heads, p = d / H channels of a head.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bedouin.kernels.decode.arguments import StepOperands, StepOptions, StepParameters
from bedouin.kernels.decode.triton_overlap import can_overlap, start_next, wait_for_last
from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import build_coupled, input_scale
from bedouin.kernels.device.elementary import LOG2E, sigmoid, softplus
from bedouin.kernels.device.norms import inverse_norm, max_norms_of_three
from bedouin.kernels.device.reflections import (
    combine,
    eliminate,
    inverse_sizes,
    local_system,
    products,
    rows_times,
    scale,
    scale_symmetric,
    subtract,
    sums_at_once,
    symmetric_times,
    upper_times,
    wy_upper,
)
from bedouin.kernels.direct import MAX_RESIDUAL, ROUNDING
from bedouin.kernels.householder.reference import UNIT_EPS
from bedouin.kernels.launch import next_power_of_two


@triton.jit
def _part(raw_ptr, fed_ptr, at, mask, bias, FED: tl.constexpr):
    """raw^x + bias + W^y norm(y_{t-1}) at some columns, from pointers to the start of a part."""
    raw = tl.load(raw_ptr + at, mask=mask, other=0.0).to(bias.dtype) + bias
    if FED:
        raw += tl.load(fed_ptr + at, mask=mask, other=0.0).to(bias.dtype)
    return raw


@triton.jit
def _scalar(raw_ptr, fed_ptr, at, bias, FED: tl.constexpr):
    """`_part` at one column."""
    raw = tl.load(raw_ptr + at).to(bias.dtype) + bias
    if FED:
        raw += tl.load(fed_ptr + at).to(bias.dtype)
    return raw


@triton.jit
def _bias(bias_ptr, at, mask, kind, BIAS: tl.constexpr):
    """The bias at some columns, zeros without one."""
    if BIAS:
        bias = tl.load(bias_ptr + at, mask=mask, other=0.0).to(kind)
    else:
        bias = tl.zeros(at.shape, kind)
    return bias


@triton.jit
def _decay_matrix(
    decay_ptr, rows, cols, mask, n, kind, DECAY: tl.constexpr, SHARPNESS: tl.constexpr
):
    """A (n, p) from the parameter (p, n) behind it."""
    if DECAY == "one":
        A = tl.where(mask, -1.0, 0.0).to(kind)
    else:
        at = cols[None, :] * n + rows[:, None]
        A = tl.load(decay_ptr + at, mask=mask, other=0.0).to(kind)
        if DECAY == "exp":
            A = -tl.exp(A)
        else:
            A = -SHARPNESS * softplus(A)
    return A


@triton.jit
def _decay_tile(delta, A, EIGENVALUES: tl.constexpr):
    """lambda (n, p) from Delta (p,) and A (n, p).

    Not `build_decay`, which rounds log2(e) A first: the last bits would change.
    """
    decay = tl.exp(A * delta[None, :])
    if EIGENVALUES == "full":
        decay = 2 * decay - 1
    return decay


@triton.jit(do_not_specialize=["x_row", "drive_row", "z_row", "raw_row", "fed_row", "drive_head"])
def _token_kernel(
    x_ptr,  # (b, d)
    drive_ptr,  # (H, b, p)
    z_ptr,  # (b, d)
    raw_ptr,  # (H b, r + p)
    fed_ptr,  # (H b, f + p)
    decay_ptr,  # (d, n)
    delta_bias_ptr,  # (d,)
    raw_bias_ptr,  # (H r,)
    D_ptr,  # (d,)
    norm_ptr,  # (d,)
    h_ptr,  # (b, n, d), in place
    y_ptr,  # (b, d)
    normed_ptr,  # (b, d)
    hidden_ptr,  # (b, d)
    residual_ptr,  # (H b,)
    pivot_ptr,  # (H b,)
    converged_ptr,  # (H b,)
    all_converged_ptr,  # (H b,), in place: whether this token and all before it have converged
    x_row,
    drive_row,
    z_row,
    raw_row,
    fed_row,
    p,
    n,
    fed_B_at,
    fed_C_at,
    fed_u_at,
    fed_gate_at,
    drive_head,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
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
    MAX_RESIDUAL: tl.constexpr,
    EPS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    STARTS_NEXT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One token of all samples, after its projections:

    raw = raw^x + bias + W^y norm(y_{t-1})                       Delta, B, C, Q, gate
    (I - diag(sigma) (I - Q)) y = (lambda * h) C + sigma * Q drive
    h <- lambda * h + (s * (drive + (I - Q) (y - drive))) B^T
    hidden = SiLU(gate + z) * norm(y + D x), or gate * SiLU(y + D x) without OUTPUT_NORM

    and norm(y), the relative residual, the smallest pivot and whether the token has converged.
    """
    sample = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    in_n, in_p = rows < n, cols < p
    in_state = in_n[:, None] & in_p[None, :]
    kind = h_ptr.dtype.element_ty
    # `folded` is the index where each head of a sample has an entry of its own; `d` counts the
    # channels of all heads
    folded, d = sample, p
    if HEADS:
        head = tl.program_id(1).to(tl.int64)
        folded, d = head * tl.num_programs(0) + sample, p * tl.num_programs(1)
        first = head * p
        x_ptr += first
        drive_ptr += head * drive_head
        z_ptr += first
        decay_ptr += first * n
        delta_bias_ptr += first
        raw_bias_ptr += head * (p + (2 * n if SELECTIVE else 0) + K * (p + 1))
        D_ptr += first
        norm_ptr += first
        h_ptr += first
        y_ptr += first
        normed_ptr += first
        hidden_ptr += first
    h_ptr += sample * n * d
    raw_ptr += folded * raw_row
    fed_ptr += folded * fed_row

    # All loads come first, so that none waits for a reduction, and before the wait all of what no
    # launch of this token writes.
    start_next(STARTS_NEXT)
    # raw is [Delta p | B n | C n | u k p | alpha k | gate p], B and C only if SELECTIVE
    SKIPPED: tl.constexpr = 2 if SELECTIVE else 0
    B_at, C_at, u_at = p, p + n, p + SKIPPED * n
    gate_at = u_at + K * (p + 1)
    raw_bias_ptr -= p  # raw_bias has none of Delta
    delta_bias = _bias(delta_bias_ptr, cols, in_p, kind, True)
    gate_bias = _bias(raw_bias_ptr + gate_at, cols, in_p, kind, BIAS)
    u_bias = ()
    alpha_bias = ()
    for i in tl.static_range(K):
        u_bias = u_bias + (_bias(raw_bias_ptr + u_at + i * p, cols, in_p, kind, BIAS),)
        alpha_at = u_at + K * p + i
        if BIAS:
            alpha_bias = alpha_bias + (tl.load(raw_bias_ptr + alpha_at).to(kind),)
        else:
            alpha_bias = alpha_bias + (tl.zeros([], kind),)
    at_state = rows[:, None] * d + cols[None, :]
    if BY_CHANNEL:
        # Without wide loads a thread takes a channel with all its states, as it does of vectors,
        # so that sums over states need no exchange. At most one channel a thread: the registers do
        # not suffice for more.
        at_state = tl.multiple_of(at_state, (1, 1))
    A = _decay_matrix(decay_ptr, rows, cols, in_state, n, kind, DECAY, SHARPNESS)
    h = tl.load(h_ptr + at_state, mask=in_state, other=0.0)
    D = tl.load(D_ptr + cols, mask=in_p, other=0.0).to(kind)
    if OUTPUT_NORM:
        norm_weight = tl.load(norm_ptr + cols, mask=in_p, other=0.0).to(kind)
    all_converged = tl.load(all_converged_ptr + folded)
    if SELECTIVE:
        B_bias = _bias(raw_bias_ptr + B_at, rows, in_n, kind, BIAS)
        C_bias = _bias(raw_bias_ptr + C_at, rows, in_n, kind, BIAS)

    wait_for_last(OVERLAPS)
    delta_raw = _part(raw_ptr, fed_ptr, cols, in_p, delta_bias, FED_DELTA)
    if SELECTIVE:
        B = _part(raw_ptr + B_at, fed_ptr + fed_B_at, rows, in_n, B_bias, FED_B)
        C = _part(raw_ptr + C_at, fed_ptr + fed_C_at, rows, in_n, C_bias, FED_C)
    u = ()
    alpha = ()
    u_raw, u_fed = raw_ptr + u_at, fed_ptr + fed_u_at
    for i in tl.static_range(K):
        u = u + (_part(u_raw, u_fed, i * p + cols, in_p, u_bias[i], FED_U),)
        alpha = alpha + (_scalar(u_raw, u_fed, K * p + i, alpha_bias[i], FED_U),)
    drive = tl.load(drive_ptr + sample * drive_row + cols, mask=in_p, other=0.0).to(kind)
    x = tl.load(x_ptr + sample * x_row + cols, mask=in_p, other=0.0).to(kind)
    gate = _part(raw_ptr + gate_at, fed_ptr + fed_gate_at, cols, in_p, gate_bias, FED_GATE)
    if OUTPUT_NORM:
        gate += tl.load(z_ptr + sample * z_row + cols, mask=in_p, other=0.0).to(kind)

    delta = activate(delta_raw, ACTIVATION)
    if SELECTIVE:
        B *= inverse_norm(tl.sum(B * B, axis=0), n * EPS)
        C *= inverse_norm(tl.sum(C * C, axis=0), n * EPS)
    else:
        B = tl.where(in_n, 1.0, 0.0).to(kind)
        C = B
    beta = ()
    for i in tl.static_range(K):
        beta = beta + (BETA_MAX * sigmoid(alpha[i]),)
    # The local equation of the direct sweep, (I - S T) U y = U rest - S T U drive, solved for U y.
    # `solve_token` solves for U (y - drive), which is shorter, but the last bits would change.
    if INPUT_SCALE == "one_minus_decay":
        decay, s_rows = build_coupled(A * LOG2E * delta[None, :], EIGENVALUES == "full", False)
        sigma = tl.sum(s_rows * (B * C)[:, None], axis=0)
    else:
        decay = _decay_tile(delta, A, EIGENVALUES)
        s = input_scale(delta, INPUT_SCALE)
        sigma = s * tl.sum(B * C, axis=0)
    h *= decay  # lambda * h up to the write of the new input
    rest = tl.sum(h * C[:, None], axis=0) + sigma * drive
    PAIRS: tl.constexpr = K * (K + 1) // 2
    if K == 0:
        y = rest
        pivot = tl.full([], 1.0, kind)
    else:
        sigma_u = rows_times(u, sigma, K)
        with_drive, with_rest = rows_times(u, drive, K), rows_times(u, rest, K)
        dots = sums_at_once(products(u, u, K) + products(sigma_u, u, K) + with_drive + with_rest)
        inv = inverse_sizes(dots, p, K, EPS)
        G = scale_symmetric(dots[0:PAIRS], inv, K)
        S = scale_symmetric(dots[PAIRS : 2 * PAIRS], inv, K)
        U_drive = scale(dots[2 * PAIRS : 2 * PAIRS + K], inv, K)
        U_rest = scale(dots[2 * PAIRS + K : 2 * PAIRS + 2 * K], inv, K)
        T = wy_upper(G, beta, K)
        U_rhs = subtract(U_rest, symmetric_times(S, upper_times(T, U_drive, K), K), K)
        a, pivot = eliminate(local_system(S, T, False, K), U_rhs, K, 1, RECIPROCALS=True)
        mixing = scale(upper_times(T, subtract(a, U_drive, K), K), inv, K)
        y = rest + sigma * combine(mixing, u, K)
    tl.store(y_ptr + sample * d + cols, y, mask=in_p)

    v = y + D * x
    dots = sums_at_once((y * y, v * v) + rows_times(u, y, K))
    mixed = drive
    if K > 0:
        U_y = scale(dots[2 : K + 2], inv, K)
        mixing = scale(upper_times(T, subtract(U_y, U_drive, K), K), inv, K)
        mixed = drive + combine(mixing, u, K)
    terms = tl.abs(drive) + tl.abs(mixed)
    if INPUT_SCALE == "one_minus_decay":
        h += s_rows * mixed[None, :] * B[:, None]
        terms *= tl.max(tl.where(in_state, s_rows, 0.0), axis=0)
    else:
        h += (s * mixed)[None, :] * B[:, None]
        terms *= s
    tl.store(h_ptr + at_state, h, mask=in_state)
    F = tl.sum(h * C[:, None], axis=0)
    defect, size, magnitude = max_norms_of_three(F - y, F, terms)
    ratio = tl.where(defect == 0, defect, defect / size)
    # Inf - Inf is NaN: a ratio that is not finite comes out as NaN
    tl.store(residual_ptr + folded, ratio + (ratio - ratio))
    tl.store(pivot_ptr + folded, tl.where(pivot == pivot, pivot, float("inf")))
    largest = tl.maximum(size, magnitude)
    # a comparison with NaN is false; Inf - Inf is NaN
    finite = (size - size == 0) & (magnitude - magnitude == 0)
    explained = (defect <= ROUNDING * largest) & (defect <= MAX_RESIDUAL * size)
    converged = (finite & explained).to(tl.uint8)
    tl.store(converged_ptr + folded, converged)
    tl.store(all_converged_ptr + folded, all_converged & converged)

    normed = y
    if FEEDBACK_NORM:
        normed = y * inverse_norm(dots[0] / p, FEEDBACK_NORM_EPS)
    normed = normed.to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + sample * d + cols, normed, mask=in_p)

    if OUTPUT_NORM:
        hidden = gate * sigmoid(gate) * v * inverse_norm(dots[1] / p, NORM_EPS) * norm_weight
    else:
        hidden = gate * v * sigmoid(v)
    hidden = hidden.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + sample * d + cols, hidden, mask=in_p)


def launch_decode_token(
    operands: StepOperands, parameters: StepParameters, options: StepOptions, overlaps: bool = False
) -> None:
    """Launch the kernel once; for None it gets another tensor, which it does not read."""
    o, p, layout = operands, parameters, options.layout
    (b, n, d), heads, k = o.h.shape, options.num_heads, options.layout.num_householder
    channels = d // heads
    raw = o.raw.flatten(0, -2)
    z, fed = _or(o.z, o.x), raw if o.fed is None else o.fed.flatten(0, -2)
    has_feedback = o.fed is not None
    offsets, is_fed = _fed_offsets(channels, n, options)
    starts_early, num_warps = can_overlap(o.h.device), _num_warps(channels, n)
    overlaps = overlaps and starts_early
    _token_kernel[(b, heads)](
        o.x,
        o.drive,
        z,
        raw,
        fed,
        _or(p.decay, o.h),
        p.delta_bias,
        _or(p.raw_bias, o.raw),
        p.D,
        _or(p.norm, p.D),
        *o[5:],
        *(tensor.stride(-2) for tensor in (o.x, o.drive, z, raw, fed)),
        channels,
        n,
        *offsets,
        o.drive.stride(0),
        HEADS=heads > 1,
        K=k,
        BLOCK_P=next_power_of_two(channels),
        BLOCK_N=next_power_of_two(n),
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
        ROUNDING=ROUNDING * torch.finfo(o.h.dtype).eps,
        MAX_RESIDUAL=MAX_RESIDUAL,
        EPS=UNIT_EPS,
        BY_CHANNEL=_by_channel(channels, num_warps),
        STARTS_NEXT=starts_early,
        OVERLAPS=overlaps,
        launch_pdl=overlaps,
        num_warps=num_warps,
    )


def _num_warps(p: int, n: int) -> int:
    """At 1024 channels with 16 states eight warps spill nothing, sixteen 216 bytes a thread."""
    tile = next_power_of_two(p) * next_power_of_two(n)
    return 4 if tile <= 2048 else 8 if tile <= 16384 else 16


def _by_channel(p: int, num_warps: int) -> bool:
    """Whether there is a thread for each channel."""
    return next_power_of_two(p) <= 32 * num_warps


def _or(tensor: Tensor | None, unread: Tensor) -> Tensor:
    """The tensor, or for None one that is not read; of any shape."""
    return unread if tensor is None else tensor


def _fed_offsets(p: int, n: int, options: StepOptions) -> tuple[list[int], tuple[bool, ...]]:
    """Where B, C, the reflections and the gate begin among the fed-back values of a head."""
    offsets, at = [], 0
    for size, is_fed in zip(options.part_sizes(p, n), options.fed, strict=True):
        at += size if is_fed else 0
        offsets.append(at)
    return offsets, options.fed
