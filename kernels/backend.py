"""Which implementation of an operation runs: decided here, from the argument and the tensors."""

import sys
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch

Backend = Literal["auto", "triton", "reference"]
Implementation = Literal["triton", "reference"]

AUTO_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Where "auto" takes Triton; float64 is for checking numbers, which is the reference's task."""


def check_backend(backend: str) -> None:
    """Raise ValueError unless `backend` is one of "auto", "triton" and "reference"."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")


def choose_backend(
    backend: Backend, device: torch.device, dtype: torch.dtype = torch.float32
) -> Implementation:
    """The implementation for tensors of `dtype` on `device`; only "auto" chooses.

    "auto" is Triton on a GPU, but the reference for float64 and under torch.func transforms, which
    no Triton operation has rules for. Raises ValueError for an unknown name and for "triton" where
    it cannot run: without Triton, and on a CPU unless Triton's interpreter is on.
    """
    check_backend(backend)
    if backend == "triton":
        _check_triton(device)
        return "triton"
    on_gpu = device.type == "cuda" and dtype in AUTO_DTYPES and _has_triton()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return "triton" if backend == "auto" and on_gpu and not transformed else "reference"


def _check_triton(device: torch.device) -> None:
    if not _has_triton():
        raise ValueError(
            "backend='triton' needs the package triton: install it, or use backend='auto' or "
            "'reference'"
        )
    if device.type != "cuda" and not _interpreting():
        raise ValueError(
            f"backend='triton' needs tensors on a CUDA device, got {device}: "
            "move the layer and its input there, or use backend='auto' or 'reference'"
        )


@cache
def _has_triton() -> bool:
    return sys.platform == "linux" and find_spec("triton") is not None


def _interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the first import)."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
