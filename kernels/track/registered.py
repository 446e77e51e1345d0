"""The tracker's recurrence in Triton as an operation of torch.library, once differentiable: two
launches forward, and backward four, three sums and a product.

Triton is imported when an operation runs. The operations take the fields of `Recurrence` one by
one. Letters as in `limits.py`.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.coalescing import without_coalescing
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import accumulator, arguments_of, ceil_div, last_axis_contiguous
from bedouin.kernels.operation import empty_like, operation, plain_operation
from bedouin.kernels.track.limits import (
    CHUNK,
    FINISH_TOKENS,
    GRADIENT_STATES,
    PART,
    TOKENS,
    Sizes,
)
from bedouin.kernels.track.reference import track_reference
from bedouin.kernels.track.types import Kept, Recurrence, Tracked, TrackInputs

INPUTS = (
    "Tensor x, Tensor B, Tensor C, Tensor delta, Tensor erase, Tensor dt_bias, Tensor erase_bias, "
    "Tensor A_log, Tensor W, Tensor? h0, Tensor? y0, float eps"
)
COUNT = len(Recurrence._fields)

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
