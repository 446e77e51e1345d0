"""The recurrence of the tracker as a loop, with the equations of `bedouin.kernels.track.track`: the
specification. Letters as in `types.py`.
"""

import torch
from torch.nn.functional import silu, softplus

from bedouin.kernels.feedback import normalize_feedback
from bedouin.kernels.householder import unit
from bedouin.kernels.launch import accumulator
from bedouin.kernels.track.types import Tracked, TrackInputs


def track_reference(inputs: TrackInputs, eps: float) -> Tracked:
    """`track` in at least float32."""
    b, t, H, c, n = inputs.sizes
    dtype = accumulator(*(v.dtype for v in inputs if v is not None))
    wide = TrackInputs(*(None if v is None else v.to(dtype) for v in inputs))  # type: ignore[arg-type]
    x, gate, skip = (v.unflatten(-1, (H, c)) for v in (wide.x, wide.gate, wide.skip))
    delta = (wide.delta + wide.dt_bias).unflatten(-1, (H, c))
    B, C = (unit(v.unflatten(-1, (H, n))).unsqueeze(-1) for v in (wide.B, wide.C))
    beta = torch.sigmoid(wide.erase + wide.erase_bias).unsqueeze(-1)
    A, D = -torch.exp(wide.A_log.reshape(H, c, n)), wide.D.reshape(H, c)
    h = A.new_zeros(b, H, c, n) if wide.h0 is None else wide.h0.reshape(b, H, c, n)
    y = A.new_zeros(b, H, c) if wide.y0 is None else wide.y0.reshape(b, H, c)
    ys = [y]
    # not by index, whose backward writes zeros of all tokens for each of them
    for row in zip(*(v.unbind(1) for v in (x, B, C, delta, beta, gate, skip)), strict=True):
        x_t, B_t, C_t, delta_t, beta_t, gate_t, skip_t = row
        fed = torch.matmul(wide.W_y, y.unsqueeze(-1)).squeeze(-1)
        of_delta, of_x, of_gate = fed.chunk(3, -1)
        step = softplus(delta_t + of_delta, threshold=50)
        decayed = torch.exp(A * step.unsqueeze(-1)) * h
        read = torch.matmul(decayed, B_t).squeeze(-1)
        written = step * (x_t + of_x) - beta_t * read
        h = decayed + written.unsqueeze(-1) * B_t.mT
        o = torch.matmul(h, C_t).squeeze(-1) + D * skip_t
        y = normalize_feedback(silu(gate_t + of_gate) * o, eps)
        ys.append(y)
    return Tracked(torch.stack(ys, 1)[:, 1:].flatten(-2), h.reshape(b, H * c, n))
