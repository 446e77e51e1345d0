"""Discretization of a token: its decay lambda and its input scale s, from Delta and A.

Exponents are multiplied by log2(e): 2^v takes one instruction, exp(v) four more.
Letters: d channels, n state per channel.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import exp2, one_minus_exp2, reciprocal


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
    delta,  # with the axis of channels, and one of size 1
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
):
    """lambda = exp(A Delta), or 2 exp(A Delta) - 1 if FULL, in the shape of A; and s, in the shape
    of delta, or of A for the coupled scale 1 - |lambda|, exact to rounding near both ends.

    A token past the end has Delta = 0, so lambda = 1 and s = 0: it changes nothing.
    """
    exponent = A_log2 * delta
    power = exp2(exponent, FAST)
    decay = 2 * power - 1 if FULL else power
    if INPUT_SCALE == "one_minus_decay":
        rest = one_minus_exp2(exponent, power)
        return decay, 2 * tl.minimum(power, rest) if FULL else rest
    else:
        return decay, input_scale(delta, INPUT_SCALE, FAST)


@triton.jit
def coupled_reach(decay, s, FULL: tl.constexpr):
    """d lambda / d(A Delta) beside the coupled scale: lambda, or for FULL lambda + 1.

    Near lambda = -1 that sum has lost its digits, and s is the same number.
    """
    if FULL:
        return tl.where(decay < 0, s, decay + 1)
    else:
        return decay
