"""Coefficients from raw values as a `RawLayout` describes them, in plain torch.

Operations of torch.library cannot take a function as an argument, so they compute the coefficients
from the layout.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values, H heads;
leading axes are free.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.householder import unit, wy_factor
from bedouin.kernels.operands import Activation, Bind, Coefficients, RawLayout

SOFTPLUS_IS_LINEAR = 20.0
"""The value above which torch's softplus returns its argument."""


def is_covered(
    layout: RawLayout | None,
    raw: Tensor,  # (..., r)
    A: Tensor,  # (d, n) or (H, d, n)
    bind_parameters: tuple[Tensor, ...],  # any shapes
) -> bool:
    """Whether `layout` describes the coefficients, which then depend on the raw values alone."""
    if layout is None or bind_parameters:
        return False
    return raw.shape[-1] == layout.size(*A.shape[-2:])


def bind_by_layout(
    layout: RawLayout,
    A: Tensor,  # (d, n) or (H, d, n)
) -> Bind:
    """The function raw (..., r) -> coefficients that the layout describes."""
    d, n = A.shape[-2:]

    def bind(raw: Tensor) -> Coefficients:  # raw: (..., r)
        delta, *memory, u, alpha = raw.split(layout.parts(d, n), -1)
        ones = torch.ones_like(raw[..., :1])
        B, C = (unit(v) for v in memory) if memory else (ones, ones)
        U = unit(u.unflatten(-1, (layout.num_householder, d)))
        T = wy_factor(U, layout.beta_max * torch.sigmoid(alpha))
        return Coefficients(
            activate_delta(layout.activation, delta), B, C, torch.zeros_like(ones), U, T
        )

    return bind


def state_major(
    h: Tensor,  # (b, d, n)
) -> Tensor:  # (b, n, d), in new memory
    return h.mT.clone(memory_format=torch.contiguous_format)


def activate_delta(
    activation: Activation,
    delta: Tensor,  # (..., d), raw values
) -> Tensor:  # (..., d)
    """Delta from its raw values."""
    if activation == "sigmoid":
        return torch.sigmoid(delta)
    return F.softplus(-delta if activation == "softplus_of_minus" else delta)


def activation_slope(
    activation: Activation,
    delta: Tensor,  # (..., d), raw values
) -> Tensor:  # (..., d)
    """The derivative of the activation."""
    if activation == "sigmoid":
        gate = torch.sigmoid(delta)
        return gate * (1 - gate)
    is_minus = activation == "softplus_of_minus"
    v = -delta if is_minus else delta
    slope = torch.sigmoid(v)
    if v.dtype == torch.float64:
        # in lower dtypes the sigmoid of such values is 1 already
        slope = slope.masked_fill(v > SOFTPLUS_IS_LINEAR, 1.0)
    return -slope if is_minus else slope
