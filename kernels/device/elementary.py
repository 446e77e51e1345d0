"""Elementary functions: powers of two, reciprocals, logarithms near one, the logistic function.

With `exp` and divisions that cover every float32, one Delta costs about 110 instructions, against 5
for one state. FAST selects the approximate instructions of the device instead: it is set in
compiled kernels. All computation is in float32.
"""

import triton
import triton.language as tl

from bedouin.kernels.backend import interpreter_is_on

FAST = tl.constexpr(not interpreter_is_on())
"""Whether kernels are compiled, and not run by Triton's interpreter."""

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def exp2(v, FAST: tl.constexpr):
    """2^v; FAST: one instruction, which flushes results below 1e-38 to 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(v)


@triton.jit
def reciprocal(v, FAST: tl.constexpr):
    """1 / v; FAST: one instruction, exact to one unit in the last place, 0 for 1 / inf."""
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
