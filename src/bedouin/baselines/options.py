"""Checks of options and initial values that several baselines share.

Letters: b batch, t time, m d_model.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from bedouin.checks import check_tensor
from bedouin.kernels.backend import autocast_dtype

DT_RANGE = (1e-3, 0.1)
DT_FLOOR = 1e-4


def positive_number(name: str, value: float) -> float:
    """`value` as a float; TypeError or ValueError that names it unless it is finite and > 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number > 0, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and > 0, got {value!r}")
    return float(value)


def expanded(name: str, factor: float, base: str, size: int) -> int:
    """int(factor * size); ValueError that names the option `name` where that is less than 1."""
    width = int(positive_number(name, factor) * size)
    if width < 1:
        raise ValueError(f"{name} * {base} must be at least 1, got {factor} * {size}")
    return width


def head_size(d_model: int, num_heads: int) -> int:
    """d_model / num_heads; ValueError unless that is an integer."""
    if d_model % num_heads:
        raise ValueError(
            f"num_heads must divide d_model = {d_model}, got {num_heads}: choose a divisor"
        )
    return d_model // num_heads


def check_input(x: object, rank: int, d_model: int, weight: Tensor) -> None:
    """TypeError or ValueError unless x is (b, t, m) or (b, m), by `rank`, and fits `weight`, a
    parameter of the layer, in device and dtype."""
    shape = "(b, t, m)" if rank == 3 else "(b, m)"
    check_tensor("x", x, shape)
    assert isinstance(x, Tensor)
    if x.dim() != rank or x.shape[-1] != d_model:
        raise ValueError(
            f"x must have shape {shape} with m = d_model = {d_model}, got {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating dtype, got {x.dtype}: embed tokens first")
    if x.device != weight.device:
        raise ValueError(f"x must be on the layer's device {weight.device}, got {x.device}")
    if x.dtype != weight.dtype and not (autocast_dtype(x) and autocast_dtype(weight)):
        raise TypeError(
            f"x must have the layer's dtype {weight.dtype}, got {x.dtype}: convert one of them, or "
            "use torch.autocast (which casts no float64)"
        )


def at_least_float32(tensor: Tensor) -> Tensor:
    """`tensor` in float32, or in float64 where it has that dtype."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def reset_dt_bias(bias: Tensor) -> None:
    """Fill `bias` so that softplus(bias) is log-uniform in [1e-3, 0.1], as Mamba does."""
    low, high = (math.log(v) for v in DT_RANGE)
    dt = torch.exp(torch.rand_like(bias) * (high - low) + low).clamp(min=DT_FLOOR)
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def mark(parameter: nn.Parameter, *names: str) -> None:
    """Set the attributes `_no_weight_decay` or `_no_reinit`, which optimizers and initializers that
    follow Mamba look for."""
    for name in names:
        setattr(parameter, name, True)


def factory_options(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Where and in which dtype a layer makes its parameters, as torch's modules take it."""
    return {"device": device, "dtype": dtype}
