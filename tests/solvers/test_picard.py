"""Picard: what it returns, when it stops, and independence of samples and tokens.

Letters: b batch, t tokens, c values of a token.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.solvers import Picard, Result, Solution, UnrolledAdjoint, solve
from bedouin.solvers.base import Map


def _run(f: Map, y0: Tensor, solver: Picard, max_steps: int = 100, **options: Any) -> Solution:
    return solve(f, y0, solver, max_steps=max_steps, on_unconverged="ignore", **options)


def _rates(*rates: float) -> Map:
    """A contraction that is faster for some samples than for others; fixed point 1 / (1 - rate)."""
    rate = torch.tensor(rates, dtype=torch.float64)[:, None]
    return lambda y: rate * y + 1


def _causal_map(x: Tensor) -> Map:  # (b, t, c)
    """Each token sees itself and its past, elementwise, so that equal inputs give equal bits."""

    def f(y: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        return torch.tanh(0.4 * y - 1.3 * before + x)

    return f


def test_each_sample_stops_at_its_own_step_and_keeps_the_measured_value() -> None:
    f, solver = _rates(0.1, 0.5, 0.9), Picard(rtol=1e-5, atol=1e-7)
    y0 = torch.zeros(3, 2, dtype=torch.float64)
    solution = _run(f, y0, solver, max_steps=200)
    y, values, steps = y0, y0.clone(), [0, 0, 0]
    for step in range(1, 201):
        f_y = f(y)
        small = (f_y - y).abs().amax(1) < 1e-7 + 1e-5 * f_y.abs().amax(1)
        for i in range(3):
            if small[i] and not steps[i]:
                steps[i], values[i] = step, y[i]
        y = f_y
    assert len(set(steps)) == 3
    assert solution.stats.num_steps.tolist() == steps
    assert torch.equal(solution.value, values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stop_rule", ["prefix", "paper"])
def test_a_sample_that_is_exactly_zero_converges_at_once(
    dtype: torch.dtype, stop_rule: Any
) -> None:
    solver, x = Picard(stop_rule=stop_rule), torch.tensor([[0.0], [1.0]], dtype=dtype)
    solution = _run(lambda y: 0.5 * y + x, torch.zeros_like(x), solver)
    assert solution.stats.num_steps[0] == 1 and solution.result is Result.converged
    assert solution.value[0] == 0 and solution.value.dtype == dtype


def test_convergence_does_not_depend_on_the_scale_of_y() -> None:
    """2 ** -60 is a power of two: every iterate is the other one, scaled without rounding."""
    x = torch.randn(3, 5, dtype=torch.float64)

    def at(size: float) -> Solution:
        return _run(lambda y: 0.5 * y + size * x, torch.zeros_like(x), Picard())

    small, large = at(2.0**-60), at(1.0)
    assert torch.equal(small.value, 2.0**-60 * large.value)
    assert torch.equal(small.stats.num_steps, large.stats.num_steps)


def test_small_cotangents_have_gradients() -> None:
    """An adjoint solve starts at zero, which an absolute tolerance would call the solution."""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    solution = _run(lambda y: 0.5 * y + x, torch.zeros_like(x), Picard(1e-12))
    (gradient,) = torch.autograd.grad(1e-10 * solution.value.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 2e-10), rtol=1e-9, atol=0)


def test_damping_is_the_weight_of_the_new_value() -> None:
    f, y0 = _rates(0.5), torch.zeros(1, 1, dtype=torch.float64)
    solution = _run(f, y0, Picard(0.0, 0.0, damping=0.25), max_steps=2)
    assert solution.value.tolist() == [[0.25 + 0.25 * (1 + 0.5 * 0.25 - 0.25)]]


def _oscillating(y: Tensor) -> Tensor:
    return -1.2 * y + 1.1


def test_adaptive_damping_tames_an_oscillation_where_plain_picard_diverges() -> None:
    """A sample that improves is not touched."""
    rates, y0 = (0.5, -1.2), torch.zeros(2, 1, dtype=torch.float64)
    f, plain = _rates(*rates), _run(_rates(*rates), y0, Picard(1e-6))
    assert plain.stats.converged.tolist() == [True, False]
    assert plain.value[1].abs() > 1e3
    adaptive = _run(f, y0, Picard(1e-6, patience=2, shrink=0.5))
    assert adaptive.result is Result.converged
    assert torch.equal(adaptive.value[0], plain.value[0])
    assert adaptive.value[1].item() == pytest.approx(1 / 2.2, rel=1e-5)


def test_adaptive_damping_shrinks_after_patience_steps_without_a_new_low() -> None:
    y0 = torch.zeros(1, 1, dtype=torch.float64)
    solver = Picard(0.0, 0.0, patience=3, shrink=0.5)
    # the first defect is the lowest, so the fourth update is the first damped one
    y = y0
    for factor in (1.0, 1.0, 1.0, 0.5):
        y = torch.lerp(y, _oscillating(y), factor)
    torch.testing.assert_close(_run(_oscillating, y0, solver, 4).value, y)


def test_a_token_waits_for_all_tokens_before_it() -> None:
    """Token 1 is right from the start, but its past is not: it must not freeze."""
    y0 = torch.tensor([[[1.0], [0.0]]])

    def f(y: Tensor) -> Tensor:
        return torch.stack([0.5 * y[:, 0], (y[:, 0] > 0.9).float() * y[:, 1] + y[:, 0]], 1)

    solution = _run(f, y0, Picard(0.0, 1e-3), time_dim=1)
    assert solution.result is Result.converged
    assert solution.value.abs().max() < 5e-3


def test_scale_is_that_of_the_past_not_of_the_future() -> None:
    """A large later token must not loosen the tolerance of an earlier one."""

    def f(y: Tensor) -> Tensor:
        return 0.5 * y + torch.tensor([[[1.0], [1e6]]])

    solution = _run(f, torch.zeros(1, 2, 1), Picard(1e-3, 0.0), time_dim=1)
    assert abs(solution.value[0, 0, 0].item() - 2) < 4e-3


def _paper_loop(x: Tensor, max_steps: int, damping: float = 1.0) -> tuple[Tensor, Tensor, int]:
    """What the last step started from, what it evaluated, and the number of steps."""
    f, y_before, steps = _causal_map(x), torch.zeros_like(x), 1
    y = f(y_before)
    while steps < max_steps and (y - y_before).abs().max() >= 0.1 * y.abs().max():
        y_before, steps = torch.lerp(y_before, y, damping), steps + 1
        y = f(y_before)
    return y_before, y, steps


@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 50])
def test_the_papers_rule_is_its_loop_and_returns_the_last_evaluation(
    max_steps: int, damping: float
) -> None:
    """By the tolerance, each sample at its own step, or by the cap, which adds no evaluation."""
    x = torch.randn(3, 6, 2, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0])[:, None, None]
    f, count = _causal_map(x), []

    def counted(y: Tensor) -> Tensor:
        count.append(y)
        return f(y)

    solver = Picard(0.1, 0.0, damping, stop_rule="paper")
    with torch.no_grad():
        solution = _run(counted, torch.zeros_like(x), solver, max_steps, time_dim=1)
    for i in range(3):
        y_before, y, steps = _paper_loop(x[i : i + 1], max_steps, damping)
        assert torch.equal(solution.value[i : i + 1], y)
        assert solution.stats.num_steps[i] == steps
        assert solution.stats.converged[i] == (steps < max_steps)
        defect, scale = (y - y_before).abs().amax(-1), y.abs().amax(-1)
        residual = (defect / torch.cummax(scale, 1).values).max()
        torch.testing.assert_close(solution.stats.residual[i], residual, rtol=1e-12, atol=0)
    assert len(count) == solution.stats.num_steps.max()
    assert max_steps < 50 or len(set(solution.stats.num_steps.tolist())) > 1


@pytest.mark.parametrize("max_steps", [2, 50])
def test_unrolling_the_paper_stop_rule_is_the_gradient_of_its_evaluations(max_steps: int) -> None:
    x = torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True)
    y0, solver = torch.zeros_like(x), Picard(0.1, 0.0, 0.6, stop_rule="paper")
    options: dict[str, Any] = {"max_steps": max_steps, "adjoint": UnrolledAdjoint(), "time_dim": 1}
    solution = _run(_causal_map(x), y0, solver, **options)
    (ours,) = torch.autograd.grad(solution.value.square().sum(), x)
    (theirs,) = torch.autograd.grad(_paper_loop(x, max_steps, 0.6)[1].square().sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_an_infinity_on_the_way_does_not_fail_a_later_token() -> None:
    """Token 1 overflows until token 0, which it divides by, has left zero."""

    def f(y: Tensor) -> Tensor:
        return torch.stack([torch.ones_like(y[:, 0]), 2 / y[:, 0]], 1)

    solution = _run(f, torch.zeros(1, 2, 1), Picard(), time_dim=1)
    assert solution.value.flatten().tolist() == [1.0, 2.0]
    assert solution.result is Result.converged
