"""Sizes, dtypes, memory layout, devices and compilation of launches, shared by all operations.

Importing this module does not import Triton. Triton has functions like `ceil_div` of its own, but
these are made for kernels and are slow on the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on


class Constants:
    """Values by name as one argument, annotated as `tl.constexpr`, of a kernel that is compiled for
    them; they are attributes. It is compared by its identity in every launch, since comparing many
    values would take longer."""

    def __init__(self, values: dict[str, Any]) -> None:
        import triton.language as tl

        self._values = values
        for name, value in values.items():
            setattr(self, name, value if interpreter_is_on() else tl.constexpr(value))

    def __repr__(self) -> str:
        # a part of the key under which Triton stores what it has compiled
        return repr(self._values)


@lru_cache(maxsize=1024, typed=True)
def as_constants(values: Any) -> Constants:
    """Those of a named tuple, the same object for the same values."""
    return Constants(values._asdict())


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`, for size >= 1."""
    return 1 << (size - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def accumulator(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of computations with operands of `dtypes`: float64 if one of them is float64,
    otherwise float32. Iterates, memories, residuals and sums have it throughout the library.
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32


def last_axis_contiguous(
    v: Tensor,  # (..., c)
) -> Tensor:  # (..., c)
    """v, copied only if its last axis is not contiguous."""
    return v if v.stride(-1) == 1 else v.contiguous()


def evenly_spaced(
    v: Tensor,  # (b, t, c)
) -> Tensor:  # (b, t, c)
    """v, copied unless its b t rows are contiguous and `v.stride(1)` apart. That stride is the
    distance of the rows for a single token, too, of which torch does not say anything."""
    spaced = v.shape[0] == 1 or v.stride(0) == v.shape[1] * v.stride(1)
    # not contiguous(), which ignores the strides of axes of size 1
    as_rows = torch.contiguous_format
    return v if spaced and v.stride(2) == 1 else v.clone(memory_format=as_rows)


@dataclass(frozen=True)
class Device:
    """What programs a device can run; None programs: Triton's interpreter, one after the other."""

    programs: int | None  # that run at the same time if each occupies a whole multiprocessor
    shared_memory: int  # bytes that one program can have

    @staticmethod
    @lru_cache
    def of(device: torch.device) -> "Device":
        """The properties of a GPU, or of Triton's interpreter."""
        if interpreter_is_on():
            return Device(None, 232448)
        properties = torch.cuda.get_device_properties(device)
        shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return Device(properties.multi_processor_count, shared_memory)


_LEFT_OUT: ContextVar[bool] = ContextVar("coalescing is left out", default=False)


@contextmanager
def without_coalescing() -> Iterator[None]:
    """Compilations in this context leave out Triton's pass TritonGPUCoalesce, which chooses layouts
    for large loads and stores; those of other threads do not.

    The kernels of the tracker are written for the layouts that shapes alone give to tensors; the
    pass would replace them. It follows each load and store through the whole kernel, which takes a
    half to three quarters of the compilation.
    """
    _install()
    token = _LEFT_OUT.set(True)
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


@cache
def _install() -> None:
    """Let Triton's compiler ask before it adds the pass: it offers no option for that."""
    from triton._C.libtriton import passes

    add = passes.ttgpuir.add_coalesce

    def add_unless_left_out(pass_manager: Any) -> None:
        if not _LEFT_OUT.get():
            add(pass_manager)

    passes.ttgpuir.add_coalesce = add_unless_left_out
