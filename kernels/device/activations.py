"""Delta from its raw value, and the adjoint of that."""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import (
    LOG2E,
    exp2,
    log1p_of_fraction,
    reciprocal,
    sigmoid,
)


@triton.jit
def activate(raw, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """Delta from its raw value."""
    if ACTIVATION == "sigmoid":
        if FAST:
            # the power may overflow to infinity, whose reciprocal is 0
            return reciprocal(1 + exp2(raw * -LOG2E, FAST), FAST)
        else:
            return sigmoid(raw)
    else:
        v = raw if ACTIVATION == "softplus" else -raw
        return tl.maximum(v, 0.0) + log1p_of_fraction(exp2(tl.abs(v) * -LOG2E, FAST))


@triton.jit
def activate_vjp(grad, raw, ACTIVATION: tl.constexpr):
    """Cotangent of the raw value from the cotangent of Delta."""
    if ACTIVATION == "sigmoid":
        value = sigmoid(raw)
        return grad * value * (1 - value)
    elif ACTIVATION == "softplus":
        return grad * tl.where(raw > 20, 1.0, sigmoid(raw))
    else:
        return -grad * tl.where(raw < -20, 1.0, sigmoid(-raw))


@triton.jit
def silu_slope(v, sigmoid):
    """d SiLU(v) / dv from v and sigmoid(v)."""
    return sigmoid * (1 + v * (1 - sigmoid))
