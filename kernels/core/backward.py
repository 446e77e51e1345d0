"""The backward pass of a layer's core.

The cotangents of the raw values and of the gate are kept apart, each in rows that are aligned; the
gradients of a weight's two parts are written into one tensor.
Letters as in `types.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.core.forward import output_operands
from bedouin.kernels.core.launch import launch_clear, launch_finish
from bedouin.kernels.core.products import (
    add_product_,
    first_rows,
    joined_gradient,
    loop_rows,
    multiply,
    rows_of,
    samples_of,
)
from bedouin.kernels.core.types import CoreOptions, CoreSaved, CoreTensors
from bedouin.kernels.direct.buffers import GradBuffers, SolvedBuffers, state_major
from bedouin.kernels.direct.heads.launch import launch_head_reverse
from bedouin.kernels.direct.triton_launch import ReverseZeros, count_splits, launch_reverse
from bedouin.kernels.feedback import normalize_feedback_vjp
from bedouin.kernels.linear import ALIGNMENT
from bedouin.kernels.output.launch import output_backward, shifted_norm_backward

COUNTERS = 16
"""Integers that a launch's counters occupy: 64 bytes, for aligned addresses."""


class CoreCotangents(NamedTuple):
    """Cotangents of outputs; None: zeros."""

    hidden: Tensor | None  # (b, t, d)
    y: Tensor | None  # (b', t, p)
    h: Tensor | None  # (b', p, n)


class CoreGradients(NamedTuple):
    """Gradients; those that are not wanted are empty."""

    projected: Tensor  # (b, t, w)
    W_x: Tensor  # (r + p, p) or (H, r + p, p)
    W_y: Tensor  # (f + p, p) or (H, f + p, p)
    decay: Tensor  # (d, n)
    sums: Tensor  # (2, p) or (2, H, p), of D and weight, or (1, p) or (1, H, p) of D alone
    h0: Tensor  # (b', p, n)
    y0: Tensor  # (b', p), empty without y0
    dt_bias: Tensor  # (p,) or (H, p)
    raw_bias: Tensor  # (r,) or (H, r)
    statistics: Tensor  # (2, b', t), defect and scale of the adjoint equation


class Wanted(NamedTuple):
    """Gradients that cost a product or a sum of their own."""

    W_x: bool
    W_y: bool
    y0: bool
    bias: bool


def core_backward(
    cotangents: CoreCotangents,
    tensors: CoreTensors,
    saved: CoreSaved,
    options: CoreOptions,
    wanted: Wanted,
    *,
    overwrites: bool,
) -> CoreGradients:
    """The gradients of a call of `core_forward`; `overwrites` allows it to use the memory of
    `saved.raw`, which it takes for the cotangent of the raw values."""
    (W_x, W_y), y, gate = saved.weights(tensors), saved.y, saved.gate
    sizes, eps = tensors.sizes(), options.parameterization.feedback_norm_eps
    H, _, _, p, _, r, f = sizes
    x = rows_of(tensors.x, H)
    grad_projected = torch.empty_like(tensors.projected, memory_format=torch.contiguous_format)
    of_x = rows_of(grad_projected[..., : H * p], H)
    if tensors.weight is None:
        of_gate = torch.empty_like(gate)
    else:
        # the cotangent of z, too
        of_gate = rows_of(grad_projected[..., H * p :], H)
    operands = output_operands(tensors, y, x, gate)
    grad_hidden = cotangents.hidden
    grad_hidden = torch.zeros_like(gate) if grad_hidden is None else rows_of(grad_hidden, H)
    grad_y, _, _, sums = output_backward(grad_hidden, operands, options.eps, into=(of_x, of_gate))
    grad_y = grad_y.view(y.shape)
    # without feedback y0 has no influence
    grad_y0 = y.new_empty(0) if tensors.y0 is None else torch.zeros_like(tensors.y0)
    if W_y is not None:
        grad_normed = multiply(of_gate, W_y[..., f:, :]).view(y.shape)
        _, grad_y0 = shifted_norm_backward(grad_normed, y, tensors.y0, eps, add_to=grad_y)
        del grad_normed
    if cotangents.y is not None:
        grad_y += cotangents.y

    raw = _raw_with_feedback(tensors, saved, overwrites)
    # a token's raw values are read before their cotangent is written, so both can share memory
    shares = overwrites or W_y is not None
    grad_raw = raw if shares else torch.empty_like(raw)
    grads, parts = _reverse(cotangents.h, grad_y, raw, grad_raw, tensors, saved, options, wanted.y0)
    if wanted.y0 and tensors.y0 is not None and parts is not None:
        grad_y0 = grad_y0 + normalize_feedback_vjp(parts.sum(0), tensors.y0, eps)
    wide = grad_raw.shape[2]
    grad_raw = grad_raw.view(sizes.of_heads(-1, wide))
    of_x += grads.x.view(gate.shape)
    grad_H, of_A, statistics = grads.H, grads.A, grads.statistics
    del grads, grad_y
    add_product_(of_x, of_gate, W_x[..., r:, :])
    add_product_(of_x, grad_raw, first_rows(W_x, wide))
    grad_W_x, grad_W_y = W_x.new_empty(0), W_x.new_empty(0)
    if wanted.W_x:
        grad_W_x = joined_gradient(grad_raw, of_gate, x, r)
    if wanted.W_y and W_y is not None:
        grad_W_y = joined_gradient(grad_raw, of_gate, saved.normed.view(gate.shape), f)
    bias = of_A.new_empty(0)
    if wanted.bias:
        bias = _bias_gradient(grad_raw, of_gate, r, bias.dtype)
    of_A = of_A.sum(0) if H == 1 else of_A.unflatten(0, (H, -1)).sum(1)
    finished = launch_finish(tensors, options, of_A, bias, grad_W_x, grad_W_y)
    of_weights = finished.W_x, finished.W_y, finished.decay, sums
    of_biases = finished.dt_bias, finished.raw_bias
    return CoreGradients(grad_projected, *of_weights, grad_H.mT, grad_y0, *of_biases, statistics)


def _raw_with_feedback(
    tensors: CoreTensors,
    saved: CoreSaved,
    overwrites: bool,
) -> Tensor:  # (b', t, r + padding)
    """raw^x + W^y norm(y_{t-1}): in new memory, or in that of raw^x if `overwrites`."""
    _, W_y = saved.weights(tensors)
    if W_y is None:
        return saved.raw
    normed = saved.normed.view(saved.gate.shape)
    wide = saved.raw.shape[2]
    raw = saved.raw.view(*normed.shape[:-1], wide)
    total = raw if overwrites else raw.clone()
    sizes = tensors.sizes()
    if sizes.f < sizes.r:
        add_product_(total[..., : sizes.f], normed, W_y[..., : sizes.f, :].mT)
    else:
        add_product_(total, normed, first_rows(W_y, wide).mT)
    return total.view(saved.raw.shape)


def _reverse(
    grad_h: Tensor | None,  # (b', p, n)
    grad_y: Tensor,  # (b', t, p)
    raw: Tensor,  # (b', t, r + padding), with feedback
    grad_raw: Tensor,  # (b', t, r + padding), written, may be the memory of raw
    tensors: CoreTensors,
    saved: CoreSaved,
    options: CoreOptions,
    wants_y0: bool,
) -> tuple[GradBuffers, Tensor | None]:
    """The reverse sweep: its results, and parts (splits, b', p) of the cotangent of norm(y0)."""
    A, kept, sizes = saved.A, saved.kept, tensors.sizes()
    H, _, t, p, n, r, _ = sizes
    b = sizes.folded
    _, W_y = saved.weights(tensors)
    loop = loop_rows(W_y, sizes)
    # what only the kernels of one head need
    alone = loop is not None and H == 1
    splits = count_splits(loop, b) if alone and loop is not None else 0
    chunks = kept.shape[1] + 1 if alone else 0
    of_H = b if grad_h is None else 0
    of_h0 = 1 if tensors.h0 is None else 0
    of_fed = r if alone else 0
    shapes = [of_H * n * p, b * n * p, splits * b * p, of_h0 * n * p, COUNTERS * chunks, of_fed]
    aligned = [size + -size % ALIGNMENT for size in shapes]
    flat = A.new_empty(sum(aligned))
    launch_clear(flat, grad_raw, r)
    zero_H, grad_A, normed, first, counts, fed = (
        v[:size] for v, size in zip(flat.split(aligned), shapes, strict=True)
    )
    # all samples share one memory of zeros
    h0 = first.view(n, p).expand(b, n, p) if tensors.h0 is None else tensors.h0.mT.contiguous()
    known = SolvedBuffers(
        samples_of(tensors.x, H),
        saved.y,
        raw[..., :r],
        # raw contains it: to each token the kernels of one head add the same zeros
        fed.view(raw.dtype)[:r].expand(b, t, r) if alone else None,
        A,
        h0,
        kept,
    )
    grads = GradBuffers(
        grad_y,
        zero_H.view(b, n, p) if grad_h is None else state_major(grad_h),
        raw.new_empty(b, t, p),
        grad_raw,
        grad_A.view(b, n, p),
        A.new_empty(2, b, t),
    )
    how = options.parameterization, options.keep_every
    if H > 1 and loop is not None:
        return grads, launch_head_reverse(known, grads, loop, *how, wants_first=wants_y0)
    counters = counts.view(torch.int32)[: COUNTERS * chunks].view(chunks, COUNTERS)
    zeros = ReverseZeros(counters, normed.view(splits, b, p) if splits else None)
    return grads, launch_reverse(known, grads, loop, *how, zeros=zeros)


def _bias_gradient(
    grad_raw: Tensor,  # (i, r + padding) or (H, i, r + padding)
    grad_gate: Tensor,  # (i, p) or (H, i, p)
    r: int,
    dtype: torch.dtype,  # of the sums
) -> Tensor:  # (r + p,) or (H, r + p)
    """That of W^x's bias."""
    shape = *grad_gate.shape[:-2], r + grad_gate.shape[-1]
    both = grad_raw.new_empty(shape, dtype=dtype)
    torch.sum(grad_raw[..., :r], -2, dtype=dtype, out=both[..., :r])
    torch.sum(grad_gate, -2, dtype=dtype, out=both[..., r:])
    return both
