"""Which implementation of an operation runs: decided here, from the argument and the device."""

import os
import sys
from typing import Literal, get_args

import torch

Backend = Literal["auto", "triton", "reference"]
Implementation = Literal["triton", "reference"]


def check_backend(backend: str) -> None:
    """Raise ValueError unless `backend` is one of "auto", "triton" and "reference"."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")


def interpreter_is_on() -> bool:
    """Whether Triton kernels run in its interpreter, on tensors of any device.

    Triton reads TRITON_INTERPRET when it is imported, so the variable has to be set before that.
    """
    if "triton" in sys.modules:
        return bool(sys.modules["triton"].knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def choose_backend(
    backend: Backend, device: torch.device, unsupported: str | None = None
) -> Implementation:
    """The implementation for tensors on `device`; only "auto" chooses, "triton" on a GPU.

    `unsupported` names what the operation's Triton kernels do not cover, None if they can run.
    Raises ValueError for an unknown name, for "triton" on a device without Triton, and for "triton"
    with something unsupported.
    """
    check_backend(backend)
    if backend == "reference":
        return "reference"
    if backend == "auto":
        return "triton" if device.type == "cuda" and unsupported is None else "reference"
    if device.type != "cuda" and not interpreter_is_on():
        raise ValueError(
            f"backend='triton' needs tensors on a CUDA device, got {device}: "
            "move the layer and its input there, use backend='auto' or 'reference', or set "
            "TRITON_INTERPRET=1 before the start to run the kernels in Triton's interpreter"
        )
    if unsupported is not None:
        raise ValueError(
            f"backend='triton' does not support {unsupported}: use backend='auto' or 'reference'"
        )
    return "triton"
