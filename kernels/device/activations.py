"""What the kernels of a token compute of its vectors: activations, decays, scales, norms."""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.scan.triton_segments import build_coupled, build_decay


@triton.jit
def sigmoid(v):
    """Without overflow on either side."""
    z = tl.exp(-tl.abs(v))
    inverse = 1 / (1 + z)
    return tl.where(v >= 0, inverse, z * inverse)


@triton.jit
def log1p_of_fraction(z):
    """log(1 + z) for 0 <= z <= 1: a polynomial times z, relative error below 2e-7 in float32."""
    value = 0.005232673138380051 * z - 0.029505159705877304
    value = value * z + 0.07822583615779877
    value = value * z - 0.13663236796855927
    value = value * z + 0.19106003642082214
    value = value * z - 0.2484298199415207
    value = value * z + 0.3331909775733948
    value = value * z - 0.4999949336051941
    value = value * z + 0.9999999403953552
    return value * z


@triton.jit
def softplus(v):
    """log(1 + exp(v)); in float64 v itself above 20, as in torch (in float32 that is the same).

    In float64 log1p(z) = log(u) z / (u - 1), u = 1 + z rounded: exact to rounding where log(1 + z)
    is not. In float32 a polynomial is as exact and takes a tenth of the instructions.
    """
    z = tl.exp(-tl.abs(v))
    if v.dtype == tl.float64:
        u = 1 + z
        log1p = tl.where(u == 1, z, tl.log(u) * z / tl.where(u == 1, 1.0, u - 1))
        return tl.where(v > 20, v, tl.maximum(v, 0.0) + log1p)
    else:
        return tl.maximum(v, 0.0) + log1p_of_fraction(z)


@triton.jit
def activate(raw, ACTIVATION: tl.constexpr):
    """Delta from its raw value."""
    if ACTIVATION == "sigmoid":
        return sigmoid(raw)
    elif ACTIVATION == "softplus":
        return softplus(raw)
    else:
        return softplus(-raw)


@triton.jit
def activate_vjp(grad, raw, ACTIVATION: tl.constexpr):
    """Cotangent of the raw value from that of Delta."""
    if ACTIVATION == "sigmoid":
        value = sigmoid(raw)
        return grad * value * (1 - value)
    elif ACTIVATION == "softplus":
        return grad * tl.where(raw > 20, 1.0, sigmoid(raw))
    else:
        return -grad * tl.where(raw < -20, 1.0, sigmoid(-raw))


@triton.jit
def decay_tile(delta, A, EIGENVALUES: tl.constexpr):
    """lambda (n, d) from Delta (d,) and A (n, d)."""
    decay = tl.exp(A * delta[None, :])
    if EIGENVALUES == "full":
        decay = 2 * decay - 1
    return decay


@triton.jit
def decay_rows(delta, A_log2, FULL: tl.constexpr, FAST: tl.constexpr):
    """lambda (n, d) from Delta (d,) and log2(e) A (n, d)."""
    return build_decay(A_log2 * delta[None, :], FULL, FAST)


@triton.jit
def coupled_rows(delta, A_log2, FULL: tl.constexpr, FAST: tl.constexpr):
    """lambda and s = 1 - |lambda|, (n, d) each, from Delta (d,) and log2(e) A (n, d)."""
    return build_coupled(A_log2 * delta[None, :], FULL, FAST)


@triton.jit
def input_scale(delta, INPUT_SCALE: tl.constexpr):
    """s (d,) of the scales that have no state axis."""
    if INPUT_SCALE == "bounded_delta":
        return delta / (1 + delta)
    else:
        return delta


@triton.jit
def _larger2(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _larger3(a0, a1, a2, b0, b1, b2):
    return tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2)


@triton.jit
def max_norms(v0, v1, v2):
    """max |v| of three vectors in one reduction, NaN left out."""
    return tl.reduce((tl.abs(v0), tl.abs(v1), tl.abs(v2)), 0, _larger3)


@triton.jit
def max_norms_of_two(v0, v1):
    """max |v| of two vectors in one reduction, NaN left out."""
    return tl.reduce((tl.abs(v0), tl.abs(v1)), 0, _larger2)
