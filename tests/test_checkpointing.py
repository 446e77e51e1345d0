"""Layers under activation checkpointing: unchanged numbers, and no call counted twice."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.layer_cases import saved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from bedouin import Bedouin, FixedPointRNN
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Direct,
    FixedCap,
    GammaCap,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solver,
    UnrolledAdjoint,
    draws,
    solve,
)

CAP = GammaCap(4.0, 1.0, 12, seed=3)
WAYS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "without early stop": {"use_reentrant": False, "early_stop": False},
}
PAIRS: list[tuple[Solver, Adjoint | None]] = [
    (Direct(), None),
    (Picard(), OneStepAdjoint()),
    (Picard(), None),
    (Picard(), UnrolledAdjoint()),
    (Picard(), ImplicitAdjoint(Picard())),
    (Jacobi(), PhantomAdjoint()),
    (Jacobi(), ImplicitAdjoint(Jacobi())),
    (Anderson(), OneStepAdjoint()),
]
Call = Callable[[FixedPointLayer, Tensor], Tensor]
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def make(
    kind: Callable[..., FixedPointLayer] = Bedouin, cap: Any = CAP, **options: Any
) -> FixedPointLayer:
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


def gradients(layer: FixedPointLayer, call: Call) -> list[Tensor]:
    """The gradients of x and of all parameters, after one backward pass."""
    x = draw_input()
    call(layer, x).square().sum().backward()
    found = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def assert_same(plain: Call, checkpointed: Call, **options: Any) -> None:
    """Two calls have the same gradients, and count the same."""
    first = make(**options)
    second = copy.deepcopy(first)
    pairs = zip(gradients(first, plain), gradients(second, checkpointed), strict=True)
    for expected, actual in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(first.get_extra_state(), second.get_extra_state())


def once(layer: FixedPointLayer, x: Tensor) -> Tensor:
    output: Tensor = layer(x)
    return output


def twice(layer: FixedPointLayer, x: Tensor) -> Tensor:
    return once(layer, torch.tanh(once(layer, x)))


@ways
@pytest.mark.parametrize(("solver", "adjoint"), PAIRS)
@pytest.mark.parametrize("kind", [Bedouin, FixedPointRNN])
def test_one_call(
    way: dict[str, Any], solver: Solver, adjoint: Adjoint | None, kind: type[FixedPointLayer]
) -> None:
    def checkpointed(layer: FixedPointLayer, x: Tensor) -> Tensor:
        return checkpoint(layer, x, **way)  # type: ignore[no-any-return]

    assert_same(once, checkpointed, kind=kind, solver=solver, adjoint=adjoint)


@ways
def test_two_calls_before_one_backward(way: dict[str, Any]) -> None:
    def checkpointed(layer: FixedPointLayer, x: Tensor) -> Tensor:
        run = functools.partial(checkpoint, layer, **way)
        output: Tensor = run(torch.tanh(run(x)))
        return output

    assert_same(twice, checkpointed)


@ways
def test_two_calls_in_one_region(way: dict[str, Any]) -> None:
    def checkpointed(layer: FixedPointLayer, x: Tensor) -> Tensor:
        return checkpoint(twice, layer, x, **way)  # type: ignore[no-any-return]

    assert_same(twice, checkpointed)


@ways
def test_micro_batches_before_one_backward(way: dict[str, Any]) -> None:
    def losses(layer: FixedPointLayer, x: Tensor, run: Call) -> Tensor:
        total = x.new_zeros(())
        for i in range(3):
            total = total + run(layer, x * (i + 1)).square().sum()
        return total

    def checkpointed(layer: FixedPointLayer, x: Tensor) -> Tensor:
        return checkpoint(layer, x, **way)  # type: ignore[no-any-return]

    assert_same(
        lambda layer, x: losses(layer, x, once), lambda layer, x: losses(layer, x, checkpointed)
    )


# reentrant checkpointing warns about nested regions, whose forward runs without gradients
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@ways
@pytest.mark.parametrize("inner", [True, False])
def test_nested_regions(way: dict[str, Any], inner: bool) -> None:
    def block(layer: FixedPointLayer, x: Tensor, run: Any) -> Tensor:
        y = torch.tanh(once(layer, x))
        y = run(once, layer, y)
        y = run(twice, layer, torch.tanh(y))
        return once(layer, torch.tanh(y))

    def checkpointed(layer: FixedPointLayer, x: Tensor) -> Tensor:
        run, y = functools.partial(checkpoint, use_reentrant=inner), x
        for i in range(2):
            y = checkpoint(block, layer, torch.tanh(y) if i else y, run, **way)
        return y

    def plain(layer: FixedPointLayer, x: Tensor) -> Tensor:
        def run(f: Any, *args: Any) -> Any:
            return f(*args)

        return block(layer, torch.tanh(block(layer, x, run)), run)

    assert_same(plain, checkpointed)


class Block(nn.Module):
    """A block with dropout on both sides of its layer, checkpointed as in Hugging Face's models."""

    def __init__(self, layer: FixedPointLayer, way: dict[str, Any] | None) -> None:
        super().__init__()
        self.layer = layer
        self.run: Any = None if way is None else functools.partial(checkpoint, **way)

    def __call__(self, x: Tensor, **options: Any) -> Any:
        if self.run is None:
            return super().__call__(x, **options)
        return self.run(functools.partial(super().__call__, **options), x)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        x = nn.functional.dropout(x, 0.2)
        return x + scale * nn.functional.dropout(self.layer(x), 0.2)


@ways
def test_the_way_of_hugging_face_with_several_layers(way: dict[str, Any]) -> None:
    def run(way: dict[str, Any] | None) -> tuple[list[Tensor], list[int]]:
        layers = [make(cap=GammaCap(limit=12, seed=i)) for i in range(3)]
        blocks = [Block(layer, way) for layer in layers]
        x, found = draw_input(), []
        torch.manual_seed(1)
        for step in range(2):
            y = x
            for block in blocks:
                y = block(y, scale=0.5 + step)
            y.square().sum().backward()
        for layer in layers:
            found += [p.grad for p in layer.parameters() if p.grad is not None]
        return found, [layer.num_calls for layer in layers]

    (expected, counts), (actual, counted) = run(None), run(way)
    assert counts == counted == [2, 2, 2]
    for pair in zip(actual, expected, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-14)


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
def test_the_calls_after_it_draw_what_they_would_have(way: dict[str, Any]) -> None:
    layer = make()
    steps = []
    for _ in range(6):
        checkpoint(layer, draw_input(), **way).sum().backward()
        assert layer.stats is not None
        steps.append(int(layer.stats.num_steps.max()))
    assert steps == [CAP.draw(i) for i in range(6)]


@ways
def test_a_fixed_cap_leaves_the_random_state_alone_and_counts_once(way: dict[str, Any]) -> None:
    layer, x = make(cap=FixedCap(5), on_unconverged="ignore"), draw_input()
    before = torch.get_rng_state()
    checkpoint(layer, x, **way).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert layer.num_calls == 1


class Counted(nn.Module):
    """A layer that counts its forwards."""

    def __init__(self, layer: FixedPointLayer) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.layer(x)
        return output


@pytest.mark.parametrize("solver", [Picard(), Jacobi(), Anderson()])
def test_an_iterative_adjoint_recomputes_the_forward_once(solver: Solver) -> None:
    layer = make(solver=Picard(), adjoint=ImplicitAdjoint(solver), cap=100)
    counted, x = Counted(layer), draw_input()
    y = checkpoint(counted, x, use_reentrant=False)
    for backward in (1, 2):
        (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        assert counted.calls == 1 + backward
    assert layer.stats is not None and layer.stats.backward is not None
    assert int(layer.stats.backward.num_steps.max()) > 3
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


def test_an_iterative_adjoint_reads_tensors_saved_on_the_cpu_once() -> None:
    layer, x = make(solver=Picard(), adjoint=ImplicitAdjoint(Picard()), cap=100), draw_input()
    counts = {"packed": 0, "unpacked": 0}

    def count(name: str, saved: Tensor) -> Tensor:
        counts[name] += 1
        return saved

    hooks = functools.partial(count, "packed"), functools.partial(count, "unpacked")
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        y = layer(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)
    # one of them twice: at the y from which the adjoint solve starts
    assert counts["unpacked"] <= counts["packed"] + 1


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


def test_evaluation_leaves_the_random_state_alone() -> None:
    layer, before = make(on_unconverged="ignore").eval(), torch.get_rng_state()
    layer(draw_input())
    assert torch.equal(torch.get_rng_state(), before)
    assert layer.num_calls == 0


@ways
@pytest.mark.parametrize("call", [once, twice])
def test_a_region_that_forgets_the_random_state_is_an_error(
    way: dict[str, Any], call: Call
) -> None:
    y = checkpoint(call, make(), draw_input(), preserve_rng_state=False, **way)
    with pytest.raises(RuntimeError, match="no earlier call drew .*preserve_rng_state=True"):
        y.sum().backward()


@ways
def test_regions_after_the_same_seed_are_an_error(way: dict[str, Any]) -> None:
    layer, total = make(), torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        torch.manual_seed(5)
        total = total + checkpoint(layer, draw_input(), **way).sum()
    with pytest.raises(RuntimeError, match="several calls drew the same random key"):
        total.backward()


def test_calls_beyond_the_limit_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MAX_CALLS", 2)
    layer = make()
    first, *_, last = (checkpoint(layer, draw_input(), use_reentrant=False) for _ in range(3))
    last.sum().backward()
    with pytest.raises(RuntimeError, match="no earlier call drew"):
        first.sum().backward()


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


def test_other_checkpointing_that_restores_the_random_state() -> None:
    def checkpointed(layer: FixedPointLayer, x: Tensor) -> Tensor:
        y = _OwnCheckpoint.apply(layer, True, x)  # type: ignore[no-untyped-call]
        f = functools.partial(twice, layer)
        return _OwnCheckpoint.apply(f, True, torch.tanh(y))  # type: ignore[no-untyped-call, no-any-return]

    assert_same(lambda layer, x: twice(layer, torch.tanh(once(layer, x))), checkpointed)


def test_other_checkpointing_that_does_not_is_an_error() -> None:
    y = _OwnCheckpoint.apply(make(), False, draw_input())  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="no earlier call drew the same random key"):
        y.sum().backward()


def test_other_checkpointing_of_calls_with_equal_keys_is_an_error() -> None:
    layer, x, total = make(), draw_input(), torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        torch.manual_seed(0)
        total = total + _OwnCheckpoint.apply(layer, True, x).sum()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="several calls drew the same random key"):
        total.backward()


def test_copies_keep_the_count_alone() -> None:
    layer, x = make(), draw_input()
    random_state = torch.get_rng_state()
    layer(x)
    for other in (copy.deepcopy(layer), saved(layer)):
        assert other.draws.count == 1

        def recompute(grad: Tensor, other: torch.nn.Module = other) -> None:
            torch.set_rng_state(random_state)
            other(x)

        y = torch.ones(1, requires_grad=True).clone()
        y.register_hook(recompute)
        with pytest.raises(RuntimeError, match="no earlier call drew the same random key"):
            y.backward()


def test_a_region_around_vmap() -> None:
    """The recomputation runs under the transform as well."""

    def vmapped(layer: FixedPointLayer, x: Tensor) -> Tensor:
        output: Tensor = torch.func.vmap(layer)(x.unflatten(0, (2, 1)))
        return output.flatten(0, 1)

    def checkpointed(layer: FixedPointLayer, x: Tensor) -> Tensor:
        return checkpoint(vmapped, layer, x, use_reentrant=False)  # type: ignore[no-any-return]

    assert_same(vmapped, checkpointed, on_unconverged="ignore")


# a warning of torch.compile itself, when it resumes after a graph break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_a_compiled_layer() -> None:
    def checkpointed(layer: FixedPointLayer, x: Tensor) -> Tensor:
        call = torch.compile(layer, backend="eager")
        y = checkpoint(call, x, use_reentrant=False)
        return checkpoint(call, torch.tanh(y), use_reentrant=False)  # type: ignore[no-any-return]

    assert_same(twice, checkpointed)


@ways
def test_tokens_one_by_one(way: dict[str, Any]) -> None:
    def steps(layer: FixedPointLayer, x: Tensor) -> Tensor:
        state, outputs = layer.init_state(2), []
        for t in range(3):
            output, state = layer.step(x[:, t], state)
            outputs.append(output)
        return torch.stack(outputs, 1)

    def checkpointed(layer: FixedPointLayer, x: Tensor) -> Tensor:
        return checkpoint(steps, layer, x, **way)  # type: ignore[no-any-return]

    assert_same(steps, checkpointed)
