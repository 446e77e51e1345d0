"""Linear maps and norms of heads: channels cut into groups that share no weights.

Inside of a layer of H > 1 heads a sample is H folded samples: number j b + i is head j of i.

Letters: b batch, t time, d d_inner, n d_state, H heads, p = d / H channels of a head, r rows.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.kernels.heads import apply_weight, reshape_whole
from bedouin.state import BedouinState

InitialScales = tuple[tuple[Any, float], ...]  # parts of a weight, factors on initial values


def by_head(v: Tensor, num_heads: int) -> Tensor:  # (d, ...) -> (H, p, ...)
    """A parameter of channels as kernels take it: for one head as it is."""
    return v if num_heads == 1 else v.unflatten(0, (num_heads, -1))


def fold_state(state: BedouinState, num_heads: int) -> BedouinState:
    """The state of folded samples, ssm (H b, p, n) and y (H b, p); the window is not folded."""
    if num_heads == 1:
        return state
    pair = state.ssm, state.y
    ssm, y = (v.unflatten(1, (num_heads, -1)).transpose(0, 1).flatten(0, 1) for v in pair)
    return BedouinState(ssm, y, state.conv)


def unfold_state(state: BedouinState, num_heads: int) -> BedouinState:
    """The inverse of `fold_state`, with ssm and y in memory of their own."""
    pair = state.ssm, state.y
    if num_heads == 1:
        ssm, y = (v.clone() for v in pair)
    else:
        # by torch.cat, since a view keeps FSDP from gathering the parameters for its backward
        ssm, y = (torch.cat(v.unflatten(0, (num_heads, -1)).unbind(), 1) for v in pair)
    return BedouinState(ssm, y, state.conv)


class ScaledLinear(nn.Linear):
    """An nn.Linear without bias whose initial weight is multiplied by `scales`, which it keeps,
    since tools that bring modules from the meta device call `reset_parameters` of each one."""

    def __init__(
        self, in_features: int, out_features: int, scales: InitialScales, **factory: Any
    ) -> None:
        self.scales = scales  # torch's constructor draws the weight
        super().__init__(in_features, out_features, bias=False, **factory)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _scale_parts(self.weight, self.scales)


class HeadLinear(nn.Module):
    """Linear maps of several heads without bias: each folded sample uses the weight of its head,
    whose initial values are those of `nn.Linear(in_features, out_features)` times `scales`. PEFT
    adapts the weight (H, out_features, in_features) by its name, in LoraConfig's
    target_parameters=["x_proj.weight", "y_proj.weight"]; it cannot wrap the module."""

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int,
        scales: InitialScales = (),
        **factory: Any,
    ) -> None:
        super().__init__()
        self.scales = scales
        self.weight = nn.Parameter(torch.empty(num_heads, out_features, in_features, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        bound = 1 / math.sqrt(self.weight.shape[2])
        nn.init.uniform_(self.weight, -bound, bound)
        _scale_parts(self.weight, self.scales)

    def forward(self, v: Tensor) -> Tensor:  # (H b, ..., in_features) -> (H b, ..., out_features)
        return apply_weight(v, self.weight)

    def extra_repr(self) -> str:
        num_heads, rows, columns = self.weight.shape
        return f"num_heads={num_heads}, in_features={columns}, out_features={rows}, bias=False"


@torch.no_grad()
def _scale_parts(weight: Tensor, scales: InitialScales) -> None:  # weight: any shape
    for part, factor in scales:
        weight[part] *= factor


def make_linear(
    num_heads: int, in_features: int, out_features: int, scales: InitialScales = (), **factory: Any
) -> nn.Linear | HeadLinear:
    """A linear map without bias of folded samples; for one head, an nn.Linear."""
    scales = tuple((part, factor) for part, factor in scales if factor != 1)
    if num_heads > 1:
        return HeadLinear(num_heads, in_features, out_features, scales, **factory)
    if scales:
        return ScaledLinear(in_features, out_features, scales, **factory)
    return nn.Linear(in_features, out_features, bias=False, **factory)


def project_heads(v: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W v + bias (H b, t, s) of v (H b, t, p), cast as autocast does, with the weight (r, p) or
    (H, r, p) and bias (s,) or (H, s) of its head. Nothing may read the last s - r columns."""
    missing = bias.shape[-1] - weight.shape[-2]
    if missing:
        # any rows serve; new zeros would take a launch
        row = weight.detach()[..., :1, :]
        weight = torch.cat([weight, row.expand(*row.shape[:-2], missing, -1)], -2)
    if weight.dim() == 2:
        return F.linear(v, weight, bias)
    rows = v.reshape(len(weight), -1, v.shape[2])
    out = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return reshape_whole(out, *v.shape[:2], out.shape[2])


class HeadNorm(nn.RMSNorm):
    """RMSNorm over the channels of each head by itself, with a weight for every channel."""

    def __init__(self, num_heads: int, d: int, eps: float, **factory: Any) -> None:
        super().__init__(d, eps=eps, **factory)
        self.num_heads = num_heads

    def forward(self, v: Tensor) -> Tensor:  # (..., d) -> (..., d)
        by_channels: Tensor = v.unflatten(-1, (self.num_heads, -1))
        normed = F.rms_norm(by_channels, by_channels.shape[-1:], None, self.eps)
        return normed.flatten(-2) * self.weight

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, {super().extra_repr()}"
