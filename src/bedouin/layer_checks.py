"""Checks of the arguments of a layer's constructor and of its calls.

Letters: b batch, t time, m d_model, d d_inner.
"""

import torch
from torch import Tensor

from bedouin.checks import check_tensor
from bedouin.kernels.backend import autocast_dtype
from bedouin.mixers import ChannelMixer
from bedouin.solvers.base import check_number


def check_layer_input(
    x: Tensor,  # (b, t, m) for rank 3, (b, m) for rank 2
    rank: int,
    d_model: int,
    weight: Tensor,  # a parameter of the layer, any shape
) -> None:
    """Raise TypeError or ValueError unless x has this rank, width m, and the layer's device and
    dtype; under autocast it may have another dtype."""
    shape = "(b, t, m)" if rank == 3 else "(b, m)"
    check_tensor("x", x, shape)
    if x.dim() != rank or x.shape[-1] != d_model:
        raise ValueError(
            f"x must have shape {shape} with m = d_model = {d_model}, got {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating dtype, got {x.dtype}: embed tokens first")
    if x.device != weight.device:
        raise ValueError(f"x must be on the layer's device {weight.device}, got {x.device}")
    if x.dtype != weight.dtype and not (autocast_dtype(x) and autocast_dtype(weight)):
        wide = torch.float64 in (x.dtype, weight.dtype)
        remedy = " (torch.autocast casts no float64)" if wide else ", or use torch.autocast"
        raise TypeError(
            f"x must have the layer's dtype {weight.dtype}, got {x.dtype}: convert one of "
            f"them{remedy}"
        )


def check_device(mixer: ChannelMixer, device: torch.device) -> None:
    """Raise ValueError unless the mixer's parameters are on the layer's device."""
    for name, parameter in mixer.named_parameters():
        if parameter.device != device:
            raise ValueError(
                f"mixer must be on the layer's device {device}, got {name} on {parameter.device}: "
                "make it there, or move the whole layer with to(device) once it is made"
            )


def inner_size(expand: float, d_model: int) -> int:
    """d = expand * m, rounded down. Raises ValueError if it is less than 1."""
    check_number("expand", expand, 0, 1e3, open_low=True)
    d = int(expand * d_model)
    if d < 1:
        raise ValueError(f"expand * d_model must be at least 1, got {expand} * {d_model}")
    return d
