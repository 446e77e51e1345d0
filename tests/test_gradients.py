"""Gradients in float64: exact adjoints against unrolling and finite differences; biased ones."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.layer_cases import (
    CPU,
    FIXED_POINTS,
    ITERATED,
    RNGS,
    drawn,
    make,
    random_layer,
    random_state,
)
from torch import Tensor

from bedouin import Bedouin, BedouinState, FixedPointRNN, HouseholderProduct, LowRank, NoMixing
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Broyden,
    Direct,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solver,
    UnrolledAdjoint,
)
from bedouin.testing import assert_close, layer_gradients

PICARD, JACOBI = Picard(rtol=1e-13, atol=1e-300), Jacobi(rtol=1e-13, atol=1e-300)
ANDERSON, BROYDEN = Anderson(rtol=1e-10, atol=1e-300), Broyden(rtol=1e-10, atol=1e-300)
ENDLESS_PICARD, ENDLESS_JACOBI = Picard(rtol=0.0, atol=0.0), Jacobi(rtol=0.0, atol=0.0)

EXACT: list[tuple[Solver, Adjoint]] = [
    (Direct(), UnrolledAdjoint()),
    (ENDLESS_PICARD, UnrolledAdjoint()),
    (ENDLESS_JACOBI, UnrolledAdjoint()),
    *((solver, ImplicitAdjoint()) for solver in (PICARD, JACOBI, ANDERSON, BROYDEN)),
    *((Direct(), ImplicitAdjoint(solver)) for solver in (PICARD, JACOBI, ANDERSON, BROYDEN)),
    (JACOBI, ImplicitAdjoint(Direct())),
    (PICARD, ImplicitAdjoint(JACOBI)),
]


def problem(layer: FixedPointLayer, b: int, t: int, seed: int = 0) -> tuple[Tensor, BedouinState]:
    """A random input and a random nonzero incoming state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = random_state(layer, b, 1.0)
        return torch.randn(b, t, layer.d_model, dtype=torch.float64), state


OTHERS: dict[str, Callable[..., Any]] = {
    "delta": partial(Bedouin, d_state=1, input_scale="delta", beta_max=2.0, num_householder=1,
                     feedback=("B", "mixer"), feedback_norm=False),
    "unmixed, delta": partial(Bedouin, d_state=2, mixer=NoMixing(), feedback=("delta",),
                              feedback_norm=False, num_heads=2, eigenvalues="full",
                              input_scale="one_minus_decay"),
    "unmixed vector": partial(FixedPointRNN, mixer=NoMixing()),
    "low-rank vector": partial(FixedPointRNN, decay="griffin", eigenvalues="full",
                               mixer=LowRank(1)),
}  # fmt: skip
names = pytest.mark.parametrize("name", [*(n for n in FIXED_POINTS if n not in ITERATED), *OTHERS])


def layer_of(name: str) -> FixedPointLayer:
    """Of the table, or of the others, with two channels."""
    options: dict[str, Any] = {"max_steps": 80, "on_unconverged": "ignore"}
    if name in OTHERS:
        layer: FixedPointLayer = OTHERS[name](2, dtype=torch.float64, **options)
        return layer
    layer = make(name, CPU._replace(m=2), **options)
    return layer


def assert_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Each relative to its own largest entry; zero only where zero is expected."""
    assert actual.keys() == expected.keys()
    overall = max(g.abs().max().item() for g in expected.values())
    for name, gradient in expected.items():
        assert_close(f"gradient of {name}", actual[name], gradient, rtol, atol=1e-9 * overall)


@pytest.mark.parametrize(("solver", "adjoint"), EXACT, ids=lambda v: str(v)[:60])
@names
def test_every_exact_adjoint_agrees(name: str, solver: Solver, adjoint: Adjoint) -> None:
    layer = layer_of(name)
    x, state = problem(layer, b=2, t=5)
    exact = layer_gradients(layer, x, ImplicitAdjoint(), solver=Direct(), state=state)
    assert {"x", "state.ssm", "state.y", "in_proj.weight", "D", "dt_bias"} <= exact.keys()
    actual = layer_gradients(layer, x, adjoint, solver=solver, state=state)
    assert_gradients(actual, exact, 1e-6)


@drawn(25, RNGS, st.integers(1, 3), st.integers(1, 7))
def test_the_reverse_sweep_is_the_unrolled_sweep(rng: random.Random, b: int, t: int) -> None:
    layer = random_layer(rng, solver=Direct())
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    x, state = problem(layer, b, t, seed=rng.randint(0, 99))
    exact = layer_gradients(layer, x, ImplicitAdjoint(), state=state)
    unrolled = layer_gradients(layer, x, UnrolledAdjoint(), state=state)
    assert_gradients(exact, unrolled, 1e-6)


@pytest.mark.parametrize(
    "adjoint",
    [ImplicitAdjoint(), ImplicitAdjoint(PICARD), OneStepAdjoint(), PhantomAdjoint()],
    ids=str,
)
@pytest.mark.parametrize("solver", [Direct(), PICARD], ids=["direct", "picard"])
def test_eval_gradients_are_training_gradients(solver: Solver, adjoint: Adjoint) -> None:
    layer = Bedouin(3, solver=solver, adjoint=adjoint, dtype=torch.float64)
    x, state = problem(layer, b=2, t=5)
    training = layer_gradients(layer.train(), x, state=state)
    evaluation = layer_gradients(layer.eval(), x, state=state)
    assert all(torch.equal(training[name], evaluation[name]) for name in training)


def test_a_frozen_layer_gives_input_gradients_only() -> None:
    layer = Bedouin(3, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0
    assert all(p.grad is None for p in layer.parameters())
    assert not layer(x.detach()).requires_grad


@pytest.mark.parametrize("k", [1, 4])
def test_no_reflection_is_without_gradient(k: int) -> None:
    layer = Bedouin(4, mixer=HouseholderProduct(k), dtype=torch.float64)
    gradients = layer_gradients(layer, torch.randn(2, 5, 4, dtype=torch.float64))
    start, d = layer.d_inner + 2 * layer.d_state, layer.d_inner
    vectors = gradients["x_proj.weight"][start : start + k * d].unflatten(0, (k, d))
    assert (vectors.abs().amax((1, 2)) > 0).all()
