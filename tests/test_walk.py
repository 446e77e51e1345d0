"""How many functions of the library a call passes on its way from a layer to the arithmetic.

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

from bedouin import Bedouin
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
