"""Repeated launches of a Triton kernel without Triton's binder.

`kernel[grid](...)` inspects every argument at every launch, which costs the host 14 to 20
microseconds for fifty arguments. A plan remembers the compiled kernel for all that Triton
specializes on, and launches it as `CompiledKernel.__getitem__` does, which has had the same form
from Triton 3.6 to 3.9. It passes addresses instead of tensors, of which the launcher would ask each
for its address and then the driver whether that is one of the device. The ordinary launch remains
for the first launch of each kind, in the interpreter, for hooks that see each call, and for
versions of Triton that nobody has tried. Settings such as TRITON_DEBUG are read at the first
launch.
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bedouin.kernels.backend import version_numbers

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
    major, minor = version_numbers(version)[:2]
    return major == 3 and minor in KNOWN_VERSIONS


_KNOWN = _is_known(triton.__version__)


class Constants(dict[str, Any]):
    """Compile-time constants and launch options by name, never changed; equal only to itself.

    A function that makes them is cached, so that equal ones are the same object.
    """

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
    kernel does not specialize on are free to change without another plan.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
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
        """Launch on the current device and stream. Returns the plan of launches like this one on
        this device for tensors that are aligned as Triton prefers it; None if there is none yet."""
        kernel = self.kernel
        if not _KNOWN or not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
            kernel[grid](*tensors, *integers, **constants)
            return None
        addresses = [tensor.data_ptr() for tensor in tensors]
        active = driver.active
        device = active.get_current_device()
        dtypes = tuple([tensor.dtype for tensor in tensors])
        aligned: tuple[bool, ...] | None = None
        if any([address % ALIGNMENT for address in addresses]):
            aligned = tuple([not address % ALIGNMENT for address in addresses])
        # the launcher would refuse the address of a CPU, but no longer sees the tensor
        devices = tuple([tensor.get_device() for tensor in tensors])
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
        return plan if aligned is None else None

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
        compiled = self.kernel[grid](*tensors, *integers, **constants)
        if regular and isinstance(compiled, CompiledKernel):
            names = self._names[len(tensors) + len(integers) :]
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
                self._seen.clear()
            self._plans[key] = _Plan(compiled, tuple(constants[name] for name in names))
        return None


class LaunchSeries:
    """Launches of a kernel one after the other, with the same tensors and with integers of which
    only the first changes, on the device and stream that are current in the first launch.

    The kernel must not specialize on the first integer, which must not be larger than another.
    """

    __slots__ = ("_before", "_behind", "_given", "_run")

    def __init__(
        self,
        kernel: PlannedKernel,
        grid: tuple[int, ...],
        tensors: tuple[Tensor, ...],  # any shapes
        integers: tuple[int | None, ...],  # behind the first
        constants: Constants,
    ) -> None:
        self._given = kernel, grid, tensors, integers, constants
        # of a launch with a plan: the call, and its arguments before the first integer and behind
        self._run: Callable[..., None] | None = None
        self._before: tuple[Any, ...] = ()
        self._behind: tuple[Any, ...] = ()

    def launch(self, first: int) -> None:
        """Launch with this first integer."""
        if self._run is not None:
            self._run(*self._before, first, *self._behind)
            return
        kernel, grid, tensors, integers, constants = self._given
        plan = kernel.launch(grid, tensors, (first, *integers), constants)
        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if plan is None or any([hook.calls for hook in hooks]):
            return
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        given = plan.function, plan.metadata, None, None, None
        addresses = [tensor.data_ptr() for tensor in tensors]
        self._before = (*(*grid, 1, 1)[:3], stream, *given, *addresses)
        self._behind = (*integers, *plan.last)
        self._run = plan.run


How = tuple[tuple[int, ...], tuple[int | None, ...], Constants]
"""Grid, integers and constants of a launch."""


class KnownLaunch:
    """A launch, and its plan on a device once it has one."""

    __slots__ = ("constants", "device", "grid", "integers", "plan", "rest", "sizes")

    def __init__(
        self, grid: tuple[int, ...], integers: tuple[int | None, ...], constants: Constants
    ):
        self.grid, self.integers, self.constants = grid, integers, constants
        self.sizes = (*grid, 1, 1)[:3]
        self.plan: _Plan | None = None
        self.device: int | None = None
        self.rest: tuple[Any, ...] = ()


KnownLaunches = dict[Hashable, Any]
"""Launches, and other values, that calls of one kind have in common. Calls of one kind agree in all
that a launch depends on but the addresses of tensors: shapes, strides, dtypes, devices, options and
settings."""

ValueT = TypeVar("ValueT")


class Observer(Protocol):
    """What sees the launches of a call."""

    def launched(
        self, kernel: PlannedKernel, known: KnownLaunch, tensors: tuple[Tensor, ...]
    ) -> None:
        """A launch with a plan, of aligned tensors."""

    def refuse(self) -> None:
        """The call launches kernels that are not reported."""


class Launcher:
    """Launches the kernels of one call, on the device and stream that are current in it.

    What a launch of a known kind depends on is computed once, by the first call of the kind.
    `is_planned`: whether all launches so far had plans and aligned tensors.
    """

    __slots__ = ("_device", "_known", "_observer", "_stream", "is_planned")

    def __init__(
        self, known: KnownLaunches | None = None, observer: Observer | None = None
    ) -> None:
        """`known`: that of the call's kind; None: nothing is remembered."""
        self._known, self._observer = known, observer
        self.is_planned = True
        self._device: int | None = None
        self._stream: Any = None

    def launch(
        self,
        kernel: PlannedKernel,
        name: Hashable,
        tensors: tuple[Tensor, ...],  # any shapes
        how: Callable[[], How],
    ) -> None:
        """Launch the kernel; `name` distinguishes the launches of a kernel in a call, and `how` is
        called if this one is not known."""
        if self._known is None:
            grid, integers, constants = how()
            kernel.launch(grid, tensors, integers, constants)
            return
        key = kernel, name
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = KnownLaunch(*how())
        plan = known.plan
        if plan is not None and self._is_current(known.device) and not kernel.kernel.pre_run_hooks:
            addresses = [tensor.data_ptr() for tensor in tensors]
            if not any([address % ALIGNMENT for address in addresses]):
                given = plan.function, plan.metadata, None, None, None
                plan.run(*known.sizes, self._stream, *given, *addresses, *known.rest)
                if self._observer is not None:
                    self._observer.launched(kernel, known, tensors)
                return
        self.is_planned = False
        plan = kernel.launch(known.grid, tensors, known.integers, known.constants)
        if plan is not None:
            known.device = driver.active.get_current_device()
            known.rest = (*known.integers, *plan.last)
            # last, because another thread may read it
            known.plan = plan

    def goes_around(self) -> None:
        """The call launches a kernel by itself, not by this object."""
        if self._observer is not None:
            self._observer.refuse()

    def once(self, name: str, compute: Callable[[], ValueT]) -> ValueT:
        """The value of `compute`, which is the same for all calls of the kind and no tensor."""
        if self._known is None:
            return compute()
        if name not in self._known:
            self._known[name] = compute()
        found: ValueT = self._known[name]
        return found

    def _is_current(self, device: int | None) -> bool:
        """Whether the device is the current one, and no hook wants to see launches."""
        if self._device is None:
            active, runtime = driver.active, knobs.runtime
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                return False
            current = active.get_current_device()
            self._device, self._stream = current, active.get_current_stream(current)
        return device == self._device


AFRESH = Launcher()
"""A launcher that computes what a launch depends on each time."""


def _is_free(kernel: Any, name: str) -> bool:
    """Whether Triton compiles one kernel for all values of an integer."""
    chosen = getattr(kernel, "do_not_specialize", None) or ()
    return name in chosen or kernel.arg_names.index(name) in chosen
