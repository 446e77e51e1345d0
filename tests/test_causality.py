"""No output depends on later tokens or other samples, even if these are NaN."""

import random
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.layer_cases import RNGS, drawn, random_layer
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import Anderson, Broyden, Direct, FixedCap, Jacobi, Picard, Solver
from bedouin.testing import assert_close, measure_growth, relative_error

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


def name(solver: object) -> str:
    return str(solver)[:60]


def draw(rng: random.Random, b: int, t: int, **fixed: Any) -> tuple[FixedPointLayer, Tensor]:
    layer = random_layer(rng, **fixed)
    layer.cap = FixedCap(200)
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    torch.manual_seed(rng.randint(0, 999))
    with torch.no_grad():
        layer.dt_bias.add_(rng.choice((0.0, 2.0)))
    return layer, torch.randn(b, t, layer.d_model, dtype=torch.float64)


def futures(x: Tensor, cut: int) -> list[Tensor]:
    """x with other tokens, huge tokens and NaN from `cut` on."""
    changed = []
    for future in (torch.randn_like(x), 1e30 * torch.randn_like(x), torch.full_like(x, torch.nan)):
        changed.append(torch.cat([x[:, :cut], future[:, cut:]], 1))
    return changed


@torch.no_grad()
@pytest.mark.parametrize("solver", BIT_FOR_BIT, ids=name)
@drawn(12, RNGS, st.integers(1, 3), st.integers(2, 9))
def test_the_past_does_not_see_the_future(
    solver: Solver, rng: random.Random, b: int, t: int
) -> None:
    layer, x = draw(rng, b, t, solver=solver)
    expected = layer(x)
    cut = rng.randint(1, t - 1)
    for other in futures(x, cut):
        assert torch.equal(layer(other)[:, :cut], expected[:, :cut])


@torch.no_grad()
@pytest.mark.parametrize("solver", TO_TOLERANCE, ids=name)
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
@pytest.mark.parametrize("solver", [*BIT_FOR_BIT, *TO_TOLERANCE], ids=name)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 3])
def test_a_sick_sample_is_reported_and_leaves_the_others_alone(
    solver: Solver, value: float, at: int
) -> None:
    layer = Bedouin(4, solver=solver, max_steps=200, on_unconverged="ignore", dtype=torch.float64)
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    expected = layer(x)
    healthy = layer.stats
    sick = x.clone()
    sick[1, at, 2] = value
    output = layer(sick)
    assert healthy is not None and layer.stats is not None
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
