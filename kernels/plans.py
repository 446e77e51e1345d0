"""Repeated launches of a Triton kernel without Triton's binder.

`kernel[grid](...)` inspects every argument at every launch, which costs the host 14 to 20
microseconds for fifty arguments. A plan remembers the compiled kernel for all that Triton
specializes on, and launches it as `CompiledKernel.__getitem__` does, which has had the same form
from Triton 3.6 to 3.9. It passes addresses instead of tensors, for each of which the launcher calls
a method and then the driver, to see that the address is one of the device. The ordinary launch
remains for the first launch of each kind, in the interpreter, for hooks that see each call, and for
versions of Triton that nobody has tried. Settings such as TRITON_DEBUG are read at the first
launch.
"""

from contextlib import nullcontext
from functools import reduce
from operator import attrgetter, methodcaller, or_
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bedouin.kernels.backend import version_numbers
from bedouin.kernels.coalescing import without_coalescing

KNOWN_VERSIONS = range(6, 10)
"""Minor versions of Triton 3 whose `CompiledKernel` has been read."""

ALIGNMENT = 16
"""Bytes: Triton compiles another kernel for a pointer that is not a multiple of it."""

MAX_PLANS = 512
"""Plans of a kernel, after which all are dropped: lengths of sequences may vary without end."""

LAUNCH_OPTIONS = "num_warps", "num_stages", "maxnreg"
"""What a launch may have beside the parameters of its kernel."""

KEPT_CONSTANTS = 256
"""`Constants` of a kernel that are kept, one for each kind of call."""

LARGEST = 2**31
"""The sum of the integers of a planned launch is below this, so that each has 32 bits."""


_DTYPE, _DEVICE = attrgetter("dtype"), methodcaller("get_device")


def _is_known(version: str) -> bool:
    major, minor = version_numbers(version)[:2]
    return major == 3 and minor in KNOWN_VERSIONS


_KNOWN = _is_known(triton.__version__)


class Constants(dict[str, Any]):
    """Compile-time constants and launch options by name, never changed; equal only to itself.

    A function that makes them is cached, so that equal ones are the same object. Operations are
    fused, which is Triton's default in some versions alone.
    """

    def __init__(self, *constants: dict[str, Any], **more: Any) -> None:
        super().__init__(*constants, **more)
        self["enable_fp_fusion"] = True

    @staticmethod
    def of(kernel: "PlannedKernel", every: dict[str, Any]) -> "Constants":
        """Those of `every` that the kernel has as parameters, and the launch options."""
        chosen = {*kernel.kernel.arg_names, *LAUNCH_OPTIONS}
        return Constants({name: value for name, value in every.items() if name in chosen})

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class _Plan:
    """A compiled kernel and the arguments behind its integers."""

    __slots__ = ("compiled", "function", "last", "metadata", "run")

    def __init__(self, compiled: CompiledKernel, last: tuple[Any, ...]) -> None:
        self.compiled, self.last = compiled, last
        # looked up once: `run` is a property, which creates the launcher when it is first read
        self.run, self.function = compiled.run, compiled.function
        self.metadata = compiled.packed_metadata


class PlannedKernel:
    """A Triton kernel whose launches are planned.

    The parameters of the kernel are pointers, then integers, then constants. Integers that the
    kernel does not specialize on are free to change without another plan. `coalesces`: whether the
    compiler may choose layouts for its loads and stores (`coalescing.py`).
    """

    def __init__(self, kernel: Any, *, coalesces: bool = True) -> None:
        self.kernel = kernel
        self.compiling = nullcontext if coalesces else without_coalescing
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        # the plans again, by all integers: these need not be looked at then
        self._seen: dict[tuple[Any, ...], _Plan] = {}
        names = kernel.arg_names
        self._names, self._specialized = names, [not _is_free(kernel, name) for name in names]

    def launch(
        self,
        grid: tuple[int, ...],
        tensors: tuple[Tensor, ...],  # any shapes
        integers: tuple[int | None, ...],
        constants: Constants,
    ) -> _Plan | None:
        """Launch on the current device and stream. Returns the plan, None if there is none yet."""
        kernel = self.kernel
        if not _KNOWN or not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
            with self.compiling():
                kernel[grid](*tensors, *integers, **constants)
            return None
        # `map` of a function of C takes less time than a comprehension
        addresses = list(map(Tensor.data_ptr, tensors))
        active = driver.active
        device = active.get_current_device()
        dtypes = tuple(map(_DTYPE, tensors))
        aligned: tuple[bool, ...] | None = None
        if reduce(or_, addresses) % ALIGNMENT:
            aligned = tuple([not address % ALIGNMENT for address in addresses])
        # the launcher would refuse the address of a CPU, but no longer sees the tensor
        devices = tuple(map(_DEVICE, tensors))
        seen = device, constants, integers, dtypes, devices, aligned
        plan = self._seen.get(seen)
        if plan is None:
            plan = self._find(grid, tensors, seen)
            if plan is None:
                return None
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if enter.calls or leave.calls:
            plan.compiled[x, y, z](*addresses, *integers, *plan.last, stream=stream)
        else:
            # no metadata and no hooks: chains of hooks that are empty would be called, too
            given = plan.function, plan.metadata, None, None, None
            plan.run(x, y, z, stream, *given, *addresses, *integers, *plan.last)
        return plan

    def _find(
        self,
        grid: tuple[int, ...],
        tensors: tuple[Tensor, ...],  # any shapes
        seen: tuple[Any, ...],
    ) -> _Plan | None:
        """The plan of a launch whose integers have not been seen; None after an ordinary launch."""
        device, constants, integers, *others = seen
        matters = self._specialized[len(tensors) :]
        # None is a constant wherever it stands
        pairs = zip(integers, matters, strict=False)
        fixed = tuple([v if matter or v is None else 0 for v, matter in pairs])
        key = (device, constants, fixed, *others)
        plan = self._plans.get(key)
        regular = sum([v for v in integers if v]) < LARGEST
        if plan is not None and regular:
            if len(self._seen) >= MAX_PLANS:
                self._seen.clear()
            self._seen[seen] = plan
            return plan
        with self.compiling():
            compiled = self.kernel[grid](*tensors, *integers, **constants)
        if regular and isinstance(compiled, CompiledKernel):
            names = self._names[len(tensors) + len(integers) :]
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
                self._seen.clear()
            self._plans[key] = _Plan(compiled, tuple(constants[name] for name in names))
        return None


def _is_free(kernel: Any, name: str) -> bool:
    """Whether Triton compiles one kernel for all values of an integer."""
    chosen = getattr(kernel, "do_not_specialize", None) or ()
    return name in chosen or kernel.arg_names.index(name) in chosen
