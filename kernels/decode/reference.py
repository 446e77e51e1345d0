"""One decoded token in plain torch: the specification of the kernel.

Letters: b batch, d channels, n state per channel, k reflections, r raw values, f fed-back ones.
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from bedouin.kernels.decode.arguments import StepOperands, StepOptions, StepParameters
from bedouin.kernels.direct import ROUNDING, Sweep, direct_sweep_reference
from bedouin.kernels.feedback import normalize_feedback
from bedouin.kernels.operands import Operands


@torch.no_grad()
def decode_token_reference(
    operands: StepOperands, parameters: StepParameters, options: StepOptions
) -> None:
    """As `decode_token`: the plain sweep over one token, and the plain output stage."""
    o, dtype = operands, operands.h.dtype
    raw, gate = _raw_and_gate(operands, parameters, options)
    A = _decay_matrix(parameters.decay, o.h, options)
    drive = o.drive.to(dtype).unsqueeze(1)
    swept = Operands(drive, raw.unsqueeze(1), None, A, o.h.mT, o.y)
    sweep = direct_sweep_reference(swept, options)
    y = sweep.y[:, 0]
    o.hidden.copy_(_output_stage(operands, parameters, options, y, gate))
    o.h.copy_(sweep.h.mT)
    o.y.copy_(y)
    o.normed.copy_(normalize_feedback(y, options.feedback_norm_eps))
    _write_statistics(operands, sweep)


def _raw_and_gate(
    o: StepOperands, parameters: StepParameters, options: StepOptions
) -> tuple[Tensor, Tensor]:
    """(b, r) and (b, d), bias and feedback included."""
    (_, n, d), dtype = o.h.shape, o.h.dtype
    raw = o.raw.to(dtype, copy=True)
    raw[:, :d] += parameters.delta_bias.to(dtype)
    if parameters.raw_bias is not None:
        raw[:, d:] += parameters.raw_bias.to(dtype)
    if o.fed is not None:
        at = fed_at = 0
        parts = zip((*options.part_sizes(d, n), d), (*options.fed, True), strict=True)
        for size, is_fed in parts:
            if is_fed:
                raw[:, at : at + size] += o.fed[:, fed_at : fed_at + size].to(dtype)
                fed_at += size
            at += size
    return raw[:, :-d], raw[:, -d:]


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


def _output_stage(
    o: StepOperands,
    parameters: StepParameters,
    options: StepOptions,
    y: Tensor,  # (b, d)
    gate: Tensor,  # (b, d)
) -> Tensor:  # (b, d)
    v = y + parameters.D.to(y.dtype) * o.x.to(y.dtype)
    if options.norm_eps is None or parameters.norm is None or o.z is None:
        return gate * silu(v)
    normed = rms_norm(v, v.shape[-1:], parameters.norm.to(y.dtype), options.norm_eps)
    return silu(gate + o.z.to(y.dtype)) * normed


def _write_statistics(o: StepOperands, sweep: Sweep) -> None:
    """Relative residual, smallest pivot, and whether rounding explains the defect."""
    defect, scale, magnitude = sweep.defect[:, 0], sweep.scale[:, 0], sweep.magnitude[:, 0]
    terms = torch.maximum(scale, magnitude)
    bound = ROUNDING * torch.finfo(terms.dtype).eps * terms
    converged = torch.isfinite(terms) & (defect <= bound)
    ratio = torch.where(defect == 0, torch.zeros_like(defect), defect / scale)
    o.residual.copy_(torch.where(torch.isfinite(ratio), ratio, torch.nan))
    o.pivot.copy_(sweep.pivot)
    o.converged.copy_(converged)
    o.all_converged.copy_(o.all_converged.bool() & converged)
