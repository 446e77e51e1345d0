"""Tapes: calls that play one give the numbers of the ordinary code, in memory of their own.

Kernels run in Triton's interpreter with the addresses that a tape gives them, as a GPU would.
"""

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.test_plans import Driver
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import driver

from bedouin import Bedouin
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
        ({"feedback": ("delta",), "bias": False}, True, False, 1, 1),
        ({"num_heads": 2, "expand": 4}, True, True, 1, 2),
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
    layer = Bedouin(4, d_state=1, backend="triton", **options)
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
    layer = Bedouin(4, d_state=1, backend="triton")
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
