"""The choice of an operation's implementation, from the argument `backend` and the tensors."""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "reference"]
Implementation = Literal["triton", "reference"]

AUTO_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes for which "auto" chooses Triton. float64 serves to check numbers, as the reference
does."""
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
    """The implementation for tensors of `dtype` on `device`.

    "auto" chooses Triton on a GPU, except for float64, under torch.func transforms and forward
    mode, for which no Triton operation has rules, and if `unsupported` names a property of the call
    that the kernels do not support; then it chooses the reference. Raises ValueError for an unknown
    name, and for "triton" if it cannot run: without Triton, with an unsupported call, under a
    transform, or on a CPU unless Triton's interpreter is on.
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
    """Whether a torch.func transform such as vmap, or forward-mode differentiation, is active."""
    if torch.compiler.is_compiling():
        return False
    return is_forward_mode() or torch._C._functorch.peek_interpreter_stack() is not None


def is_forward_mode() -> bool:
    """Whether tensors may carry tangents, as within torch.func.jvp or torch.autograd.forward_ad."""
    if torch.compiler.is_compiling():
        return False
    level: int = torch.autograd.forward_ad._current_level
    return level >= 0


def is_batched(
    *tensors: Tensor | None,  # any shapes
) -> bool:
    """Whether one of the tensors is a batch of cotangents from `torch.autograd.grad` with
    is_grads_batched=True, which batches tensors without a torch.func transform."""
    if torch.compiler.is_compiling():
        return False
    is_one = torch._C._functorch.is_legacy_batchedtensor
    return any(v is not None and is_one(v) for v in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A context in which autocast is off on `device`; the meta device has no autocast."""
    # torch.autocast raises for the meta device
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_dtype(
    x: torch.Tensor,  # any shape
) -> torch.dtype | None:
    """The dtype to which autocast casts x for a matrix product; None if autocast is off or does not
    cast x, as for float64."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def interpreter_is_on() -> bool:
    """Whether Triton kernels run in its interpreter, on tensors of any device.

    Triton reads TRITON_INTERPRET when a kernel's module is imported, so set it before the program
    starts. Unlike Triton's own setting, this function can be traced by torch.compile.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
