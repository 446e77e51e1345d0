"""The backward pass of a layer's core.

The cotangents of the raw values and of the gate are kept apart, each in rows that are aligned; the
gradients of a weight's two parts are written into one tensor.
Letters as in `types.py`.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.core.forward import output_operands
from bedouin.kernels.core.launch import launch_clear, launch_finish
from bedouin.kernels.core.products import (
    add_product_,
    columns_of,
    first_rows,
    joined_gradient,
    loop_rows,
    multiply,
    samples_of,
)
from bedouin.kernels.core.types import CoreOptions, CoreSaved, CoreTensors
from bedouin.kernels.direct.buffers import GradBuffers, SolvedBuffers, state_major
from bedouin.kernels.direct.heads.launch import launch_head_reverse
from bedouin.kernels.direct.triton_launch import launch_reverse
from bedouin.kernels.direct.triton_summary import summarize_adjoint
from bedouin.kernels.feedback import normalize_feedback_vjp
from bedouin.kernels.linear import ALIGNMENT
from bedouin.kernels.output.launch import output_backward, shifted_norm_backward
from bedouin.kernels.plans import Launcher


class CoreCotangents(NamedTuple):
    """Cotangents of outputs; None: zeros."""

    hidden: Tensor | None  # (b, t, d)
    y: Tensor | None  # (b', t, p)
    h: Tensor | None  # (b', p, n)


class CoreGradients(NamedTuple):
    """Gradients and statistics; those that are not wanted are empty."""

    projected: Tensor  # (b, t, w)
    W_x: Tensor  # (r + p, p) or (H, r + p, p)
    W_y: Tensor  # (f + p, p) or (H, f + p, p)
    decay: Tensor  # (d, n)
    D: Tensor  # (d,)
    weight: Tensor  # (d,), empty without weight
    h0: Tensor  # (b', p, n)
    y0: Tensor  # (b', p), empty without y0
    dt_bias: Tensor  # (d,)
    raw_bias: Tensor  # (H r,)
    statistics: Tensor  # (2, b', t), defect and scale of the adjoint equation
    steps: Tensor  # (b',), of the adjoint equation
    residual: Tensor  # (b',), likewise
    converged: Tensor  # (b',), likewise


class Wanted(NamedTuple):
    """Results that cost a launch, a product or a sum of their own."""

    W_x: bool
    W_y: bool
    y0: bool
    bias: bool
    low_bias: bool  # the biases have the dtype of D; else their gradients are those of the sums
    summary: bool  # how the adjoint equation was solved


def core_backward(
    cotangents: CoreCotangents,
    tensors: CoreTensors,
    saved: CoreSaved,
    options: CoreOptions,
    wanted: Wanted,
    launcher: Launcher,
    *,
    overwrites: bool,
) -> CoreGradients:
    """The gradients of a call of `core_forward`; `overwrites` allows it to use the memory of
    `saved.raw`, which it takes for the cotangent of the raw values."""
    (W_x, W_y), y, gate = saved.weights(tensors), saved.y, saved.gate
    sizes, eps = tensors.sizes(), options.parameterization.feedback_norm_eps
    H, _, _, p, _, r, f = sizes
    x = columns_of(tensors.projected, 0, H, p)
    grad_projected = torch.empty_like(tensors.projected, memory_format=torch.contiguous_format)
    of_x = columns_of(grad_projected, 0, H, p)
    if tensors.weight is None:
        of_gate = torch.empty_like(gate)
    else:
        # the cotangent of z, too
        of_gate = columns_of(grad_projected, H * p, H, p)
    operands = output_operands(tensors, y, x, gate)
    grad_hidden = cotangents.hidden
    if grad_hidden is None:
        grad_hidden = torch.zeros_like(gate)
    else:
        grad_hidden = columns_of(grad_hidden, 0, H, p)
    grad_y, *_, of_channels = output_backward(
        grad_hidden, operands, options.eps, into=(of_x, of_gate), adds=False, launcher=launcher
    )
    grad_y = grad_y.view(y.shape)
    if W_y is not None:
        grad_normed = multiply(of_gate, W_y.narrow(-2, f, p)).view(y.shape)
        given = grad_normed, y, tensors.y0, eps, grad_y
        _, grad_y0 = shifted_norm_backward(*given, launcher=launcher)
        del grad_normed, given
    else:
        # y0 has no influence
        grad_y0 = y.new_empty(0) if tensors.y0 is None else torch.zeros_like(tensors.y0)
    if cotangents.y is not None:
        grad_y += cotangents.y

    raw = _raw_with_feedback(tensors, saved, overwrites)
    # a token's raw values are read before their cotangent is written, so both can share memory
    shares = overwrites or W_y is not None
    grad_raw = raw if shares else torch.empty_like(raw)
    how = options, wanted.y0, launcher
    grads, grad_first = _reverse(cotangents.h, grad_y, raw, grad_raw, tensors, saved, *how)
    if wanted.y0 and tensors.y0 is not None and grad_first is not None:
        grad_y0 = grad_y0 + normalize_feedback_vjp(grad_first, tensors.y0, eps)
    wide = grad_raw.shape[2]
    grad_raw = grad_raw.view(sizes.of_heads(-1, wide))
    of_x += grads.x.view(gate.shape)
    grad_H, of_A, statistics = grads.H, grads.A, grads.statistics
    del grads, grad_y
    add_product_(of_x, of_gate, W_x.narrow(-2, r, p))
    add_product_(of_x, grad_raw, first_rows(W_x, wide))
    if wanted.W_x:
        grad_W_x = joined_gradient(grad_raw, of_gate, x, r)
    else:
        grad_W_x = W_x.new_empty(0)
    if wanted.W_y and W_y is not None:
        grad_W_y = joined_gradient(grad_raw, of_gate, saved.normed.view(gate.shape), f)
    else:
        grad_W_y = W_x.new_empty(0)
    of_biases: torch.dtype | None = None
    if wanted.bias:
        of_biases = tensors.D.dtype if wanted.low_bias else of_A.dtype
    parts_of = of_A, grad_raw, of_gate, of_channels
    weights = grad_W_x, grad_W_y
    finished = launch_finish(tensors, options, *parts_of, *weights, of_biases, launcher)
    states = grad_H.mT, grad_y0
    if wanted.summary:
        summary = summarize_adjoint(statistics, launcher=launcher)
    else:
        steps, converged = (statistics.new_empty(0, dtype=v) for v in (torch.int64, torch.bool))
        summary = steps, statistics.new_empty(0), converged
    told = statistics, *summary
    return CoreGradients(grad_projected, *finished[:5], *states, *finished[5:], *told)


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
    launcher: Launcher,
) -> tuple[GradBuffers, Tensor | None]:
    """The reverse sweep: its results, and the cotangent of norm(y0) (b', p)."""
    A, kept, sizes = saved.A, saved.kept, tensors.sizes()
    H, _, t, p, n, r, _ = sizes
    b = sizes.folded
    _, W_y = saved.weights(tensors)
    loop = loop_rows(W_y, sizes)
    # what only the kernels of one head need
    alone = loop is not None and H == 1
    of_H = b if grad_h is None else 0
    of_h0 = 1 if tensors.h0 is None else 0
    of_fed = r if alone else 0
    lengths = of_H * n * p, b * n * p, of_h0 * n * p, of_fed
    ends = list(accumulate([size + -size % ALIGNMENT for size in lengths]))
    flat = A.new_empty(ends[-1])
    launch_clear(flat, grad_raw, r, launcher)
    # one view each, because views cost the host as much as launches
    of_samples = (b, n, p), (n * p, p, 1)
    # all samples share one memory of zeros
    zero_h0 = (b, n, p), (0, p, 1), ends[1]
    known = SolvedBuffers(
        samples_of(tensors.x, H),
        saved.y,
        raw.narrow(2, 0, r),
        # raw contains it: to each token the kernels of one head add the same zeros
        _at_each_token(flat, ends[2], raw, r) if alone else None,
        A,
        flat.as_strided(*zero_h0) if tensors.h0 is None else tensors.h0.mT.contiguous(),
        kept,
    )
    grads = GradBuffers(
        grad_y,
        flat.as_strided(*of_samples, 0) if grad_h is None else state_major(grad_h),
        raw.new_empty(b, t, p),
        grad_raw,
        flat.as_strided(*of_samples, ends[0]),
        A.new_empty(2, b, t),
    )
    how = options.parameterization, options.keep_every
    if H > 1 and loop is not None:
        given = known, grads, loop, *how
        parts = launch_head_reverse(*given, wants_first=wants_y0, launcher=launcher)
        return grads, None if parts is None else parts[0]
    return grads, launch_reverse(known, grads, loop, *how, launcher=launcher)


def _at_each_token(
    flat: Tensor,  # (size,)
    start: int,
    raw: Tensor,  # (b, t, r or more)
    r: int,
) -> Tensor:  # (b, t, r)
    """The same values of `flat` for all tokens, read as those of raw are."""
    offset = start * flat.element_size() // raw.element_size()
    return flat.view(raw.dtype).as_strided((*raw.shape[:2], r), (0, 0, 1), offset)
