"""Which implementation of an operation runs: decided here, from the argument and the device."""

from typing import Literal, get_args

import torch

Backend = Literal["auto", "triton", "reference"]
Implementation = Literal["triton", "reference"]


def check_backend(backend: str) -> None:
    """Raise ValueError unless `backend` is one of "auto", "triton" and "reference"."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")


def choose_backend(backend: Backend, device: torch.device) -> Implementation:
    """The implementation for tensors on `device`; only "auto" chooses.

    Raises ValueError for an unknown name and for "triton" on a device without Triton, and
    NotImplementedError for "triton" on a GPU, because this version has reference kernels only.
    """
    check_backend(backend)
    if backend != "triton":
        return "reference"
    if device.type != "cuda":
        raise ValueError(
            f"backend='triton' needs tensors on a CUDA device, got {device}: "
            "move the layer and its input there, or use backend='auto' or 'reference'"
        )
    raise NotImplementedError(
        "backend='triton': this version has no Triton kernels; use backend='auto' or 'reference'"
    )
