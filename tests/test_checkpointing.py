"""Layers under activation checkpointing: unchanged numbers, and no call counted twice."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.layer_cases import PAIRS
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from bedouin import Bedouin, FixedPointRNN
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import (
    Adjoint,
    Anderson,
    FixedCap,
    GammaCap,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    Picard,
    Solver,
    draws,
    solve,
)

CAP = GammaCap(4.0, 1.0, 12, seed=3)


class _OwnCheckpoint(torch.autograd.Function):
    """An implementation of checkpointing without torch.utils.checkpoint."""

    @staticmethod
    def forward(ctx: Any, f: Any, preserves: bool, x: Tensor) -> Tensor:
        ctx.f, ctx.state = f, torch.get_rng_state() if preserves else None
        ctx.save_for_backward(x)
        with torch.no_grad():
            output: Tensor = f(x)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            if ctx.state is not None:
                torch.set_rng_state(ctx.state)
            y = ctx.f(x)
        torch.autograd.backward(y, grad)
        return None, None, x.grad


def plainly(f: Any, x: Tensor) -> Any:
    return f(x)


Run = Callable[..., Tensor]
"""Runs a function of a tensor, with checkpointing or without."""
WAYS: dict[str, Run] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "without early stop": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "of another library": lambda f, x, preserve_rng_state=True: _OwnCheckpoint.apply(  # type: ignore[no-untyped-call]
        f, preserve_rng_state, x
    ),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def make(kind: Callable[..., FixedPointLayer] = Bedouin, cap: Any = CAP, **options: Any) -> Any:
    """A layer whose solves every cap cuts short, so that each cap gives other gradients."""
    defaults = {"solver": Picard(rtol=0.0, atol=0.0), "adjoint": OneStepAdjoint()}
    torch.manual_seed(0)
    layer = kind(4, max_steps=cap, dtype=torch.float64, **(defaults | options))
    with torch.no_grad():
        layer.dt_bias.add_(2.0)
    return layer


def draw_input(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 9, 4, dtype=torch.float64, generator=generator)
    return x.requires_grad_()


Region = Callable[[FixedPointLayer, Tensor, Run], Tensor]


def gradients(layer: FixedPointLayer, region: Region, run: Run) -> list[Tensor]:
    """The gradients of x and of all parameters, after one backward pass."""
    x = draw_input()
    region(layer, x, run).square().sum().backward()
    found = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def assert_same(region: Region, way: Run, **options: Any) -> None:
    """Calls with checkpointing have the same gradients as without, and count the same."""
    first = make(**options)
    second = copy.deepcopy(first)
    pairs = zip(gradients(first, region, plainly), gradients(second, region, way), strict=True)
    for expected, actual in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(first.get_extra_state(), second.get_extra_state())


def twice(layer: FixedPointLayer, x: Tensor) -> Any:
    return layer(torch.tanh(layer(x)))


def token_by_token(layer: FixedPointLayer, x: Tensor, run: Run) -> Tensor:
    def steps(x: Tensor) -> Tensor:
        state, outputs = layer.init_state(2), []
        for t in range(3):
            output, state = layer.step(x[:, t], state)
            outputs.append(output)
        return torch.stack(outputs, 1)

    return run(steps, x)


def nested(layer: FixedPointLayer, x: Tensor, run: Run, inner: bool = True) -> Tensor:
    within = plainly if run is plainly else functools.partial(checkpoint, use_reentrant=inner)

    def block(x: Tensor) -> Any:
        y = within(layer, torch.tanh(layer(x)))
        y = within(functools.partial(twice, layer), torch.tanh(y))
        return layer(torch.tanh(y))

    return run(block, torch.tanh(run(block, x)))


REGIONS: dict[str, Region] = {
    "two calls before one backward": lambda layer, x, run: run(layer, torch.tanh(run(layer, x))),
    "two calls in one region": lambda layer, x, run: run(functools.partial(twice, layer), x),
    "micro-batches": lambda layer, x, run: torch.stack(
        [run(layer, x * (i + 1)).square().sum() for i in range(3)]
    ),
    "token by token": token_by_token,
    "nested, reentrant": nested,
    "nested, non-reentrant": functools.partial(nested, inner=False),
}


# reentrant checkpointing warns about nested regions, whose forward runs without gradients
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@ways
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_regions(way: Run, region: Region) -> None:
    assert_same(region, way)


@ways
@pytest.mark.parametrize(("solver", "adjoint"), PAIRS)
@pytest.mark.parametrize("kind", [Bedouin, FixedPointRNN])
def test_one_call(
    way: Run, solver: Solver, adjoint: Adjoint | None, kind: type[FixedPointLayer]
) -> None:
    assert_same(lambda layer, x, run: run(layer, x), way, kind=kind, solver=solver, adjoint=adjoint)


def test_a_region_around_vmap() -> None:
    """The recomputation runs under the transform as well."""

    def region(layer: FixedPointLayer, x: Tensor, run: Run) -> Tensor:
        return run(torch.func.vmap(layer), x.unflatten(0, (2, 1)))

    assert_same(region, WAYS["non-reentrant"], on_unconverged="ignore")


# a warning of torch.compile itself, when it resumes after a graph break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_a_compiled_layer() -> None:
    def region(layer: Any, x: Tensor, run: Run) -> Tensor:
        call: Any = layer if run is plainly else torch.compile(layer, backend="eager")
        return REGIONS["two calls before one backward"](call, x, run)

    assert_same(region, WAYS["non-reentrant"])


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_second_backward_recomputes_the_same(early_stop: bool) -> None:
    layer, x = make(), draw_input()
    with set_checkpoint_early_stop(early_stop):
        y = checkpoint(layer, x, use_reentrant=False)
    found = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(3)]
    (expected,) = torch.autograd.grad(make()(x).sum(), x)
    assert all(torch.equal(grad, expected) for grad in found)
    assert layer.num_calls == 1


@ways
def test_a_fixed_cap_leaves_the_random_state_alone_and_counts_once(way: Run) -> None:
    layer, x = make(cap=FixedCap(5), on_unconverged="ignore"), draw_input()
    before = torch.get_rng_state()
    way(layer, x).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert layer.num_calls == 1


@pytest.mark.parametrize("solver", [Picard(), Jacobi(), Anderson()])
def test_an_iterative_adjoint_recomputes_the_forward_once(solver: Solver) -> None:
    layer = make(solver=Picard(), adjoint=ImplicitAdjoint(solver), cap=100)
    calls, x = [], draw_input()
    layer.register_forward_pre_hook(lambda *_: calls.append(layer))
    y = checkpoint(layer, x, use_reentrant=False)
    for backward in (1, 2):
        (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        assert len(calls) == 1 + backward
    assert int(layer.stats.backward.num_steps.max()) > 3
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


def test_an_iterative_adjoint_of_a_map_under_autocast() -> None:
    W = (0.3 * torch.randn(8, 8)).requires_grad_()

    def fixed_point(x: Tensor) -> Tensor:
        def f(y: Tensor) -> Tensor:
            return torch.tanh((y + x) @ W).float()

        with torch.autocast("cpu", torch.bfloat16):
            adjoint = ImplicitAdjoint(Picard(1e-3))
            return solve(f, torch.zeros_like(x), Picard(1e-2), adjoint=adjoint).value

    x = torch.randn(2, 8)
    (expected,) = torch.autograd.grad(fixed_point(x).sum(), W)
    (grad,) = torch.autograd.grad(checkpoint(fixed_point, x, use_reentrant=False).sum(), W)
    assert torch.equal(grad, expected)


@ways
@pytest.mark.parametrize("call", [plainly, twice])
def test_a_region_that_forgets_the_random_state_is_an_error(way: Run, call: Any) -> None:
    y = way(functools.partial(call, make()), draw_input(), preserve_rng_state=False)
    with pytest.raises(RuntimeError, match="no earlier call drew .*preserve_rng_state=True"):
        y.sum().backward()


@ways
def test_regions_after_the_same_seed_are_an_error(way: Run) -> None:
    layer, total = make(), torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        torch.manual_seed(5)
        total = total + way(layer, draw_input()).sum()
    with pytest.raises(RuntimeError, match="several calls drew the same random key"):
        total.backward()


def test_calls_beyond_the_limit_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MAX_CALLS", 2)
    layer = make()
    first, *_, last = (checkpoint(layer, draw_input(), use_reentrant=False) for _ in range(3))
    last.sum().backward()
    with pytest.raises(RuntimeError, match="no earlier call drew"):
        first.sum().backward()
