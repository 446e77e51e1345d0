"""Elementary functions, norms, raw values raw^x + W^y norm(y_{t-1}) of a token, what follows from
them, and its discretization.

With `exp` and divisions that cover every float32, one Delta costs about 110 instructions, against 5
for one state. Where FAST, the approximate instructions of the device take their place. Exponents
are multiplied by log2(e), because exp(v) takes four instructions more than 2^v. All computation is
in float32.
Letters: d channels, n state per channel, k reflections.
"""

import triton
import triton.language as tl

from bedouin.kernels.backend import interpreter_is_on

FAST = tl.constexpr(not interpreter_is_on())
"""Whether kernels are compiled, and not run by Triton's interpreter."""

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def exp2(v):
    """2^v; where FAST one instruction, which flushes results below 1e-38 to 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(v)


@triton.jit
def reciprocal(v):
    """1 / v; where FAST one instruction, exact to one unit in the last place, 0 for 1 / inf."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / v


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
def one_minus_exp2(exponent, power):
    """1 - 2^w from w <= 0 and power = 2^w; the difference cancels near w = 0.

    Down to w = -1 it is a polynomial times w, relative error below 2e-7.
    """
    near = 0.00011458056542323902 * exponent + 0.0012907800264656544
    near = near * exponent + 0.009596276096999645
    near = near * exponent + 0.05549895390868187
    near = near * exponent + 0.24022606015205383
    near = near * exponent + 0.6931471824645996
    near = -near * exponent
    return tl.where(exponent > -1, near, 1 - power)


@triton.jit
def sigmoid(v):
    """1 / (1 + exp(-v)), without overflow at either end."""
    z = tl.exp(-tl.abs(v))
    inverse = 1 / (1 + z)
    return tl.where(v >= 0, inverse, z * inverse)


@triton.jit
def activate(raw, ACTIVATION: tl.constexpr):
    """Delta from its raw value."""
    if ACTIVATION == "sigmoid":
        if FAST:
            # the power may overflow to infinity, whose reciprocal is 0
            return reciprocal(1 + exp2(raw * -LOG2E))
        else:
            return sigmoid(raw)
    else:
        v = raw if ACTIVATION == "softplus" else -raw
        return tl.maximum(v, 0.0) + log1p_of_fraction(exp2(tl.abs(v) * -LOG2E))


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


@triton.jit
def input_scale(delta, INPUT_SCALE: tl.constexpr):
    """s (d,) of the input scales without a state axis, Delta or Delta / (1 + Delta)."""
    if INPUT_SCALE == "bounded_delta":
        return delta * reciprocal(1 + delta)
    else:
        return delta


@triton.jit
def discretize(
    A_log2,  # log2(e) A, with a channel and a state axis
    delta,  # with the axis of channels, and one of size 1
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
):
    """lambda = exp(A Delta), or 2 exp(A Delta) - 1 if FULL, in the shape of A; and s, in the shape
    of delta, or of A for the coupled scale 1 - |lambda|, exact to rounding near both ends.

    A token past the end has Delta = 0, so lambda = 1 and s = 0: it changes nothing.
    """
    exponent = A_log2 * delta
    power = exp2(exponent)
    decay = 2 * power - 1 if FULL else power
    if INPUT_SCALE == "one_minus_decay":
        rest = one_minus_exp2(exponent, power)
        return decay, 2 * tl.minimum(power, rest) if FULL else rest
    else:
        return decay, input_scale(delta, INPUT_SCALE)


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
def larger_or_nan(a, b):
    """max(a, b), or NaN if one of them is NaN, as in torch.cummax."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def inverse_norm(squares, floor):
    """rsqrt(squares + floor), or NaN where the squares have overflowed, so that the sample is
    reported: the factor 0 would make a zero of the vector."""
    return tl.rsqrt(tl.where(squares == float("inf"), float("nan"), squares) + floor)


@triton.jit
def max_norm(v, axis: tl.constexpr):
    """max |v| over an axis, or NaN if there is one: a warp reduces integers in one instruction."""
    # as integers |v| are in the same order, and NaN is the largest
    bits = tl.abs(v).to(tl.int32, bitcast=True)
    return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def load_wide(ptr, mask):
    """Values in float32, zeros where the mask is False."""
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rounded(ptr, v, mask):
    """Store v in the dtype of the pointer."""
    tl.store(ptr, v.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_raw(
    raw_ptr, fed_ptr, at, mask, FEEDBACK: tl.constexpr, CACHE: tl.constexpr, EVICT: tl.constexpr
):
    """The raw values at the columns `at`, of its shape; CACHE and EVICT are the cache modifier and
    the eviction policy of the loads."""
    raw = tl.load(raw_ptr + at, mask, 0.0, cache_modifier=CACHE, eviction_policy=EVICT)
    raw = raw.to(tl.float32)
    if FEEDBACK:
        fed = tl.load(fed_ptr + at, mask, 0.0, cache_modifier=CACHE, eviction_policy=EVICT)
        raw += fed.to(tl.float32)
    return raw


@triton.jit
def load_unit(raw_ptr, fed_ptr, at, mask, n, FEEDBACK: tl.constexpr, EPS: tl.constexpr):
    """The raw B or C (n,), and 1 / its norm, sqrt(|v|^2 + n EPS) as in `unit`."""
    v = load_raw(raw_ptr, fed_ptr, at, mask, FEEDBACK, "", "")
    return v, inverse_norm(tl.sum(v * v, axis=0), n * EPS)


@triton.jit
def load_beta(
    raw_ptr,  # (k,): alpha
    fed_ptr,
    K: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BETA_MAX: tl.constexpr,
):
    """beta_1 .. beta_k, beta_max sigmoid(alpha), as a tuple of scalars."""
    beta = ()
    for i in tl.static_range(K):
        alpha = load_raw(raw_ptr, fed_ptr, i, True, FEEDBACK, "", "")
        beta = beta + (BETA_MAX * sigmoid(alpha),)
    return beta
