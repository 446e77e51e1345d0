"""Block-Jacobi and Direct on maps with a local equation or a sweep, and histories of residuals.

Letters: b batch, t time, c values of a token.
"""

from typing import Any

import pytest
import torch
from tests.toy_map import SweptMap, ToyMap
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.solvers import (
    Anderson,
    Broyden,
    Direct,
    Jacobi,
    Picard,
    Result,
    Solution,
    Solver,
    UnrolledAdjoint,
    solve,
)


def _toy(b: int = 2, t: int = 7, gain: float = 1.9, seed: int = 0) -> ToyMap:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, t, 3, dtype=torch.float64, generator=generator)
    return ToyMap(torch.tensor(gain, dtype=torch.float64), torch.tensor(3.0), x)


def _run(f: ToyMap, solver: Solver, y0: Tensor | None = None, **options: Any) -> Solution:
    y0 = torch.zeros_like(f.x) if y0 is None else y0
    return solve(f, y0, solver, time_dim=1, on_unconverged="ignore", **options)


def test_after_j_steps_the_first_j_tokens_are_exact() -> None:
    f = _toy(t=9)
    for steps in range(1, 9):
        value = _run(f, Jacobi(0.0, 0.0), max_steps=steps).value
        assert torch.equal(value[:, :steps], f.loop()[:, :steps])
        assert not torch.equal(value[:, steps:], f.loop()[:, steps:])


# -- Direct: one sweep and its statistics


def _map(b: int = 3, t: int = 6, dtype: torch.dtype = torch.float64) -> SweptMap:
    return SweptMap(torch.tensor(0.5, dtype=dtype), torch.ones(()), torch.randn(b, t, 2).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_step_and_a_residual_at_rounding_level_whatever_the_start(dtype: torch.dtype) -> None:
    f = _map(dtype=dtype)
    solution = _run(f, Direct())
    assert solution.result is Result.converged and f.unrolled is False
    assert solution.stats.num_steps.tolist() == [1, 1, 1]
    assert solution.stats.residual.max() < 10 * torch.finfo(dtype).eps
    again = _run(f, Direct(), torch.full_like(f.x, torch.nan), max_steps=1)
    assert torch.equal(again.value, solution.value)


def test_a_sweep_that_misses_its_equation_has_not_converged() -> None:
    f = _map()
    f.error = 1e-6
    solution = _run(f, Direct())
    assert not bool(solution.stats.converged.any())
    assert solution.result is Result.max_steps_reached


@pytest.mark.parametrize(("b", "t"), [(0, 6), (3, 0)])
def test_empty_input(b: int, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    f = _map(b, t)
    monkeypatch.setattr(f, "loop", lambda: f.x)
    solution = _run(f, Direct())
    assert solution.value.shape == f.x.shape
    assert solution.stats.num_steps.tolist() == [0] * b
    assert solution.result is Result.converged


def test_unrolled_asks_the_map_to_differentiate_the_loop() -> None:
    f = _map()
    f.x.requires_grad_()
    solution = _run(f, Direct(), adjoint=UnrolledAdjoint())
    assert f.unrolled
    (grad,) = torch.autograd.grad(solution.value[:, -1].sum(), f.x)
    (expected,) = torch.autograd.grad(f.loop()[:, -1].sum(), f.x)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("kind", [Bedouin, FixedPointRNN])
def test_a_value_of_rounding_errors_has_not_converged(kind: Any) -> None:
    """Two reflections of a single channel make a Q near 0, so that Q x is lost beside x."""
    layer = kind(4, num_heads=8, num_householder=2, dtype=torch.float64, on_unconverged="ignore")
    with torch.no_grad():
        for weight in (p for p in layer.parameters() if p.dim() > 1):
            weight.mul_(8)
        layer(10 * torch.randn(64, 2, 4, dtype=torch.float64))
    assert layer.stats is not None
    wrong = ~(layer.stats.residual < 0.1)
    assert wrong.any() and not layer.stats.converged[wrong].any()
    assert layer.stats.converged.any()


# -- the history of residuals that `solve` records on request

SOLVERS: list[Solver] = [Picard(1e-12, 0.0), Anderson(1e-12, 0.0), Broyden(1e-12, 0.0)]


@pytest.mark.parametrize("solver", SOLVERS)
@torch.no_grad()
def test_history_has_the_residual_of_every_evaluation(solver: Solver) -> None:
    weight, x = 0.2 * torch.randn(7, 7, dtype=torch.float64), torch.randn(2, 7).double()
    seen: list[Tensor] = []

    def f(y: Tensor) -> Tensor:
        f_y = torch.tanh(y @ weight + x)
        seen.append((f_y - y).abs().amax(1) / f_y.abs().amax(1))
        return f_y

    solution = solve(f, torch.zeros_like(x), solver, max_steps=200, record_history=True)
    history = solution.stats.history
    assert history is not None
    # all evaluations but the one that may only measure the last iterate
    assert int(solution.stats.num_steps.max()) in (len(history), len(history) - 1)
    torch.testing.assert_close(history[0], seen[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(history[-1], solution.stats.residual, rtol=0, atol=0)
    if isinstance(solver, Picard):
        for ours, theirs in zip(history, seen, strict=True):
            # a sample that has converged stays
            assert bool(((ours - theirs).abs() <= 1e-13).all())
    again = solve(f, torch.zeros_like(x), solver, max_steps=200)
    assert again.stats.history is None and torch.equal(again.value, solution.value)


@pytest.mark.parametrize(
    ("solver", "max_steps", "evaluations"),
    [(Jacobi(rtol=1e-12), 2, 3), (Jacobi(rtol=1e-12), 50, None), (Direct(), 1, 1)],
)
def test_history_of_a_structured_map(
    solver: Solver, max_steps: int, evaluations: int | None
) -> None:
    layer = Bedouin(4, d_state=2).double()
    f = layer.map(torch.randn(2, 5, 4, dtype=torch.float64))
    y0 = torch.zeros(2, 5, layer.d_inner, dtype=torch.float64)
    options: dict[str, Any] = {"time_dim": 1, "record_history": True, "on_unconverged": "ignore"}
    with torch.no_grad():
        solution = solve(f, y0, solver, max_steps=max_steps, **options)
    history = solution.stats.history
    assert history is not None
    # a cap that ends the solve is followed by one that only measures
    assert len(history) == (evaluations or int(solution.stats.num_steps.max()))
    assert torch.equal(history[-1], solution.stats.residual)
