"""What an eager call costs the host, and that known launches are those that would be computed.

Counted are Python calls and operations of torch.

Triton runs with a driver that only names a GPU, and with kernels that record instead of running, so
that the numbers of a call are meaningless and its path is that of a GPU.

Letters: b batch, t time, m d_model.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import triton
from tests.kernels.test_plans import Driver
from tests.test_core import Inside, Live
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import bedouin.solvers.direct
import bedouin.solvers.reporting
from bedouin import Bedouin
from bedouin.kernels import backend, plans
from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.core import kinds
from bedouin.kernels.direct.triton_constants import uses_tf32
from bedouin.kernels.launch import Device
from bedouin.kernels.plans import Launcher
from bedouin.kernels.tape import Compute, Kind
from bedouin.state import BedouinState

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter launches by itself")

CALLS = 5
"""Calls of a kind that compile kernels, make plans and record a tape, before one that plays it."""

Launch = tuple[str, tuple[Any, ...]]
"""The name of a kernel and, without addresses, what it is launched with."""


class Recorded(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that notes its launches and does nothing."""

    name = src = function = packed_metadata = module = None

    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.launches, self.kernel_name = launches, kernel.__name__
        self.pointers = sum(name.endswith("_ptr") for name in kernel.arg_names)

    def _init_handles(self) -> None:
        pass

    def run(self, *args: Any) -> None:
        # grid and stream, then five that belong to Triton, then the arguments of the kernel
        self.launches.append((self.kernel_name, (*args[:4], *args[9 + self.pointers :])))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Those of all kernels, on what looks like an H100."""
    found: list[Launch] = []

    def compile_(self: Any, key: Any, signature: Any, device: int, *rest: Any) -> Recorded:
        compiled = self.device_caches[device][0][key] = Recorded(self, found)
        return compiled

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(JITFunction, "_do_compile", compile_)
    monkeypatch.setattr(backend, "is_cuda_device", lambda device: True)
    monkeypatch.setattr(Device, "of", staticmethod(lambda device: Device(132, 232448)))
    for module in (bedouin.solvers.direct, bedouin.solvers.reporting):
        monkeypatch.setattr(module, "can_read_device", lambda tensor: False)
    # nothing that another test has launched, and nothing of these tests for others
    monkeypatch.setattr(kinds, "_KINDS", {})
    for kernel in _planned():
        monkeypatch.setattr(kernel, "_plans", {})
        monkeypatch.setattr(kernel, "_seen", {})
        monkeypatch.setattr(kernel.kernel, "device_caches", _empty_caches(kernel.kernel))
    return found


def _planned() -> list[Any]:
    """All kernels with plans, whose modules a call imports."""
    import gc

    import bedouin.kernels.core.backward
    import bedouin.kernels.core.forward
    import bedouin.kernels.direct.triton_summary  # noqa: F401

    return [v for v in gc.get_objects() if type(v) is plans.PlannedKernel]


def _empty_caches(kernel: Any) -> Any:
    return type(kernel.device_caches)(kernel.device_caches.default_factory)


def make(num_heads: int, **options: Any) -> Bedouin:
    layer = Bedouin(16 * num_heads, num_heads=num_heads, num_householder=4, **options)
    return layer.requires_grad_()


def step(
    layer: Bedouin,
    x: Tensor,  # (b, t, m)
    **options: Any,
) -> None:
    layer.zero_grad()
    x.grad = None
    layer(x, **options).sum().backward()


def count_calls(run: Callable[[], None]) -> int:
    """Calls of Python functions of this library."""
    calls: Counter[str] = Counter()

    def see(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("bedouin."):
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls.total()


class Operations(Inside):
    """Counts the operations that torch dispatches, also those that only make views."""

    count = 0

    def saw(self, func: Any, results: Any) -> None:
        self.count += 1


@pytest.mark.parametrize(
    ("num_heads", "cast", "most_calls", "most_operations"),
    [(1, False, 380, 163), (1, True, 380, 171), (2, False, 180, 127)],
)
def test_a_call_and_its_backward_pass(
    num_heads: int, cast: bool, most_calls: int, most_operations: int, launches: list[Launch]
) -> None:
    """After the first calls of a kind; the bounds are a little more than the numbers found.

    With one head each of the four tokens is a product and a launch of its own.
    """
    layer, x = make(num_heads), torch.randn(2, 4, 16 * num_heads, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        run = partial(step, layer, x)
        for _ in range(CALLS):
            run()
        launches.clear()
        calls, count = count_calls(run), Operations()
        assert len(launches) >= 10
        with count:
            run()
    assert calls <= most_calls and count.count <= most_operations


class Computing(Kind):
    """A kind that remembers nothing."""

    def run(self, given: Sequence[Tensor | None], compute: Compute) -> tuple[Tensor, ...]:
        return compute(Launcher())


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("feedback", [True, False])
def test_known_launches_are_those_that_would_be_computed(
    feedback: bool, num_heads: int, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For calls of several kinds in turn, which differ in what launches depend on."""
    options: dict[str, Any] = {} if feedback else {"feedback": ()}
    layer, other = make(num_heads, **options), make(num_heads, **options, beta_max=1.5)
    m = 16 * num_heads
    wide = torch.randn(3, 7, 2 * m)
    state = BedouinState(*(torch.randn_like(v) for v in layer.init_state(2)))
    mask = torch.ones(2, 5, dtype=torch.bool)
    runs: list[Callable[[], None]] = []
    for of, shape in ((layer, (2, 5)), (other, (2, 5)), (layer, (3, 5)), (layer, (2, 40))):
        runs.append(partial(step, of, torch.randn(*shape, m, requires_grad=True)))
    x = torch.randn(2, 5, m, requires_grad=True)
    runs.append(partial(step, layer, x, state=state))
    runs.append(partial(step, layer, x, mask=mask))
    runs.append(partial(step, layer, wide[..., m:].requires_grad_()))

    def last_state() -> None:
        out, last = layer(x, return_state=True)
        (out.sum() + last.ssm.sum() + last.y.sum()).backward()

    def again() -> None:
        total = layer(x).mT.square().sum()
        total.backward(retain_graph=True)
        total.backward()

    def without() -> None:
        with torch.no_grad():
            layer(x)

    def frozen() -> None:
        layer.x_proj.requires_grad_(False)
        layer.dt_bias.requires_grad_(False)
        step(layer, x)
        layer.requires_grad_()

    def misaligned() -> None:
        layer.D.data = torch.randn(layer.D.numel() + 1)[1:]
        step(layer, x)

    runs += [last_state, again, without, frozen, misaligned]

    def record() -> list[Launch]:
        launches.clear()
        for run in runs:
            run()
        return list(launches)

    for _ in range(CALLS):
        known = record()
    monkeypatch.setattr(kinds, "Kind", Computing)
    monkeypatch.setattr(kinds, "_KINDS", {})
    for _ in range(2):
        computed = record()
    assert len(known) > 10 * len(runs) and known == computed


def test_a_known_launch_sees_hooks(launches: list[Launch]) -> None:
    layer, x = make(1), torch.randn(2, 3, 16, requires_grad=True)
    for _ in range(CALLS):
        step(layer, x)
    launches.clear()
    step(layer, x)
    seen: list[Any] = []
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        step(layer, x)
    finally:
        hooks.remove(seen.append)
    assert launches[: len(launches) // 2] == launches[len(launches) // 2 :]


@pytest.mark.parametrize("num_heads", [1, 2])
def test_the_most_memory_at_a_time(
    num_heads: int, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tape of a backward pass takes no more than the ordinary code, though what kernels alone
    use shares allocations."""
    layer, x = make(num_heads), torch.randn(40, 16, 16 * num_heads, requires_grad=True)
    for _ in range(CALLS):
        step(layer, x)

    def peak() -> int:
        layer.zero_grad()
        total, live = layer(x).sum(), Live()
        with live:
            total.backward()
        return live.peak

    played = peak()
    monkeypatch.setattr(kinds, "Kind", Computing)
    monkeypatch.setattr(kinds, "_KINDS", {})
    assert played <= peak()


def test_the_precision_of_products_by_all_names_of_the_setting() -> None:
    """Also by the name whose use makes torch refuse to read the older one."""
    matmul = torch.backends.cuda.matmul
    before, older = matmul.fp32_precision, torch.get_float32_matmul_precision()
    try:
        assert not uses_tf32()
        torch.set_float32_matmul_precision("high")
        assert uses_tf32()
        torch.set_float32_matmul_precision("highest")
        for precision in ("tf32", "ieee", "tf32"):
            matmul.fp32_precision = precision
            assert uses_tf32() == (precision == "tf32")
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(older)
        matmul.fp32_precision = before
