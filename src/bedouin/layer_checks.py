"""Checks of the arguments of a layer's constructor.

Letters: m d_model, d d_inner.
"""

import torch

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
    """d = expand * m, rounded down. Raises ValueError if it is less than 1."""
    check_number("expand", expand, 0, 1e3, open_low=True)
    d = int(expand * d_model)
    if d < 1:
        raise ValueError(f"expand * d_model must be at least 1, got {expand} * {d_model}")
    return d
