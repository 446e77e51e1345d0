"""Tapes: calls that play one give the numbers of the ordinary code, in memory of their own.

Kernels run in Triton's interpreter with the addresses that a tape gives them, as a GPU would.
"""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.test_plans import Driver
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import driver

from bedouin import Bedouin
from bedouin.kernels import tape as tapes
from bedouin.kernels.core import kinds
from bedouin.kernels.plans import KnownLaunch, Launcher, PlannedKernel
from bedouin.kernels.tape import Kind, Recorder, Tape
from bedouin.state import BedouinState

CALLS = 4
"""Calls that make plans and record, before one that plays."""


class Interpreted:
    """A plan whose kernel the interpreter runs with addresses of a CPU."""

    function = metadata = None
    last: tuple[Any, ...] = ()

    def __init__(self, kernel: PlannedKernel, tensors: Any, integers: Any, constants: Any) -> None:
        self.kernel, self.dtypes = kernel.kernel, [v.dtype for v in tensors]
        self.integers, self.constants = integers, constants

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        at = args[5 : 5 + len(self.dtypes)]
        assert args[5 + len(self.dtypes) :] == tuple(self.integers)
        # the interpreter calls operations of torch, which no GPU does
        with _disable_current_modes():
            tensors = [memory(*pair) for pair in zip(at, self.dtypes, strict=True)]
            self.kernel[x, y, z](*tensors, *self.integers, **self.constants)


def memory(address: int, dtype: torch.dtype) -> Tensor:
    """A tensor at an address; kernels compute the addresses of all other elements."""
    if not address:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * 16).from_address(address), dtype=dtype)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tape]]:
    """The tapes that were played, with plans of what is interpreted."""
    found: list[Tape] = []
    ordinary, play = PlannedKernel.launch, Tape.play

    def launch(self: Any, grid: Any, tensors: Any, integers: Any, constants: Any) -> Any:
        ordinary(self, grid, tensors, integers, constants)
        return Interpreted(self, tensors, integers, constants)

    def noted(self: Tape, given: Any) -> Any:
        results = play(self, given)
        if results is not None:
            found.append(self)
        return results

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(PlannedKernel, "launch", launch)
    monkeypatch.setattr(Tape, "play", noted)
    monkeypatch.setattr(kinds, "_KINDS", {})
    yield found


def results(
    layer: Bedouin,
    x: Tensor,  # (b, t, m)
    state: BedouinState | None,
    times: int,
    mask: Tensor | None,  # (b, t)
) -> list[Tensor]:
    """Output, state, statistics, and the gradients of as many backward passes."""
    inputs = [x, *(state or ()), *layer.parameters()]
    out, last = layer(x, state, return_state=True, mask=mask)
    weights = torch.arange(out.numel()).view(out.shape).to(out.dtype)
    total = (out * weights).sum() + last.y.sum() + last.ssm.square().sum()
    grads: list[Tensor] = []
    for i in range(times):
        grads += torch.autograd.grad(total, inputs, retain_graph=i < times - 1)
    assert layer.stats is not None and layer.stats.backward is not None
    assert layer.stats.conditioning is not None
    stats = layer.stats.residual, layer.stats.conditioning, layer.stats.backward.residual
    return [out.detach(), *[v.detach() for v in last], *stats, *grads]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("options", "with_state", "cast", "times", "real"),
    [
        ({"num_householder": 1}, False, True, 2, 2),
        ({"feedback": ("delta", "B"), "bias": False}, True, False, 1, 1),
        ({"expand": 4}, True, True, 1, 2),
        ({"output": "paper", "feedback_norm": False}, False, False, 1, 2),
    ],
)
def test_the_same_as_without_a_tape(
    options: dict[str, Any],
    with_state: bool,
    cast: bool,
    times: int,
    real: int,  # tokens
    played: list[Tape],
) -> None:
    layer = Bedouin(4, d_state=1, num_heads=2, backend="triton", **options)
    x = torch.randn(1, 2, 4, requires_grad=True)
    mask = None if real == 2 else torch.arange(2).unsqueeze(0) < real
    state = None
    if with_state:
        state = BedouinState(
            *(torch.randn_like(v, requires_grad=True) for v in layer.init_state(1))
        )

    def run() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return results(layer, x, state, times, mask)

    first, *others = [run() for _ in range(CALLS)]
    assert len(played) == 1 + times
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.interpreter
def test_other_values_and_memory_of_its_own(played: list[Tape]) -> None:
    """Results of one call do not change when the next one plays the same tape."""
    layer = Bedouin(4, d_state=1, num_heads=2, backend="triton")
    layer.requires_grad_(False)
    xs = [torch.randn(1, 2, 4) for _ in range(CALLS + 1)]
    outs = [layer(x) for x in xs]
    assert len(played) >= 2
    kept = [out.clone() for out in outs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "_KINDS", {})
        for x, out, copy in zip(xs, outs, kept, strict=True):
            assert torch.equal(layer(x), out) and torch.equal(out, copy)


class Plan:
    function = metadata = None
    last: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.seen.append(args)


class Kernel:
    pre_run_hooks: tuple[Any, ...] = ()


def planned() -> tuple[Any, KnownLaunch, Plan]:
    kernel: Any = type("Planned", (), {"kernel": Kernel()})()
    known, plan = KnownLaunch((1,), (5,), {}), Plan()  # type: ignore[arg-type]
    known.plan, known.rest = plan, (5,)  # type: ignore[assignment]
    return kernel, known, plan


def record(
    given: tuple[Tensor | None, ...], compute: Any
) -> tuple[Tape | None, tuple[Tensor, ...]]:
    recorder = Recorder(given)
    with recorder:
        results = compute(recorder, *given)
    return recorder.tape(results), results


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", Driver())


@pytest.mark.usefixtures("device")
def test_products_views_and_addresses() -> None:
    kernel, known, plan = planned()

    def compute(recorder: Recorder, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        out = a.new_empty(4, 6)
        scratch, more = a.new_empty(7, dtype=torch.float64), a.new_empty(3)
        torch.mm(a[:4], b.mT, out=out)
        first, second = out.split([2, 4], 1)
        second.add_(1)
        recorder.launched(kernel, known, (out[1:], scratch, more, b[0, 2:]))
        return first, (a[:4] @ b.mT)[1:], out

    given = torch.randn(5, 8), torch.randn(6, 8)
    tape, results = record(given, compute)
    assert tape is not None
    wide = torch.randn(9, 8)
    others = wide[4:], torch.randn(6, 8)
    found = tape.play(others)
    assert found is not None
    product = others[0][:4] @ others[1].mT
    assert torch.allclose(found[0], product[:, :2]) and torch.allclose(found[1], product[1:])
    assert torch.allclose(found[2][:, 2:], product[:, 2:] + 1)
    assert [v.stride() for v in found] == [v.stride() for v in results]
    *_, at, scratch, more, of_b, five = plan.seen[-1]
    assert at == found[2][1:].data_ptr() and of_b == others[1][0, 2:].data_ptr() and five == 5
    assert abs(more - scratch) >= 7 * 8


@pytest.mark.usefixtures("device")
def test_operations_that_write_what_shares_memory_with_an_argument() -> None:
    def compute(recorder: Recorder, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        both = a.new_empty(2, 4, 4)
        first, second = both
        torch.mm(a, b, out=first)
        torch.mm(first, b, out=second)
        second.add_(first)
        return both, first.contiguous().mT

    def given() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 4), torch.randn(4, 4)

    tape, _ = record(given(), compute)
    a, b = given()
    assert tape is not None
    found = tape.play((a, b))
    assert found is not None
    assert torch.allclose(found[0], torch.stack([a @ b, a @ b @ b + a @ b]), atol=1e-5)
    assert torch.equal(found[1], found[0][0].mT)


@pytest.mark.usefixtures("device")
def test_what_is_not_recorded() -> None:
    v = torch.randn(4)
    elsewhere = torch.randn(4)
    kernel, known, _ = planned()

    def launched(recorder: Recorder, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        recorder.launched(kernel, known, (elsewhere,))
        return (v + 1,)

    computes: list[Any] = [
        launched,
        lambda recorder, v: (v * v.sum().item(),),
        lambda recorder, v: (v + elsewhere,),
        lambda recorder, v: (v[v > 0],),
        lambda recorder, v: (torch.cat([v, v]),),
        lambda recorder, v: tuple(torch._foreach_add([v, v], 1)),
        lambda recorder, v: v.topk(2),
        lambda recorder, v: (torch.rand_like(v),),
        lambda recorder, v: (v,),
        lambda recorder, v: (v[:2],),
        lambda recorder, v: (recorder.refuse(), v + 1)[1:],
    ]
    for compute in computes:
        assert record((v,), compute)[0] is None
    assert record((v, v), lambda recorder, v, w: (v + w,))[0] is None
    assert record((v, None), lambda recorder, v, w: (v + 1,))[0] is not None


@pytest.mark.usefixtures("device")
def test_new_memory_that_begins_before_its_tensor() -> None:
    with torch.library._scoped_library("bedouin_tests", "FRAGMENT") as library:
        library.define("behind_two(Tensor v) -> Tensor")
        library.impl("behind_two", lambda v: torch.cat([v.new_zeros(2), v])[2:], "CPU")
        operation = torch.ops.bedouin_tests.behind_two

        def compute(recorder: Recorder, v: Tensor) -> tuple[Tensor, ...]:
            return (operation(v)[1:] + 1,)

        tape, results = record((torch.arange(4.0),), compute)
        assert torch.equal(results[0], torch.tensor([2.0, 3.0, 4.0]))
        found = results if tape is None else tape.play((torch.arange(4.0),))
    assert found is not None and torch.equal(found[0], results[0])


@pytest.mark.usefixtures("device")
def test_memory_ends_after_its_last_use() -> None:
    """Of tensors that are not returned, and of none that is."""

    def compute(recorder: Recorder, v: Tensor) -> tuple[Tensor, ...]:
        for _ in range(4):
            v = (v + 1).view(-1)
        return (v,)

    tape, _ = record((torch.zeros(4),), compute)
    assert tape is not None
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            seen.append(weakref.ref(result))
            alive.append(sum(v() is not None for v in seen))
            return result

    with Sees():  # type: ignore[no-untyped-call]
        found = tape.play((torch.zeros(4),))
    assert found is not None and torch.equal(found[0], torch.full((4,), 4.0))
    assert len(alive) > 4 and max(alive) <= 3


@pytest.mark.usefixtures("device")
def test_the_ordinary_code_where_launches_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, known, plan = planned()

    def compute(launcher: Any) -> tuple[Tensor, ...]:
        raise AssertionError

    def recorded(recorder: Recorder, v: Tensor) -> tuple[Tensor, ...]:
        recorder.launched(kernel, known, (v,))
        return (v + 1,)

    tape, _ = record((torch.randn(4),), recorded)
    assert tape is not None
    kind = Kind()
    kind._tape = tape
    kind.run((torch.randn(4),), compute)
    with pytest.raises(AssertionError):
        kind.run((torch.randn(5)[1:],), compute)
    monkeypatch.setattr(Driver, "device", 1)
    with pytest.raises(AssertionError):
        kind.run((torch.randn(4),), compute)
    monkeypatch.setattr(Driver, "device", 0)
    monkeypatch.setattr(Kernel, "pre_run_hooks", (print,))
    with pytest.raises(AssertionError):
        kind.run((torch.randn(4),), compute)
    assert len(plan.seen) == 1


@pytest.mark.usefixtures("device")
def test_a_call_with_a_launch_that_has_no_plan_is_not_recorded() -> None:
    kind, planned = Kind(), [False]

    def compute(launcher: Launcher) -> tuple[Tensor, ...]:
        launcher.is_planned = planned[0]
        return (v + 1,)

    v = torch.randn(4)
    for _ in range(3):
        kind.run((v,), compute)
    assert kind._tape is None
    planned[0] = True
    for _ in range(2):
        kind.run((v,), compute)
    assert kind._tape is not None


@pytest.mark.usefixtures("device")
def test_a_launch_that_has_lost_its_plan_ends_the_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until all launches have plans again: a mode sees each operation of a recorded call."""
    kind, recorded = Kind(), [0]

    class Counted(Recorder):
        def __init__(self, given: Any) -> None:
            super().__init__(given)
            recorded[0] += 1

    def compute(launcher: Launcher) -> tuple[Tensor, ...]:
        launcher.is_planned = not recorded[0]
        return (v + 1,)

    monkeypatch.setattr(tapes, "Recorder", Counted)
    v = torch.randn(4)
    for _ in range(5):
        kind.run((v,), compute)
    assert recorded[0] == 1 and kind._tape is None


@pytest.mark.usefixtures("device")
def test_an_exception_in_a_recorded_call() -> None:
    """Ends the recording; a later call is recorded as a whole."""
    kind, fails = Kind(), [False]

    def run(v: Tensor) -> tuple[Tensor, ...]:
        def compute(launcher: Launcher) -> tuple[Tensor, ...]:
            more = v + 1
            if fails[0]:
                raise RuntimeError("no memory")
            return (2 * more,)

        return kind.run((v,), compute)

    run(torch.randn(4))
    fails[0] = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            run(torch.randn(4))
        assert torch._C._len_torch_dispatch_stack() == 0 and kind._tape is None
    fails[0] = False
    for _ in range(3):
        v = torch.randn(4)
        assert torch.equal(run(v)[0], 2 * (v + 1))
    assert kind._tape is not None


@pytest.mark.usefixtures("device")
def test_too_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "MOST_STEPS", 3)

    def compute(recorder: Recorder, v: Tensor, steps: int) -> tuple[Tensor, ...]:
        for _ in range(steps):
            v = v + 1
        return (v,)

    for steps, is_recorded in ((3, True), (4, False)):
        tape, _ = record((torch.zeros(4),), lambda recorder, v, n=steps: compute(recorder, v, n))
        assert (tape is not None) == is_recorded


@pytest.mark.usefixtures("device")
def test_a_compiled_kernel_lives_as_long_as_a_tape_that_launches_it() -> None:
    kernel, known, plan = planned()

    def compute(recorder: Recorder, v: Tensor) -> tuple[Tensor, ...]:
        recorder.launched(kernel, known, (v,))
        return (v + 1,)

    # a plan whose function does not hold it, as that of a compiled kernel does not
    seen: list[Any] = []
    plan.run = lambda *args: seen.append(args)  # type: ignore[method-assign]
    tape, _ = record((torch.randn(4),), compute)
    assert tape is not None
    lives = weakref.ref(plan)
    known.plan, plan = None, Plan()
    gc.collect()
    tape.play((torch.randn(4),))
    assert len(seen) == 1 and lives() is not None
    del tape
    gc.collect()
    assert lives() is None


@pytest.mark.usefixtures("device")
def test_threads_that_record_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second to begin ends last; neither records what the other does, and the process is in no
    mode then, in which torch.compile would compile nothing."""
    for name in vars(_python_dispatch):
        if name.startswith("_is_in_"):
            monkeypatch.setattr(_python_dispatch, name, getattr(_python_dispatch, name))
    kinds, turns = (Kind(), Kind()), [threading.Event() for _ in range(3)]
    given = [torch.randn(4) for _ in kinds]
    found: list[Any] = [None, None]

    def begin(i: int) -> None:
        def compute(launcher: Launcher) -> tuple[Tensor, ...]:
            v = given[i] + 1
            turns[i].set()
            assert turns[i + 1].wait(20)
            return (v * (2 + i),)

        found[i] = kinds[i].run((given[i],), compute)

    def alone(i: int) -> None:
        kinds[i].run((given[i],), lambda launcher: (given[i] + 1,))

    for i in range(2):
        alone(i)
    threads = [threading.Thread(target=begin, args=(i,)) for i in range(2)]
    threads[0].start()
    assert turns[0].wait(20)
    threads[1].start()
    threads[0].join(20)
    turns[2].set()
    threads[1].join(20)
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    for i, kind in enumerate(kinds):
        assert kind._tape is not None
        v = torch.randn(4)
        (played,) = kind._tape.play((v,)) or (None,)
        assert played is not None and torch.equal(played, (v + 1) * (2 + i))
        assert torch.equal(found[i][0], (given[i] + 1) * (2 + i))


CALLS_OF_A_PROCESS = """
import gc, sys, weakref
from types import SimpleNamespace
import torch
from triton.runtime import driver
from bedouin.kernels.tape import Kind

gc.collect()
gc.disable()
found = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 7}
driver._active = SimpleNamespace(**found)
kind = Kind()

def call():
    v = torch.randn(4)
    results = kind.run((v,), lambda launcher: (v + 1, v * 2))
    return [weakref.ref(one) for one in (v, *results)]

alive = [one() is not None for _ in range(4) for one in call()]
print(kind._tape is not None, any(alive), "torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize(("setting", "records"), [("0", False), (None, True)])
def test_a_process(setting: str | None, records: bool) -> None:
    """A recorded call keeps no tensors and imports no compiler, and the environment turns tapes
    off."""
    environment = {k: v for k, v in os.environ.items() if k != "BEDOUIN_TAPES"}
    if setting is not None:
        environment["BEDOUIN_TAPES"] = setting
    run = subprocess.run(
        [sys.executable, "-P", "-c", CALLS_OF_A_PROCESS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.stdout.split() == [str(records), "False", "False"], run.stderr
