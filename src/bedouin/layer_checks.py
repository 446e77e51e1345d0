"""Checks of the arguments of a layer's constructor.

Letters: m d_model, d d_inner.
"""

import math

import torch
from torch import Tensor, nn

from bedouin.kernels.backend import autocast_dtype
from bedouin.mixers import ChannelMixer
from bedouin.solvers.base import check_number


def check_device(mixer: ChannelMixer, device: torch.device) -> None:
    """Raise ValueError unless the mixer's parameters are on the layer's device."""
    for name, parameter in mixer.named_parameters():
        if parameter.device != device:
            raise ValueError(
                f"mixer must be on the layer's device {device}, got {name} on {parameter.device}: "
                "make it there, or move the whole layer with to(device) once it is made"
            )


def inner_size(expand: float, d_model: int) -> int:
    """d = expand * m. Raises ValueError unless it is a whole number."""
    check_number("expand", expand, 0, 1e3, open_low=True)
    d = round(expand * d_model)
    if d < 1 or not math.isclose(d, expand * d_model, rel_tol=1e-9):
        near = max(d, 1)
        raise ValueError(
            f"expand * d_model must be a whole number of channels, at least 1, got {expand} * "
            f"{d_model} = {expand * d_model:.6g}: for {near} use expand={near} / {d_model}"
        )
    return d


def check_projection_dtype(
    x: Tensor,  # any shape
    D: Tensor,  # (d,)
    projection: nn.Module,
) -> None:
    """Raise TypeError if x has the dtype of the projections, but D another, which is taken for the
    dtype of the layer."""
    dtype = getattr(getattr(projection, "weight", None), "dtype", None)
    if x.dtype == dtype and not autocast_dtype(x):
        raise TypeError(
            f"the parameter D must have the dtype of the layer's projections {dtype}, got "
            f"{D.dtype}: convert the whole layer with to({dtype}), or keep all of it in {D.dtype} "
            "and use torch.autocast"
        )
