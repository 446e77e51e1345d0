"""Allocation of the buffers of the sweep and the reverse sweep in Triton; does not import Triton.

Letters: b batch, t time, d channels, n state per channel, r raw values, f those of them with
feedback, H heads (kernels/heads.py). The kernels read r rows of W^y, the last r - f zero.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.feedback import normalize_feedback_vjp, padded_rows
from bedouin.kernels.heads import sum_samples
from bedouin.kernels.launch import last_axis_contiguous
from bedouin.kernels.linear import apply_weight, padding, weight_gradient
from bedouin.kernels.operands import Operands, Parameterization

CHUNK = 16
"""Tokens between two kept h. The reverse sweep's workspace is this many tensors (b, n, d)."""

WORKSPACE = 2**23
"""Most elements of h (32 MB in float32) that the reverse sweep's kernels hold for a chunk."""


class SweepBuffers(NamedTuple):
    """Tensors of a sweep, all contiguous except x and raw, whose last axis is contiguous."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r)
    W_y: Tensor | None  # (H, r, d)
    A: Tensor  # (H, n, d), log2(e) A
    h: Tensor  # (b, n, d), the first memory, overwritten by the last
    kept: Tensor  # (b, `count_kept`, n, d)
    y: Tensor  # (b, t, d)
    first: Tensor  # (b, 1, d), norm(y0) in the dtype of W^y; y without W^y
    statistics: Tensor  # (4, b, t): defect, scale, magnitude, pivot


class SolvedBuffers(NamedTuple):
    """Inputs of the kernels that run for a known y: its memory, and the reverse sweep."""

    x: Tensor  # (b, t, d)
    y: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r)
    fed: Tensor | None  # (b, t, r or more), W^y norm(y_{t-1}); None: no feedback
    A: Tensor  # (H, n, d), log2(e) A
    h0: Tensor  # (b, n, d), possibly expanded: all samples may share one memory
    kept: Tensor  # (b, `count_kept`, n, d)


class GradBuffers(NamedTuple):
    """Cotangents: those of y and H are inputs of the reverse sweep, the others its results."""

    y: Tensor  # (b, t, d)
    H: Tensor  # (b, n, d), of the last h, overwritten by that of h0
    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r or more), may share memory with `fed`; zeros from column r on
    A: Tensor  # (b, n, d), zeros at first
    statistics: Tensor  # (2, b, t): defect and scale


def choose_chunk(operands: Operands) -> int:
    """Tokens between two kept h: CHUNK, or for at most that many tokens fewer, but at least 4, if
    the workspace would otherwise exceed WORKSPACE.

    The h of more tokens that were kept for smaller chunks would take more memory than the
    workspace.
    """
    (samples, t_end, _), (d, n) = operands.x.shape, operands.A.shape[-2:]
    if t_end > CHUNK:
        return CHUNK
    size = samples * d * n
    return next((c for c in (CHUNK, CHUNK // 2) if c * size <= WORKSPACE), CHUNK // 4)


def count_kept(t_end: int, keep_every: int) -> int:
    """Number of kept h: those before tokens keep_every, 2 keep_every, and so on. The h before
    token 0 is an input."""
    return max(0, (t_end - 1) // keep_every)


def allocate_sweep(
    operands: Operands, parameterization: Parameterization, keep_every: int
) -> SweepBuffers:
    """The inputs in the layout that the kernel reads, and memory for its results."""
    x, raw, W_y, A, h0, y0 = operands
    (b, t_end, d), n = x.shape, A.shape[-1]
    y, kept = A.new_empty(b, t_end, d), A.new_empty(b, count_kept(t_end, keep_every), n, d)
    h, first = _first_memory(h0, b, A), y
    if W_y is not None:
        if y0 is None:
            first = W_y.new_zeros(b, 1, d)
        else:
            first = normed_past(y0.unsqueeze(1), operands, W_y, parameterization)
        W_y = padded_rows(W_y, raw.shape[2])
    rows = last_axis_contiguous(x), last_axis_contiguous(raw), W_y, exponents(A)
    return SweepBuffers(*rows, h, kept, y, first, A.new_empty(4, b, t_end))


def allocate_memory(
    y: Tensor,  # (b, t, d), a fixed point found elsewhere
    operands: Operands,
    parameterization: Parameterization,
    keep_every: int,
) -> tuple[SolvedBuffers, Tensor]:
    """Buffers whose `kept` the kernel fills, and h (b, n, d), the first memory, which the kernel
    overwrites with the last."""
    x, raw, W_y, A, h0, _ = operands
    (b, t_end, d), n = x.shape, A.shape[-1]
    kept = A.new_empty(b, count_kept(t_end, keep_every), n, d)
    y = y.contiguous()
    fed = None
    if W_y is not None:
        fed = _feedback(normed_past(y, operands, W_y, parameterization), W_y, raw.shape[2])
    return _solved_buffers(y, fed, kept, operands), _first_memory(h0, b, A)


def allocate_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, `count_kept`, n, d)
    operands: Operands,
    parameterization: Parameterization,
) -> tuple[SolvedBuffers, GradBuffers]:
    """The inputs of the reverse sweep and memory for its results; the feedback is recomputed."""
    x, raw, W_y, A, _, _ = operands
    (b, t_end, d), n, r = x.shape, A.shape[-1], raw.shape[2]
    if grad_h is None:
        H, grad_A = A.new_zeros(2, b, n, d).unbind()
    else:
        H, grad_A = state_major(grad_h), A.new_zeros(b, n, d)
    fed = None
    if W_y is None:
        # padded, so that rows are aligned for cuBLAS and for vectorized stores
        grad_raw = raw.new_empty(b, t_end, r + padding(r))
    else:
        fed = _feedback(normed_past(y, operands, W_y, parameterization), W_y, r)
        # a token's feedback is read before its cotangent is written, so both can share memory
        grad_raw = fed if fed.dtype == raw.dtype else torch.zeros_like(fed, dtype=raw.dtype)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    statistics = A.new_empty(2, b, t_end)
    grads = GradBuffers(last_axis_contiguous(grad_y), H, grad_x, grad_raw, grad_A, statistics)
    return _solved_buffers(y, fed, kept, operands), grads


def collect_gradients(
    grads: GradBuffers,
    grad_normed: Tensor | None,  # (b, d), the cotangent of norm(y0)
    y: Tensor,  # (b, t, d)
    operands: Operands,
    parameterization: Parameterization,
    *,
    wants_y0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, raw, W_y (empty without feedback), A, h0, and y0 (empty if not wanted)."""
    _, raw, W_y, A, _, y0 = operands
    r = raw.shape[2]
    grad_y0, grad_W_y = A.new_empty(0, y.shape[2]), A.new_empty(0)
    if wants_y0 and y0 is not None:
        eps = parameterization.feedback_norm_eps
        grad_y0 = torch.zeros_like(y0)
        if grad_normed is not None:
            grad_y0 = normalize_feedback_vjp(grad_normed, y0, eps)
    if W_y is not None:
        past, f = normed_past(y, operands, W_y, parameterization), W_y.shape[-2]
        # some more columns, so that the product is aligned
        rows = grads.raw[..., : f + padding(f)].to(W_y.dtype)
        grad_W_y = weight_gradient(rows, past, W_y)[..., :f, :]
    grad_A = sum_samples(grads.A, len(A))
    return grads.x, grads.raw[..., :r], grad_W_y, grad_A.mT, grads.H.mT, grad_y0


def _solved_buffers(
    y: Tensor,  # (b, t, d)
    fed: Tensor | None,  # (b, t, r or more)
    kept: Tensor,  # (b, `count_kept`, n, d)
    operands: Operands,
) -> SolvedBuffers:
    x, raw, _, A, h0, _ = operands
    (d, n), b = A.shape[-2:], len(x)
    # all samples share one memory of zeros
    first = A.new_zeros(n, d).expand(b, n, d) if h0 is None else h0.mT.contiguous()
    rows = last_axis_contiguous(x), y, last_axis_contiguous(raw)
    return SolvedBuffers(*rows, fed, exponents(A), first, kept)


def _first_memory(
    h0: Tensor | None,  # (b, d, n); None: zeros
    b: int,
    A: Tensor,  # (H, d, n)
) -> Tensor:  # (b, n, d), in new memory
    return A.new_zeros(b, *A.mT.shape[-2:]) if h0 is None else state_major(h0)


def state_major(
    h: Tensor,  # (b, d, n)
) -> Tensor:  # (b, n, d), in new memory
    return h.mT.clone(memory_format=torch.contiguous_format)


def normed_past(
    y: Tensor,  # (b, t, d)
    operands: Operands,
    W_y: Tensor,  # (H, f, d)
    parameterization: Parameterization,
) -> Tensor:  # (b, t, d)
    """norm(y_{t-1}) in the dtype of W^y."""
    from bedouin.kernels.output.registered import shifted_norm_operation

    if not y.numel():
        return y.to(W_y.dtype)
    eps = parameterization.feedback_norm_eps
    return shifted_norm_operation.function(y, operands.y0, eps, W_y.dtype)


def _feedback(
    past: Tensor,  # (b, t, d), norm(y_{t-1})
    W_y: Tensor,  # (H, f, d)
    r: int,
) -> Tensor:  # (b, t, r or more)
    """W^y norm(y_{t-1}), with zeros from column f on."""
    return apply_weight(past, padded_rows(W_y, r + padding(r)))


def exponents(
    A: Tensor,  # (H, d, n)
) -> Tensor:  # (H, n, d)
    """log2(e) A, with which the decay is 2^(log2(e) A Delta)."""
    transposed = A.mT
    exponents = A.new_empty(transposed.shape)
    return torch.mul(transposed, math.log2(math.e), out=exponents)
