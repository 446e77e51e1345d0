"""What raw values mean where a `RawLayout` says it, and the cotangents of that, in plain torch.

Operations of torch.library take no functions, and a sweep that calls no autograd of its own runs
inside of them, under every transform and under hooks on saved tensors.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values; leading axes
are free.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.direct.reference import Coefficients, RawLayout, SweepOptions
from bedouin.kernels.householder import unit, unit_vjp, wy_factor, wy_factor_vjp

SOFTPLUS_IS_LINEAR = 20.0
"""Where torch's softplus returns its argument."""


def is_covered(
    layout: RawLayout | None, raw: Tensor, A: Tensor, bind_parameters: tuple[Tensor, ...]
) -> bool:
    """Whether a layout says all about the raw values (..., r), for A (d, n)."""
    if layout is None or bind_parameters:
        return False
    return raw.shape[-1] == layout.size(*A.shape)


def bind_by_layout(layout: RawLayout, A: Tensor) -> Callable[[Tensor], Coefficients]:
    """The `bind` of `SweepOptions` that the layout describes, for A (d, n)."""
    return partial(_bind, layout, tuple(A.shape))


def _split(layout: RawLayout, sizes: tuple[int, ...], raw: Tensor) -> tuple[Tensor, ...]:
    """Delta (..., d), B and C (..., n) if selective, u (..., k, d) and alpha (..., k), raw."""
    (d, n), k = sizes, layout.num_householder
    memory = [n, n] if layout.selective else []
    *before, u, alpha = raw.split([d, *memory, k * d, k], -1)
    return *before, u.unflatten(-1, (k, d)), alpha


def _bind(layout: RawLayout, sizes: tuple[int, ...], raw: Tensor) -> Coefficients:
    delta, *memory, u, alpha = _split(layout, sizes, raw)
    ones = torch.ones_like(raw[..., :1])
    B, C = (unit(v) for v in memory) if memory else (ones, ones)
    U = unit(u)
    T = wy_factor(U, layout.beta_max * torch.sigmoid(alpha))
    return Coefficients(_activate(layout, delta), B, C, torch.zeros_like(ones), U, T)


def _activate(layout: RawLayout, delta: Tensor) -> Tensor:
    if layout.activation == "sigmoid":
        return torch.sigmoid(delta)
    return F.softplus(-delta if layout.activation == "softplus_of_minus" else delta)


def bind_vjp(
    options: SweepOptions,
    raw: Tensor,  # (b, r)
    cotangents: Coefficients,
) -> Tensor:
    """Cotangent of raw values that the layout of `options` covers; e is constant."""
    layout = options.layout
    assert layout is not None
    d, n = cotangents.delta.shape[-1], cotangents.B.shape[-1]
    delta, *memory, u, alpha = _split(layout, (d, n), raw)
    gate = torch.sigmoid(alpha)
    grad_U, grad_beta = wy_factor_vjp(cotangents.M, unit(u), layout.beta_max * gate)
    parts = [cotangents.delta * _slope(layout, delta)]
    grads = (cotangents.B, cotangents.C)
    parts += [unit_vjp(grad, v) for grad, v in zip(grads, memory, strict=False)]
    grad_u = unit_vjp(cotangents.U + grad_U, u)
    # a reshape, since batched cotangents have no rule for flatten
    parts.append(grad_u.reshape(*grad_u.shape[:-2], u.shape[-2] * d))
    parts.append(grad_beta * layout.beta_max * gate * (1 - gate))
    return torch.cat(parts, -1)


def _slope(layout: RawLayout, delta: Tensor) -> Tensor:
    """The derivative of the activation."""
    if layout.activation == "sigmoid":
        gate = torch.sigmoid(delta)
        return gate * (1 - gate)
    sign = -1.0 if layout.activation == "softplus_of_minus" else 1.0
    v = sign * delta
    return sign * torch.where(v > SOFTPLUS_IS_LINEAR, torch.ones_like(v), torch.sigmoid(v))
