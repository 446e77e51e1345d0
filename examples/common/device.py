"""The device of a script."""

from typing import Literal

import torch

from common.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]


def choose_device(name: Device) -> torch.device:
    """The device of this name; auto: the GPU if there is one. Raises UsageError without a GPU for
    cuda."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and torch sees none: use --device cpu")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
