"""The phases as implementations of the registered operations; Triton is imported by a call.

Letters: b folded samples, t time, d channels of a head, n state per channel, r raw values, f those
of them with feedback and of x, H heads.
"""

import torch
from torch import Tensor

from bedouin.kernels.direct.buffers import normed_past, state_major
from bedouin.kernels.direct.phases.limits import sizes_of
from bedouin.kernels.feedback import feedback_weight_gradient
from bedouin.kernels.heads import count_heads
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import Operands, Parameterization


def phase_sweep(
    operands: Operands, options: Parameterization, *, keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (b, t, d), the last h (b, d, n), what is kept for the gradient, and the statistics
    (4, b, t): defect, scale, magnitude, pivot."""
    x, A = operands.x, operands.A
    if x.numel():
        from bedouin.kernels.direct.phases.launch import launch_phases

        y, h, kept, statistics = launch_phases(operands, options, keeps=keeps)
        return y, h.mT, kept, statistics
    y, h0 = A.new_empty(x.shape), operands.h0
    h = A.new_zeros(len(x), *A.mT.shape[-2:]) if h0 is None else state_major(h0)
    kept = A.new_empty(len(x), sizes_of(operands, options).kept if keeps else 0)
    return y, h.mT, kept, A.new_empty(4, *x.shape[:2])


def phase_reverse(
    known: tuple[Tensor, Tensor | None, Tensor, Tensor],  # grad_y, grad_h, y, kept
    operands: Operands,
    options: Parameterization,
    *,
    wants_y0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, raw, W_y (empty without feedback), A, h0, y0 (empty if not wanted), and
    the statistics (2, b, t) of the adjoint equation: defect and scale."""
    x, raw, W_y, A, _, _ = operands
    r = raw.shape[2]
    if not x.numel():
        return _of_nothing(known[1], operands, wants_y0=wants_y0)
    from bedouin.kernels.direct.phases.launch import launch_reverse_phases

    grads = launch_reverse_phases(*known, operands, options)
    grad_W_y = A.new_empty(0)
    if W_y is not None:
        past = normed_past(known[2], operands, W_y, options)
        grad_W_y = feedback_weight_gradient(grads.delta, past, W_y)
    grad_A = grads.A.unflatten(0, (count_heads(A), -1)).sum((1, 2))
    grad_A = (grad_A if A.dim() == 3 else grad_A.squeeze(0)).mT
    last = grads.h0.mT, grads.y0[: None if wants_y0 else 0], grads.statistics
    return grads.x.contiguous(), grads.raw[..., :r], grad_W_y, grad_A, *last


def _of_nothing(
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    operands: Operands,
    *,
    wants_y0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of `phase_reverse` without tokens."""
    x, raw, W_y, A, _, _ = operands
    (b, t, d), r = x.shape, raw.shape[2]
    grad_raw = raw.new_empty(b, t, r + padding(r))[..., :r]
    grad_W_y = A.new_empty(0) if W_y is None else torch.zeros_like(W_y)
    grad_h0 = A.new_zeros(b, *A.mT.shape[-2:]) if grad_h is None else state_major(grad_h)
    grad_y0 = A.new_zeros(b if wants_y0 else 0, d)
    first = x.new_empty(x.shape), grad_raw, grad_W_y, torch.zeros_like(A.mT).mT
    return *first, grad_h0.mT, grad_y0, A.new_empty(2, b, t)
