"""The short causal convolution before the recurrence of a layer or a baseline.

Letters: b batch, t time, c channels, w width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import check_bool, positive_int
from bedouin.kernels.backend import Backend
from bedouin.kernels.convolution import Groups, short_convolution
from bedouin.kernels.convolution.reference import shifted_sum
from bedouin.wrapped import is_untouched


class ShortConvolution(nn.Module):
    """y_t = sum_i weight[:, i] * x_{t - w + 1 + i} + bias for each channel by itself, the identity
    for a width of None. The state is the window of the last w - 1 inputs."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, channels: int, width: int | None, *, bias: bool, **factory: Any) -> None:
        super().__init__()
        check_bool("conv_bias", bias)
        self.channels = channels
        self.width = None if width is None else positive_int("d_conv", width)
        self.weight = self.bias = None
        if self.width is not None:
            self.weight = nn.Parameter(torch.empty(channels, self.width, **factory))
            self.bias = nn.Parameter(torch.empty(channels, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as torch.nn.Conv1d does."""
        for parameter in (self.weight, self.bias):
            if parameter is not None and self.width is not None:
                bound = 1 / math.sqrt(self.width)
                nn.init.uniform_(parameter, -bound, bound)

    @property
    def window_size(self) -> tuple[int, int]:
        """(w - 1, c): the shape of the state of one sample."""
        return (self.width or 1) - 1, self.channels

    def forward(
        self, x: Tensor, window: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # (b, t, c), (b, w - 1, c), (b,)
        """The convolved x (b, t, c) and the window after the last token, in the window's dtype.
        lengths: the tokens of each sample, which padding follows; None: t."""
        if self.weight is None:
            return x, window
        padded = torch.cat([window.to(x.dtype), x], dim=1)
        # conv1d refuses fewer inputs than its width
        if x.is_cuda and x.numel() and not torch.compiler.is_compiling():
            weight = self.weight.unsqueeze(1)
            y = F.conv1d(padded.mT, weight, self.bias, groups=self.channels).mT
        else:
            y = shifted_sum(padded, self.weight)
            y = (y if self.bias is None else y + self.bias).to(padded.dtype)
        return y, _last(padded, x.shape[1], window, lengths)

    def activated(
        self,
        x: Tensor,  # (b, t, c)
        window: Tensor,  # (b, w - 1, c)
        lengths: Tensor | None = None,  # (b,)
        added: Tensor | None = None,  # (b, t, a), a <= c
        groups: Groups | None = None,
        *,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:
        """SiLU(conv(x)) with groups of unit length, then SiLU(conv(x)[..., :a] + added), (b, t, c +
        a), and the window after the last token, in one pass of a kernel, unless it is hooked."""
        if self.weight is None or self.bias is not None or not is_untouched(self):
            x, after = self(x, window, lengths)
            window, weight = window[:, :0], x.new_ones(self.channels, 1)
            return short_convolution(x, weight, window, added, groups, backend=backend)[0], after
        found, after = short_convolution(x, self.weight, window, added, groups, backend=backend)
        if lengths is not None:
            after = _last(torch.cat([window.to(x.dtype), x], dim=1), 0, window, lengths)
        return found, after

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}"


def _last(padded: Tensor, t: int, window: Tensor, lengths: Tensor | None) -> Tensor:
    """The inputs (b, w - 1, c) before the first token after each sample, of the window and t tokens
    (b, w - 1 + t, c), in the dtype of the window."""
    if lengths is None:
        # a copy: a view would keep all of `padded` alive
        return padded[:, t:].clone().to(window.dtype)
    places = lengths.unsqueeze(1) + torch.arange(window.shape[1], device=padded.device)
    return padded.gather(1, places.unsqueeze(-1).expand(window.shape)).to(window.dtype)
