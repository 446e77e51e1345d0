"""The recurrence of a tracker with its output: heads that keep a memory and read themselves.

In Triton the recurrence is an operation of torch.library, once differentiable: two launches
forward, and backward four, two sums and a product. It takes the fields of `Recurrence` one by
one, and imports Triton when it runs. Letters as in `types.py`.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.checks import check_sequence, check_shapes
from bedouin.kernels.heads import apply_weight, fold
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import (
    accumulator,
    as_constants,
    ceil_div,
    last_axis_contiguous,
    without_coalescing,
)
from bedouin.kernels.operation import empty_like, is_recorded, operation, plain_operation
from bedouin.kernels.output import gated_output
from bedouin.kernels.track.reference import track_reference
from bedouin.kernels.track.types import (
    CHUNK,
    FINISH_TOKENS,
    GRADIENT_STATES,
    PART,
    TOKENS,
    Kept,
    Layout,
    Recurrence,
    Tracked,
    TrackInputs,
    unfit,
)

__all__ = ["TrackInputs", "Tracked", "choose_track", "track", "track_reference"]


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
    (_, _, H, c, _), low = inputs.sizes, inputs.x.dtype
    W, W_gate = inputs.W_y.split([2 * c, c], 1)
    parameters = inputs.dt_bias, inputs.erase_bias, inputs.A_log, W
    read = Recurrence(*inputs[:5], *parameters, inputs.h0, inputs.y0)
    y, h, normed, *_ = track_operation(*read, feedback_eps, is_recorded(*read))
    axis = (H,) if H > 1 else ()
    skip, gate, normed = (fold(v, H) for v in (inputs.skip, inputs.gate, normed))
    W_gate = W_gate.to(low).view(*axis, c, c)
    D, weight = (v.view(*axis, c) for v in (inputs.D, inputs.weight))
    parts = fold(y, H), skip, D, gate, None, apply_weight(normed, W_gate), weight
    return Tracked(gated_output(*parts, eps=eps, dtype=low, backend=backend), h, y)


def choose_track(inputs: TrackInputs, backend: Backend) -> Implementation:
    """The implementation of `track`; raises as `choose_backend` does. Warns, once, of a call on a
    GPU that has no kernel, unless it is in float64, for which there are none at all."""
    dtype = accumulator(*[v.dtype for v in inputs if v is not None])
    sizes = inputs.W_y.shape[-1], inputs.A_log.shape[-1]
    unsupported = None if dtype == torch.float64 else unfit(*sizes)
    dtype = inputs.x.dtype if dtype == torch.float32 else dtype
    return choose_backend(backend, inputs.x.device, dtype, unsupported, warning=unsupported)


def _check(inputs: TrackInputs) -> None:
    x, B, C, delta, erase, gate, skip, dt_bias, erase_bias, A_log, D, weight, W_y, h0, y0 = inputs
    check_sequence("x", x)
    check_sequence("erase", erase)
    b, t, H, c, n = inputs.sizes
    d = H * c
    check_shapes((b, t, d), "(b, t, H c)", x=x, delta=delta, gate=gate, skip=skip)
    check_shapes((b, t, H * n), "(b, t, H n)", B=B, C=C)
    check_shapes((d,), "(H c,)", dt_bias=dt_bias, D=D, weight=weight)
    check_shapes((H,), "(H,)", erase_bias=erase_bias)
    check_shapes((H, 3 * c, c), "(H, 3 c, c)", W_y=W_y)
    check_shapes((H, c, n), "(H, c, n)", A_log=A_log if A_log.dim() == 3 else None)
    check_shapes((d, n), "(H c, n)", A_log=None if A_log.dim() == 3 else A_log)
    check_shapes((b, d, n), "(b, H c, n)", h0=h0)
    check_shapes((b, d), "(b, H c)", y0=y0)


INPUTS = (
    "Tensor x, Tensor B, Tensor C, Tensor delta, Tensor erase, Tensor dt_bias, Tensor erase_bias, "
    "Tensor A_log, Tensor W, Tensor? h0, Tensor? y0, float eps"
)
COUNT = len(Recurrence._fields)
"""Tensors of the operation."""

SEQUENTIAL = "sweep_kernel", "replay_kernel", "reverse_kernel"
"""The kernels whose threads have one channel each."""


@lru_cache(maxsize=1024)
def options(kernel: Any, layout: Layout, eps: float) -> dict[str, Any]:
    """What a kernel has at compile time, and its launch options. Not to be changed."""
    name = kernel.__name__
    warps = 1 if name == "gradients_kernel" else 4
    if name in SEQUENTIAL:
        warps = layout.P * layout.NL // 32
    tokens = TOKENS if name == "prepare_kernel" else FINISH_TOKENS
    every: dict[str, Any] = {
        "s": as_constants(layout),
        **{"CHUNK": CHUNK, "TOKENS": tokens},
        **{"S": GRADIENT_STATES, "PL": 32 * layout.V // GRADIENT_STATES},
        **{"FEEDBACK_EPS": eps, "UNIT_EPS": UNIT_EPS},
    }
    known = {name: v for name, v in every.items() if name in kernel.arg_names}
    # operations are fused, which is Triton's default in some versions alone
    return known | {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


def _readable(given: tuple[Any, ...]) -> tuple[Recurrence, tuple[tuple[int, ...], ...]]:
    """The tensors as the kernels read them: rows whose last axis is contiguous, all else whole; and
    the strides of the samples and tokens of the rows."""
    rows = tuple(map(last_axis_contiguous, given[:5]))
    whole = (None if v is None else v.contiguous() for v in given[5:COUNT])
    return Recurrence(*rows, *whole), tuple(v.stride()[:2] for v in rows)


def _like(*given: Any) -> tuple[Tensor, ...]:
    inputs = Recurrence(*given[:COUNT])
    x, layout, (b, t, H) = inputs.x, inputs.layout, inputs.erase.shape
    c, n = layout[:2]
    y, h = (x.new_empty(size, dtype=torch.float32) for size in ((b, t, H * c), (b, H * c, n)))
    return y, h, x.new_empty(b, t, H * c), *Kept.empty(inputs.erase, layout, given[-1])


@operation("track", f"({INPUTS}, bool keep) -> ({', '.join(['Tensor'] * 10)})", _like)
def track_operation(*given: Any) -> tuple[Tensor, ...]:
    """y (b, t, H c), the last h (b, H c, n), norm(y_{t-1}) (b, t, H c) in the dtype of x, and the
    fields of `Kept`, a part of them without `keep`. No size may be 0."""
    from bedouin.kernels.track.triton_sweep import prepare_kernel, sweep_kernel

    read, (eps, keep) = _readable(given), given[COUNT:]
    layout, (b, t, H) = read[0].layout, read[0].erase.shape
    y, h, normed, *found = _like(*given)
    kept = Kept(*found)
    words = kept.B.view(torch.int32), kept.C.view(torch.int32)
    prepare_kernel[(ceil_div(b * t, TOKENS), H)](
        *(*read, *words, kept.scalars, b * t, t, H), **options(prepare_kernel, layout, eps)
    )
    with without_coalescing():
        sweep_kernel[(b * H,)](
            *(*read, kept, h, y, normed, t, H), KEEP=keep, **options(sweep_kernel, layout, eps)
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
    from bedouin.kernels.track.triton_sweep import finish_kernel

    kept, (inputs, strides), eps = Kept(*given[:7]), _readable(given[7:]), given[-1]
    x, A_log, layout, (b, t, H) = inputs.x, inputs.A_log, inputs.layout, inputs.erase.shape
    (c, n, P, N, *_), f, chunks = layout, b * H, ceil_div(t, CHUNK)
    blocks = ceil_div(b * t, FINISH_TOKENS)
    found, grad_y = empty_like(*inputs), grad_y.contiguous()
    grads = Recurrence(*found)
    normed, fed = x.new_empty(b, t, H, c), x.new_empty(b, t, H, 2, c)
    adjoint, slopes, factors = (torch.empty_like(kept.rows) for _ in range(3))
    edges, memory = torch.empty_like(kept.states), kept.rows.new_empty(f, t, P * layout.WORDS)
    read, grad_past = grad_y.new_empty(2, f, t, P)
    unit_B, unit_C = grad_y.new_empty(2, f, t, N)
    last = None if grad_h is None else grad_h.contiguous()
    parts = grad_y.new_empty(f, ceil_div(chunks, PART), c, n)
    sums = grad_y.new_empty(blocks, H, 2, c)
    with without_coalescing():
        replay_kernel[(f, chunks)](
            *(inputs, strides, kept, grad_y, grad_normed.contiguous()),
            *(memory, factors, slopes, read, grad_past, t, H),
            **options(replay_kernel, layout, eps),
        )
        reverse_kernel[(f,)](
            *(inputs, kept, slopes, factors, memory, grad_past, grad_y),
            *(last, grads, edges, adjoint, fed, t, H),
            **options(reverse_kernel, layout, eps),
        )
        gradients_kernel[(f * parts.shape[1] * (N // GRADIENT_STATES),)](
            *(kept, adjoint, memory, A_log, edges, unit_B, unit_C, parts, t, H),
            PART=PART,
            **options(gradients_kernel, layout, eps),
        )
    finish_kernel[(blocks, H)](
        *(inputs, strides, kept, adjoint, read, unit_B, unit_C, fed, grads, normed, sums),
        *(b * t, t, H),
        **options(finish_kernel, layout, eps),
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
    return *found[:5], *cast, *found[9:]


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
