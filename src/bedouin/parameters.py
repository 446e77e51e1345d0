"""Dtypes and initial values of parameters, shared by layers and baselines."""

import math
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.launch import accumulator

DELTA_RANGE = (1e-3, 0.1)


def factory_options(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """The arguments `device` and `dtype` of torch's modules and tensor factories."""
    return {"device": device, "dtype": dtype}


def at_least_float32(tensor: Tensor) -> Tensor:
    """`tensor`, of any shape, in the dtype of the solve, at least float32."""
    return tensor.to(accumulator(tensor.dtype))


def log_uniform(
    like: Tensor,  # any shape
    low: float,
    high: float,
) -> Tensor:  # as `like`
    """Random values in [low, high] with a uniformly distributed logarithm."""
    span = math.log(high) - math.log(low)
    return torch.exp(torch.rand_like(like) * span + math.log(low))


def inverse_softplus(
    value: Tensor,  # any shape
) -> Tensor:  # as `value`
    """The x with softplus(x) = `value`, for positive values."""
    return value + torch.log(-torch.expm1(-value))
