"""Checks of options and initial values that several layers share."""

import math

import torch
from torch import Tensor

from bedouin.parameters import DELTA_RANGE, inverse_softplus, log_uniform


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


@torch.no_grad()
def reset_dt_bias(bias: Tensor) -> None:
    """Fill `bias` so that softplus(bias) is log-uniform in [1e-3, 0.1], as Mamba does."""
    bias.copy_(inverse_softplus(log_uniform(bias, *DELTA_RANGE)))
