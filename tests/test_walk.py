"""How many functions of the library a call passes on its way from a layer to the arithmetic, and
how many kernels and operations of torch it launches.

Counted are Python frames of bedouin from `forward` to the function that does the work: the loop
over time in plain torch, or the function that launches a Triton kernel. Frames of torch
(`Module.__call__`, the dispatcher of registered operations, `autograd.Function.apply`) are left
out, and so are those that stand in their place or in that of Triton's launch.
Letters: b batch, t time, m d_model.
"""

import sys
from itertools import groupby
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

import bedouin.solvers.iterate
import bedouin.solvers.reporting
from bedouin import Bedouin, NoMixing
from bedouin.kernels.operation import OPERATIONS
from bedouin.solvers import Direct, Jacobi, Picard, Solver

MOST_FRAMES = 11
NOT_COUNTED = ("bedouin.kernels.operation",)
LOOPS = ("sweep_tokens", "cpu_sweep", "selective_scan_reference")
"""The functions with a loop over time in plain torch."""


def walks(solver: Solver, backend: Any, gradient: bool, num_heads: int) -> list[list[str]]:
    """The frames, as "module:function", from `forward` to each loop or launch, innermost first, in
    calls of one layer."""
    options: dict[str, Any] = {"num_heads": num_heads, "num_householder": 1, "backend": backend}
    layer = Bedouin(2, d_state=2, solver=solver, max_steps=2, **options)
    layer.on_unconverged = "ignore"
    found: list[list[str]] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and _does_the_work(frame):
            names = _names(frame)
            # the layer's output stage has launches of its own, which are no part of the solve
            if "bedouin.layers.stages:gated" not in names:
                found.append(names)

    x, before = torch.randn(1, 1, 2), sys.gettrace()
    # not setprofile, which also watches returns and functions in C
    sys.settrace(watch)
    try:
        with torch.set_grad_enabled(gradient):
            layer(x)
    finally:
        sys.settrace(before)
    return found


def _does_the_work(frame: FrameType) -> bool:
    name = frame.f_code.co_name
    if name in LOOPS:
        return _module(frame).startswith("bedouin.")
    # kernel[grid](...): a frame of Triton that the launching function calls, other than those of an
    # index within a kernel; its name comes first, because Triton's interpreter calls very many
    # functions
    caller = frame.f_back
    return (
        name == "__getitem__"
        and caller is not None
        and _module(frame) == "triton.runtime.jit"
        and _module(caller).startswith("bedouin.kernels.")
    )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _names(frame: FrameType) -> list[str]:
    """Frames of bedouin up to the layer's `forward`, innermost first."""
    names: list[str] = []
    outer: FrameType | None = frame
    while outer is not None:
        if _module(outer).startswith("bedouin.") and _module(outer) not in NOT_COUNTED:
            names.append(f"{_module(outer)}:{outer.f_code.co_name}")
            if names[-1] == "bedouin.layers.fixed_point:forward":
                return names
        outer = outer.f_back
    return names


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("solver", [Direct(), Jacobi(), Picard()])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=pytest.mark.interpreter)]
)
def test_the_walk_to_the_loop_or_launch(
    backend: str, gradient: bool, solver: Solver, num_heads: int
) -> None:
    found = walks(solver, backend, gradient, num_heads)
    longest = max(found, key=len)
    assert longest[-1] == "bedouin.layers.fixed_point:forward"
    assert len(longest) <= MOST_FRAMES, " <- ".join(longest)
    for frames in found:
        modules = [module for module, _ in groupby(name.partition(":")[0] for name in frames)]
        assert len(modules) == len(set(modules)), "a module is left and entered again"


HEADS = "sweep_kernel", "reverse_kernel"
ALL = ("delta", "B", "C", "mixer")


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU, also within our own operations: operations of torch
    that compute, and Triton kernels, which do not run."""

    FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def launch(self, kernel: Any) -> None:
        self.names.append(kernel.fn.__name__)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OPERATIONS.get(func._schema.name)
        parts = own.function if own is not None else None
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            parts = func.decompose
        if parts is not None:
            with self:
                return parts(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches_of(
    layer: Bedouin,
    x: Tensor,  # (b, t, m)
    monkeypatch: pytest.MonkeyPatch,
    **places: Any,
) -> tuple[Launches, Launches]:
    """Those of forward and backward, on a machine whose device cannot be read."""
    # it fills uninitialized memory, which costs launches
    torch.use_deterministic_algorithms(False)
    for module in (bedouin.solvers.reporting, bedouin.solvers.iterate):
        monkeypatch.setattr(module, "can_read_device", lambda tensor: False)
    forward, backward = Launches(), Launches()
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *a, **k: forward.launch(kernel))
    with forward:
        out = layer(x, **places)
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *a, **k: backward.launch(kernel))
    with backward:
        out.backward(torch.ones_like(out))
    return forward, backward


@pytest.mark.interpreter
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "batch", "places", "most"),
    [
        # documents of one length are a batch as it is; others are gathered, in both directions
        ((1, 96), (2, 48), {"cu_seqlens": torch.tensor([0, 48, 96])}, (2, 0)),
        ((1, 96), (3, 66), {"cu_seqlens": torch.tensor([0, 10, 30, 96])}, (29, 7)),
        # which orders the tokens, and masks input, raw values and output
        ((40, 16), (40, 16), {"mask": torch.arange(16) < torch.arange(40)[:, None] % 17}, (37, 9)),
    ],
    ids=["documents of one length", "documents", "padding"],
)
def test_the_launches_beyond_those_of_a_batch(
    shape: tuple[int, int],
    batch: tuple[int, int],
    places: dict[str, Tensor],
    most: tuple[int, int],
    num_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, counts = 32 * num_heads, []
    layer = Bedouin(m, num_heads=num_heads, backend="triton", on_unconverged="ignore")
    for size, given in ((batch, {}), (shape, places)):
        layer.zero_grad()
        x = torch.randn(*size, m, requires_grad=True)
        counts.append([found.names for found in launches_of(layer, x, monkeypatch, **given)])
    for plain, found, more in zip(*counts, most, strict=True):
        assert len(found) <= len(plain) + more, found
        assert "mask" in places or not {"index_add", "index_put"} & {*found}


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("feedback", "num_heads", "most", "mixed"),
    [
        (ALL, 1, (18, 43), {}),
        (ALL, 2, (23, 43), {}),
        # W^y is padded with rows of zeros
        (("delta", "B"), 1, (19, 44), {}),
        (("delta", "B"), 2, (24, 44), {}),
        (("delta",), 1, (20, 44), {}),
        (("delta",), 2, (27, 48), {}),
        ((), 1, (16, 32), {}),
        ((), 2, (22, 35), {}),
        (ALL, 2, (22, 41), {"mixer": NoMixing()}),
        (("delta",), 2, (26, 44), {"mixer": NoMixing()}),
    ],
)
def test_the_number_of_launches(
    feedback: Any,
    num_heads: int,
    most: tuple[int, int],
    mixed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 40 samples of 16 tokens, with and without reflections."""
    options: dict[str, Any] = {"num_heads": num_heads, "feedback": feedback, "backend": "triton"}
    layer = Bedouin(32 * num_heads, on_unconverged="ignore", **options, **mixed)
    x = torch.randn(40, 16, 32 * num_heads, requires_grad=True)
    forward, backward = launches_of(layer, x, monkeypatch)
    assert len(forward.names) <= most[0], forward.names
    assert len(backward.names) <= most[1], backward.names
    assert HEADS[0] in forward.names and HEADS[1] in backward.names
