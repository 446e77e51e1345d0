"""The choice of an operation's implementation, from the argument `backend` and the tensors, what
torch is doing at the time, and decorators for functions that torch.compile must not trace."""

import os
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

Backend = Literal["auto", "triton", "reference"]
Implementation = Literal["triton", "reference"]

_BACKENDS = get_args(Backend)

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of x that the Triton kernels take; they compute in float32. float64 serves to check
numbers, as the reference does."""
LOWEST_TRITON = (3, 6)
"""The version that comes with torch 2.11, the lowest torch that is tested."""


def outside_of_graphs(reason: str) -> Callable[[FunctionT], FunctionT]:
    """Decorator: torch.compile breaks the graph at the function, and with fullgraph=True its error
    message contains `reason`. Equivalent to `torch.compiler.disable`, which would import the
    compiler when this library is imported."""

    def decorate(function: FunctionT) -> FunctionT:
        outside: Any = _disable_dynamo(function)
        # the attributes that torch's own decorator sets
        outside._torchdynamo_disable = True
        outside._torchdynamo_disable_msg = reason
        left_out: FunctionT = outside
        return left_out

    return decorate


def constant_in_graphs(function: FunctionT) -> FunctionT:
    """Decorator: torch.compile calls the function, whose arguments must be constants, and takes its
    result for a constant. Equivalent to `torch.compiler.assume_constant_result`, which would import
    the compiler when this library is imported."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def version_numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, or as many as it has."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _find_triton() -> tuple[str, bool]:
    """The version of the installed Triton, "" without one and "unknown" for a build without
    metadata, and whether it is too old. Read from metadata, because importing Triton is slow."""
    if find_spec("triton") is None:
        return "", False
    for build in ("triton", "pytorch-triton", "triton-windows"):
        try:
            version = metadata.version(build)
        except metadata.PackageNotFoundError:
            continue
        return version, version_numbers(version)[:2] < LOWEST_TRITON
    return "unknown", False


_TRITON, _IS_OLD = _find_triton()

LOWEST_CAPABILITY = (8, 0)
"""Of a GPU. Older ones have less shared memory than the kernels take, and no bfloat16."""

_TOO_OLD: dict[torch.device, str] = {}
_TOLD: set[tuple[torch.device, str]] = set()


@constant_in_graphs
def _old_capability(device: torch.device) -> str:
    """The compute capability of a GPU below LOWEST_CAPABILITY; "" for all others, and for devices
    that only stand for a GPU."""
    found = _TOO_OLD.get(device)
    if found is None:
        numbers = LOWEST_CAPABILITY
        if device.type == "cuda" and torch.cuda.is_available():
            numbers = torch.cuda.get_device_capability(device)
        found = _TOO_OLD[device] = _dotted(numbers) if numbers < LOWEST_CAPABILITY else ""
    return found


@constant_in_graphs
def _warn_once(device: torch.device, reason: str) -> bool:
    """Warn that "auto" takes the reference on this GPU; returns whether this call did."""
    if (device, reason) in _TOLD:
        return False
    _TOLD.add((device, reason))
    warnings.warn(
        f"backend='auto' takes the reference on {device}, which is slow: the Triton kernels "
        f"{reason}",
        stacklevel=4,
    )
    return True


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def triton_version() -> tuple[int, ...]:
    """Up to three numbers; none without Triton and for a build without metadata."""
    return version_numbers(_TRITON)


def check_backend(backend: str) -> None:
    """Raise ValueError unless `backend` is one of "auto", "triton" and "reference"."""
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {_BACKENDS}, got {backend!r}")


def choose_backend(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    unsupported: str | None = None,
    warning: str | None = None,
) -> Implementation:
    """The implementation for tensors of `dtype` on `device`.

    "auto" chooses Triton on a CUDA device of compute capability 8.0 or more, except for float64,
    which no kernel takes, under torch.func transforms and forward mode, for which no Triton
    operation has rules, and if `unsupported` names a property of the call that the kernels do not
    support; then, without Triton and on any other device, ROCm's included, it chooses the
    reference. Raises ValueError for an unknown name, for a Triton that is too old, and for "triton"
    if it cannot run: without Triton, on an older GPU, with an unsupported call, under a transform,
    or on a CPU unless Triton's interpreter is on. `warning` is what "auto" warns of, once a device
    and text, where it takes the reference on a GPU for an unsupported call; not under transforms,
    which have no kernels at all.
    """
    check_backend(backend)
    if unsupported is None and is_transformed():
        unsupported = "torch.func transforms and forward-mode differentiation"
    if unsupported is None and dtype not in KERNEL_DTYPES:
        unsupported = f"{dtype} (only {', '.join(map(str, KERNEL_DTYPES))})"
    if backend == "triton":
        _check_triton(device, unsupported)
        return "triton"
    if backend == "reference" or not is_cuda_device(device):
        return "reference"
    if not _TRITON or unsupported is not None:
        if _TRITON and warning is not None and not is_transformed():
            _warn_once(device, f"do not support {warning}")
        return "reference"
    _check_version(backend)
    found = _old_capability(device)
    if found:
        lowest = _dotted(LOWEST_CAPABILITY)
        _warn_once(device, f"need compute capability {lowest}, and this GPU has {found}")
        return "reference"
    return "triton"


def is_cuda_device(device: torch.device) -> bool:
    """Whether it is a GPU on which the kernels run: torch calls those of ROCm "cuda", too."""
    return device.type == "cuda" and torch.version.hip is None


def _check_version(backend: Backend) -> None:
    if _IS_OLD:
        lowest = _dotted(LOWEST_TRITON)
        raise ValueError(
            f"backend={backend!r} on a CUDA device needs triton >= {lowest}, got {_TRITON}: "
            f"install the version that belongs to torch, with pip install 'triton>={lowest}', or "
            "use plain torch: backend='reference', for a delta rule 'torch'"
        )


def _check_triton(device: torch.device, unsupported: str | None) -> None:
    if not _TRITON:
        raise ValueError(
            "backend='triton' needs the package triton: install it with pip install triton, or use "
            "backend='auto'"
        )
    _check_version("triton")
    if not is_cuda_device(device) and not interpreter_is_on():
        kind = " of ROCm" if torch.version.hip is not None else ""
        raise ValueError(
            f"backend='triton' needs tensors on a CUDA device, got {device}{kind}: "
            "move the layer and its input there, use backend='auto', or set "
            "TRITON_INTERPRET=1 before the start to run the kernels in Triton's interpreter"
        )
    found = _old_capability(device)
    if found:
        raise ValueError(
            f"backend='triton' needs a GPU of compute capability {_dotted(LOWEST_CAPABILITY)} or "
            f"more, got {found} of {device}: use backend='auto'"
        )
    if unsupported is not None:
        raise ValueError(f"backend='triton' does not support {unsupported}: use backend='auto'")


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
    return any([v is not None and is_one(v) for v in tensors])  # a generator takes longer


def has_values(tensor: Tensor) -> bool:
    """Whether `tensor` (any shape) holds numbers, unlike those of the meta device and of
    FakeTensorMode."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def can_read_device(tensor: Tensor) -> bool:
    """Whether the host may read the values of `tensor` (any shape).

    Not under torch.compile, torch.func transforms or graph capture, not for batched cotangents, and
    not where there are no values.
    """
    if not has_values(tensor) or torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or is_batched(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def is_recomputation() -> bool:
    """Whether a call recomputes an earlier one with its graph, as activation checkpointing does in
    a backward pass. Backward passes of other functions run without gradients by default."""
    return in_backward() and torch.is_grad_enabled()


_NOTHING = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A context in which autocast is off on `device`; the meta device has no autocast."""
    # torch.autocast raises for the meta device, and takes a while where it has nothing to do
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


def autocast_dtype(
    x: torch.Tensor,  # any shape
) -> torch.dtype | None:
    """The dtype to which autocast casts x for a matrix product; None if autocast is off or does not
    cast x, as for float64."""
    device = "cuda" if x.is_cuda else x.device.type  # a fifth of the time of the attributes
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def interpreter_is_on() -> bool:
    """Whether Triton kernels run in its interpreter, on tensors of any device.

    Triton reads TRITON_INTERPRET when a kernel's module is imported, so set it before the program
    starts. Unlike Triton's own setting, this function can be traced by torch.compile.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
