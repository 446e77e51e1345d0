"""The backward pass of a layer's core.

The cotangents of the raw values and of the gate are kept apart, each in rows that are aligned; the
gradients of a weight's two parts are written into one tensor.
Letters: b batch, t time, d channels, n state per channel, r raw values, w as in `CoreTensors`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.core.forward import first_rows
from bedouin.kernels.core.launch import decay_gradient, launch_clear
from bedouin.kernels.core.types import CoreOptions, CoreSaved, CoreTensors
from bedouin.kernels.direct.buffers import GradBuffers, SolvedBuffers, state_major
from bedouin.kernels.direct.triton_launch import ReverseZeros, count_splits, launch_reverse
from bedouin.kernels.feedback import normalize_feedback_vjp
from bedouin.kernels.linear import ALIGNMENT, padding
from bedouin.kernels.output.launch import output_backward, shifted_norm_backward
from bedouin.kernels.output.types import OutputOperands

COUNTERS = 16
"""Integers that a launch's counters occupy: 64 bytes, for aligned addresses."""


class CoreCotangents(NamedTuple):
    """Cotangents of outputs; None: zeros."""

    hidden: Tensor | None  # (b, t, d)
    y: Tensor | None  # (b, t, d)
    h: Tensor | None  # (b, d, n)


class CoreGradients(NamedTuple):
    """Gradients; those that are not wanted are empty."""

    projected: Tensor  # (b, t, w)
    W_x: Tensor  # (r + d, d)
    bias: Tensor  # (r + d,)
    W_y: Tensor  # (r + d, d)
    decay: Tensor  # (d, n)
    sums: Tensor  # (2, d), of D and weight, or (1, d) of D alone
    h0: Tensor  # (b, d, n)
    y0: Tensor  # (b, d), empty without y0
    statistics: Tensor  # (2, b, t), defect and scale of the adjoint equation


class Wanted(NamedTuple):
    """Gradients that cost a product of their own."""

    W_x: bool
    bias: bool
    W_y: bool
    y0: bool


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
    W_x, W_y, y, A = tensors.W_x, tensors.W_y, saved.y, saved.A
    x, z = tensors.split()
    b, t, d = x.shape
    r, rows, eps = W_x.shape[0] - d, b * t, options.parameterization.feedback_norm_eps
    wide = r + padding(r)
    projected = tensors.projected
    grad_projected = projected.new_empty(projected.shape)
    grad_x = grad_projected[..., :d]
    grad_gate = saved.gate.new_empty(b, t, d) if z is None else grad_projected[..., d:]
    operands = OutputOperands(y, x, tensors.D, saved.gate, None, z, tensors.weight)
    grad_hidden = torch.zeros_like(saved.gate) if cotangents.hidden is None else cotangents.hidden
    grad_y, _, _, sums = output_backward(
        grad_hidden, operands, options.eps, into=(grad_x, grad_gate)
    )
    of_gate, of_x = grad_gate.flatten(0, 1), grad_x.flatten(0, 1)
    # without feedback y0 has no influence
    grad_y0 = A.new_empty(0) if tensors.y0 is None else torch.zeros_like(tensors.y0)
    if W_y is not None:
        grad_normed = (of_gate @ W_y[r:]).view(b, t, d)
        _, grad_y0 = shifted_norm_backward(grad_normed, y, tensors.y0, eps, add_to=grad_y)
    if cotangents.y is not None:
        grad_y += cotangents.y

    raw = _raw_with_feedback(tensors, saved, overwrites)
    # a token's raw values are read before their cotangent is written, so both can share memory
    shares = overwrites or W_y is not None
    grad_raw = raw if shares else torch.empty_like(raw)
    grads, parts = _reverse(cotangents.h, grad_y, raw, grad_raw, tensors, saved, options)
    if wanted.y0 and tensors.y0 is not None and parts is not None:
        grad_y0 = grad_y0 + normalize_feedback_vjp(parts.sum(0), tensors.y0, eps)
    grad_raw = grad_raw.view(rows, wide)
    of_x += grads.x.view(rows, d)
    of_x.addmm_(of_gate, W_x[r:]).addmm_(grad_raw, first_rows(W_x, wide))
    none = W_x.new_empty(0)
    grad_W_x = grad_W_y = grad_bias = none
    if wanted.W_x:
        grad_W_x = _weight_gradient(grad_raw, of_gate, x.flatten(0, 1), r)
    if wanted.W_y and W_y is not None:
        grad_W_y = _weight_gradient(grad_raw, of_gate, saved.normed.view(rows, d), r)
    if wanted.bias:
        grad_bias = W_x.new_empty(max(wide, r + d))
        torch.sum(grad_raw, 0, out=grad_bias[:wide])
        torch.sum(of_gate, 0, out=grad_bias[r : r + d])
        grad_bias = grad_bias[: r + d]
    return CoreGradients(
        grad_projected,
        grad_W_x,
        grad_bias,
        grad_W_y,
        decay_gradient(grads.A.sum(0), tensors.decay, options),
        sums,
        grads.H.mT,
        grad_y0,
        grads.statistics,
    )


def _raw_with_feedback(
    tensors: CoreTensors,
    saved: CoreSaved,
    overwrites: bool,
) -> Tensor:  # (b, t, r + padding)
    """raw^x + W^y norm(y_{t-1}): in new memory, or in that of raw^x if `overwrites`."""
    if tensors.W_y is None:
        return saved.raw
    raw = saved.raw.flatten(0, 1)
    factors = saved.normed.flatten(0, 1), first_rows(tensors.W_y, raw.shape[1]).mT
    total = raw.addmm_(*factors) if overwrites else torch.addmm(raw, *factors)
    return total.view(saved.raw.shape)


def _reverse(
    grad_h: Tensor | None,  # (b, d, n)
    grad_y: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r + padding), with feedback
    grad_raw: Tensor,  # (b, t, r + padding), written, may be the memory of raw
    tensors: CoreTensors,
    saved: CoreSaved,
    options: CoreOptions,
) -> tuple[GradBuffers, Tensor | None]:
    """The reverse sweep: its results, and parts (splits, b, d) of the cotangent of norm(y0)."""
    (x, _), A, kept = tensors.split(), saved.A, saved.kept
    (b, t, d), n, r = x.shape, A.shape[0], tensors.W_x.shape[0] - x.shape[2]
    loop = None if tensors.W_y is None else tensors.W_y[:r]
    splits = 0 if loop is None else count_splits(loop, b)
    of_H = b if grad_h is None else 0
    of_h0 = 1 if tensors.h0 is None else 0
    chunks = kept.shape[1] + 1
    of_fed = 0 if loop is None else r
    sizes = [of_H * n * d, b * n * d, splits * b * d, of_h0 * n * d, COUNTERS * chunks, of_fed]
    aligned = [size + -size % ALIGNMENT for size in sizes]
    flat = A.new_empty(sum(aligned))
    launch_clear(flat, grad_raw, r)
    H, grad_A, normed, first, counts, zero = (
        v[:size] for v, size in zip(flat.split(aligned), sizes, strict=True)
    )
    zeros = ReverseZeros(
        counts.view(torch.int32)[: COUNTERS * chunks].view(chunks, COUNTERS),
        normed.view(splits, b, d) if splits else None,
    )
    # all samples share one memory of zeros
    h0 = first.view(n, d).expand(b, n, d) if tensors.h0 is None else tensors.h0.mT.contiguous()
    # raw contains the feedback: the kernels add that of one token, which is zero, for all
    fed = None if loop is None else zero.view(raw.dtype)[:r].expand(b, t, r)
    known = SolvedBuffers(x, saved.y, raw[..., :r], fed, A, h0, kept)
    grads = GradBuffers(
        grad_y,
        H.view(b, n, d) if grad_h is None else state_major(grad_h),
        x.new_empty(b, t, d),
        grad_raw,
        grad_A.view(b, n, d),
        A.new_empty(2, b, t),
    )
    how = options.parameterization, options.keep_every
    return grads, launch_reverse(known, grads, loop, *how, zeros=zeros)


def _weight_gradient(
    grad_raw: Tensor,  # (b t, r + padding)
    grad_gate: Tensor,  # (b t, d)
    rows: Tensor,  # (b t, d)
    r: int,
) -> Tensor:  # (r + d, d)
    wide, d = grad_raw.shape[1], grad_gate.shape[1]
    joined = grad_raw.new_empty(max(wide, r + d), d)
    torch.mm(grad_raw.mT, rows, out=joined[:wide])
    # overwrites the rows of the padding
    torch.mm(grad_gate.mT, rows, out=joined[r : r + d])
    return joined[: r + d]
