"""The recurrence of the tracker as a loop, with the equations of `bedouin.kernels.track.track`: the
specification. Letters as in `types.py`.
"""

import torch
from torch.nn.functional import silu, softplus

from bedouin.kernels.feedback import normalize_feedback
from bedouin.kernels.householder import unit
from bedouin.kernels.launch import accumulator
from bedouin.kernels.track.types import Tracked, TrackInputs


def track_reference(inputs: TrackInputs, feedback_eps: float, eps: float) -> Tracked:
    """`track` in at least float32."""
    b, t, H, c, n = inputs.sizes
    dtype = accumulator(*(v.dtype for v in inputs if v is not None))
    wide = TrackInputs(*(None if v is None else v.to(dtype) for v in inputs))  # type: ignore[arg-type]
    x, gate, skip = (v.unflatten(-1, (H, c)) for v in (wide.x, wide.gate, wide.skip))
    delta = (wide.delta + wide.dt_bias).unflatten(-1, (H, c))
    B, C = (unit(v.unflatten(-1, (H, n))).unsqueeze(-1) for v in (wide.B, wide.C))
    beta = torch.sigmoid(wide.erase + wide.erase_bias).unsqueeze(-1)
    A, D = -torch.exp(wide.A_log.reshape(H, c, n)), wide.D.reshape(H, c)
    W_recurrent, W_gate = wide.W_y.split([2 * c, c], 1)
    h = A.new_zeros(b, H, c, n) if wide.h0 is None else wide.h0.reshape(b, H, c, n)
    y = A.new_zeros(b, H, c) if wide.y0 is None else wide.y0.reshape(b, H, c)
    ys, normed = [], []
    # not by index, whose backward writes zeros of all tokens for each of them
    for row in zip(*(v.unbind(1) for v in (x, delta, B, C, beta)), strict=True):
        x_t, delta_t, B_t, C_t, beta_t = row
        normed.append(normalize_feedback(y, feedback_eps))
        fed = torch.matmul(W_recurrent, normed[-1].unsqueeze(-1)).squeeze(-1)
        of_delta, of_x = fed.chunk(2, -1)
        step = softplus(delta_t + of_delta, threshold=50)
        decayed = torch.exp(A * step.unsqueeze(-1)) * h
        read = torch.matmul(decayed, B_t).squeeze(-1)
        written = step * (x_t + of_x) - beta_t * read
        h = decayed + written.unsqueeze(-1) * B_t.mT
        y = torch.matmul(h, C_t).squeeze(-1)
        ys.append(y)
    last = h.reshape(b, H * c, n)
    if not t:
        empty = A.new_zeros(b, 0, H * c)
        return Tracked(empty.to(inputs.x.dtype), last, empty)
    outputs = torch.stack(ys, 1)
    of_gate = torch.matmul(W_gate, torch.stack(normed, 1).unsqueeze(-1)).squeeze(-1)
    shown = normalize_feedback(outputs + D * skip, eps) * wide.weight.reshape(H, c)
    hidden = silu(gate + of_gate) * shown
    return Tracked(hidden.flatten(-2).to(inputs.x.dtype), last, outputs.flatten(-2))
