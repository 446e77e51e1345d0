"""Planned launches: the arguments that Triton would pass, and the ordinary launch where one is due.

Triton runs with a driver that only names a GPU, and with kernels that record instead of running.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from bedouin import Bedouin
from bedouin.kernels import plans
from bedouin.kernels.plans import Constants, PlannedKernel


class Driver:
    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Recorded(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel that notes its launches."""

    name = src = function = packed_metadata = module = None

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def _init_handles(self) -> None:
        pass

    def run(self, *args: Any) -> None:
        self.launches.append(args)


class Elsewhere(Tensor):
    """A tensor of another device."""

    def get_device(self) -> int:
        return 3


def kernel_of(first_ptr, second_ptr, free, size, width: tl.constexpr, BLOCK: tl.constexpr, NAME: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip # noqa: E501
    pass


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """The kernels that Triton was asked to compile."""
    kernels: list[Recorded] = []

    def compile_(self: Any, key: Any, signature: Any, device: int, *rest: Any) -> Recorded:
        kernels.append(Recorded())
        self.device_caches[device][0][key] = kernels[-1]
        return kernels[-1]

    # set, because Triton 3.9 warns about the default
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(JITFunction, "_do_compile", compile_)
    return kernels


def make_kernel() -> PlannedKernel:
    return PlannedKernel(JITFunction(kernel_of, do_not_specialize=["free"]))


CONSTANTS = Constants(BLOCK=16, NAME="sum", num_warps=2)
FIRST, SECOND = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)


def binds(kernel: PlannedKernel) -> Any:
    """Counts the calls of Triton's own launch."""
    return patch.object(kernel.kernel, "run", wraps=kernel.kernel.run)


def test_a_planned_launch_passes_what_the_ordinary_one_does(compiled: list[Recorded]) -> None:
    kernel = make_kernel()
    with binds(kernel) as ordinary:
        for _ in range(3):
            kernel.launch((5, 2), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
    assert ordinary.call_count == 1 and len(compiled) == 1
    first, *planned = compiled[0].launches
    assert len(planned) == 2
    for launch in planned:
        assert len(launch) == len(first)
        # grid, stream, function, metadata, hooks, then the arguments in the kernel's order: hooks
        # that do nothing and their metadata are left out, and addresses stand for tensors
        same = [a is b or (type(a) is int and a == b) for a, b in zip(first, launch, strict=True)]
        assert [at for at, equal in enumerate(same) if not equal] == [6, 7, 8, 9, 10]
        assert launch[6:9] == (None, None, None)
        assert launch[9:11] == (FIRST.data_ptr(), SECOND.data_ptr())
    assert first[:4] == (5, 2, 1, 7) and first[-3:] == (8, 16, "sum")


@pytest.mark.parametrize(
    ("tensors", "integers", "constants"),
    [
        ((FIRST.double(), SECOND), (3, 40, 8), CONSTANTS),
        ((FIRST, SECOND), (3, 41, 8), CONSTANTS),
        ((FIRST, SECOND), (3, 40, 9), CONSTANTS),
        ((FIRST, SECOND), (3, 40, 8), Constants(BLOCK=32, NAME="sum", num_warps=2)),
        ((FIRST[1:], SECOND), (3, 40, 8), CONSTANTS),
        ((FIRST, SECOND), (3, 2**31, 8), CONSTANTS),
        ((FIRST, SECOND), (None, 40, 8), CONSTANTS),
    ],
)
def test_what_triton_compiles_anew_is_no_planned_launch(
    compiled: list[Recorded],
    tensors: tuple[Tensor, ...],
    integers: tuple[int | None, ...],
    constants: Constants,
) -> None:
    kernel = make_kernel()
    kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
    kernel.launch((1,), tensors, integers, constants)
    assert [len(one.launches) for one in compiled] == [1, 1] or integers[1] == 41
    with binds(kernel) as ordinary:
        kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
    assert not ordinary.called


def test_another_device_has_plans_of_its_own(compiled: list[Recorded]) -> None:
    kernel = make_kernel()
    kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
    with patch.object(Driver, "device", 1):
        kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
    assert [len(one.launches) for one in compiled] == [1, 1]


def test_an_integer_that_is_free_needs_no_other_plan(compiled: list[Recorded]) -> None:
    kernel = make_kernel()
    with binds(kernel) as ordinary:
        for free in (3, 4, 16, 1):
            kernel.launch((1,), (FIRST, SECOND), (free, 40, 8), CONSTANTS)
    assert ordinary.call_count == 1 and len(compiled[0].launches) == 4
    assert [launch[-5] for launch in compiled[0].launches] == [3, 4, 16, 1]


def test_hooks_and_unknown_versions_get_the_ordinary_launch(compiled: list[Recorded]) -> None:
    kernel, seen = make_kernel(), []
    with binds(kernel) as ordinary:
        kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
        kernel.kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(args))
        kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
        kernel.kernel.pre_run_hooks.clear()
        with patch.object(plans, "_KNOWN", False):
            kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
    assert ordinary.call_count == 3 and len(seen) == 1


def test_hooks_of_launches_see_a_planned_one(compiled: list[Recorded]) -> None:
    kernel = make_kernel()
    seen: list[Any] = []
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        compiled.clear()
        hooks.add(seen.append)
        try:
            for _ in range(2):
                kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
        finally:
            hooks.remove(seen.append)
        kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
    *hooked, plain = kernel._plans.values()
    assert not hooked
    launches = plain.compiled.launches
    assert [launch[7] is not None and launch[8] is not None for launch in launches] == (
        [True, True, False] * 2
    )


def test_tensors_of_another_device_have_plans_of_their_own(compiled: list[Recorded]) -> None:
    """The launcher gets addresses, so that only the first launch can see that one is a CPU's."""
    kernel = make_kernel()
    with binds(kernel) as ordinary:
        for _ in range(2):
            kernel.launch((1,), (FIRST, SECOND), (3, 40, 8), CONSTANTS)
            kernel.launch((1,), (FIRST, SECOND.as_subclass(Elsewhere)), (3, 40, 8), CONSTANTS)
    assert ordinary.call_count == 2


def test_old_plans_are_dropped(compiled: list[Recorded]) -> None:
    kernel = make_kernel()
    with patch.object(plans, "MAX_PLANS", 2):
        for size in range(8):
            kernel.launch((1,), (FIRST, SECOND), (3, size, 8), CONSTANTS)
    assert len(kernel._plans) <= 2


def test_versions() -> None:
    known = {"3.6.0": True, "3.9.0+git1": True, "3.10.0": False, "3.5.1": False, "4.6": False}
    assert {version: plans._is_known(version) for version in known} == known


def test_misaligned_tensors_have_plans_of_their_own(compiled: list[Recorded]) -> None:
    kernel = make_kernel()
    with binds(kernel) as ordinary:
        for tensors in [(FIRST, SECOND), (FIRST[1:], SECOND), (FIRST, SECOND[1:])] * 2:
            kernel.launch((1,), tensors, (3, 40, 8), CONSTANTS)
    assert ordinary.call_count == 3 and [len(one.launches) for one in compiled] == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [1, 2])
def test_planned_launches_of_a_layer(num_heads: int) -> None:
    """The second call of a kind is planned: alone, on another stream, in a graph, and hooked."""
    layer = Bedouin(32, num_heads=num_heads, device="cuda")
    x = torch.randn(3, 5, 32, device="cuda", requires_grad=True)

    def run() -> list[Tensor]:
        out = layer(x)
        grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
        # an output with its graph would tie the gradients of the next calls to this stream
        return [out.detach(), *grads]

    first = run()
    with patch.object(JITFunction, "run", side_effect=AssertionError("not planned")):
        again = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    for results in (again, aside, captured):
        assert all(map(torch.equal, results, first))
    entered: list[Any] = []
    hook = entered.append
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        run()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(entered) >= 10
