"""Launches of the tracker's kernels: three forward, and backward five and three sums.

Letters as in `limits.py`.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.coalescing import without_coalescing
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import ceil_div, last_axis_contiguous
from bedouin.kernels.track.limits import (
    CHUNK,
    GRADIENT_STATES,
    OUTPUT_TOKENS,
    STATES_OF_REVERSE,
    STATES_OF_SWEEP,
    TOKENS,
    Sizes,
)
from bedouin.kernels.track.triton_gradients import gradients_kernel
from bedouin.kernels.track.triton_output import output_backward_kernel, output_kernel
from bedouin.kernels.track.triton_reverse import replay_kernel, reverse_kernel
from bedouin.kernels.track.triton_sweep import sweep_kernel
from bedouin.kernels.track.triton_tokens import finish_kernel, prepare_kernel
from bedouin.kernels.track.types import Gradients, Kept, TrackInputs


def constants(sizes: Sizes, dtype: torch.dtype, epsilons: tuple[float, float]) -> dict[str, Any]:
    """What the kernels have at compile time beside the flags of a call and the lanes."""
    dot = torch.float32 if interpreter_is_on() else dtype
    return {
        **{"c": sizes.c, "n": sizes.n, "P": sizes.P, "N": sizes.N, "V": sizes.V},
        **{"CHUNK": CHUNK, "FAST": not interpreter_is_on()},
        **{"FEEDBACK_EPS": epsilons[0], "EPS": epsilons[1]},
        "DOT": getattr(triton.language, str(dot).removeprefix("torch.")),
        "PRECISION": "tf32x3",
    }


def options_of(kernel: Any, sizes: Sizes, common: dict[str, Any]) -> dict[str, Any]:
    """Those of `common` that the kernel takes, and what only it has."""
    own: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    if kernel in (sweep_kernel, replay_kernel, reverse_kernel):
        lanes = sizes.lanes(STATES_OF_SWEEP if kernel is sweep_kernel else STATES_OF_REVERSE)
        # a thread has one channel
        own |= {"NL": lanes, "num_warps": sizes.P * lanes // 32}
    elif kernel is gradients_kernel:
        own |= {"NL": sizes.lanes(STATES_OF_REVERSE), "S": GRADIENT_STATES, "num_warps": 1}
        own["PL"] = 32 * sizes.V // GRADIENT_STATES
    elif kernel in (output_kernel, output_backward_kernel):
        own["TOKENS"] = OUTPUT_TOKENS
    else:
        own |= {"TOKENS": OUTPUT_TOKENS if kernel is finish_kernel else TOKENS, "EPS": UNIT_EPS}
    return {k: v for k, v in common.items() if k in kernel.arg_names} | own


def _readable(inputs: TrackInputs) -> TrackInputs:
    """The inputs as the kernels read them: rows whose last axis is contiguous, all else whole."""
    rows, others = inputs[:6], inputs[6:]
    whole = (None if v is None else v.contiguous() for v in others)
    return TrackInputs(*map(last_axis_contiguous, rows), *whole)


def launch_forward(
    inputs: TrackInputs, feedback_eps: float, eps: float, keep: bool
) -> tuple[Tensor, ...]:
    """hidden (b, t, H c), the last h (b, H c, n), y (b, t, H c), and the fields of `Kept`. No size
    may be 0."""
    inputs = _readable(inputs)
    x, delta, gate = inputs.x, inputs.delta, inputs.gate
    b, t, H, c, n = inputs.sizes
    sizes = Sizes.of(b, t, H, c, n, x.dtype)
    common = constants(sizes, x.dtype, (feedback_eps, eps))
    kept, hidden = Kept.empty(x, sizes, keep), x.new_empty(x.shape)
    h, y = (x.new_empty(size, dtype=torch.float32) for size in ((b, H * c, n), (b, t, H * c)))
    numbers = b * t, t, H
    words = kept.B.view(torch.int32), kept.C.view(torch.int32), kept.scalars
    prepare_kernel[(ceil_div(b * t, TOKENS), H)](
        *(inputs.B, inputs.C, inputs.erase, inputs.erase_bias, *words, *numbers),
        *(*inputs.B.stride()[:2], *inputs.C.stride()[:2], *inputs.erase.stride()[:2]),
        **options_of(prepare_kernel, sizes, common),
    )
    h0, y0 = inputs.h0, inputs.y0
    if (h0 is None) != (y0 is None):
        h0 = torch.zeros_like(h) if h0 is None else h0
        y0 = y.new_zeros(b, H * c) if y0 is None else y0
    started = h0 is not None
    before = (h, y) if h0 is None or y0 is None else (h0, y0)
    common |= {"STARTED": started, "NOISY": inputs.noise is not None}
    with without_coalescing():
        sweep_kernel[(sizes.f,)](
            *(
                x,
                x if inputs.noise is None else inputs.noise,
                delta,
                kept.scalars,
                kept.B,
                kept.C,
                inputs.dt_bias,
                inputs.A,
                inputs.W_y,
            ),
            *(*before, h, y, *kept[3:], t, H, *x.stride()[:2], *delta.stride()[:2]),
            KEEP=keep,
            **options_of(sweep_kernel, sizes, common),
        )
    output_kernel[(ceil_div(b * t, OUTPUT_TOKENS), H)](
        *(x, gate, y, before[1], inputs.D, inputs.weight, inputs.W_y, hidden, *numbers),
        *(*x.stride()[:2], *gate.stride()[:2]),
        **options_of(output_kernel, sizes, common),
    )
    return hidden, h, y, *kept


def launch_backward(
    grads: tuple[Tensor, Tensor | None, Tensor | None],  # (b, t, H c), (b, H c, n), (b, t, H c)
    y: Tensor,  # (b, t, H c)
    kept: Kept,
    inputs: TrackInputs,
    feedback_eps: float,
    eps: float,
) -> Gradients:
    """The gradients; those of outputs that are None are zeros. No size may be 0."""
    inputs = _readable(inputs)
    x, gate, sizes = inputs.x, inputs.gate, Sizes.of(*inputs.sizes, inputs.x.dtype)
    b, t, H, c = sizes[:4]
    f, P, N, blocks = sizes.f, sizes.P, sizes.N, sizes.blocks
    found = Gradients.empty(inputs)
    common = constants(sizes, x.dtype, (feedback_eps, eps))
    common |= {"STARTED": inputs.y0 is not None, "OF_Y": grads[2] is not None}
    common["NOISY"] = inputs.noise is not None
    grad, grad_y = last_axis_contiguous(grads[0]), y if grads[2] is None else grads[2].contiguous()
    fed, normed = x.new_empty(b, t, H, 3, c), x.new_empty(b, t, H, c)
    past, inverse = kept.rows.new_empty(f, t + 1, P), y.new_empty(f, t + 1)
    sums = y.new_empty(blocks, H, 4, c)
    y0 = y if inputs.y0 is None else inputs.y0
    output_backward_kernel[(blocks, H)](
        *(grad, grad_y, x, gate, y, y0, inputs.D, inputs.weight, inputs.W_y),
        *(found.x, found.gate, fed, normed, past, inverse, sums, b * (t + 1), t, H),
        *(*grad.stride()[:2], *x.stride()[:2], *gate.stride()[:2]),
        **options_of(output_backward_kernel, sizes, common),
    )
    read, adjoint = y.new_empty(f, t, P, dtype=sizes.low), torch.empty_like(kept.rows)
    unit_B, unit_C = (y.new_empty(f, t, N) for _ in range(2))
    buffers = past, inverse, adjoint, read, fed, unit_B, unit_C
    parts = _reverse(grads[1], kept, inputs, buffers, found, sizes, common)
    finish_kernel[(blocks, H)](
        *(inputs.B, inputs.C, kept.scalars, kept.rows, adjoint, read, unit_B, unit_C, fed),
        *(found.x, found.B, found.C, found.delta, found.erase, sums, b * t, t, H),
        *(*inputs.B.stride()[:2], *inputs.C.stride()[:2]),
        **options_of(finish_kernel, sizes, common),
    )
    torch.sum(sums, 0, out=found.sums)
    torch.sum(parts.view(b, H, -1, c, sizes.n), (0, 2), out=found.A.view(H, c, sizes.n))
    by_head = fed.view(b * t, H, 3 * c).transpose(0, 1), normed.view(b * t, H, c).transpose(0, 1)
    torch.bmm(by_head[0].mT, by_head[1], out=found.W_y)
    return found


def _reverse(
    grad_h: Tensor | None,  # (b, H c, n), of the last h
    kept: Kept,
    inputs: TrackInputs,
    buffers: tuple[Tensor, ...],  # past, inverse, adjoint, read, fed, unit_B, unit_C
    found: Gradients,  # of which h0 and y0 are written
    sizes: Sizes,
    common: dict[str, Any],
) -> Tensor:  # (f, parts, c, n), of A
    """What depends on the order of the tokens, in segments from the last one on."""
    past, inverse, adjoint, read, fed, unit_B, unit_C = buffers
    f, t, H, P, N, V = sizes.f, sizes.t, sizes.H, sizes.P, sizes.N, sizes.V
    longest, y = min(sizes.segment * CHUNK, t), inverse
    memory = past.new_empty(f, longest, N * P // V)
    slopes, factors = past.new_empty(f, longest, P), kept.fed.new_empty(f, longest, P)
    edges, parts = torch.empty_like(kept.states), []
    last = found.h0 if grad_h is None else grad_h.contiguous()
    words, is_last = (kept.scalars, kept.B, kept.C), grad_h is not None
    with without_coalescing():
        for start in reversed(range(0, t, longest)):
            tokens = min(longest, t - start)
            chunks = ceil_div(tokens, CHUNK)
            replay_kernel[(f, chunks)](
                *(
                    inputs.x,
                    inputs.x if inputs.noise is None else inputs.noise,
                    kept.rows,
                    kept.fed,
                    *words,
                    inputs.A,
                    kept.states,
                ),
                *(memory, factors, slopes, read, t, H, start, tokens, *inputs.x.stride()[:2]),
                **options_of(replay_kernel, sizes, common),
            )
            reverse_kernel[(f,)](
                *(
                    slopes,
                    factors,
                    kept.fed,
                    memory,
                    past,
                    inverse,
                    *words,
                    inputs.A,
                    inputs.W_y,
                    last,
                ),
                *(found.h0, edges, adjoint, fed, found.y0, t, H, start, tokens),
                LAST=is_last,
                **options_of(reverse_kernel, sizes, common),
            )
            part = y.new_empty(f, ceil_div(chunks, sizes.per_part), sizes.c, sizes.n)
            gradients_kernel[(N // GRADIENT_STATES, part.shape[1], f)](
                *(kept.rows, adjoint, *words, memory, inputs.A, edges, unit_B, unit_C, part),
                *(t, H, start, tokens, sizes.per_part),
                **options_of(gradients_kernel, sizes, common),
            )
            parts.append(part)
            last, is_last = found.h0, True
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
