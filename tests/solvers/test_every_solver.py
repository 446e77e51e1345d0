"""Every solver: what is reported, how far a NaN reaches, and histories; what Jacobi and Direct
make of a map with a local equation or a sweep.

Letters: b batch, t tokens, c values of a token.
"""

from typing import Any

import pytest
import torch
from tests.toy_map import SweptMap, ToyMap
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.kernels.checks import frozen_options
from bedouin.solvers import (
    Anderson,
    Broyden,
    Direct,
    ImplicitAdjoint,
    Jacobi,
    Picard,
    Result,
    Solution,
    Solver,
    UnrolledAdjoint,
    solve,
)
from bedouin.solvers.iterate import IterativeSolver
from bedouin.testing import assert_close, layer_gradients

B, T, NAN = 3, 6, torch.nan
EXACT: list[Solver] = [Picard(1e-6), Picard(1e-4, stop_rule="paper"), Jacobi(), Direct()]
MIXING: list[Solver] = [Anderson(1e-10, 0.0), Broyden(1e-10, 0.0)]
ALL = EXACT + MIXING


def make(gain: float = 0.3, dtype: torch.dtype = torch.float64) -> SweptMap:
    return SweptMap(
        torch.tensor(gain, dtype=dtype), torch.tensor(0.5), torch.randn(B, T, 2).to(dtype)
    )


def run(f: ToyMap, solver: Solver, **options: Any) -> Solution:
    y0 = options.pop("y0", torch.zeros_like(f.x))
    return solve(f, y0, solver, time_dim=1, on_unconverged="ignore", **options)


def evaluation(f: ToyMap, solver: Solver, y: Tensor) -> Tensor:
    """Of the map that is iterated."""
    return f.block_solve(y)[0] if isinstance(solver, Jacobi) else f(y)


@pytest.mark.parametrize("solver", [*EXACT[:2], *MIXING], ids=str)
def test_a_start_that_is_not_finite_fails_its_sample(solver: Solver) -> None:
    """From its token on, where tokens are not mixed; test_causality.py has other input."""
    f = make()
    clean, y0 = run(f, solver), torch.zeros_like(f.x)
    y0[1, 2] = NAN
    solution = run(f, solver, y0=y0)
    rtol = 1e-8 if solver in MIXING else 0.0
    torch.testing.assert_close(solution.value[[0, 2]], clean.value[[0, 2]], rtol=rtol, atol=rtol)
    if solver not in MIXING:
        # under the paper's rule later tokens decide when earlier ones stop
        rtol = 1e-3 if solver == EXACT[1] else 0.0
        torch.testing.assert_close(solution.value[1, :2], clean.value[1, :2], rtol=rtol, atol=rtol)
    assert not bool(solution.value[1, 2:].isfinite().any())
    assert solution.stats.converged.tolist() == [True, False, True]
    assert solution.stats.residual.isnan().tolist() == [False, True, False]
    assert clean.result is Result.converged and solution.result is Result.nonfinite


@pytest.mark.parametrize("solver", [Picard(), *MIXING], ids=str)
def test_a_sample_that_becomes_nan_on_the_way_fails_alone(solver: Solver) -> None:
    start = torch.ones(2, 4, dtype=torch.float64)
    f = lambda y: torch.stack([0.5 * y[0] + 1, torch.log(y[1])])  # noqa: E731
    solution = solve(f, start, solver, on_unconverged="ignore")
    assert solution.stats.converged.tolist() == [True, False]
    if solver not in MIXING:  # which return the best of their iterates
        assert solution.stats.residual.isnan().tolist() == [False, True]
        assert solution.result is Result.nonfinite and solution.stats.num_steps[1] < 10
    assert (solution.value[0] - 2).abs().max() < 2e-3


@pytest.mark.parametrize("solver", ALL, ids=str)
@pytest.mark.parametrize("max_steps", [1, 2, 7, 100])
def test_the_residual_is_that_of_the_returned_value(solver: Solver, max_steps: int) -> None:
    f = make()
    solution = run(f, solver, max_steps=max_steps)
    y = solution.value
    f_y = evaluation(f, solver, y)
    if solver == EXACT[1]:
        return  # of the last step; test_picard
    ratio = (f_y - y).abs().amax(-1) / f_y.abs().amax(-1).cummax(1).values
    torch.testing.assert_close(solution.stats.residual, ratio.amax(1), rtol=1e-7, atol=1e-16)


@pytest.mark.parametrize("kind", [Picard, Jacobi, Anderson, Broyden])
@pytest.mark.parametrize("at_fixed_point", [False, True])
def test_zero_tolerances_never_stop_early(kind: Any, at_fixed_point: bool) -> None:
    f = make()
    y0 = f.loop() if at_fixed_point else torch.zeros_like(f.x)
    solution = run(f, kind(0.0, 0.0), y0=y0, max_steps=60)
    assert solution.stats.num_steps.tolist() == [60] * B
    assert solution.stats.residual.max() < 1e-10 and not bool(solution.stats.converged.any())


@pytest.mark.parametrize("solver", ALL, ids=str)
def test_any_start_leads_to_the_same_point(solver: Solver) -> None:
    f = make()
    found = run(f, solver, y0=1e2 * torch.randn_like(f.x)).value
    torch.testing.assert_close(found, f.loop(), rtol=1e-3, atol=1e-3)


def test_after_j_steps_of_jacobi_the_first_j_tokens_are_exact() -> None:
    f = make(gain=1.9)
    for steps in range(1, T):
        value = run(f, Jacobi(0.0, 0.0), max_steps=steps).value
        assert torch.equal(value[:, :steps], f.loop()[:, :steps])
        assert not torch.equal(value[:, steps:], f.loop()[:, steps:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_direct_takes_one_step_to_rounding_level_whatever_the_start(dtype: torch.dtype) -> None:
    f = make(dtype=dtype)
    solution = run(f, Direct())
    assert solution.result is Result.converged and f.unrolled is False
    assert solution.stats.num_steps.tolist() == [1] * B
    assert solution.stats.residual.max() < 10 * torch.finfo(dtype).eps
    again = run(f, Direct(), y0=torch.full_like(f.x, torch.nan), max_steps=1)
    assert torch.equal(again.value, solution.value)


def test_a_sweep_that_misses_its_equation_has_not_converged() -> None:
    f = make()
    f.error = 1e-6
    missed = run(f, Direct())
    assert not bool(missed.stats.converged.any()) and missed.result is Result.max_steps_reached


def test_unrolled_asks_the_map_to_differentiate_the_loop() -> None:
    f = make()
    f.x.requires_grad_()
    solution = run(f, Direct(), adjoint=UnrolledAdjoint())
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
    wrong = ~(layer.stats.residual < 0.1)
    assert wrong.any() and not layer.stats.converged[wrong].any()
    assert layer.stats.converged.any()


@pytest.mark.parametrize("max_steps", [2, 200])
@pytest.mark.parametrize("solver", [Picard(1e-12, 0.0), Jacobi(1e-12), *MIXING], ids=str)
@torch.no_grad()
def test_a_history_has_the_residual_of_every_evaluation(
    solver: Solver, max_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, seen = make(), []
    name = "block_solve" if isinstance(solver, Jacobi) else "__call__"
    method = getattr(SweptMap, name)

    def watched(f: SweptMap, y: Tensor) -> Any:
        found = method(f, y)
        f_y = found[0] if isinstance(solver, Jacobi) else found
        ratio = (f_y - y).abs().amax(-1) / f_y.abs().amax(-1).cummax(1).values
        seen.append(ratio.amax(1))
        return found

    expected = run(f, solver, max_steps=max_steps)
    monkeypatch.setattr(SweptMap, name, watched)
    found = run(f, solver, max_steps=max_steps, record_history=True)
    history = found.stats.history
    assert expected.stats.history is None and torch.equal(expected.value, found.value)
    assert history is not None and torch.equal(history[-1], found.stats.residual)
    if solver in MIXING:  # which may only measure the last iterate
        assert len(seen) - len(history) in (0, 1)
        torch.testing.assert_close(history[0], seen[0], rtol=1e-12, atol=0)
    else:
        torch.testing.assert_close(history, torch.stack(seen), rtol=1e-9, atol=1e-13)


@frozen_options
class Averaged(IterativeSolver):
    """A solver of a user, who writes one method."""

    def update(self, y: Tensor, f_y: Tensor, memory: Any) -> tuple[Tensor, Any]:
        return (y + f_y) / 2, None


def test_a_new_solver_is_one_class_with_one_method() -> None:
    torch.manual_seed(0)
    layer, x = Bedouin(4, d_state=2).double(), torch.randn(2, 5, 4, dtype=torch.float64)
    expected = layer_gradients(layer, x)
    layer.solver, layer.adjoint = Averaged(1e-13), ImplicitAdjoint(Averaged(1e-13))
    found = layer_gradients(layer, x)
    for name, gradient in expected.items():
        assert_close(name, found[name], gradient, 1e-9, atol=1e-12)
    layer(x)
    assert layer.stats is not None and layer.stats.converged.all()
    assert layer.stats.num_steps.min() > 10


def halve(y: Tensor) -> Tensor:
    return 0.5 * y


@pytest.mark.parametrize(
    ("solver", "f", "time_dim", "message"),
    [
        (Jacobi(), halve, 1, r"block_solve\(y\), and time_dim=1, got function: use Picard"),
        (Jacobi(), make(), None, r"block_solve\(y\), and time_dim=1, got SweptMap"),
        (Direct(), halve, 1, "sweep, got function: use Picard"),
        (Direct(), halve, None, "sweep, got function: use Picard"),
    ],
)
def test_a_map_without_what_a_solver_needs_is_refused_by_name(
    solver: Solver, f: Any, time_dim: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=f"{type(solver).__name__} needs a map with a .*{message}"):
        solve(f, torch.ones(2, 3, 1), solver, time_dim=time_dim)
