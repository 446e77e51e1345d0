"""The recurrence of a tracker with its output: heads that keep a memory and read themselves.

Letters: b batch, t time, H heads, c channels and n states of a head.
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend, warn_of_reference
from bedouin.kernels.checks import check_sequence, check_shape
from bedouin.kernels.heads import fold
from bedouin.kernels.launch import accumulator
from bedouin.kernels.linear import apply_weight
from bedouin.kernels.output import gated_output
from bedouin.kernels.track.limits import unfit
from bedouin.kernels.track.reference import track_reference
from bedouin.kernels.track.registered import plain_track, track_operation
from bedouin.kernels.track.types import Recurrence, Tracked, TrackInputs

__all__ = ["TrackInputs", "Tracked", "choose_track", "hidden_of", "track", "track_reference"]


def track(
    inputs: TrackInputs, feedback_eps: float, eps: float, *, backend: Backend = "auto"
) -> Tracked:
    """The outputs before the last projection, the last memory, and y of all tokens:

        n_t    = norm(y_{t-1})                                     RMSNorm over a head's channels
        Delta  = softplus(delta_t + dt_bias + W_Delta n_t),  beta = sigmoid(erase_t + erase_bias)
        h_t    = exp(A Delta) * h_{t-1} (I - beta B_t B_t^T) + (Delta * (x_t + W_x n_t)) B_t^T
        y_t    = h_t C_t
        hidden = SiLU(gate_t + W_g n_t) * norm(y_t + D * skip_t) * weight

    with B_t and C_t of unit length. `feedback_eps` is that of n_t, `eps` that of the other norm.
    Computes in at least float32; in the Triton version products with W_y have factors in the dtype
    of x. It takes heads of at most 64 channels with 128 states, is once differentiable, and saves
    its inputs, y, n, the unit B and C, six vectors of a token and h at every 16th token. Its
    backward needs c n numbers more for each token of a head.

    Raises ValueError for shapes that do not fit, or a backend that cannot run.
    """
    _check(inputs)
    if not inputs.x.numel() or choose_track(inputs, backend) == "reference":
        # other runtimes decode by the elementary operations of a single token
        is_one = torch.compiler.is_exporting() and inputs.x.shape[1] == 1
        if inputs.x.numel() and torch.compiler.is_compiling() and not is_one:
            return Tracked(*plain_track(*inputs, feedback_eps, eps))
        return track_reference(inputs, feedback_eps, eps)
    if (inputs.h0 is None) != (inputs.y0 is None):
        b, _, H, c, n = inputs.sizes
        h0, y0 = (inputs.A_log.new_zeros(shape) for shape in ((b, H * c, n), (b, H * c)))
        given = h0 if inputs.h0 is None else inputs.h0, y0 if inputs.y0 is None else inputs.y0
        inputs = inputs._replace(h0=given[0], y0=given[1])
    c = inputs.W_y.shape[-1]
    W, W_gate = inputs.W_y.split([2 * c, c], 1)
    parameters = inputs.dt_bias, inputs.erase_bias, inputs.A_log, W
    read = Recurrence(*inputs[:5], *parameters, inputs.h0, inputs.y0)
    keep = torch.is_grad_enabled() and any([v is not None and v.requires_grad for v in read])
    y, h, normed, *_ = track_operation(*read, feedback_eps, keep)
    return Tracked(hidden_of(inputs, y, normed, W_gate, eps, backend=backend), h, y)


def hidden_of(
    inputs: TrackInputs,
    y: Tensor,  # (b, t, H c)
    normed: Tensor,  # (b, t, H c), norm(y_{t-1}), in the dtype of x
    W_gate: Tensor,  # (H, c, c), the last rows of W_y
    eps: float,
    *,
    backend: Backend = "auto",
) -> Tensor:  # (b, t, H c), in the dtype of x
    """`hidden` of `track`, computed in the dtype of y, with a product in that of x."""
    _, _, H, c, _ = inputs.sizes
    low, axis = inputs.x.dtype, (H,) if H > 1 else ()
    y, skip, gate, normed = (fold(v, H) for v in (y, inputs.skip, inputs.gate, normed))
    W_gate = W_gate.to(low).view(*axis, c, c)
    D, weight = (v.view(*axis, c) for v in (inputs.D, inputs.weight))
    parts = y, skip, D, gate, None, apply_weight(normed, W_gate), weight
    return gated_output(*parts, eps=eps, dtype=low, backend=backend)


def choose_track(inputs: TrackInputs, backend: Backend) -> Implementation:
    """The implementation of `track`; raises as `choose_backend` does. Warns, once, of a call on a
    GPU that has no kernel, unless it is in float64, for which there are none at all."""
    dtype = accumulator(*[v.dtype for v in inputs if v is not None])
    sizes = inputs.W_y.shape[-1], inputs.A_log.shape[-1]
    unsupported = None if dtype == torch.float64 else unfit(*sizes)
    dtype = inputs.x.dtype if dtype == torch.float32 else dtype
    chosen = choose_backend(backend, inputs.x.device, dtype, unsupported)
    if unsupported is not None and backend == "auto":
        warn_of_reference(inputs.x.device, unsupported)
    return chosen


def _check(inputs: TrackInputs) -> None:
    check_sequence("x", inputs.x)
    check_sequence("erase", inputs.erase)
    b, t, H, c, n = inputs.sizes
    d, rows = H * c, {"x": inputs.x, "delta": inputs.delta, "gate": inputs.gate}
    rows["skip"] = inputs.skip
    for name, v in rows.items():
        check_shape(name, v, (b, t, d), "(b, t, H c)")
    for name, v in {"B": inputs.B, "C": inputs.C}.items():
        check_shape(name, v, (b, t, H * n), "(b, t, H n)")
    for name, v in {"dt_bias": inputs.dt_bias, "D": inputs.D, "weight": inputs.weight}.items():
        check_shape(name, v, (d,), "(H c,)")
    check_shape("erase_bias", inputs.erase_bias, (H,), "(H,)")
    check_shape("W_y", inputs.W_y, (H, 3 * c, c), "(H, 3 c, c)")
    if inputs.A_log.dim() == 3:
        check_shape("A_log", inputs.A_log, (H, c, n), "(H, c, n)")
    else:
        check_shape("A_log", inputs.A_log, (d, n), "(H c, n)")
    check_shape("h0", inputs.h0, (b, d, n), "(b, H c, n)")
    check_shape("y0", inputs.y0, (b, d), "(b, H c)")
