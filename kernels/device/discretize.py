"""Discretization of a token: its decay lambda and its input scale s, from Delta and A.

`exponent` is log2(e) A Delta, of any shape: 2^v takes one instruction, exp(v) four more.
Letters: d channels, n state per channel.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import exp2, one_minus_exp2, reciprocal


@triton.jit
def build_decay(exponent, FULL: tl.constexpr, FAST: tl.constexpr):
    """lambda = 2^exponent, or 2 * 2^exponent - 1 if FULL, from log2(e) A Delta <= 0.

    A token past the end has Delta = 0, so lambda = 1 and s = 0: it changes nothing.
    """
    decay = exp2(exponent, FAST)
    if FULL:
        decay = 2 * decay - 1
    return decay


@triton.jit
def build_coupled(exponent, FULL: tl.constexpr, FAST: tl.constexpr):
    """lambda and the coupled scale s = 1 - |lambda|, exact to rounding near both ends."""
    power = exp2(exponent, FAST)
    rest = one_minus_exp2(exponent, power)
    if FULL:
        return 2 * power - 1, 2 * tl.minimum(power, rest)
    else:
        return power, rest


@triton.jit
def coupled_reach(decay, s, FULL: tl.constexpr):
    """d lambda / d(A Delta) beside the coupled scale: lambda, or for FULL lambda + 1.

    Near lambda = -1 that sum has lost its digits, and s is the same number.
    """
    if FULL:
        return tl.where(decay < 0, s, decay + 1)
    else:
        return decay


@triton.jit
def input_scale(delta, INPUT_SCALE: tl.constexpr, FAST: tl.constexpr):
    """s (d,) of the input scales without a state axis, Delta or Delta / (1 + Delta)."""
    if INPUT_SCALE == "bounded_delta":
        return delta * reciprocal(1 + delta, FAST)
    else:
        return delta


@triton.jit
def discretize(
    A_log2,  # log2(e) A, with a channel and a state axis
    delta,  # with the axis of channels alone, and one of size 1
    INPUT_SCALE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """lambda in the shape of A, and s, in that of A if coupled, else in that of delta."""
    if INPUT_SCALE == "one_minus_decay":
        return build_coupled(A_log2 * delta, FULL, FAST)
    else:
        return build_decay(A_log2 * delta, FULL, FAST), input_scale(delta, INPUT_SCALE, FAST)
