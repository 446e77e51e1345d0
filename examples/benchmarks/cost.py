"""Lower bounds on bytes moved and floating-point operations, from which floors are computed.

Every linear map reads its operands once and writes its result once; its weights count once per
pass. What is between the maps does not count. Flops: linear maps only.
"""

from collections.abc import Iterator

from torch import nn

from benchmarks.setting import Setting, Shape
from benchmarks.timing import Cost

FLOAT32_BYTES = 4
"""Bytes of a value of the state, which is float32."""
ELEMENTWISE = "A_log", "conv.weight"
"""Parameters of several axes that are not those of a linear map."""


def linear_maps(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of the linear maps of a layer by name, (rows, columns) or (heads, rows,
    columns)."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and not name.endswith(ELEMENTWISE):
            yield name, parameter


def layer_cost(module: nn.Module, shape: Shape) -> Cost:
    """The linear maps of a layer, forward."""
    maps = [weight for _, weight in linear_maps(module)]
    weights, e = sum(weight.numel() for weight in maps), maps[0].itemsize
    a_token = sum(weight.shape[:-2].numel() * sum(weight.shape[-2:]) for weight in maps)
    return Cost(e * (weights + a_token * shape.tokens), 2.0 * weights * shape.tokens)


def scan_cost(setting: Setting, shape: Shape) -> Cost:
    """Forward: reads x, Delta, B, C and writes y."""
    d, n, e = setting.d, setting.n, setting.dtype.itemsize
    return Cost(e * shape.tokens * (3 * d + 2 * n) + FLOAT32_BYTES * d * n, 0)


SCAN_BACKWARD = 5 / 3
"""Forward passes in the bytes of a backward one, at least: it reads x, Delta, B, C and the gradient
of y, and writes the gradients of x, Delta, B, C."""


def iteration_cost(setting: Setting, shape: Shape) -> Cost:
    """One read of raw and x in the dtype of the products, one read and one write of y."""
    e = setting.dtype.itemsize
    return Cost(shape.tokens * (e * (setting.r + setting.d) + 2 * FLOAT32_BYTES * setting.d), 0)
