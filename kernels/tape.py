"""Tapes: the allocations, products and launches of a call, without the code that decided on them.

All calls of one kind (`KnownLaunches`) allocate the same sizes and call the same operations and
kernels in the same order: only the addresses differ. A tape is recorded in one call of a kind and
played in the later ones, which costs the host a fraction of the ordinary code.

Recorded are the operations that torch dispatches and the launches of a `Launcher`. A tape has
numbers for regions of memory: those of the inputs first, then those that the call allocates. What
kernels alone read and write has no tensor, only an address.

A call is not recorded if one of its operations depends on the values of a tensor, if one of its
tensors is neither an input nor the result of an operation, or if it has too many steps.

With BEDOUIN_TAPES=0 in the environment of the process, every call takes the ordinary code.
"""

import os
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import driver

from bedouin.kernels.plans import ALIGNMENT, KnownLaunch, KnownLaunches, Launcher, PlannedKernel

Compute = Callable[[Launcher], tuple[Tensor, ...]]

PIECE_ALIGNMENT = 256
"""Bytes to whose multiples the parts of an allocation are rounded."""

MOST_STEPS = 1000
"""Of a tape. A longer call keeps the GPU busy for longer than the ordinary code takes the host, and
its tape would take the host a large part of a second to compile."""

RECORDS = os.environ.get("BEDOUIN_TAPES", "1") != "0"
"""Whether calls are recorded."""

_aten = torch.ops.aten

ALLOCATIONS = frozenset(
    [
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    ]
)
"""Operations whose result is uninitialized memory."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: torch.mm,
    _aten.mm.out: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.bmm.out: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.addmm.out: torch.addmm,
    _aten.addmm_.default: Tensor.addmm_,
    _aten.baddbmm.default: torch.baddbmm,
    _aten.baddbmm_.default: Tensor.baddbmm_,
    _aten.add_.Tensor: Tensor.add_,
    _aten.linear.default: linear,
}
"""Functions that call an operation in less time than the operation's own object."""

REFUSED_TAGS = frozenset(
    [
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.nondeterministic_seeded,
    ]
)


class _View(NamedTuple):
    """A tensor in a region."""

    region: int
    offset: int  # bytes from the first element of the region's tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(v: Tensor, region: int, offset: int) -> "_View":
        return _View(region, offset, tuple(v.shape), v.stride(), v.dtype)


Run = Callable[[list[Tensor], list[int], Any, torch.device], tuple[Tensor, ...]]
"""Inputs, their addresses, the stream and the device of torch -> results."""


class _Source:
    """The source of a function `Run`, with a line for each step.

    Tensors are variables t0, t1, ... and the addresses of regions a0, a1, ...: those of the inputs
    come first. Values without a short literal are global variables of the function. A loop over
    objects that each do one step would add a call of a Python function to each.
    """

    def __init__(self, inputs: int) -> None:
        self._values: dict[str, Any] = {"empty": torch.empty, "empty_strided": torch.empty_strided}
        tensors, addresses = (
            "".join([f"{letter}{i}, " for i in range(inputs)]) for letter in ("t", "a")
        )
        self._lines = [f"({tensors}) = tensors", f"({addresses}) = addresses"]

    def name(self, value: object) -> str:
        """The value in the source."""
        entries = value if isinstance(value, tuple | list) else [value]
        if all([type(v) in (bool, int, type(None)) for v in entries]):
            return repr(tuple(value) if isinstance(value, tuple) else value)
        name = f"c{len(self._values)}"
        self._values[name] = value
        return name

    def allocate(self, view: _View, like: int | None) -> None:
        """Memory of a region, contiguous and with the dtype of the input `like` if it is given."""
        i = view.region
        if like is not None:
            # takes less time
            self._lines.append(f"t{i} = t{like}.new_empty({view.shape})")
        else:
            dtype, sizes = self.name(view.dtype), f"{view.shape}, {view.strides}"
            self._lines.append(f"t{i} = empty_strided({sizes}, dtype={dtype}, device=device)")
        self._lines.append(f"a{i} = t{i}.data_ptr()")

    def allocate_pieces(self, size: int, pieces: list[tuple[int, int]]) -> None:
        """Memory of several regions that need no tensors: the numbers and offsets in bytes."""
        first, dtype = pieces[0][0], self.name(torch.uint8)
        self._lines.append(f"t{first} = empty({size}, dtype={dtype}, device=device)")
        self._lines.append(f"a{first} = t{first}.data_ptr()")
        self._lines += [f"a{i} = a{first} + {offset}" for i, offset in pieces[1:]]

    def view(self, slot: int, view: _View, *, of_input: bool) -> None:
        i, offset = view.region, str(view.offset // view.dtype.itemsize)
        if of_input:
            offset += f" + t{i}.storage_offset()"
        self._lines.append(f"t{slot} = t{i}.as_strided({view.shape}, {view.strides}, {offset})")

    def call(
        self,
        function: Callable[..., Any],
        args: list[str],
        options: dict[str, str],
        result: int | None,
    ) -> None:
        """An operation with arguments as `name` gives them; `result`: the region of its result, if
        that is new memory."""
        given = ", ".join([*args, *[f"{name}={value}" for name, value in options.items()]])
        line = f"{self.name(function)}({given})"
        if result is None:
            self._lines.append(line)
        else:
            self._lines += [f"t{result} = {line}", f"a{result} = t{result}.data_ptr()"]

    def launch(self, known: KnownLaunch, pointers: tuple[tuple[int, int], ...]) -> None:
        plan = known.plan
        assert plan is not None
        # the compiled kernel must live as long as the tape: it unloads itself when it ends
        self.name(plan)
        given = self.name(plan.function), self.name(plan.metadata), "None, None, None"
        at = [f"a{i} + {offset}" if offset else f"a{i}" for i, offset in pointers]
        rest = [self.name(value) for value in known.rest]
        sizes = map(str, known.sizes)
        arguments = ", ".join([*sizes, "stream", *given, *at, *rest])
        self._lines.append(f"{self.name(plan.run)}({arguments})")

    def free(self, slots: list[int]) -> None:
        self._lines.append("del " + ", ".join([f"t{slot}" for slot in slots]))

    def function(self, results: list[int]) -> Run:
        tensors = "".join([f"t{slot}, " for slot in results])
        lines = [*self._lines, f"return ({tensors})"]
        head = "def run(tensors, addresses, stream, device):"
        source = "\n    ".join([head, *lines])
        exec(compile(source, "<tape>", "exec"), self._values)
        run: Run = self._values["run"]
        return run


class Tape:
    """The steps of a call, on one device."""

    def __init__(self, device: int, kernels: list[Any], run: Run) -> None:
        """`kernels`: those that `run` launches."""
        self._device, self._kernels, self._run = device, kernels, run

    def play(self, given: Sequence[Tensor | None]) -> tuple[Tensor, ...] | None:
        """The results for tensors like those of the recorded call; None, with nothing done, if the
        launches would not be the same: on another device, for tensors that are not aligned, or with
        hooks that are to see launches."""
        active, runtime = driver.active, knobs.runtime
        if active.get_current_device() != self._device:
            return None
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            return None
        if any([kernel.pre_run_hooks for kernel in self._kernels]):
            return None
        inputs = [v for v in given if v is not None]
        addresses = [v.data_ptr() for v in inputs]
        if any([address % ALIGNMENT for address in addresses]):
            return None
        stream = active.get_current_stream(self._device)
        return self._run(inputs, addresses, stream, inputs[0].device)


class _Region(NamedTuple):
    """What the recorder knows of a region."""

    view: _View
    made_at: int  # the number of the event; -1: an input
    is_result: bool  # made by an operation that computes


class _Operation(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]  # a view in the place of a tensor
    options: dict[str, Any]  # likewise
    result: int | None

    def views(self) -> list[_View]:
        return [v for v in (*self.args, *self.options.values()) if isinstance(v, _View)]


class _Launched(NamedTuple):
    known: KnownLaunch
    pointers: tuple[tuple[int, int], ...]  # region, offset in bytes


class _Allocated(NamedTuple):
    region: int


class Recorder(TorchDispatchMode):
    """Records a call: a mode, and what its `Launcher` reports launches to.

    It is entered once, in one thread.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # the method would be wrapped such that its first call imports the compiler, which takes
        # seconds, and the import keeps the frames of all callers, with their tensors
        return False

    def __enter__(self) -> Self:
        # not that of the class, which also sets variables of the process: of two threads that
        # record, the last to leave would leave behind that the process is in a mode, and
        # torch.compile would compile nothing any more
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *raised: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places: dict[int, tuple[ref[Tensor], int, int]] = {}
        self._regions: list[_Region] = []
        self._events: list[_Operation | _Launched | _Allocated] = []
        self._kernels: list[Any] = []
        self._is_refused = False
        self._inputs = [v for v in given if v is not None]
        # the same tensor twice could be two tensors in another call
        if len(set(map(id, self._inputs))) < len(self._inputs):
            self.refuse()
        for v in self._inputs:
            self._place_new(v, -1)

    def refuse(self) -> None:
        """No tape can be made: the call does what is not recorded."""
        self._is_refused = True

    def launched(
        self, kernel: PlannedKernel, known: KnownLaunch, tensors: tuple[Tensor, ...]
    ) -> None:
        """A launch with a plan, of aligned tensors."""
        if kernel.kernel not in self._kernels:
            self._kernels.append(kernel.kernel)
        places = [self._find(v) for v in tensors]
        self._events.append(_Launched(known, tuple([(v.region, v.offset) for v in places])))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        writes = func._schema.is_mutable
        if func in ALLOCATIONS:
            self._allocated(result)
        elif not REFUSED_TAGS.isdisjoint(func.tags):
            self.refuse()
        elif isinstance(result, list | tuple):
            # views alone are recorded: no operation here computes several tensors
            for v in result:
                if writes or not isinstance(v, Tensor) or not _shares(v, args[0]):
                    self.refuse()
                else:
                    self._place_view(v, args[0])
        elif not isinstance(result, Tensor):
            self.refuse()
        elif writes or not any(_shares(result, v) for v in (*args, *kwargs.values())):
            self._computed(func, result, args, kwargs)
        elif _shares(result, args[0]):
            self._place_view(result, args[0])
        else:
            self.refuse()
        return result

    def _allocated(self, result: Tensor) -> None:
        if result.device != self._inputs[0].device:
            self.refuse()
        self._place_new(result, len(self._events))
        self._events.append(_Allocated(len(self._regions) - 1))

    def _computed(
        self, func: Any, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if any(_has_tensors(v) for v in (*args, *kwargs.values())):
            self.refuse()
        if any(isinstance(v, Tensor) and name != "out" for name, v in kwargs.items()):
            self.refuse()
        views = tuple([self._find(v) if isinstance(v, Tensor) else v for v in args])
        options = {k: self._find(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        region = None
        if not any(result is v for v in (*args, *kwargs.values())):
            self._place_new(result, len(self._events), is_result=True)
            region = len(self._regions) - 1
        self._events.append(_Operation(FUNCTIONS.get(func, func), views, options, region))

    def _place_new(self, v: Tensor, made_at: int, *, is_result: bool = False) -> None:
        """v is a region of its own."""
        # views of new memory count from its start
        if made_at >= 0 and v.storage_offset():
            self.refuse()
        number = len(self._regions)
        self._regions.append(_Region(_View.of(v, number, 0), made_at, is_result))
        self._places[id(v)] = ref(v), number, 0

    def _place_view(self, v: Tensor, of: Tensor) -> None:
        base = self._find(of)
        start = int(of.storage_offset()) * of.itemsize
        offset = base.offset + int(v.storage_offset()) * v.itemsize - start
        self._places[id(v)] = ref(v), base.region, offset

    def _find(self, v: Tensor) -> _View:
        """Where v lies."""
        alive, region, offset = self._places.get(id(v), (None, 0, 0))
        if alive is None or alive() is not v:
            self.refuse()
        return _View.of(v, region, offset)

    def tape(self, results: tuple[Tensor, ...]) -> Tape | None:
        """The tape of the call with these results; None if none can be made."""
        views = [self._find(v) for v in results]
        if any(self._regions[v.region].made_at < 0 for v in views):
            self.refuse()
        operations = [event for event in self._events if isinstance(event, _Operation)]
        taken = [*views, *[v for operation in operations for v in operation.views()]]
        if any(v.dtype != self._regions[v.region].view.dtype for v in taken):
            self.refuse()
        if self._is_refused or len(self._events) > MOST_STEPS:
            return None
        device = driver.active.get_current_device()
        run = _Arrangement(self._regions, self._events, views).function()
        return Tape(device, self._kernels, run)


def _shares(result: Tensor, first: Any) -> bool:
    """Whether the result lies in the memory of the first argument."""
    if not isinstance(first, Tensor):
        return False
    return bool(result.untyped_storage()._cdata == first.untyped_storage()._cdata)


def _has_tensors(v: Any) -> bool:
    return isinstance(v, list | tuple) and any(isinstance(entry, Tensor) for entry in v)


class _Arrangement:
    """The order of the steps of a tape, and which memory regions share."""

    def __init__(
        self,
        regions: list[_Region],
        events: list[_Operation | _Launched | _Allocated],
        results: list[_View],
    ) -> None:
        self._regions, self._events, self._results = regions, events, results
        self._inputs = [i for i, region in enumerate(regions) if region.made_at < 0]
        self._slots: dict[_View, int] = {region.view: i for i, region in enumerate(regions)}
        self._source = _Source(len(self._inputs))
        # slots that hold a region: its own and those of its views
        self._held: dict[int, list[int]] = {}
        self._last = self._last_uses()

    def function(self) -> Run:
        shared, skipped = self._share()
        for at, event in enumerate(self._events):
            if isinstance(event, _Operation):
                self._call(event)
            elif isinstance(event, _Launched):
                self._source.launch(event.known, event.pointers)
            elif event.region in shared:
                self._source.allocate_pieces(*shared[event.region])
            elif event.region not in skipped:
                self._allocate(self._regions[event.region].view)
            ending = [region for region, last in self._last.items() if last == at]
            slots = [slot for region in ending for slot in self._held.get(region, [region])]
            if slots:
                self._source.free(slots)
        return self._source.function([self._slot(v) for v in self._results])

    def _last_uses(self) -> dict[int, int]:
        """The last event that uses a region, of those that the call makes and does not return."""
        last: dict[int, int] = {}
        for at, event in enumerate(self._events):
            if isinstance(event, _Launched):
                used = [region for region, _ in event.pointers]
            elif isinstance(event, _Operation):
                used = [v.region for v in event.views()]
                used += [] if event.result is None else [event.result]
            else:
                used = [event.region]
            last |= dict.fromkeys(used, at)
        kept = {*self._inputs, *[v.region for v in self._results]}
        return {region: at for region, at in last.items() if region not in kept}

    def _share(self) -> tuple[dict[int, tuple[int, list[tuple[int, int]]]], set[int]]:
        """The allocations of regions that share memory, as `_Source.allocate_pieces` takes them, by
        the region that is made first, and all such regions.

        Those regions are shared that kernels alone use and whose last uses have no allocation of a
        result between them: so the most memory that is allocated at a time hardly changes.
        """
        operations = [event for event in self._events if isinstance(event, _Operation)]
        taken = {v.region for operation in operations for v in operation.views()}
        alone = [i for i in self._last if i not in taken and not self._regions[i].is_result]
        made = [self._regions[i].made_at for i in {v.region for v in self._results}]
        phases = {region: sum([at < self._last[region] for at in made]) for region in alone}
        ordered = sorted([(phases[region], region) for region in alone])
        shared: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        for _, group in groupby(ordered, itemgetter(0)):
            members, pieces, size = [region for _, region in group], [], 0
            for region in members:
                pieces.append((region, size))
                size += _extent(self._regions[region].view, PIECE_ALIGNMENT)
            shared[members[0]] = size, pieces
            # the slot of the first holds the memory of all
            self._last[members[0]] = max([self._last.pop(region) for region in members])
        return shared, set(alone)

    def _allocate(self, view: _View) -> None:
        inputs = [self._regions[i].view for i in self._inputs]
        like = [v.region for v in inputs if v.dtype == view.dtype]
        is_contiguous = view.strides == _contiguous(view.shape)
        self._source.allocate(view, like[0] if like and is_contiguous else None)

    def _call(self, event: _Operation) -> None:
        args, options = [self._name(v) for v in event.args], event.options.items()
        named = {k: self._name(v) for k, v in options}
        self._source.call(event.function, args, named, event.result)

    def _name(self, v: object) -> str:
        return f"t{self._slot(v)}" if isinstance(v, _View) else self._source.name(v)

    def _slot(self, view: _View) -> int:
        """The slot of a tensor, which is made where it is first needed."""
        slot = self._slots.get(view)
        if slot is None:
            slot = self._slots[view] = len(self._slots)
            self._source.view(slot, view, of_input=view.region in self._inputs)
            self._held.setdefault(view.region, [view.region]).append(slot)
        return slot


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a new tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def _extent(view: _View, multiple: int) -> int:
    """The bytes of a region, rounded up."""
    if 0 in view.shape:
        return 0
    pairs = zip(view.shape, view.strides, strict=True)
    elements = 1 + sum([(size - 1) * stride for size, stride in pairs])
    size = elements * view.dtype.itemsize
    return size + -size % multiple


class Kind:
    """What calls of one kind have in common: their launches, and their tape once there is one."""

    def __init__(self) -> None:
        self.known: KnownLaunches = {}
        self._tape: Tape | None = None
        self._records = self._is_untaped = False

    def run(self, given: Sequence[Tensor | None], compute: Compute) -> tuple[Tensor, ...]:
        """The results of `compute` for a launcher of this kind, which must depend on nothing but
        the kind and the tensors `given`, and return none of these nor views of these."""
        if self._tape is not None:
            results = self._tape.play(given)
            if results is not None:
                return results
        if not self._records or self._is_untaped or self._tape is not None:
            launcher = Launcher(self.known)
            results = compute(launcher)
            # a call whose launches all have plans: the next one can be recorded
            self._records = launcher.is_planned and RECORDS
            return results
        recorder = Recorder(given)
        launcher = Launcher(self.known, recorder)
        with recorder:
            results = compute(launcher)
        self._records = launcher.is_planned
        if launcher.is_planned:
            self._tape = recorder.tape(results)
            self._is_untaped = self._tape is None
        return results
