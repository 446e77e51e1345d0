"""The recurrence of the tracker as a loop: the specification.

    n_t    = norm(y_{t-1})                                     RMSNorm over the channels of a head
    x^_t   = x_t + W_x n_t
    Delta  = softplus(delta_t + dt_bias + W_Delta n_t),  beta = sigmoid(erase_t + erase_bias)
    h_t    = exp(A Delta) * h_{t-1} (I - beta B_t B_t^T) + (Delta * x^_t) B_t^T,   y_t = h_t C_t
    hidden = SiLU(gate_t + W_g n_t) * norm(y_t + D * skip_t) * weight

B_t and C_t are made unit. Letters as in `types.py`.
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
    by_head = (v.unflatten(-1, (H, c)) for v in (wide.x, wide.delta, wide.gate, wide.skip))
    x, delta, gate, skip = by_head
    B, C = (unit(v.unflatten(-1, (H, n))) for v in (wide.B, wide.C))
    delta = delta + wide.dt_bias.view(H, c)
    beta = torch.sigmoid(wide.erase + wide.erase_bias)
    A, D = -torch.exp(wide.A_log.view(H, c, n)), wide.D.view(H, c)
    weight = wide.weight.view(H, c)
    h = A.new_zeros(b, H, c, n) if wide.h0 is None else wide.h0.view(b, H, c, n)
    y = A.new_zeros(b, H, c) if wide.y0 is None else wide.y0.view(b, H, c)
    outputs, hidden = [], []
    for i in range(t):
        normed = normalize_feedback(y, feedback_eps)
        of_delta, of_x, of_gate = torch.einsum("hoc,bhc->bho", wide.W_y, normed).chunk(3, -1)
        step = softplus(delta[:, i] + of_delta, threshold=50)
        decayed = torch.exp(A * step.unsqueeze(-1)) * h
        read = torch.einsum("bhcn,bhn->bhc", decayed, B[:, i])
        written = step * (x[:, i] + of_x) - beta[:, i].unsqueeze(-1) * read
        h = decayed + written.unsqueeze(-1) * B[:, i].unsqueeze(-2)
        y = torch.einsum("bhcn,bhn->bhc", h, C[:, i])
        outputs.append(y.flatten(-2))
        shown = normalize_feedback(y + D * skip[:, i], eps) * weight
        hidden.append((silu(gate[:, i] + of_gate) * shown).flatten(-2))
    last = h.reshape(b, H * c, n)
    if not t:
        empty = A.new_zeros(b, 0, H * c)
        return Tracked(empty.to(inputs.x.dtype), last, empty)
    return Tracked(torch.stack(hidden, 1).to(inputs.x.dtype), last, torch.stack(outputs, 1))
