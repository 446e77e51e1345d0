"""Repeated launches of a Triton kernel without Triton's binder.

`kernel[grid](...)` inspects every argument at every launch, which costs the host 14 to 20
microseconds for fifty arguments. A plan remembers the compiled kernel for all that Triton
specializes on, and launches it by `CompiledKernel.__getitem__`, which has had the same form from
Triton 3.6 to 3.9 and calls the launch hooks itself. The ordinary launch remains for the first
launch of each kind, in the interpreter, for hooks that see each call, and for versions of Triton
that nobody has tried. Settings such as TRITON_DEBUG are read at the first launch.
"""

import re
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

KNOWN_VERSIONS = range(6, 10)
"""Minor versions of Triton 3 whose `CompiledKernel` has been read."""

ALIGNMENT = 16
"""Bytes: Triton compiles another kernel for a pointer that is not a multiple of it."""

MAX_PLANS = 512
"""Plans of a kernel, after which all are dropped: lengths of sequences may vary without end."""

KEPT_CONSTANTS = 256
"""`Constants` of a kernel that are kept, one for each kind of call."""

LARGEST = 2**31
"""The sum of the integers of a planned launch is below this, so that each has 32 bits."""


def _is_known(version: str) -> bool:
    major, minor = map(int, re.findall(r"\d+", version)[:2])
    return major == 3 and minor in KNOWN_VERSIONS


_KNOWN = _is_known(triton.__version__)


class Constants(dict[str, Any]):
    """Compile-time constants and launch options by name, never changed; equal only to itself.

    A function that makes them is cached, so that equal ones are the same object.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class PlannedKernel:
    """A Triton kernel whose launches are planned.

    The parameters of the kernel are pointers, then integers, then constants. Integers that the
    kernel does not specialize on are free to change without another plan.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._plans: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}
        names = kernel.arg_names
        self._names, self._specialized = names, [not _is_free(kernel, name) for name in names]

    def launch(
        self,
        grid: tuple[int, ...],
        tensors: tuple[Tensor, ...],  # any shapes
        integers: tuple[int | None, ...],
        constants: Constants,
    ) -> None:
        """Launch on the current device and stream."""
        if not _KNOWN or not isinstance(self.kernel, JITFunction) or self.kernel.pre_run_hooks:
            self.kernel[grid](*tensors, *integers, **constants)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        device = driver.active.get_current_device()
        dtypes = tuple([tensor.dtype for tensor in tensors])
        aligned: tuple[bool, ...] | None = None
        if any([address % ALIGNMENT for address in addresses]):
            aligned = tuple([not address % ALIGNMENT for address in addresses])
        matters = self._specialized[len(tensors) :]
        # None is a constant wherever it stands
        pairs = zip(integers, matters, strict=False)
        fixed = tuple([v if matter or v is None else 0 for v, matter in pairs])
        key = (device, constants, fixed, dtypes, aligned)
        found = self._plans.get(key)
        regular = sum([v for v in integers if v]) < LARGEST
        if found is not None and regular:
            compiled, last = found
            sizes = (*grid, 1, 1)[:3]
            stream = driver.active.get_current_stream(device)
            compiled[sizes](*tensors, *integers, *last, stream=stream)
            return
        compiled = self.kernel[grid](*tensors, *integers, **constants)
        if regular and isinstance(compiled, CompiledKernel):
            names = self._names[len(tensors) + len(integers) :]
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = compiled, tuple(constants[name] for name in names)


def _is_free(kernel: Any, name: str) -> bool:
    """Whether Triton compiles one kernel for all values of an integer."""
    chosen = getattr(kernel, "do_not_specialize", None) or ()
    return name in chosen or kernel.arg_names.index(name) in chosen
