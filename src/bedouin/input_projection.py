"""Projections of a layer's input, before the solve: x, the raw values and the gate.

Letters: b batch, t time, m d_model, d d_inner, n d_state, k num_householder, H num_heads,
p = d / H head_dim, r raw values of a head, the first f with feedback. Between the projections from
m to d and back a layer has b' = H b folded samples, each one head of one sample (bedouin.heads).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.heads import by_head, spread_keys
from bedouin.kernels.backend import autocast_dtype, choose_backend
from bedouin.kernels.branches import beside, join
from bedouin.kernels.heads import fold, per_sample
from bedouin.kernels.launch import accumulator
from bedouin.kernels.projection import split_projection, takes_split
from bedouin.layer_parameters import KEYS, LayerParameters
from bedouin.packing import Packing
from bedouin.parameterization import split_named
from bedouin.projection import project_raw, split_projected
from bedouin.short_convolution import ShortConvolution
from bedouin.state import BedouinState
from bedouin.wrapped import is_plain, is_untouched


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
        *,
        at_once: bool,
        wants_state: bool,
    ) -> tuple[Tensor, Tensor | None]:  # as projected, (b, w - 1, c)
        """SiLU(conv(v)) in place of the parts v that the convolution acts on, unless a kernel does
        that `at_once` with the split, and its window after the last token; None where that costs
        something and is not wanted."""
        conv = self.conv
        if conv is None:
            return projected, None
        if at_once and not wants_state:
            return projected, None
        lengths = None if packing is None else packing.padded_lengths()
        window = _window_before(conv, projected, before)
        if at_once:
            with beside("state", projected):
                return projected, self._last_window(window, projected, lengths)
        parts, convolved = split_named(projected, self.projected_sizes), self._convolved_sizes()
        joined = torch.cat([parts[name] for name in convolved], -1)
        acted, window = conv(joined, window, lengths)
        parts |= split_named(F.silu(acted), convolved)
        return torch.cat(list(parts.values()), -1), window

    def _splits_at_once(
        self,
        projected: Tensor,  # (b, t, sum of projected_sizes)
    ) -> bool:
        """Whether a kernel convolves, splits and folds the projected input in one pass."""
        if self.projection != "input" or self.has_drive or not projected.numel():
            return False
        if self.conv is not None and not is_untouched(self.conv):
            return False
        device, dtype = projected.device, projected.dtype
        if choose_backend(self.backend, device, dtype) != "triton":
            return False
        width = 1 if self.conv is None else self.conv.width or 1
        return takes_split(self._parts, width, len(projected))

    def _last_window(
        self,
        window: Tensor,  # (b, w - 1, c), before the first token
        projected: Tensor,  # (b, t, sum of projected_sizes)
        lengths: Tensor | None,  # (b,)
    ) -> Tensor:  # (b, w - 1, c)
        """The convolution's window after the last token."""
        count = window.shape[1]
        if lengths is None:
            last = self._convolved(projected[:, max(0, projected.shape[1] - count) :])
            return torch.cat([window[:, last.shape[1] :], last], 1)  # in the dtype of the window
        places = (lengths.unsqueeze(1) + torch.arange(-count, 0, device=window.device)).unsqueeze(2)
        columns = places.clamp(min=0).expand(-1, -1, projected.shape[2])
        found = self._convolved(projected.gather(1, columns)).to(window.dtype)
        earlier = window.gather(1, (places + count).clamp(max=count - 1).expand(window.shape))
        return torch.where(places < 0, earlier, found)

    def _convolved(
        self,
        projected: Tensor,  # (b, t, sum of projected_sizes)
    ) -> Tensor:  # (b, t, c)
        """The parts that the convolution acts on, side by side."""
        parts = split_named(projected, self.projected_sizes)
        return torch.cat([parts[name] for name in self._convolved_sizes()], -1)

    def _split_projected(
        self,
        projected: Tensor,  # (b, t, sum of projected_sizes)
        before: BedouinState | None,
        *,
        at_once: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """x (b', t, p), the raw values (b', t, r), the mixer's input (b', t, p) if it is not x, and
        the gate (b', t, p), from one product of the input, whose parts have been convolved unless a
        kernel does that `at_once`."""
        heads = self.num_heads
        projected = self._spread(projected, self.projected_sizes)
        if at_once:
            weight: Tensor | None = None if self.conv is None else self.conv.weight
            window = None
            if weight is not None and before is not None and before.conv is not None:
                window = self._spread(before.conv.float(), self._convolved_sizes())
            if weight is not None and self.num_groups is not None:
                weight = self._spread(weight.T, self._convolved_sizes()).T
            with beside("parameters"):
                bias = self.dt_bias.view(heads, -1)
                if self.raw_bias is not None:
                    bias = torch.cat([bias, self.raw_bias.view(heads, -1)], -1)
            join("parameters", bias)
            x, raw, gate = split_projection(projected, bias, weight, window, self._parts)
            return x, raw, None, gate
        sizes = {
            name: heads * self._sizes.get(name, self.head_dim) for name in self.projected_sizes
        }
        parts = {name: fold(v, heads) for name, v in split_named(projected, sizes).items()}
        raw = torch.cat([parts[name] for name in self.components], -1)
        bias = self._input_bias().to(raw.dtype)
        if heads > 1:
            bias = per_sample(bias, heads * projected.shape[0]).unsqueeze(1)
        raw = raw + bias
        drive, dtype = None, accumulator(projected.dtype)
        if self.has_drive:
            drive = F.silu(parts["b"].to(dtype)) * parts["x"].to(dtype)
        return parts["x"], raw, drive, parts["gate"]

    def _spread(
        self,
        v: Tensor,  # (..., sum of sizes)
        sizes: dict[str, int],
    ) -> Tensor:  # the same, or wider
        """v with B and C of every head where groups of heads share them."""
        if self.num_groups is None:
            return v
        parts = split_named(v, sizes)
        sizes_of_keys = self.d_state, self.num_heads, self.fed_heads
        keys = {name: spread_keys(parts[name], *sizes_of_keys) for name in KEYS}
        return torch.cat(list((parts | keys).values()), -1)

    def _input_bias(self) -> Tensor:  # (r,) or (H, r)
        """The bias of the raw values with projection="input"."""
        heads, first = self.num_heads, next(iter(self._sizes))
        values = {first: by_head(self.dt_bias, heads)}
        if self.raw_bias is not None:
            biased = {name: size for name, size in self._biased_sizes().items() if size}
            values |= split_named(by_head(self.raw_bias, heads), biased)
        zeros, padded = self.dt_bias.new_zeros(self.raw_size), []
        for name, size in self._sizes.items():
            # no empty parts, for which autograd would launch operations
            bias = values.get(name)
            missing = size if bias is None else size - bias.shape[-1]
            if missing:
                padded.append(zeros[:missing].expand(*values[first].shape[:-1], -1))
            if bias is not None:
                padded.append(bias)
        return torch.cat(padded, -1)

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
        if self.x_proj is None or self.conv is not None:
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
