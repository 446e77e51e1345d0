"""Which implementation of an operation runs: decided here, from the argument and the tensors."""

from importlib.util import find_spec
from typing import Literal, get_args

import torch

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
    if backend == "reference" or device.type != "cuda" or dtype not in AUTO_DTYPES:
        return "reference"
    return "triton" if _HAS_TRITON and not _is_transformed() else "reference"


def _check_triton(device: torch.device) -> None:
    if not _HAS_TRITON:
        raise ValueError(
            "backend='triton' needs the package triton: install it, or use backend='auto' or "
            "'reference'"
        )
    if device.type != "cuda" and not _is_interpreting():
        raise ValueError(
            f"backend='triton' needs tensors on a CUDA device, got {device}: "
            "move the layer and its input there, or use backend='auto' or 'reference'"
        )


def _is_transformed() -> bool:
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter.

    TRITON_INTERPRET=1 must be set before Triton is imported for the first time: its own library
    chooses then, and a knob set later leaves half of it compiled.
    """
    from triton import knobs

    return bool(knobs.runtime.interpret)
