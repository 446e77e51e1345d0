"""Measurements with their own procedures: one iteration, one decoded token.

Letters: b batch, t time, m d_model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bedouin import Bedouin, Decoder
from bedouin.solvers import FixedCap, Jacobi, Picard
from benchmarks.cost import iteration_cost
from benchmarks.measure import Context, Numbers
from benchmarks.setting import Shape
from benchmarks.timing import capture, median_ms, release_memory, replay_ms

FEW, MANY = 8, 24
"""The two caps whose times give the time of one iteration."""
TOKENS = 64
"""Number of tokens that are decoded in one timed call."""


def one_iteration(context: Context, shape: Shape, *, kind: type[Jacobi] | type[Picard]) -> Numbers:
    """One fused iteration without its product: the slope of the forward time over the cap.

    Feedback is off, so the loop contains no product; the tolerances are 0, so no token freezes.
    Captured on a GPU.
    """
    times = [_capped_ms(context, shape, kind, cap) for cap in (FEW, MANY)]
    ms = (times[1] - times[0]) / (MANY - FEW)
    cost = iteration_cost(context.setting, shape)
    floor = cost.floor_ms(context.machine)
    return {
        "forward_ms": ms,
        "forward_floor_ms": floor,
        "forward_floor_share": floor / ms,
        "times_floor": ms / floor,
        "forward_gb_per_s": cost.bytes / ms / 1e6,
    }


@torch.no_grad()
def _capped_ms(
    context: Context, shape: Shape, kind: type[Jacobi] | type[Picard], cap: int
) -> float:
    setting = context.setting
    solver = kind(rtol=0.0, atol=0.0)
    layer = setting.layer(solver=solver, max_steps=FixedCap(cap), feedback=())
    x = setting.randn(shape.b, shape.t, setting.m)
    return _replayed_ms(context, lambda: layer(x))


def _replayed_ms(context: Context, call: Callable[[], object]) -> float:
    """Median time of a captured call, or of the eager call without a GPU or with --no-graph."""
    setting = context.setting
    if setting.device.type != "cuda" or not context.graph:
        return median_ms(lambda i: call(), setting.device, context.repeats)
    ms = replay_ms(capture(call), setting.device, context.repeats)
    release_memory()
    return ms


def decode(context: Context, shape: Shape) -> Numbers:
    """Microseconds per token with `step` and with `Decoder`."""
    # made outside, because tensors made in inference mode have no version counter
    layer = context.setting.layer()
    with torch.inference_mode():
        return {
            "us_a_layer": _stretch_us(context, shape, _stepping(layer, shape.b)),
            "decoder_us": _stretch_us(context, shape, Decoder(layer, shape.b)),
        }


def _stepping(layer: Bedouin, b: int) -> Callable[[Tensor], Tensor]:
    """`step` as a function (b, m) -> (b, m) that keeps the state."""
    state = layer.init_state(b)

    def step(x_t: Tensor) -> Tensor:
        nonlocal state
        y_t, state = layer.step(x_t, state)
        return y_t

    return step


def _stretch_us(context: Context, shape: Shape, step: Callable[[Tensor], Tensor]) -> float:
    """Microseconds of a step, of TOKENS tokens (b, m) one after the other."""
    setting = context.setting
    tokens = [setting.randn(shape.b, setting.m) for _ in range(TOKENS)]

    def stretch(i: int) -> None:
        for token in tokens:
            step(token)

    return 1e3 * median_ms(stretch, setting.device, context.repeats) / TOKENS
