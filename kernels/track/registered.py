"""The tracker's recurrence in Triton as an operation of torch.library, once differentiable: three
launches forward, and backward five and three sums.

Triton is imported when an operation runs. The operations take the fields of `TrackInputs` one by
one. Letters as in `limits.py`.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.coalescing import without_coalescing
from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import accumulator, ceil_div, dtype_of_factors, last_axis_contiguous
from bedouin.kernels.operation import operation, plain_operation
from bedouin.kernels.track.limits import (
    CHUNK,
    GRADIENT_STATES,
    OUTPUT_TOKENS,
    STATES_OF_REVERSE,
    STATES_OF_SWEEP,
    TOKENS,
    Sizes,
)
from bedouin.kernels.track.reference import track_reference
from bedouin.kernels.track.types import ROWS, Gradients, Kept, Tracked, TrackInputs

INPUTS = (
    "Tensor x, Tensor B, Tensor C, Tensor delta, Tensor erase, Tensor gate, Tensor skip, "
    "Tensor dt_bias, Tensor erase_bias, Tensor A_log, Tensor D, Tensor weight, Tensor W_y, "
    "Tensor? h0, Tensor? y0, float feedback_eps, float eps"
)
COUNT = len(TrackInputs._fields)

FLAGS = "STARTED", "KEEP", "OF_Y", "LAST"
"""Switches of a call: whether there is a state before it, a backward after it, and a cotangent of y
and of the last memory."""

SEQUENTIAL = "sweep_kernel", "replay_kernel", "reverse_kernel"
"""The kernels whose threads have one channel each."""


@lru_cache(maxsize=1024)
def options(
    kernel: Any,
    sizes: Sizes,
    dtype: torch.dtype,
    epsilons: tuple[float, float],
    flags: tuple[str, ...],
) -> dict[str, Any]:
    """What a kernel has at compile time, and its launch options; `flags` names the switches of the
    call that are on. Not to be changed."""
    name = kernel.__name__
    states = STATES_OF_SWEEP if name == "sweep_kernel" else STATES_OF_REVERSE
    tokens = TOKENS if name == "prepare_kernel" else OUTPUT_TOKENS
    every: dict[str, Any] = {
        **{"c": sizes.c, "n": sizes.n, "P": sizes.P, "N": sizes.N, "V": sizes.V},
        **{"NL": sizes.lanes(states), "CHUNK": CHUNK, "TOKENS": tokens, "S": GRADIENT_STATES},
        **{"PL": 32 * sizes.V // GRADIENT_STATES, "FAST": not interpreter_is_on()},
        **{"FEEDBACK_EPS": epsilons[0], "EPS": epsilons[1], "UNIT_EPS": UNIT_EPS},
        "DOT": dtype_of_factors(dtype),
        "PRECISION": "tf32x3",
        **{flag: flag in flags for flag in FLAGS},
    }
    found = {name: v for name, v in every.items() if name in kernel.arg_names}
    warps = 1 if name == "gradients_kernel" else 4
    if name in SEQUENTIAL:
        warps = sizes.P * every["NL"] // 32
    return found | {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


def _readable(inputs: TrackInputs) -> TrackInputs:
    """The inputs as the kernels read them: rows whose last axis is contiguous, all else whole."""
    whole = (None if v is None else v.contiguous() for v in inputs[ROWS:])
    return TrackInputs(*map(last_axis_contiguous, inputs[:ROWS]), *whole)


def _switches(inputs: TrackInputs, **others: bool) -> tuple[str, ...]:
    """Those that are on, as `options` takes them."""
    others |= {"STARTED": inputs.y0 is not None}
    return tuple(name for name, is_on in others.items() if is_on)


@operation("track", f"({INPUTS}, bool keep) -> ({', '.join(['Tensor'] * 9)})")
def track_operation(*given: Any) -> tuple[Tensor, ...]:
    """hidden (b, t, H c), the last h (b, H c, n), y (b, t, H c), and the fields of `Kept`, a part
    of them without `keep`. h0 and y0 are both there or none is; no size may be 0."""
    from bedouin.kernels.track.triton_output import output_kernel
    from bedouin.kernels.track.triton_sweep import sweep_kernel
    from bedouin.kernels.track.triton_tokens import prepare_kernel

    inputs, (*epsilons, keep) = _readable(TrackInputs(*given[:COUNT])), given[COUNT:]
    x, B, C, delta, erase, gate, skip = inputs[:ROWS]
    b, t, H, _, _ = inputs.sizes
    sizes = Sizes.of(*inputs.sizes, x.dtype)
    how = sizes, x.dtype, tuple(epsilons), _switches(inputs, KEEP=keep)
    hidden, h, y, *found = _fake(*given)
    kept = Kept(*found)
    words, numbers = (kept.B.view(torch.int32), kept.C.view(torch.int32)), (b * t, t, H)
    prepare_kernel[(ceil_div(b * t, TOKENS), H)](
        *(B, C, erase, inputs.erase_bias, *words, kept.scalars, *numbers),
        *(*B.stride()[:2], *C.stride()[:2], *erase.stride()[:2]),
        **options(prepare_kernel, *how),
    )
    # what a kernel does not read has any tensor in its place
    before = (h if inputs.h0 is None else inputs.h0, y if inputs.y0 is None else inputs.y0)
    with without_coalescing():
        sweep_kernel[(sizes.f,)](
            *(x, delta, kept.scalars, kept.B, kept.C),
            *(inputs.dt_bias, inputs.A_log, inputs.W_y, *before, h, y, *kept[3:]),
            *(t, H, *x.stride()[:2], *delta.stride()[:2]),
            **options(sweep_kernel, *how),
        )
    output_kernel[(ceil_div(b * t, OUTPUT_TOKENS), H)](
        *(skip, gate, y, before[1], inputs.D, inputs.weight, inputs.W_y, hidden, *numbers),
        *(*skip.stride()[:2], *gate.stride()[:2]),
        **options(output_kernel, *how),
    )
    return hidden, h, y, *kept


@track_operation.register_fake
def _fake(*given: Any) -> tuple[Tensor, ...]:
    inputs = TrackInputs(*given[:COUNT])
    x, (b, t, H, c, n) = inputs.x, inputs.sizes
    kept = Kept.empty(x, Sizes.of(b, t, H, c, n, x.dtype), given[-1])
    h, y = (x.new_empty(size, dtype=torch.float32) for size in ((b, H * c, n), (b, t, H * c)))
    return x.new_empty(x.shape), h, y, *kept


@operation(
    "track_backward",
    "(Tensor grad, Tensor? grad_h, Tensor? grad_y, Tensor y, Tensor B_words, Tensor C_words, "
    "Tensor scalars, Tensor rows, Tensor fed, Tensor states, "
    f"{INPUTS}) -> ({', '.join(['Tensor'] * 12)})",
)
def _backward(
    grad: Tensor,  # (b, t, H c)
    grad_h: Tensor | None,  # (b, H c, n); None: zeros
    grad_y: Tensor | None,  # (b, t, H c); None: zeros
    y: Tensor,  # (b, t, H c)
    *given: Any,
) -> tuple[Tensor, ...]:
    """The fields of `Gradients`. No size may be 0."""
    from bedouin.kernels.track.triton_output import output_backward_kernel
    from bedouin.kernels.track.triton_tokens import finish_kernel

    kept, inputs = Kept(*given[:6]), _readable(TrackInputs(*given[6 : 6 + COUNT]))
    x, gate, skip = inputs.x, inputs.gate, inputs.skip
    sizes = Sizes.of(*inputs.sizes, x.dtype)
    (b, t, H, c, n, P, N, _), f, blocks = sizes, sizes.f, sizes.blocks
    how = sizes, x.dtype, given[6 + COUNT :], _switches(inputs, OF_Y=grad_y is not None)
    found, grad = Gradients.empty(inputs), last_axis_contiguous(grad)
    grad_y = y if grad_y is None else grad_y.contiguous()
    fed, normed = x.new_empty(b, t, H, 3, c), x.new_empty(b, t, H, c)
    past, inverse = kept.rows.new_empty(f, t + 1, P), y.new_empty(f, t + 1)
    sums = y.new_empty(blocks, H, 4, c)
    output_backward_kernel[(blocks, H)](
        *(grad, grad_y, skip, gate, y, y if inputs.y0 is None else inputs.y0),
        *(inputs.D, inputs.weight, inputs.W_y),
        *(found.skip, found.gate, fed, normed, past, inverse, sums, b * (t + 1), t, H),
        *(*grad.stride()[:2], *skip.stride()[:2], *gate.stride()[:2]),
        **options(output_backward_kernel, *how),
    )
    read, adjoint = y.new_empty(f, t, P, dtype=sizes.low), torch.empty_like(kept.rows)
    unit_B, unit_C = y.new_empty(f, t, N), y.new_empty(f, t, N)
    buffers = past, inverse, adjoint, read, fed, unit_B, unit_C
    parts = _reverse(grad_h, kept, inputs, buffers, found, how)
    finish_kernel[(blocks, H)](
        *(inputs.B, inputs.C, kept.scalars, kept.rows, adjoint, read, unit_B, unit_C, fed),
        *(found.x, found.B, found.C, found.delta, found.erase, sums, b * t, t, H),
        *(*inputs.B.stride()[:2], *inputs.C.stride()[:2]),
        **options(finish_kernel, *how),
    )
    torch.sum(sums, 0, out=found.sums)
    torch.sum(parts.view(b, H, -1, c, n), (0, 2), out=found.A_log.view(H, c, n))
    rows, columns = fed.view(b * t, H, 3 * c), normed.view(b * t, H, c)
    torch.bmm(rows.permute(1, 2, 0), columns.transpose(0, 1), out=found.W_y)
    return found


@_backward.register_fake
def _backward_fake(*given: Any) -> tuple[Tensor, ...]:
    return Gradients.empty(TrackInputs(*given[10 : 10 + COUNT]))


def _reverse(
    grad_h: Tensor | None,  # (b, H c, n), of the last h
    kept: Kept,
    inputs: TrackInputs,
    buffers: tuple[Tensor, ...],  # past, inverse, adjoint, read, fed, unit_B, unit_C
    found: Gradients,  # of which h0 and y0 are written
    how: tuple[Sizes, torch.dtype, tuple[float, float], tuple[str, ...]],
) -> Tensor:  # (f, parts, c, n), of A_log
    """What depends on the order of the tokens, in segments from the last one on."""
    from bedouin.kernels.track.triton_gradients import gradients_kernel
    from bedouin.kernels.track.triton_reverse import replay_kernel, reverse_kernel

    past, inverse, adjoint, read, fed, unit_B, unit_C = buffers
    (_, t, H, c, n, P, N, V), f, (x, A_log) = how[0], how[0].f, (inputs.x, inputs.A_log)
    longest = min(how[0].segment * CHUNK, t)
    memory, slopes = past.new_empty(f, longest, N * P // V), past.new_empty(f, longest, P)
    factors, edges = kept.fed.new_empty(f, longest, P), torch.empty_like(kept.states)
    words, numbers, parts = (kept.scalars, kept.B, kept.C), x.stride()[:2], []
    last = found.h0 if grad_h is None else grad_h.contiguous()
    with without_coalescing():
        for start in reversed(range(0, t, longest)):
            tokens = min(longest, t - start)
            chunks = ceil_div(tokens, CHUNK)
            replay_kernel[(f, chunks)](
                *(x, kept.rows, kept.fed, *words, A_log, kept.states),
                *(memory, factors, slopes, read, t, H, start, tokens, *numbers),
                **options(replay_kernel, *how),
            )
            ends = start + tokens < t or grad_h is not None
            reverse_kernel[(f,)](
                *(slopes, factors, kept.fed, memory, past, inverse, *words, A_log, inputs.W_y),
                *(last, found.h0, edges, adjoint, fed, found.y0, t, H, start, tokens),
                **options(reverse_kernel, *how[:3], ("LAST",) if ends else ()),
            )
            part = found.A_log.new_empty(f, ceil_div(chunks, how[0].per_part), c, n)
            gradients_kernel[(f * part.shape[1] * (N // GRADIENT_STATES),)](
                *(kept.rows, adjoint, *words, memory, A_log, edges, unit_B, unit_C, part),
                *(t, H, start, tokens, how[0].per_part, part.shape[1]),
                **options(gradients_kernel, *how),
            )
            parts.append(part)
            last = found.h0
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.feedback_eps, ctx.eps, keep = inputs
    if not keep:
        raise ValueError("keep must be True where gradients are recorded, got False")
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)  # zeros for what is kept would be written and not read
    ctx.save_for_backward(*output[2:], *tensors)


def _gradients(
    ctx: Any,
    grad: Tensor | None,  # (b, t, H c)
    grad_h: Tensor | None,  # (b, H c, n)
    grad_y: Tensor | None,  # (b, t, H c)
    *_: None,  # of what is kept
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    inputs = TrackInputs(*saved[7:])
    grad = torch.zeros_like(inputs.x) if grad is None else grad
    with torch.no_grad():
        *rows, sums, A_log, W_y, h0, y0 = _backward(
            grad, grad_h, grad_y, *saved, ctx.feedback_eps, ctx.eps
        )
        # unequal in what they belong to: D, the weight and dt_bias have (H c,), erase_bias (H,)
        of_D, of_weight, of_dt, of_erase = sums.unbind(1)
        found = [*rows, of_dt.reshape(-1), of_erase[:, 0], A_log, of_D.reshape(-1)]
        found += [of_weight.reshape(-1), W_y, h0, y0]
        pairs = zip(found, inputs, strict=True)
        grads = [None if v is None else of.to(v.dtype) for of, v in pairs]
    return *refuse_second_derivative(grads, [grad, grad_h, grad_y, *inputs]), *[None] * 3


track_operation.register_autograd(_gradients, setup_context=_save)


def _plain(*flat: Any) -> Tracked:
    return track_reference(TrackInputs(*flat[:COUNT]), *flat[COUNT:])


def _plain_fake(*flat: Any) -> Tracked:
    inputs = TrackInputs(*flat[:COUNT])
    b, t, H, c, n = inputs.sizes
    dtype = accumulator(*[v.dtype for v in inputs if v is not None])
    h, y = (inputs.x.new_empty(shape, dtype=dtype) for shape in ((b, H * c, n), (b, t, H * c)))
    return Tracked(inputs.x.new_empty(y.shape), h, y)


_TENSORS, _, _ = INPUTS.partition(", float")
plain_track = plain_operation(
    "plain_track", _TENSORS, "float feedback_eps, float eps", _plain, _plain_fake, results=3
)
