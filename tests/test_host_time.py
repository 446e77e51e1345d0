"""What an eager call costs the host: Python calls and operations of torch.

Triton runs with a driver that only names a GPU, and with kernels that record instead of running, so
that the numbers of a call are meaningless and its path is that of a GPU.

Letters: b batch, t time, m d_model.
"""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton
from tests.kernels.test_plans import Driver
from tests.test_layer_launches import Inside
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import bedouin.solvers.direct
import bedouin.solvers.reporting
from bedouin import Bedouin
from bedouin.kernels import backend, plans
from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.triton_constants import uses_tf32
from bedouin.kernels.launch import Device

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter launches by itself")

CALLS = 2
"""Calls of a kind that compile kernels and make plans, before one whose launches are planned."""

BY_HEAD: dict[str, Any] = {"feedback_scope": "head", "feedback_heads": None, "d_state": 32}
"""Options of `Bedouin.recall`, with which every head has feedback."""

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
    monkeypatch.setattr(Device, "of", staticmethod(lambda device: Device(132, 232448, False)))
    for module in (bedouin.solvers.direct, bedouin.solvers.reporting):
        monkeypatch.setattr(module, "can_read_device", lambda tensor: False)
    # nothing that another test has launched, and nothing of these tests for others
    for kernel in _planned():
        monkeypatch.setattr(kernel, "_plans", {})
        monkeypatch.setattr(kernel, "_seen", {})
        monkeypatch.setattr(kernel.kernel, "device_caches", _empty_caches(kernel.kernel))
    return found


def _planned() -> list[Any]:
    """All kernels with plans, whose modules a call imports."""
    import gc

    import bedouin.kernels.direct.heads.launch
    import bedouin.kernels.direct.triton_launch
    import bedouin.kernels.direct.triton_summary
    import bedouin.kernels.output.launch  # noqa: F401

    return [v for v in gc.get_objects() if type(v) is plans.PlannedKernel]


def _empty_caches(kernel: Any) -> Any:
    return type(kernel.device_caches)(kernel.device_caches.default_factory)


def step(
    layer: Bedouin,
    x: Tensor,  # (b, t, m)
) -> None:
    layer.zero_grad()
    x.grad = None
    layer(x).sum().backward()


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
    ("make", "num_heads", "cast", "most_calls", "most_operations"),
    [
        (partial(Bedouin, num_householder=4), 1, False, 535, 195),
        (partial(Bedouin, num_householder=4), 1, True, 520, 205),
        (partial(Bedouin, num_householder=4), 2, False, 520, 230),
        (partial(Bedouin.recall, **BY_HEAD), 2, False, 565, 185),
        # two sweeps, of the heads without feedback first
        (Bedouin.recall, 2, False, 890, 345),
        (partial(Bedouin.recall, num_groups=1), 2, False, 910, 412),
    ],
)
def test_a_call_and_its_backward_pass(
    make: Callable[..., Bedouin],
    num_heads: int,
    cast: bool,
    most_calls: int,
    most_operations: int,
    launches: list[Launch],
) -> None:
    """After the first calls of a kind; the bounds are a little more than the numbers found. Five to
    seven of the calls look for hooks on mixer and norm, and for calls that draw no noise."""
    layer = make(16 * num_heads, num_heads=num_heads)
    x = torch.randn(2, 4, 16 * num_heads, requires_grad=True)
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
