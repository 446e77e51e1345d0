"""Lower bounds on bytes moved and floating-point operations, from which floors are computed.

Heads: a head's raw values are projected from its own p of the d channels, so that the weights of
x and of y have (r + d) * p entries each.

Bytes: every product, the convolution, the sweep, the scan and the output stage read their operands
once and write their results once; weights count once per pass. Flops: dense products only. A
backward pass counts as two forward passes. Letters as in setting.py; e is the number of bytes of a
value.
"""

from torch import nn

from benchmarks.setting import Setting, Shape
from benchmarks.timing import Cost

FLOAT32_BYTES = 4
"""Bytes of a value of the state, which is float32."""


def layer_cost(setting: Setting, shape: Shape, *, fed: int | None, backward: bool) -> Cost:
    """The whole layer, with feedback of `fed` raw values of a token; None: no feedback."""
    m, d, r, e = setting.m, setting.d, setting.r, setting.gemm_dtype.itemsize
    rows = r + d + (0 if fed is None else fed + d)
    weights = 3 * d * m + setting.p * rows
    products = (m + 2 * d) + (d + r + d) + (d + m)
    sweep = e * (d + r) + FLOAT32_BYTES * d
    gate = 0 if fed is None else (FLOAT32_BYTES + e) * d
    output_stage = FLOAT32_BYTES * d + 4 * e * d
    a_token = e * products + sweep + gate + output_stage
    forward = Cost(e * weights + a_token * shape.tokens, 2.0 * weights * shape.tokens)
    return forward * 3 if backward else forward


def explicit_cost(module: nn.Module, setting: Setting, shape: Shape, *, backward: bool) -> Cost:
    """The linear maps of a layer, without what is between them."""
    maps = [part.weight.shape for part in module.modules() if isinstance(part, nn.Linear)]
    weights, e = sum(rows * columns for rows, columns in maps), setting.gemm_dtype.itemsize
    a_token = e * sum(rows + columns for rows, columns in maps)
    forward = Cost(e * weights + a_token * shape.tokens, 2.0 * weights * shape.tokens)
    return forward * 3 if backward else forward


def lstm_cost(setting: Setting, shape: Shape, *, backward: bool) -> Cost:
    """The gates' input part in one product, then one product per token."""
    m, d, e = setting.m, setting.d, setting.gemm_dtype.itemsize
    weights = 4 * d * (m + d)
    a_token = e * (m + 4 * d + 4 * d + d)
    forward = Cost(e * weights + a_token * shape.tokens, 2.0 * weights * shape.tokens)
    return forward * 3 if backward else forward


def scan_cost(setting: Setting, shape: Shape, *, backward: bool) -> Cost:
    """Forward: reads x, Delta, B, C and writes y. Backward: reads these and the gradient of y, and
    writes the gradients of x, Delta, B, C."""
    d, n, e = setting.d, setting.n, setting.gemm_dtype.itemsize
    forward = Cost(e * shape.tokens * (3 * d + 2 * n) + FLOAT32_BYTES * d * n, 0)
    reverse = Cost(e * shape.tokens * (5 * d + 4 * n) + 2 * FLOAT32_BYTES * d * n, 0)
    return forward + reverse if backward else forward


def iteration_cost(setting: Setting, shape: Shape) -> Cost:
    """One read of raw and x in the dtype of the products, one read and one write of y."""
    e = setting.gemm_dtype.itemsize
    return Cost(shape.tokens * (e * (setting.r + setting.d) + 2 * FLOAT32_BYTES * setting.d), 0)


def step_cost(setting: Setting) -> Cost:
    """One token of one sample: reads the weights, reads and writes the state."""
    m, d, r, e = setting.m, setting.d, setting.r, setting.gemm_dtype.itemsize
    weights = 3 * d * m + 2 * setting.p * (r + d)
    return Cost(e * weights + 2 * FLOAT32_BYTES * d * setting.n, 2.0 * weights)
