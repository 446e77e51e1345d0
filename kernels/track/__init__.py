"""The recurrence of a tracker with its output: heads that keep a memory and read themselves.

In Triton the recurrence is an operation of torch.library, once differentiable: two launches
forward, and backward four, three sums and a product. It takes the fields of `Recurrence` one by
one, and imports Triton when it runs. Letters as in `types.py`.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import (
    Backend,
    Implementation,
    choose_backend,
    interpreter_is_on,
    warn_of_reference,
)
from bedouin.kernels.checks import check_sequence, check_shape
from bedouin.kernels.coalescing import without_coalescing
from bedouin.kernels.heads import fold
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import accumulator, arguments_of, ceil_div, last_axis_contiguous
from bedouin.kernels.linear import apply_weight
from bedouin.kernels.operation import empty_like, operation, plain_operation
from bedouin.kernels.output import gated_output
from bedouin.kernels.track.reference import track_reference
from bedouin.kernels.track.types import (
    CHUNK,
    FINISH_TOKENS,
    GRADIENT_STATES,
    PART,
    TOKENS,
    Kept,
    Recurrence,
    Sizes,
    Tracked,
    TrackInputs,
    unfit,
)

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


INPUTS = (
    "Tensor x, Tensor B, Tensor C, Tensor delta, Tensor erase, Tensor dt_bias, Tensor erase_bias, "
    "Tensor A_log, Tensor W, Tensor? h0, Tensor? y0, float eps"
)
COUNT = len(Recurrence._fields)
"""Tensors of the operation."""

FLAGS = "STARTED", "KEEP", "LAST"
"""Switches of a call: whether there is a state before it, a backward after it, and a cotangent of
the last memory."""

SEQUENTIAL = "sweep_kernel", "replay_kernel", "reverse_kernel"
"""The kernels whose threads have one channel each."""


@lru_cache(maxsize=1024)
def options(kernel: Any, sizes: Sizes, eps: float, flags: tuple[str, ...]) -> dict[str, Any]:
    """What a kernel has at compile time, and its launch options; `flags` names the switches of the
    call that are on. Not to be changed."""
    name, lanes = kernel.__name__, sizes.lanes
    warps = 1 if name == "gradients_kernel" else 4
    if name in SEQUENTIAL:
        warps = sizes.P * lanes // 32
    tokens = TOKENS if name == "prepare_kernel" else FINISH_TOKENS
    every: dict[str, Any] = {
        **{"c": sizes.c, "n": sizes.n, "P": sizes.P, "N": sizes.N, "V": sizes.V, "NL": lanes},
        **{"CHUNK": CHUNK, "PART": PART, "TOKENS": tokens, "FAST": not interpreter_is_on()},
        **{"S": GRADIENT_STATES, "PL": 32 * sizes.V // GRADIENT_STATES},
        **{"FEEDBACK_EPS": eps, "UNIT_EPS": UNIT_EPS, "num_warps": warps, "num_stages": 1},
        **{flag: flag in flags for flag in FLAGS},
    }
    return arguments_of(kernel, every)


def _readable(given: tuple[Any, ...]) -> Recurrence:
    """The tensors as the kernels read them: rows whose last axis is contiguous, all else whole."""
    whole = (None if v is None else v.contiguous() for v in given[5:COUNT])
    return Recurrence(*map(last_axis_contiguous, given[:5]), *whole)


def _switches(inputs: Recurrence, **others: bool) -> tuple[str, ...]:
    """Those that are on, as `options` takes them."""
    others |= {"STARTED": inputs.y0 is not None}
    return tuple(name for name, is_on in others.items() if is_on)


def _like(*given: Any) -> tuple[Tensor, ...]:
    x, sizes = given[0], Recurrence(*given[:COUNT]).sizes
    b, t, H, c, n = sizes[:5]
    y, h = (x.new_empty(size, dtype=torch.float32) for size in ((b, t, H * c), (b, H * c, n)))
    return y, h, x.new_empty(b, t, H * c), *Kept.empty(x, sizes, given[-1])


@operation("track", f"({INPUTS}, bool keep) -> ({', '.join(['Tensor'] * 10)})", _like)
def track_operation(*given: Any) -> tuple[Tensor, ...]:
    """y (b, t, H c), the last h (b, H c, n), norm(y_{t-1}) (b, t, H c) in the dtype of x, and the
    fields of `Kept`, a part of them without `keep`. h0 and y0 are both there or none is; no size
    may be 0."""
    from bedouin.kernels.track.triton_sweep import sweep_kernel
    from bedouin.kernels.track.triton_tokens import prepare_kernel

    inputs, (eps, keep) = _readable(given), given[COUNT:]
    x, B, C, delta, erase = inputs[:5]
    sizes = inputs.sizes
    b, t, H = sizes[:3]
    how = sizes, eps, _switches(inputs, KEEP=keep)
    y, h, normed, *found = _like(*given)
    kept = Kept(*found)
    words = kept.B.view(torch.int32), kept.C.view(torch.int32)
    prepare_kernel[(ceil_div(b * t, TOKENS), H)](
        *(B, C, erase, inputs.erase_bias, *words, kept.scalars, b * t, t, H),
        *(*B.stride()[:2], *C.stride()[:2], *erase.stride()[:2]),
        **options(prepare_kernel, *how),
    )
    # what a kernel does not read has any tensor in its place
    before = (h if inputs.h0 is None else inputs.h0, y if inputs.y0 is None else inputs.y0)
    with without_coalescing():
        sweep_kernel[(sizes.f,)](
            *(x, delta, kept.scalars, kept.B, kept.C),
            *(inputs.dt_bias, inputs.A_log, inputs.W, *before, h, y, normed, *kept[3:]),
            *(t, H, *x.stride()[:2], *delta.stride()[:2]),
            **options(sweep_kernel, *how),
        )
    return y, h, normed, *kept


@track_operation.register_vjp(kept=7, optional=(1,))
def _backward(
    grad_y: Tensor,  # (b, t, H c)
    grad_h: Tensor | None,  # (b, H c, n); None: zeros
    grad_normed: Tensor,  # (b, t, H c)
    *given: Any,
) -> tuple[Tensor, ...]:
    """The gradients of the fields of `Recurrence`. No size may be 0."""
    from bedouin.kernels.track.triton_gradients import gradients_kernel
    from bedouin.kernels.track.triton_reverse import replay_kernel, reverse_kernel
    from bedouin.kernels.track.triton_tokens import finish_kernel

    kept, inputs, eps = Kept(*given[:7]), _readable(given[7:]), given[-1]
    x, A_log, sizes = inputs.x, inputs.A_log, inputs.sizes
    (b, t, H, c, n, P, N, V), f, chunks = sizes, sizes.f, sizes.chunks
    blocks = ceil_div(b * t, FINISH_TOKENS)
    how = sizes, eps, _switches(inputs, LAST=grad_h is not None)
    found, grad_y = empty_like(*inputs), grad_y.contiguous()
    of_x, of_B, of_C, of_delta, of_erase, *_, of_h0, of_y0 = found
    normed, fed = x.new_empty(b, t, H, c), x.new_empty(b, t, H, 2, c)
    adjoint, slopes, factors = (torch.empty_like(kept.rows) for _ in range(3))
    edges, memory = torch.empty_like(kept.states), kept.rows.new_empty(f, t, N * P // V)
    read, grad_past = grad_y.new_empty(2, f, t, P)
    unit_B, unit_C = grad_y.new_empty(2, f, t, N)
    words = kept.scalars, kept.B, kept.C
    # what a kernel does not read has any tensor in its place
    last = grad_y if grad_h is None else grad_h.contiguous()
    parts = grad_y.new_empty(f, ceil_div(chunks, PART), c, n)
    sums = grad_y.new_empty(blocks, H, 2, c)
    with without_coalescing():
        replay_kernel[(f, chunks)](
            *(x, kept.rows, kept.fed, *words, A_log, kept.states, kept.past, grad_y),
            *(grad_normed.contiguous(), memory, factors, slopes, read, grad_past),
            *(t, H, *x.stride()[:2]),
            **options(replay_kernel, *how),
        )
        reverse_kernel[(f,)](
            *(slopes, factors, kept.fed, memory, kept.past, grad_past, grad_y, *words),
            *(A_log, inputs.W, last, of_h0, edges, adjoint, fed, of_y0, t, H),
            **options(reverse_kernel, *how),
        )
        gradients_kernel[(f * parts.shape[1] * (N // GRADIENT_STATES),)](
            *(kept.rows, adjoint, *words, memory, A_log, edges, unit_B, unit_C, parts, t, H),
            **options(gradients_kernel, *how),
        )
    finish_kernel[(blocks, H)](
        *(inputs.B, inputs.C, kept.scalars, kept.rows, adjoint, read, kept.past, unit_B, unit_C),
        *(fed, of_x, of_B, of_C, of_delta, of_erase, normed, sums, b * t, t, H),
        *(*inputs.B.stride()[:2], *inputs.C.stride()[:2]),
        **options(finish_kernel, *how),
    )
    rows, columns = fed.view(b * t, H, 2 * c), normed.view(b * t, H, c)
    of_dt, of_erase_bias = sums.sum(0).unbind(1)
    of_A_log = parts.view(b, H, -1, c, n).sum((0, 2)).view_as(A_log)
    of_W = torch.bmm(rows.permute(1, 2, 0), columns.transpose(0, 1))
    parameters = of_dt.reshape(-1), of_erase_bias[:, 0], of_A_log, of_W
    # copied also without a cast, because an operation must not return two views of one tensor
    cast = (
        of.to(v.dtype, copy=v is inputs.erase_bias)
        for of, v in zip(parameters, inputs[5:9], strict=True)
    )
    return *found[:5], *cast, of_h0, of_y0


def _plain(*flat: Any) -> Tracked:
    *tensors, feedback_eps, eps = flat
    return track_reference(TrackInputs(*tensors), feedback_eps, eps)


def _plain_like(*flat: Any) -> Tracked:
    inputs = TrackInputs(*flat[:-2])
    b, t, H, c, n = inputs.sizes
    dtype = accumulator(*[v.dtype for v in inputs if v is not None])
    h, y = (inputs.x.new_empty(shape, dtype=dtype) for shape in ((b, H * c, n), (b, t, H * c)))
    return Tracked(inputs.x.new_empty(y.shape), h, y)


_TENSORS = ", ".join(
    f"Tensor{'?' if name in ('h0', 'y0') else ''} {name}" for name in TrackInputs._fields
)
plain_track = plain_operation(
    "plain_track",
    f"({_TENSORS}, float feedback_eps, float eps) -> (Tensor, Tensor, Tensor)",
    _plain,
    _plain_like,
)
