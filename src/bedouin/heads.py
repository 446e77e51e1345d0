"""Heads: channels cut into groups, which are folded into the batch and share no weights.

Inside of a layer of H heads, a sample is H folded samples: folded sample j b + i is head j of
sample i. One head is the layer without this module: nothing is folded.

Letters: b batch, t time, d d_inner, n d_state, H heads, p = d / H channels of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from bedouin.checks import positive_int
from bedouin.kernels.heads import fold
from bedouin.kernels.linear import apply_weight
from bedouin.state import BedouinState

HEAD_DIM, LEAST_CHANNELS = 128, 512
"""Channels of a head, and the fewest d_inner with several heads, by default."""


def choose_num_heads(num_heads: int | None, d_inner: int) -> int:
    """H: `num_heads`, or for None heads of 128 channels if d_inner is a multiple of it and at least
    512, else 1: heads of 128 learn A5 better than smaller ones, and copying better than one head;
    at d_inner 256 one head learns A5 better (examples/results/heads).

    Raises TypeError for a value that is no int, ValueError for one that does not divide d_inner.
    """
    if num_heads is None:
        wide = d_inner >= LEAST_CHANNELS and d_inner % HEAD_DIM == 0
        return d_inner // HEAD_DIM if wide else 1
    positive_int("num_heads", num_heads)
    if d_inner % num_heads:
        raise ValueError(
            f"num_heads must divide d_inner = expand * d_model = {d_inner}, got {num_heads}: use "
            "one of its divisors, for example 1, or None for the default"
        )
    return num_heads


def fold_pair(
    v: Tensor,  # (b, t, 2 d)
    num_heads: int,
) -> tuple[Tensor, Tensor]:  # (H b, t, p) each
    """`fold` of both halves of the channels, which several heads copy in one operation."""
    if num_heads == 1:
        first, second = v.chunk(2, -1)
    else:
        # not by chunk, because torch.export cannot halve a symbolic size
        first, second = fold(v, 2 * num_heads).unflatten(0, (2, -1)).unbind()
    return first, second


def by_head(
    v: Tensor,  # (d, ...)
    num_heads: int,
) -> Tensor:  # (d, ...), or (H, p, ...) for several heads
    """A parameter of channels as kernels take it."""
    return v if num_heads == 1 else v.unflatten(0, (num_heads, -1))


def fold_state(state: BedouinState, num_heads: int) -> BedouinState:
    """The state of folded samples, ssm (H b, p, n) and y (H b, p), from that of the layer; the
    window of its convolution, which is outside of the folded part, as it is."""
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
    elif torch.is_grad_enabled():
        # joined by torch.cat, since a view keeps FSDP from gathering the parameters for its
        # backward
        ssm, y = (torch.cat(v.unflatten(0, (num_heads, -1)).unbind(), 1) for v in pair)
    else:
        ssm, y = (_joined_heads(v, num_heads) for v in pair)
    return BedouinState(ssm, y, state.conv)


def _joined_heads(
    v: Tensor,  # (H b, p, ...)
    num_heads: int,
) -> Tensor:  # (b, d, ...)
    """The channels of all heads side by side, in new memory: one operation for any number of heads,
    where torch.cat needs a view of each."""
    of_heads: Tensor = v.unflatten(0, (num_heads, -1)).transpose(0, 1)
    return of_heads.clone(memory_format=torch.contiguous_format).flatten(1, 2)


InitialScales = tuple[tuple[Any, float], ...]
"""Indices of parts of a weight, and the factors by which their initial values are multiplied."""


@torch.no_grad()
def _scale_parts(weight: Tensor, scales: InitialScales) -> None:  # weight: any shape
    for part, factor in scales:
        weight[part] *= factor


class ScaledLinear(nn.Linear):
    """An nn.Linear without bias whose initial weight is multiplied by `scales`.

    The module itself knows them, since tools that bring modules from the meta device call
    `reset_parameters` of each one in an order of their own.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scales: InitialScales,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.scales = scales  # torch's constructor draws the weight
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _scale_parts(self.weight, self.scales)


class HeadLinear(nn.Module):
    """Linear maps of several heads without bias: each folded sample uses the weight of its head.

    The initial weights of a head are drawn as those of `nn.Linear(in_features, out_features)` and
    multiplied by `scales`.
    PEFT adapts the weight (H, out_features, in_features) by its name, in LoraConfig's
    target_parameters=["x_proj.weight", "y_proj.weight"]; it cannot wrap the module.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int,
        scales: InitialScales = (),
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.scales = scales
        shape = num_heads, out_features, in_features
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        bound = 1 / math.sqrt(self.weight.shape[2])
        nn.init.uniform_(self.weight, -bound, bound)
        _scale_parts(self.weight, self.scales)

    def forward(
        self,
        v: Tensor,  # (H b, ..., in_features)
    ) -> Tensor:  # (H b, ..., out_features)
        return apply_weight(v, self.weight)

    def extra_repr(self) -> str:
        num_heads, rows, columns = self.weight.shape
        return f"num_heads={num_heads}, in_features={columns}, out_features={rows}, bias=False"


class HeadNorm(nn.RMSNorm):
    """RMSNorm over the channels of each head by itself, with a weight for every channel."""

    def __init__(
        self,
        num_heads: int,
        d: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d, eps=eps, device=device, dtype=dtype)
        self.num_heads = num_heads

    def forward(
        self,
        v: Tensor,  # (..., d)
    ) -> Tensor:  # (..., d)
        by_channels: Tensor = v.unflatten(-1, (self.num_heads, -1))
        normed = nn.functional.rms_norm(by_channels, by_channels.shape[-1:], None, self.eps)
        return normed.flatten(-2) * self.weight

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, {super().extra_repr()}"


def make_linear(
    num_heads: int,
    in_features: int,
    out_features: int,
    scales: InitialScales = (),
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Linear | HeadLinear:
    """A linear map without bias of folded samples; for one head, an nn.Linear."""
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    scales = tuple((part, factor) for part, factor in scales if factor != 1)
    if num_heads > 1:
        return HeadLinear(num_heads, in_features, out_features, scales, **factory)
    if scales:
        return ScaledLinear(in_features, out_features, scales, **factory)
    return nn.Linear(in_features, out_features, bias=False, **factory)
