"""Dtypes, marks and initial values of parameters, shared by layers and baselines."""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from bedouin.kernels.launch import accumulator

DELTA_RANGE = (1e-3, 0.1)


class MarkedModule(nn.Module):
    """A module that keeps the marks of its parameters.

    Marks are the attributes `_no_weight_decay` and `_no_reinit`, which optimizers and initializers
    that follow Mamba read. Copies, `to_empty`, `load_state_dict(assign=True)` and sharding replace
    parameters by new ones without them; this class then sets them again on parameters of its own.
    """

    def _mark_parameters(self) -> None:
        """Call `mark` for the parameters that have marks; some may not exist yet."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            self._mark_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_parameters()
        return self


def mark(parameter: Tensor | None, name: str) -> None:
    """Set the mark `name`, "_no_weight_decay" or "_no_reinit", unless the parameter is None."""
    if parameter is not None:
        setattr(parameter, name, True)


def factory_options(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """The arguments `device` and `dtype` of torch's modules and tensor factories."""
    return {"device": device, "dtype": dtype}


def at_least_float32(tensor: Tensor) -> Tensor:
    """`tensor`, of any shape, in the dtype of the solve, at least float32."""
    return tensor.to(accumulator(tensor.dtype))


def log_uniform(like: Tensor, low: float, high: float) -> Tensor:  # any shape -> as `like`
    """Random values in [low, high] with a uniformly distributed logarithm."""
    span = math.log(high) - math.log(low)
    return torch.exp(torch.rand_like(like) * span + math.log(low))


def inverse_softplus(value: Tensor) -> Tensor:  # any shape -> as `value`
    """The x with softplus(x) = `value`, for positive values."""
    return value + torch.log(-torch.expm1(-value))
