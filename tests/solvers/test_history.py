"""The history of residuals that `solve` records on request.

Letters: b batch, t tokens, c values of a token.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin
from bedouin.solvers import Anderson, Broyden, Direct, Jacobi, Picard, Solver, solve

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
