"""Measurement of a differentiable function: eager and captured, forward and backward.

Letters: b batch, t time, m d_model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
from typing import Any

import torch
from torch import Tensor, nn

from bedouin import kernels
from benchmarks.cost import layer_cost
from benchmarks.setting import Setting, Shape
from benchmarks.timing import (
    Cost,
    Machine,
    capture,
    kept_gib,
    median_ms,
    peak_gib,
    pool_size,
    release_memory,
    replay_ms,
)

Numbers = dict[str, Any]
"""The numbers of a row, as JSON values."""


@dataclass(frozen=True)
class Context:
    """Sizes, machine and procedure, the same for all measurements."""

    setting: Setting
    machine: Machine
    repeats: int
    """Number of timed calls. 0: every call is made once, and the times are NaN."""
    graph: bool
    first_call: bool = False  # Only measure the first call of this process.


@dataclass(frozen=True)
class Subject:
    """A differentiable function with its inputs, its parameters and its minimal cost."""

    function: Callable[..., Tensor]
    draw: Callable[[], tuple[Tensor, ...]]
    """Returns new random inputs, all of which require a gradient."""
    parameters: tuple[Tensor, ...]
    cost: Cost
    """That of a forward pass."""
    backward: float = 2
    """How many forward passes a backward pass costs."""
    sequential_steps: int = 0  # Number of sequentially dependent steps in a forward pass.
    has_graph: bool = True  # Whether the function can be captured.
    observe: Callable[[], Numbers] = field(default=dict)
    """Returns further numbers after the measurement."""


def measure_subject(context: Context, make: Callable[[], Subject]) -> Numbers:
    """Forward (no_grad) and forward + backward (gradients of inputs and parameters), in ms."""
    subject = make()
    if context.first_call:
        return {"first_call_s": _first_call_s(context.setting, subject)}
    numbers = _eager(context, subject)
    if context.graph and subject.has_graph and context.setting.device.type == "cuda":
        release_memory()
        numbers |= _captured(context, make)
    numbers |= _achieved(context.machine, subject, numbers)
    return numbers | subject.observe()


def _first_call_s(setting: Setting, subject: Subject) -> float:
    """Seconds of one forward + backward, without the imports of Triton, the kernels and torch."""
    if find_spec("triton") is not None:
        for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
            import_module(module.name)
    leaf = setting.randn(1).requires_grad_()
    torch.autograd.grad(leaf * leaf, leaf, torch.ones_like(leaf))  # imports a part of torch
    inputs = subject.draw()
    _wait(setting.device)
    started = time.perf_counter()
    output = subject.function(*inputs)
    torch.autograd.grad(output, [*inputs, *subject.parameters], torch.ones_like(output))
    _wait(setting.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _eager(context: Context, subject: Subject) -> Numbers:
    device, repeats = context.setting.device, context.repeats
    calls = _Calls(context.setting, subject)
    numbers: Numbers = {"peak_gib": None, "kept_gib": None}
    if repeats:
        numbers["peak_gib"] = peak_gib(lambda: calls.both(0), device)
        numbers["kept_gib"] = kept_gib(lambda: calls.output(0), device)
        calls.fill_pool()
    numbers["forward_ms"] = median_ms(calls.forward, device, repeats)
    numbers["both_ms"] = median_ms(calls.both, device, repeats)
    return numbers


class _Calls:
    """The two calls that are timed, on sets of inputs that alternate."""

    def __init__(self, setting: Setting, subject: Subject) -> None:
        self.setting, self.subject = setting, subject
        self.sets = [subject.draw()]
        self.grads = [torch.randn_like(self.output(0))]

    def fill_pool(self) -> None:
        each = sum(t.numel() * t.element_size() for t in (*self.sets[0], self.grads[0]))
        for _ in range(1, pool_size(each, self.setting.device)):
            self.sets.append(self.subject.draw())
            self.grads.append(torch.randn_like(self.grads[0]))

    def output(self, i: int) -> Tensor:
        return self.subject.function(*self.sets[i % len(self.sets)])

    def forward(self, i: int) -> None:
        with torch.no_grad():
            self.output(i)

    def both(self, i: int) -> None:
        j = i % len(self.sets)
        wanted = [*self.sets[j], *self.subject.parameters]
        torch.autograd.grad(self.output(j), wanted, self.grads[j])

    @torch.no_grad()
    def refill(self, i: int) -> None:
        """Copy the inputs of another set, chosen by i, into set 0, which captured calls read."""
        j = 1 + i % (len(self.sets) - 1)
        for static, fresh in zip(self.sets[0], self.sets[j], strict=True):
            static.copy_(fresh)
        self.grads[0].copy_(self.grads[j])


def _captured(context: Context, make: Callable[[], Subject]) -> Numbers:
    """Times of replays of the two calls; refilling the inputs between replays is not timed.

    Parameters and inputs are made again, on the stream of the capture: the autograd node that
    accumulates the gradient of a leaf belongs to the stream of the leaf's first use, and a capture
    that involves another stream fails.
    """
    numbers: Numbers = {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls = _Calls(context.setting, make())
        calls.fill_pool()
    stream.synchronize()
    pairs = (("graph_forward_ms", calls.forward), ("graph_both_ms", calls.both))
    for name, call in pairs:
        try:
            graph = capture(partial(call, 0), stream)
        except (RuntimeError, ValueError) as error:
            # the row keeps its eager times and says why these are missing
            numbers[name + "_failed"] = first_line(error)
            torch.cuda.synchronize()
            continue
        device, repeats = context.setting.device, context.repeats
        numbers[name] = replay_ms(graph, device, repeats, before=calls.refill)
        del graph
        release_memory()
    return numbers


def _achieved(machine: Machine, subject: Subject, numbers: Numbers) -> Numbers:
    """Rates and shares of the floor, from the faster of the eager and the captured time."""
    found: Numbers = {}
    for name, passes in (("forward", 1), ("both", 1 + subject.backward)):
        cost, ms = subject.cost * passes, best_ms(numbers, name)
        if ms is None:
            continue
        floor = cost.floor_ms(machine)
        found |= {f"{name}_floor_ms": floor, f"{name}_floor_share": floor / ms}
        found |= {f"{name}_gb_per_s": cost.bytes / ms / 1e6}
        found |= {f"{name}_tflop_per_s": cost.flops / ms / 1e9}
        if subject.sequential_steps:
            found[f"{name}_us_a_token"] = 1e3 * ms / subject.sequential_steps
    if subject.sequential_steps:
        found["sequential_steps"] = subject.sequential_steps
    return found


def best_ms(numbers: Numbers, name: str) -> float | None:
    """The faster of the eager and the captured time; None if neither was measured."""
    times = [numbers.get(key) for key in (f"{name}_ms", f"graph_{name}_ms")]
    taken = [time for time in times if time is not None]
    return min(taken) if taken else None


def first_line(error: BaseException) -> str:
    """The type and the first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else 'no message'}"


def layer_subject(layer: nn.Module, setting: Setting, shape: Shape, steps: int = 0) -> Subject:
    """A layer on x (b, t, m), with so many sequentially dependent steps."""

    def draw() -> tuple[Tensor, ...]:
        return (setting.randn(shape.b, shape.t, setting.m).requires_grad_(),)

    return Subject(
        layer,
        draw,
        tuple(layer.parameters()),
        layer_cost(layer, shape),
        sequential_steps=steps,
        observe=lambda: _solve_numbers(layer),
    )


def _solve_numbers(layer: nn.Module) -> Numbers:
    """The worst statistics of the last solve; none of a layer without a solver."""
    stats = getattr(layer, "stats", None)
    if stats is None:
        return {}
    return {
        "residual": float(stats.residual.max()),
        "converged": bool(stats.converged.all()),
        "num_steps": int(stats.num_steps.max()),
    }
