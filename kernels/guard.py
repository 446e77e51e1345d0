"""What surrounds the launches of an operation: the tensors' device, and an answer where a kernel
does not fit the GPU."""

import warnings
from collections.abc import Callable
from functools import wraps
from traceback import walk_tb
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


OUT = "triton.runtime.errors.OutOfResources"
"""What Triton raises at the first launch of a kernel that does not fit."""


class KernelDoesNotFit(RuntimeError):
    """A Triton kernel needs more of a resource, such as shared memory, than the GPU has."""

    backend: Backend = "auto"
    """The `backend` of the call, as far as the launch was given it."""


class Launching(torch.cuda.device):
    """A context for launches, which go to a stream of the current device: that of `tensor` within.

    Raises KernelDoesNotFit where Triton finds that a kernel does not fit the GPU.
    """

    def __init__(
        self,
        tensor: Tensor,  # any shape, on any device
        backend: Backend = "auto",
    ) -> None:
        # for each call of an operation, so without the checks of the class above
        self.idx, self.prev_idx, self.backend = tensor.get_device(), -1, backend

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Literal[False]:
        torch.cuda._maybe_exchange_device(self.prev_idx)
        if error is not None and _is_out_of_resources(error):
            unfit = KernelDoesNotFit(
                f"the Triton kernel {_kernel_of(error)} needs {error.required} of {error.name}, "
                f"and this GPU has {error.limit}: use backend='reference'"
            )
            unfit.backend = self.backend
            raise unfit from error
        return False


def _is_out_of_resources(error: BaseException) -> bool:
    # without an import of Triton, which another error may not have needed
    return any(f"{kind.__module__}.{kind.__name__}" == OUT for kind in type(error).__mro__)


def _kernel_of(error: BaseException) -> str:
    """The name of the kernel whose launch raised the error, which Triton does not say."""
    name = "of unknown name"
    for frame, _ in walk_tb(error.__traceback__):
        # Triton's JITFunction has the name of its function
        name = getattr(frame.f_locals.get("self"), "__name__", name)
    return name


def answer(error: KernelDoesNotFit, backend: Backend) -> None:
    """Say that the call takes the reference instead; with another backend than "auto" raise."""
    if backend != "auto":
        raise error
    warnings.warn(f"{error}, as backend='auto' does in this call", stacklevel=3)


def falls_back(function: FunctionT) -> FunctionT:
    """Decorator of a function with an argument `backend`: for "auto" it computes with the
    reference, and says so, what a kernel cannot compute because it does not fit the GPU.

    Nothing that the function is given may have been changed by then.
    """

    @wraps(function)
    def run(*args: Any, backend: Backend = "auto", **options: Any) -> Any:
        try:
            return function(*args, backend=backend, **options)
        except KernelDoesNotFit as error:
            answer(error, backend)
        return function(*args, backend="reference", **options)

    return cast(FunctionT, run)
