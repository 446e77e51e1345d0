"""One decoded token in plain torch: the specification of the kernel.

A head of a sample is a sample of the sweep: sample j b + i is head j of sample i.
Letters: b batch, d channels, n state per channel, k reflections, r raw values, f fed-back ones, H
heads, p = d / H channels of a head.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bedouin.kernels.decode.arguments import StepOperands, StepOptions, StepParameters
from bedouin.kernels.direct import Sweep, direct_sweep_reference, is_rounding
from bedouin.kernels.feedback import normalize_feedback
from bedouin.kernels.operands import Operands
from bedouin.kernels.output import gated_output_reference
from bedouin.kernels.output.types import OutputOperands


@torch.no_grad()
def decode_token_reference(
    operands: StepOperands, parameters: StepParameters, options: StepOptions
) -> None:
    """As `decode_token`: the plain sweep over one token, and the plain output stage."""
    o, p, heads = operands, parameters, options.num_heads
    raw, gate = _raw_and_gate(operands, parameters, options)
    x, drive = _heads_of(o.x, heads), o.drive.to(o.h.dtype)
    A = _decay_matrix(p.decay, o.h, options)
    h0, y0 = _heads_of(o.h, heads).flatten(0, 1).mT, _heads_of(o.y, heads).flatten(0, 1)
    swept = Operands(_tokens(drive), _tokens(raw), None, _owned(A, heads), h0, y0)
    sweep = direct_sweep_reference(swept, options)
    y = sweep.y
    z = None if o.z is None else _tokens(_heads_of(o.z, heads))
    norm = None if p.norm is None else _owned(p.norm, heads)
    stage = OutputOperands(y, _tokens(x), _owned(p.D, heads), _tokens(gate), None, z, norm)
    hidden = gated_output_reference(stage, options.norm_eps or 0.0)
    normed = normalize_feedback(y, options.feedback_norm_eps)
    for written, value in ((o.y, y), (o.normed, normed), (o.hidden, hidden)):
        _heads_of(written, heads).copy_(value.view(heads, len(o.x), -1))
    _heads_of(o.h, heads).copy_(sweep.h.mT.unflatten(0, (heads, -1)))
    _write_statistics(operands, sweep)


def _heads_of(
    v: Tensor,  # (b, ..., d)
    num_heads: int,
) -> Tensor:  # (H, b, ..., p)
    """The channels of each head, a view."""
    of_heads: Tensor = v.unflatten(-1, (num_heads, -1))
    return of_heads.movedim(-2, 0)


def _owned(
    v: Tensor,  # (d, ...)
    num_heads: int,
) -> Tensor:  # (d, ...), or (H, p, ...) for several heads
    """A parameter as operations on several heads take it."""
    return v if num_heads == 1 else v.unflatten(0, (num_heads, -1))


def _tokens(
    v: Tensor,  # (b, ...) or (H, b, ...)
) -> Tensor:  # (H b, 1, ...)
    """Sequences of one token."""
    return v.reshape(-1, 1, v.shape[-1])


def _raw_and_gate(
    o: StepOperands, parameters: StepParameters, options: StepOptions
) -> tuple[Tensor, Tensor]:
    """(H, b, r) and (H, b, p), bias and feedback included."""
    (b, n, d), heads, dtype = o.h.shape, options.num_heads, o.h.dtype
    p = d // heads
    raw = o.raw.to(dtype, copy=True).view(heads, b, -1)
    raw[..., :p] += parameters.delta_bias.to(dtype).view(heads, 1, -1)
    if parameters.raw_bias is not None:
        raw[..., p:] += parameters.raw_bias.to(dtype).view(heads, 1, -1)
    if o.fed is not None:
        fed = o.fed.to(dtype).view(heads, b, -1)
        at = fed_at = 0
        parts = zip((*options.part_sizes(p, n), p), (*options.fed, True), strict=True)
        for size, is_fed in parts:
            if is_fed:
                raw[..., at : at + size] += fed[..., fed_at : fed_at + size]
                fed_at += size
            at += size
    return raw[..., :-p], raw[..., -p:]


def _decay_matrix(
    parameter: Tensor | None,  # (d, n)
    h: Tensor,  # (b, n, d)
    options: StepOptions,
) -> Tensor:  # (d, n)
    """A, in the dtype of h."""
    if parameter is None:
        return -torch.ones_like(h[0].mT)
    value = parameter.to(h.dtype)
    return -value.exp() if options.decay == "exp" else -options.sharpness * softplus(value)


def _write_statistics(o: StepOperands, sweep: Sweep) -> None:
    """Relative residual, smallest pivot, and whether rounding explains the defect."""
    defect, scale, magnitude = sweep.defect[:, 0], sweep.scale[:, 0], sweep.magnitude[:, 0]
    converged = is_rounding(defect, scale, magnitude)
    ratio = torch.where(defect == 0, torch.zeros_like(defect), defect / scale)
    o.residual.copy_(torch.where(torch.isfinite(ratio), ratio, torch.nan))
    o.pivot.copy_(sweep.pivot)
    o.converged.copy_(converged)
    o.all_converged.copy_(o.all_converged.bool() & converged)
