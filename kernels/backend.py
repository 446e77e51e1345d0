"""Which implementation of an operation runs: decided here, from the argument and the tensors."""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "reference"]
Implementation = Literal["triton", "reference"]

AUTO_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Where "auto" takes Triton; float64 is for checking numbers, which is the reference's task."""
_HAS_TRITON = find_spec("triton") is not None


def check_backend(backend: str) -> None:
    """Raise ValueError unless `backend` is one of "auto", "triton" and "reference"."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")


def choose_backend(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    unsupported: str | None = None,
) -> Implementation:
    """The implementation for tensors of `dtype` on `device`; only "auto" chooses.

    "auto" is Triton on a GPU, but the reference for float64, under torch.func transforms and
    forward mode, which no Triton operation has rules for, and where `unsupported` names what the
    kernels do not cover.
    Raises ValueError for an unknown name, and for "triton" where it cannot run: without Triton,
    with something unsupported, under a transform, and on a CPU unless Triton's interpreter is on.
    """
    check_backend(backend)
    if unsupported is None and is_transformed():
        unsupported = "torch.func transforms and forward-mode differentiation"
    if backend == "triton":
        _check_triton(device, unsupported)
        return "triton"
    if backend == "reference" or device.type != "cuda" or dtype not in AUTO_DTYPES:
        return "reference"
    return "triton" if _HAS_TRITON and unsupported is None else "reference"


def _check_triton(device: torch.device, unsupported: str | None) -> None:
    if not _HAS_TRITON:
        raise ValueError(
            "backend='triton' needs the package triton: install it, or use backend='auto' or "
            "'reference'"
        )
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


def is_transformed() -> bool:
    """Whether a torch.func transform such as vmap is at work, or forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False
    return is_forward_mode() or torch._C._functorch.peek_interpreter_stack() is not None


def is_forward_mode() -> bool:
    """Whether tensors may carry tangents: torch.func.jvp and its kin, torch.autograd.forward_ad."""
    if torch.compiler.is_compiling():
        return False
    level: int = torch.autograd.forward_ad._current_level
    return level >= 0


def is_batched(
    *tensors: Tensor | None,  # any shapes
) -> bool:
    """Whether one of the tensors holds the cotangents of `torch.autograd.grad` with
    is_grads_batched=True, which batches them in a way of its own, without a transform."""
    if torch.compiler.is_compiling():
        return False
    is_one = torch._C._functorch.is_legacy_batchedtensor
    return any(v is not None and is_one(v) for v in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A context in which autocast casts nothing on `device`; the meta device has none to begin
    with."""
    # torch.autocast refuses devices that it does not know
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_dtype(
    x: torch.Tensor,  # any shape
) -> torch.dtype | None:
    """What autocast makes of x for a product; None where it is off, or leaves x as it is, as it
    does float64."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def interpreter_is_on() -> bool:
    """Whether Triton kernels run in its interpreter, on tensors of any device.

    Triton reads TRITON_INTERPRET when a kernel's module is imported: set it before the start.
    torch.compile can trace this, unlike Triton's own knob.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
