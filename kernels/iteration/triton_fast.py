"""Delta and its scale in few instructions.

A channel of a token has one Delta and n decays. With `log`, `exp` and divisions that cover every
float32, Delta costs a program as much as all its states: about 110 instructions against 5 a state.
In float64 these functions are those of kernels/direct.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate, input_scale, log1p_of_fraction
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


@triton.jit
def _bits(v):
    """|v| as an integer: the same order, and NaN is the largest."""
    if v.dtype == tl.float64:
        return tl.abs(v).to(tl.int64, bitcast=True)
    else:
        return tl.abs(v).to(tl.int32, bitcast=True)


@triton.jit
def max_norm(v, axis: tl.constexpr):
    """max |v|, NaN if there is one; a warp reduces integers in one instruction."""
    return tl.max(_bits(v), axis=axis).to(v.dtype, bitcast=True)
