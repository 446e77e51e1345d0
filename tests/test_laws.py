"""Laws of the fixed point in float64, for random shapes, parameterizations and seeds: solvers find
it, and no output depends on later tokens or other samples, even if these are NaN."""

import random
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.layer_cases import RNGS, drawn, random_layer, random_state
from torch import Tensor

from bedouin import Bedouin, BedouinState, FixedPointRNN
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.mixers import StructuredMixer, WYForm
from bedouin.solvers import Anderson, Broyden, Direct, FixedCap, Jacobi, Picard, Solver
from bedouin.testing import assert_close, find_fixed_point, measure_growth, relative_error

SEEDS = st.integers(0, 2**16)
# Fixed points can be as small as 1e-12, so no absolute tolerance.
TINY = 1e-300


def draw(
    rng: random.Random, b: int, t: int, seed: int
) -> tuple[FixedPointLayer, Tensor, BedouinState]:
    """A layer, its step sizes raised half of the time, an input and an incoming state."""
    layer = random_layer(rng)
    layer.cap = FixedCap(300)
    torch.manual_seed(seed)
    with torch.no_grad():
        layer.dt_bias.add_(rng.choice((0.0, 3.0)))
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    x = torch.randn(b, t, layer.d_model, dtype=torch.float64)
    return layer, x, random_state(layer, b)


@drawn(60, RNGS, st.integers(1, 4), st.integers(1, 12), SEEDS)
def test_direct_solves_to_rounding(rng: random.Random, b: int, t: int, seed: int) -> None:
    layer, x, state = draw(rng, b, t, seed)
    found = find_fixed_point(layer, x, solver=Direct(), state=state)
    pivot = found.stats.conditioning
    assert pivot is not None
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


@pytest.mark.parametrize(("solver", "rtol"), SOLVERS, ids=lambda v: str(v)[:40])
@drawn(15, RNGS, st.integers(1, 3), st.integers(1, 8), SEEDS)
def test_every_solver_finds_directs_fixed_point(
    solver: Solver, rtol: float, rng: random.Random, b: int, t: int, seed: int
) -> None:
    """Residuals if it reports convergence, values if growth and conditioning permit."""
    layer, x, state = draw(rng, b, t, seed)
    exact = find_fixed_point(layer, x, solver=Direct(), state=state)
    found = find_fixed_point(layer, x, solver=solver, state=state)
    converged = found.stats.converged
    assert (found.residual[converged] <= rtol).all()
    assert (found.stats.residual[converged] <= rtol / 100).all()
    growth = measure_growth(layer, x, state=state)
    if growth <= 1e3 and bool(converged.all()):
        pivot = exact.stats.conditioning
        assert pivot is not None
        slack = growth / min(pivot.min().item(), 1.0)
        assert_close("fixed point", found.y, exact.y, rtol * slack)
        assert_close("output", found.output, exact.output, rtol * slack)


def near_the_reflection_limit(k: int) -> Bedouin:
    """beta ~ 2 and |sigma| ~ 0.95, so that |sigma| |I - Q| ~ 1.9: no contraction."""
    layer = Bedouin(
        4, d_state=1, num_householder=k, beta_max=2.0, decay="griffin", input_scale="delta",
        max_steps=200, on_unconverged="ignore", dtype=torch.float64,
    )  # fmt: skip
    alpha = slice(2 + k * layer.d_inner, 2 + k * (layer.d_inner + 1))
    with torch.no_grad():
        layer.dt_bias.fill_(3.0)
        assert layer.raw_bias is not None
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


class Switch(StructuredMixer):
    """I - Q = m e_1 e_1^T with m = 1 where the raw value is positive, else 1/2."""

    def raw_size(self, d_inner: int) -> int:
        return 1

    def forward(self, raw: Tensor) -> WYForm:
        U = torch.tensor([[1.0, 0.0]], dtype=raw.dtype).expand(*raw.shape[:-1], 1, 2)
        M = torch.where(raw > 0, 1.0, 0.5).to(raw.dtype).unsqueeze(-1)
        return WYForm(torch.zeros_like(raw), U, M)


def singular_layer() -> FixedPointRNN:
    """x = u, decay 0 and gain exactly 1; a token with u[0] > 0 has the local matrix diag(0, 1)."""
    layer = FixedPointRNN(
        2, expand=1, mixer=Switch(), feedback=(), on_unconverged="ignore", dtype=torch.float64
    )
    with torch.no_grad():
        layer.in_proj.weight.copy_(torch.eye(2).repeat(2, 1))
        layer.x_proj.weight.zero_()
        layer.x_proj.weight[2, 0] = 1.0
        layer.dt_bias.fill_(-1000.0)
        assert layer.raw_bias is not None
        layer.raw_bias.zero_()
    return layer


@pytest.mark.parametrize("solver", [Direct(), Jacobi(rtol=1e-12)], ids=str)
def test_a_singular_token_is_contained_and_reported(solver: Solver) -> None:
    layer = singular_layer()
    x = torch.randn(3, 6, 2, dtype=torch.float64)
    x[..., 0] = -x[..., 0].abs() - 0.1
    healthy = find_fixed_point(layer, x, solver=solver)
    assert healthy.stats.converged.all()
    sick = x.clone()
    sick[1, 3, 0] = 1.0
    found = find_fixed_point(layer, sick, solver=solver)
    assert found.stats.converged.tolist() == [True, False, True]
    assert found.stats.conditioning is not None
    assert found.stats.conditioning.tolist() == [0.5, 0.0, 0.5]
    assert found.y[1, :3].isfinite().all() and not found.y[1, 3:].isfinite().all(-1).any()
    assert torch.equal(found.y[[0, 2]], healthy.y[[0, 2]])
    assert torch.equal(found.output[1, :3], healthy.output[1, :3])
    layer.solver = solver
    layer(sick.requires_grad_())[[0, 2]].sum().backward()
    assert sick.grad is not None and sick.grad[[0, 2]].isfinite().all()


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


def draw_layer(rng: random.Random, b: int, t: int, **fixed: Any) -> tuple[FixedPointLayer, Tensor]:
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
    layer, x = draw_layer(rng, b, t, solver=solver)
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
