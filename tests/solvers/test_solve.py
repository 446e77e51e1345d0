"""`solve` on any tensor function: results, reports and errors of every solver.

Letters: b batch, t tokens, c values of a token.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.solvers import (
    Anderson,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    GammaCap,
    ImplicitAdjoint,
    Picard,
    Result,
    UnrolledAdjoint,
    solve,
)
from bedouin.solvers.base import Map, Solver

GENERAL: list[Solver] = [Picard(1e-12, 0.0), Anderson(1e-12, 0.0), Broyden(1e-12, 0.0)]
every_solver = pytest.mark.parametrize("solver", GENERAL, ids=lambda s: type(s).__name__)


def _diverging(y: Tensor) -> Tensor:
    return 2 * y + 1


# -- values


@every_solver
@pytest.mark.parametrize(
    ("shape", "time_dim"),
    [((2,), None), ((2, 3), None), ((2, 3, 4), None), ((2, 3, 4, 5), None), ((2, 3, 4, 5), 1)],
)
def test_any_shape_with_the_batch_first(solver: Solver, shape: Any, time_dim: Any) -> None:
    x = torch.randn(shape, dtype=torch.float64)

    def f(y: Tensor) -> Tensor:
        assert y.shape == shape
        return 0.5 * y + x

    solution = solve(f, torch.zeros_like(x), solver, time_dim=time_dim)
    torch.testing.assert_close(solution.value, 2 * x, rtol=1e-9, atol=1e-9)
    assert solution.stats.num_steps.shape == (2,)


@every_solver
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (2, 0, 4), (0, 0, 2)])
def test_an_empty_start_is_its_own_solution(solver: Solver, shape: tuple[int, ...]) -> None:
    solution = solve(lambda y: 0.5 * y, torch.zeros(shape), solver)
    assert solution.value.shape == shape and solution.result is Result.converged
    assert solution.stats.num_steps.tolist() == [0] * shape[0]


def test_statistics_are_detached() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    for adjoint in (ImplicitAdjoint(), UnrolledAdjoint()):
        solution = solve(lambda y: 0.5 * y + x, torch.zeros(2, 3), Picard(), adjoint=adjoint)
        assert solution.value.requires_grad and not solution.stats.residual.requires_grad


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden()])
@pytest.mark.parametrize(
    ("f", "start", "expected"),
    [
        (lambda y: 0.5 * (y - 1) ** 2, [[1.0, 1.0]], 2 - 3**0.5),
        (lambda y: 0.5 * (y - 1) ** 2, [[1.0], [0.3]], 2 - 3**0.5),
        (lambda y: 0 * y, [[1.0, 2.0]], 0.0),
        (lambda y: y / 2, [[1.0, 2.0]], 0.0),
    ],
)
def test_zeros_of_the_map_stop_no_solver(f: Map, start: Any, expected: Any, solver: Solver) -> None:
    y0 = torch.tensor(start, dtype=torch.float64)
    solution = solve(f, y0, solver, max_steps=200)
    assert solution.result is Result.converged
    # Picard's error is 1.4 times its tolerance there
    torch.testing.assert_close(solution.value, torch.full_like(y0, expected), rtol=1e-3, atol=1e-9)


def test_a_map_that_is_zero_somewhere_is_finite() -> None:
    f, start = (lambda y: torch.relu(0.5 - y)), torch.full((1, 2), 0.5)
    solution = solve(f, start, Picard(), max_steps=2, on_unconverged="ignore")
    assert solution.value.tolist() == [[0.5, 0.5]]
    assert solution.stats.residual.tolist() == [float("inf")]
    assert solution.result is Result.max_steps_reached


def test_results_of_lower_precision_are_converted() -> None:
    y0 = torch.ones(2, 3)
    solution = solve(lambda y: (0.5 * y + 1).bfloat16(), y0, Picard())
    assert solution.value.dtype == torch.float32
    torch.testing.assert_close(solution.value, torch.full_like(y0, 2.0))


def test_under_vmap_nothing_is_read_and_the_value_is_the_same() -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    outcomes: list[Result] = []

    def fixed_point(x: Tensor) -> Tensor:
        solution = solve(lambda y: 0.3 * torch.sin(y) + x, torch.zeros_like(x), Picard(1e-12))
        outcomes.append(solution.result)
        return solution.value

    with torch.no_grad():
        vmapped = torch.func.vmap(fixed_point)(x)
        looped = torch.stack([fixed_point(v) for v in x])
    assert outcomes[0] is Result.unknown and outcomes[1] is Result.converged
    torch.testing.assert_close(vmapped, looped, rtol=1e-12, atol=0)


# -- reports


def _shift(y: Tensor) -> Tensor:
    """Each token follows from the one before it."""
    return torch.cat([torch.ones_like(y[:, :1]), 2 * y[:, :-1] + 1], 1)


@pytest.mark.parametrize(
    ("f", "max_steps", "message"),
    [
        (_diverging, 7, r"solve: 2 of 2 samples did not .* in 7 steps \(worst resid.*raise max_"),
        (lambda y: 3 * y + 1, 50, r"50 steps.*the map does not contract.*bedouin\.d"),
        (lambda y: y + 1, 50, r"50 steps.*the map does not contract.*bedouin\.d"),
        (lambda y: 0.97 * y + 1, 20, "did not converge in 20 steps.*raise max_steps"),
        (_shift, 20, "did not converge in 20 steps.*raise max_steps"),
    ],
)
def test_an_unconverged_solve_is_reported(f: Map, max_steps: int, message: str) -> None:
    def run(policy: Any) -> Result:
        shape, time_dim = ((2, 40, 3), 1) if f is _shift else ((2, 3), None)
        options: dict[str, Any] = {"max_steps": max_steps, "time_dim": time_dim}
        return solve(f, torch.zeros(shape), Picard(1e-5), on_unconverged=policy, **options).result

    with pytest.warns(ConvergenceWarning, match=message):
        run("warn")
    with pytest.raises(ConvergenceError, match=message) as caught:
        run("raise")
    assert isinstance(caught.value, RuntimeError)
    assert run("ignore") is Result.max_steps_reached


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_a_tolerance_below_the_precision_is_named_at_the_first_call(policy: Any) -> None:
    def run(rtol: float, dtype: torch.dtype, adjoint: ImplicitAdjoint | None = None) -> None:
        start, solver = torch.zeros(2, 3, dtype=dtype), Picard(rtol)
        options: dict[str, Any] = {"on_unconverged": policy, "adjoint": adjoint}
        solve(lambda y: 0.5 * y.cos() + 1, start, solver, **options)

    message = "rtol=1e-09 of Picard is below the precision of torch.float32"
    with pytest.warns(UserWarning, match=message):
        run(1e-9, torch.float32)
    with pytest.warns(UserWarning, match=message):
        run(1e-6, torch.float32, ImplicitAdjoint(Picard(1e-9)))
    run(1e-6, torch.float32)
    run(1e-9, torch.float64)


@pytest.mark.parametrize("draw", [None, *range(4)])
def test_a_cap_is_drawn_in_training_and_its_limit_holds_else(draw: int | None) -> None:
    """A solve that a drawn cap cuts short is no failure."""
    cap = GammaCap(seed=5, limit=30)
    options: dict[str, Any] = {"on_unconverged": "ignore" if draw is None else "raise"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = solve(_diverging, torch.zeros(1, 1), Picard(), max_steps=cap, draw=draw, **options)
    assert found.stats.num_steps.tolist() == [30 if draw is None else cap.draw(draw)]
    assert not bool(found.stats.converged.any())


def test_a_fixed_cap_is_reported_in_training_too() -> None:
    with pytest.warns(ConvergenceWarning):
        solve(_diverging, torch.zeros(1, 1), Picard(), max_steps=5, draw=0)


# -- arguments and maps of the wrong kind


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"solver": "picard"}, TypeError, "solver must be a solver object such as .*'picard'"),
        ({"solver": Picard}, TypeError, "solver must be a solver object"),
        ({"adjoint": "implicit"}, TypeError, "adjoint must be None or an adjoint obj.*'implicit'"),
        ({"adjoint": ImplicitAdjoint}, TypeError, "adjoint must be None or an adjoint object"),
        ({"on_unconverged": "warm"}, ValueError, r"on_unconverged must be one of .*'warm'"),
        ({"max_steps": 0}, ValueError, "max_steps must be at least 1, got 0"),
        ({"max_steps": 1.5}, TypeError, "max_steps must be an int >= 1 or a Cap, got 1.5"),
        ({"time_dim": 2}, ValueError, "time_dim must be None or 1, got 2"),
        ({"time_dim": -1}, ValueError, "time_dim must be None or 1, got -1"),
        ({"y0": torch.zeros(3), "time_dim": 1}, ValueError, r"must have at least 2 axes.*\(3,\)"),
        ({"y0": torch.zeros(())}, ValueError, r"y0 must have at least 1 axes, batch fi.*got \(\)"),
        ({"y0": torch.zeros(2, 3).long()}, TypeError, "y0 must have a floating dtype"),
        ({"y0": torch.zeros(2, 3).bool()}, TypeError, "got torch.bool"),
        ({"y0": (torch.zeros(2),) * 2}, TypeError, r"y0 must be a tensor \(b, ...\), got"),
        ({"draw": "1"}, ValueError, "draw must be None or an int >= 0, got '1'"),
        ({"draw": -1}, ValueError, "draw must be None or an int >= 0, got -1"),
        ({"f": 5}, TypeError, "f must be a function of y, got 5"),
    ],
)
def test_arguments_of_the_wrong_kind(options: dict[str, Any], error: Any, message: str) -> None:
    given: dict[str, Any] = {"f": torch.sin, "y0": torch.zeros(2, 3), "solver": Picard()}
    with pytest.raises(error, match=message):
        solve(**given | options)


@every_solver
@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda y: (y,), TypeError, "f must return a tensor like y, got tuple"),
        (lambda y: None, TypeError, "f must return a tensor like y, got NoneType"),
        (Tensor.double, TypeError, "f must keep the dtype of y: expected torch.float32, got"),
        (lambda y: torch.zeros(2, 4), ValueError, r"shape of y: expected \(2, 3\), got \(2, 4\)"),
        (lambda y: y.mul_(0.5).add_(1), ValueError, "not change its argument in place.*y.clone()"),
    ],
)
@torch.no_grad()
def test_maps_that_are_refused(f: Any, error: Any, message: str, solver: Solver) -> None:
    with pytest.raises(error, match=message):
        solve(f, torch.zeros(2, 3), solver, on_unconverged="ignore")


@torch.inference_mode()
def test_in_inference_mode_a_map_that_writes_into_its_argument_gets_a_copy() -> None:
    y0 = torch.ones(2, 3, dtype=torch.float64)
    solution = solve(lambda y: y.mul_(0.5).add_(1), y0, Picard(1e-12))
    torch.testing.assert_close(solution.value, torch.full_like(y0, 2))
    assert torch.equal(y0, torch.ones_like(y0))


@pytest.mark.parametrize("solver", [Anderson(), Broyden()])
def test_torchdeq_solvers_cannot_be_unrolled(solver: Solver) -> None:
    message = f"UnrolledAdjoint cannot differentiate {type(solver).__name__}: use Picard, Jacobi"
    with pytest.raises(TypeError, match=message):
        solve(lambda y: 0.5 * y, torch.zeros(2, 3), solver, adjoint=UnrolledAdjoint())
