"""The short convolution in plain torch: the specification.

Letters: b batch, t time, c channels, w width, a channels to which something is added.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.launch import accumulator


class Groups(NamedTuple):
    """The first `number` groups of `size` channels each get unit length, with `eps` under the root
    of the norm."""

    number: int
    size: int
    eps: float


def short_convolution_reference(
    x: Tensor,  # (b, t, c)
    weight: Tensor,  # (c, w)
    window: Tensor,  # (b, w - 1, c)
    added: Tensor | None,  # (b, t, a)
    groups: Groups,
) -> tuple[Tensor, Tensor]:  # (b, t, c + a), as x, and (b, w - 1, c), as the window
    """`short_convolution`."""
    _, t, c = x.shape
    padded = torch.cat([window.to(x.dtype), x], dim=1)
    v = shifted_sum(padded, weight)
    parts = [F.silu(v)]
    if groups.number:
        normed = groups.number * groups.size
        first, rest = parts[0].split([normed, c - normed], -1)
        by_group = first.unflatten(-1, (groups.number, groups.size))
        square = by_group.square().sum(-1, keepdim=True)
        by_group = by_group * torch.rsqrt(square + groups.eps)
        parts = [by_group.flatten(-2), rest]
    if added is not None:
        parts.append(F.silu(v[..., : added.shape[-1]] + added))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    # a copy: a view would keep all of `padded` alive
    return out.to(x.dtype), padded[:, t:].clone().to(window.dtype)


def shifted_sum(
    padded: Tensor,  # (b, w - 1 + t, c)
    weight: Tensor,  # (c, w)
) -> Tensor:  # (b, t, c)
    """The convolution as a sum, in at least float32: a seventh of the time of conv1d on a CPU, and
    one kernel with its neighbours for torch.compile, but many launches on a GPU."""
    t = padded.shape[1] + 1 - weight.shape[1]
    weight = weight.to(accumulator(padded.dtype, weight.dtype))
    y = padded[:, :t] * weight[:, 0]
    for i in range(1, weight.shape[1]):
        y = y + padded[:, i : i + t] * weight[:, i]
    return y
