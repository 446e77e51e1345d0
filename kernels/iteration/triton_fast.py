"""Delta and its scale in few instructions.

A channel of a token has one Delta and n decays. With `log`, `exp` and divisions that cover every
float32, Delta costs a program as much as all its states: about 110 instructions against 5 a state.
In float64 these functions are those of kernels/direct.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.direct.triton_math import activate, input_scale
from bedouin.kernels.scan.triton_segments import LOG2E, build_decay


@triton.jit
def reciprocal(v, FAST: tl.constexpr):
    """1 / v to one unit in the last place; 0 for 1 / inf."""
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
def fast_activate(raw, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """Delta from its raw value."""
    if raw.dtype == tl.float64:
        return activate(raw, ACTIVATION)
    elif ACTIVATION == "sigmoid":
        return reciprocal(1 + build_decay(raw * -LOG2E, False, FAST), FAST)
    else:
        v = raw if ACTIVATION == "softplus" else -raw
        return tl.maximum(v, 0.0) + log1p_of_fraction(build_decay(tl.abs(v) * -LOG2E, False, FAST))


@triton.jit
def fast_scale(delta, INPUT_SCALE: tl.constexpr, FAST: tl.constexpr):
    """s of the scales that have no state axis."""
    if delta.dtype == tl.float64:
        return input_scale(delta, INPUT_SCALE)
    elif INPUT_SCALE == "bounded_delta":
        return delta * reciprocal(1 + delta, FAST)
    else:
        return delta
