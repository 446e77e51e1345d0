"""Projections of a layer's input, before the solve: x, the raw values and the gate.

Letters: b batch, t time, m d_model, d d_inner, n d_state, k num_householder, H num_heads,
p = d / H head_dim, r raw values of a head, the first f with feedback. Between the projections from
m to d and back a layer has b' = H b folded samples, each one head of one sample (bedouin.heads).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.heads import by_head
from bedouin.kernels.backend import autocast_dtype, choose_backend
from bedouin.kernels.branches import beside, join
from bedouin.kernels.launch import accumulator
from bedouin.layer_parameters import LayerParameters
from bedouin.packing import Packing
from bedouin.projection import project_raw, split_projected
from bedouin.short_convolution import ShortConvolution
from bedouin.state import BedouinState
from bedouin.wrapped import is_plain


class ProjectedLayer(LayerParameters):
    """The projections of a layer's input, with its convolution."""

    def _x_bias(self) -> Tensor:
        """The bias of W^x (r + p,) or (H, r + p), which begins with that of Delta and ends with the
        gate's."""
        of_delta = by_head(self.dt_bias, self.num_heads)
        if self.raw_bias is None:
            return F.pad(of_delta, (0, self.raw_size))
        return torch.cat([of_delta, by_head(self.raw_bias, self.num_heads)], -1)

    def _convolve(
        self,
        projected: Tensor,  # (b, t, sum of projected_sizes)
        before: BedouinState | None,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor | None]:  # as projected, (b, w - 1, d)
        """SiLU(conv(x)) in place of x, and the convolution's window after the last token."""
        conv = self.conv
        if conv is None:
            return projected, None
        lengths = None if packing is None else packing.padded_lengths()
        window = _window_before(conv, projected, before)
        x, *others = projected.split(list(self.projected_sizes.values()), -1)
        acted, window = conv(x, window, lengths)
        return torch.cat([F.silu(acted), *others], -1), window

    def _project_x(
        self,
        x: Tensor,  # (b', t, p)
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """W^x x: the raw values (b', t, r) and the gate (b', t, p), in `dtype` if kernels read
        them."""
        for_kernels = choose_backend(self.backend, x.device, x.dtype) == "triton"
        with beside("parameters"):
            bias = self._x_bias()
        join("parameters", bias)
        options: dict[str, Any] = {"r": self.raw_size, "dtype": dtype if for_kernels else None}
        if not is_plain(self.x_proj):
            return split_projected(self.x_proj(x), bias, **options)
        return project_raw(x, self.x_proj.weight, bias, **options)

    def _joins_weights(
        self,
        u: Tensor,  # (b, t, m)
    ) -> bool:
        """Whether W^x x takes fewer operations if W^x is first multiplied by the weight W of x, as
        it does if m < d and there are many tokens; on a CPU, and not in low precision, where the
        rounded product of the weights would be less accurate."""
        if self.num_heads > 1 or u.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        if self.conv is not None:
            return False
        rows, (m, d) = u.shape[:-1].numel(), (self.d_model, self.d_inner)
        if rows * (d - m) <= d * m:
            return False
        if autocast_dtype(u) is not None or accumulator(u.dtype) != u.dtype:
            return False
        if not (is_plain(self.in_proj) and is_plain(self.x_proj)):
            return False
        return choose_backend(self.backend, u.device, u.dtype) == "reference"

    def _project_joined(
        self,
        u: Tensor,  # (b, t, m)
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The raw values (b, t, r), the gate and z (b, t, d), from (W^x W) u instead of W^x (W u).

        With feedback the result has z with the gate's part added, and no gate; the output stage of
        the paper has a gate and no z.
        """
        W_x, (of_x, *others) = self.x_proj.weight, self.in_proj.weight.split(self.d_inner)
        adds = bool(others) and self.y_proj is not None
        weight = W_x @ of_x
        if adds:
            weight = weight + F.pad(others[0], (0, 0, self.raw_size, 0))
        raw, gate = project_raw(u, weight, self._x_bias(), r=self.raw_size, dtype=None)
        if adds:
            return raw, None, gate
        return raw, gate, F.linear(u, others[0]) if others else None


def _window_before(
    conv: ShortConvolution,
    projected: Tensor,  # (b, t, any size)
    before: BedouinState | None,
) -> Tensor:  # (b, w - 1, c)
    """The inputs of the convolution before the first token."""
    if before is None:
        shape = projected.shape[0], *conv.window_size
        return projected.new_zeros(shape, dtype=accumulator(projected.dtype))
    assert before.conv is not None
    return before.conv
