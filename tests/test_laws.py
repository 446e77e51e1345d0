"""Laws of the fixed point in float64, for random shapes, parameterizations and seeds: solvers find
it, no output depends on later tokens or other samples, even if these are NaN, and exact adjoints
agree with each other and with unrolling."""

import random
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

from bedouin import Bedouin, BedouinState, FixedPointRNN, HouseholderProduct
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Broyden,
    Direct,
    FixedCap,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solver,
    UnrolledAdjoint,
)
from bedouin.testing import (
    assert_close,
    find_fixed_point,
    layer_gradients,
    measure_growth,
    relative_error,
)

# Fixed points can be as small as 1e-12, so no absolute tolerance.
TINY = 1e-300


def draw(
    rng: random.Random, b: int, t: int, most: float = 3.0, **fixed: Any
) -> tuple[FixedPointLayer, Tensor, BedouinState]:
    """A layer, its step sizes raised half of the time, an input and an incoming state."""
    layer = random_layer(rng, **fixed)
    layer.cap = FixedCap(300)
    torch.manual_seed(rng.randint(0, 2**16))
    with torch.no_grad():
        layer.dt_bias.add_(rng.choice((0.0, most)))
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    x = torch.randn(b, t, layer.d_model, dtype=torch.float64)
    return layer, x, random_state(layer, b)


@drawn(60, RNGS, st.integers(1, 4), st.integers(1, 12))
def test_direct_solves_to_rounding(rng: random.Random, b: int, t: int) -> None:
    layer, x, state = draw(rng, b, t)
    found = find_fixed_point(layer, x, solver=Direct(), state=state)
    pivot: Any = found.stats.conditioning
    # the local solve loses digits near a singular system; the pivot bounds how many
    assert (found.residual <= 1e-12 / pivot.clamp(max=1)).all(), found.stats
    # with one channel a head, Q is a scalar, and Q x may cancel entirely
    if layer.head_dim > 1:
        assert found.stats.converged[pivot > 0.05].all(), found.stats
    assert found.stats.num_steps.tolist() == [1] * b


SOLVERS: list[tuple[Solver, float]] = [
    (Picard(rtol=1e-12, atol=TINY), 1e-10),
    (Picard(rtol=1e-12, atol=TINY, damping=0.7), 1e-10),
    (Picard(rtol=1e-12, atol=TINY, patience=5), 1e-10),
    (Jacobi(rtol=1e-12, atol=TINY), 1e-10),
    (Anderson(rtol=1e-10, atol=TINY), 1e-8),
    (Broyden(rtol=1e-10, atol=TINY), 1e-8),
]


@pytest.mark.parametrize(("solver", "rtol"), SOLVERS, ids=str)
@drawn(15, RNGS, st.integers(1, 3), st.integers(1, 8))
def test_every_solver_finds_directs_fixed_point(
    solver: Solver, rtol: float, rng: random.Random, b: int, t: int
) -> None:
    """Residuals if it reports convergence, values if growth and conditioning permit."""
    layer, x, state = draw(rng, b, t)
    exact = find_fixed_point(layer, x, solver=Direct(), state=state)
    found = find_fixed_point(layer, x, solver=solver, state=state)
    converged = found.stats.converged
    assert (found.residual[converged] <= rtol).all()
    assert (found.stats.residual[converged] <= rtol / 100).all()
    growth = measure_growth(layer, x, state=state)
    if growth <= 1e3 and bool(converged.all()):
        pivot: Any = exact.stats.conditioning
        slack = growth / min(pivot.min().item(), 1.0)
        assert_close("fixed point", found.y, exact.y, rtol * slack)
        assert_close("output", found.output, exact.output, rtol * slack)


def near_the_reflection_limit(k: int) -> Any:
    """beta ~ 2 and |sigma| ~ 0.95, so that |sigma| |I - Q| ~ 1.9: no contraction."""
    layer: Any = Bedouin(
        4, d_state=1, num_householder=k, beta_max=2.0, decay="griffin", input_scale="delta",
        max_steps=200, on_unconverged="ignore", dtype=torch.float64,
    )  # fmt: skip
    alpha = slice(2 + k * layer.d_inner, 2 + k * (layer.d_inner + 1))
    with torch.no_grad():
        layer.dt_bias.fill_(3.0)
        layer.raw_bias[alpha] = 12.0
    return layer


@pytest.mark.parametrize("k", [1, 2, 3])
def test_jacobi_where_picard_fails(k: int) -> None:
    layer, t = near_the_reflection_limit(k), 12
    x = torch.randn(3, t, 4, dtype=torch.float64)
    exact = find_fixed_point(layer, x, solver=Direct())
    picard = find_fixed_point(layer, x, solver=Picard(rtol=1e-6, atol=TINY))
    jacobi = find_fixed_point(layer, x, solver=Jacobi(rtol=1e-10, atol=TINY))
    assert not picard.stats.converged.any()
    assert jacobi.stats.converged.all()
    assert jacobi.stats.num_steps.max() <= t + 1
    assert jacobi.residual.max() <= 1e-9 and exact.residual.max() <= 1e-12
    growth = measure_growth(layer, x)
    if growth <= 1e6:
        assert_close("fixed point", jacobi.y, exact.y, 1e-10 * growth)


BIT_FOR_BIT: list[Solver] = [
    Direct(),
    Picard(rtol=0.3, atol=0.0),
    Picard(rtol=1e-3, atol=1e-4, damping=0.8),
    Picard(rtol=1e-10, atol=1e-300),
    Jacobi(rtol=0.3, atol=0.0),
    Jacobi(rtol=1e-10, atol=1e-300),
]
TO_TOLERANCE: list[Solver] = [
    Anderson(rtol=1e-10, atol=1e-300),
    Broyden(rtol=1e-10, atol=1e-300),
    Picard(rtol=1e-10, atol=1e-300, stop_rule="paper"),
    Picard(rtol=1e-10, atol=1e-300, patience=5),
]


def futures(x: Tensor, cut: int) -> list[Tensor]:
    """x with other tokens, huge tokens and NaN from `cut` on."""
    changed = []
    for future in (torch.randn_like(x), 1e30 * torch.randn_like(x), torch.full_like(x, torch.nan)):
        changed.append(torch.cat([x[:, :cut], future[:, cut:]], 1))
    return changed


@torch.no_grad()
@pytest.mark.parametrize("solver", BIT_FOR_BIT, ids=str)
@drawn(12, RNGS, st.integers(1, 3), st.integers(2, 9))
def test_the_past_does_not_see_the_future(
    solver: Solver, rng: random.Random, b: int, t: int
) -> None:
    layer, x, _ = draw(rng, b, t, 2.0, solver=solver)
    expected = layer(x)
    cut = rng.randint(1, t - 1)
    for other in futures(x, cut):
        assert torch.equal(layer(other)[:, :cut], expected[:, :cut])


@torch.no_grad()
@pytest.mark.parametrize("solver", TO_TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", [Bedouin, FixedPointRNN])
def test_the_past_sees_the_future_within_tolerance_only(solver: Solver, kind: Any) -> None:
    layer = kind(4, solver=solver, max_steps=200, on_unconverged="ignore", dtype=torch.float64)
    x = torch.randn(2, 8, 4, dtype=torch.float64)
    expected = layer(x)
    growth = measure_growth(layer, x)
    random_future, _, nan = futures(x, 5)
    for other in (random_future, nan):
        assert_close("the past", layer(other)[:, :5], expected[:, :5], 1e-8 * growth)


@torch.no_grad()
def test_the_papers_stop_rule_is_not_causal_at_a_loose_tolerance() -> None:
    """As documented: later tokens determine how many steps earlier ones are iterated."""
    solver = Picard(rtol=0.1, atol=0.0, stop_rule="paper")
    layer = Bedouin(4, d_state=1, feedback_init=1.0, solver=solver, dtype=torch.float64)
    layer.dt_bias.add_(2.0)
    x = torch.randn(1, 16, 4, dtype=torch.float64)
    quiet = torch.cat([x[:, :8], 1e-3 * x[:, 8:]], 1)
    loud = torch.cat([x[:, :8], 1e2 * x[:, 8:]], 1)
    assert relative_error(layer(loud)[:, :8], layer(quiet)[:, :8]) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("solver", [*BIT_FOR_BIT, *TO_TOLERANCE], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 3])
def test_a_sick_sample_is_reported_and_leaves_the_others_alone(
    solver: Solver, value: float, at: int
) -> None:
    options: dict[str, Any] = {"max_steps": 200, "on_unconverged": "ignore"}
    layer: Any = Bedouin(4, solver=solver, dtype=torch.float64, **options)
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    expected = layer(x)
    healthy = layer.stats
    sick = x.clone()
    sick[1, at, 2] = value
    output = layer(sick)
    assert healthy.converged.all()
    assert layer.stats.converged.tolist() == [True, False, True]
    assert layer.stats.residual.isfinite().tolist() == [True, False, True]
    assert not output[1, at:].isfinite().any()
    others = [0, 2]
    if solver in BIT_FOR_BIT:
        assert torch.equal(output[others], expected[others])
        assert torch.equal(layer.stats.num_steps[others], healthy.num_steps[others])
    else:
        assert_close("the others", output[others], expected[others], 1e-8)


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


def assert_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Each relative to its own largest entry; zero only where zero is expected."""
    assert actual.keys() == expected.keys()
    overall = max(g.abs().max().item() for g in expected.values())
    for name, gradient in expected.items():
        assert_close(f"gradient of {name}", actual[name], gradient, rtol, atol=1e-9 * overall)


@pytest.mark.parametrize(("solver", "adjoint"), EXACT, ids=str)
@pytest.mark.parametrize("name", [name for name in FIXED_POINTS if name not in ITERATED])
def test_every_exact_adjoint_agrees(name: str, solver: Solver, adjoint: Adjoint) -> None:
    """Of layers with other options, the test below has the reverse sweep."""
    layer = make(name, CPU._replace(m=2), max_steps=80, on_unconverged="ignore")
    x, state = torch.randn(2, 5, layer.d_model, dtype=torch.float64), random_state(layer, 2, 1.0)
    exact = layer_gradients(layer, x, ImplicitAdjoint(), solver=Direct(), state=state)
    assert {"x", "state.ssm", "state.y", "in_proj.weight", "D", "dt_bias"} <= exact.keys()
    actual = layer_gradients(layer, x, adjoint, solver=solver, state=state)
    assert_gradients(actual, exact, 1e-6)


@drawn(25, RNGS, st.integers(1, 3), st.integers(1, 7))
def test_the_reverse_sweep_is_the_unrolled_sweep(rng: random.Random, b: int, t: int) -> None:
    layer, x, state = draw(rng, b, t, 0.0, solver=Direct())
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
    x, state = torch.randn(2, 5, layer.d_model, dtype=torch.float64), random_state(layer, 2, 1.0)
    training = layer_gradients(layer.train(), x, state=state)
    evaluation = layer_gradients(layer.eval(), x, state=state)
    assert all(torch.equal(training[name], evaluation[name]) for name in training)


@pytest.mark.parametrize("k", [1, 4])
def test_no_reflection_is_without_gradient(k: int) -> None:
    layer = Bedouin(4, mixer=HouseholderProduct(k), dtype=torch.float64)
    gradients = layer_gradients(layer, torch.randn(2, 5, 4, dtype=torch.float64))
    start, d = layer.d_inner + 2 * layer.d_state, layer.d_inner
    vectors = gradients["x_proj.weight"][start : start + k * d].unflatten(0, (k, d))
    assert (vectors.abs().amax((1, 2)) > 0).all()
