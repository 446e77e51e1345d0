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
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def _linear(b: int, c: int, norm: float = 0.8) -> tuple[Map, Tensor]:
    """y -> A y + x with |A| = norm, and its fixed point."""
    A = torch.randn(c, c, dtype=torch.float64)
    A = norm * A / torch.linalg.matrix_norm(A, 2)
    x = torch.randn(b, c, dtype=torch.float64)
    exact = torch.linalg.solve(torch.eye(c, dtype=A.dtype) - A, x.T).T
    return (lambda y: y @ A.T + x), exact


def _deq(dtype: torch.dtype) -> tuple[Map, Tensor]:
    """A small DEQ on flattened images of 28 x 28: tanh(W y + U x)."""
    x, d = torch.rand(4, 784, dtype=dtype), 784
    W, U = (gain * torch.randn(d, d, dtype=dtype) / d**0.5 for gain in (0.4, 1.0))
    return (lambda y: torch.tanh(y @ W.T + x @ U.T)), torch.zeros_like(x)


def _diverging(y: Tensor) -> Tensor:
    return 2 * y + 1


@pytest.mark.parametrize("solver", GENERAL)
def test_a_linear_contraction_is_solved_exactly(solver: Solver) -> None:
    f, exact = _linear(3, 12)
    solution = solve(f, torch.zeros_like(exact), solver, max_steps=500)
    assert solution.result is Result.converged
    assert bool((solution.stats.residual < 1e-12).all())
    torch.testing.assert_close(solution.value, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", [Picard, Anderson, Broyden])
def test_a_small_deq_on_784_pixels(kind: Any, dtype: torch.dtype) -> None:
    f, y0 = _deq(dtype)
    tolerance = TOLERANCE[dtype]
    solution = solve(f, y0, kind(rtol=tolerance, atol=0.0), on_unconverged="raise")
    assert solution.value.dtype == dtype
    defect = (f(solution.value) - solution.value).abs().amax(1)
    assert bool((defect <= tolerance).all())
    assert int(solution.stats.num_steps.max()) < 60


@pytest.mark.parametrize("solver", GENERAL)
@pytest.mark.parametrize(
    ("shape", "time_dim"),
    [((2,), None), ((2, 3), None), ((2, 3, 4), None), ((2, 3, 4, 5), None), ((2, 3, 4, 5), 1)],
)
def test_any_shape_with_the_batch_first(
    solver: Solver, shape: tuple[int, ...], time_dim: Any
) -> None:
    x = torch.randn(shape, dtype=torch.float64)

    def f(y: Tensor) -> Tensor:
        assert y.shape == shape
        return 0.5 * y + x

    solution = solve(f, torch.zeros_like(x), solver, time_dim=time_dim)
    torch.testing.assert_close(solution.value, 2 * x, rtol=1e-9, atol=1e-9)
    assert solution.stats.num_steps.shape == (2,)


@pytest.mark.parametrize("solver", GENERAL)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (2, 0, 4), (0, 0, 2)])
def test_an_empty_start_is_its_own_solution(solver: Solver, shape: tuple[int, ...]) -> None:
    solution = solve(lambda y: 0.5 * y, torch.zeros(shape), solver)
    assert solution.value.shape == shape
    assert solution.stats.num_steps.tolist() == [0] * shape[0]
    assert solution.result is Result.converged


@pytest.mark.parametrize("solver", GENERAL)
def test_a_nan_sample_is_reported_and_leaves_the_others_untouched(solver: Solver) -> None:
    f, exact = _linear(4, 5)
    nan = torch.tensor([0.0, 0.0, torch.nan, 0.0], dtype=torch.float64)[:, None]
    with pytest.warns(ConvergenceWarning, match="1 of 4 samples did not converge.*NaN or Inf"):
        solution = solve(lambda y: f(y) + nan, torch.zeros_like(exact), solver, max_steps=500)
    others = [0, 1, 3]
    torch.testing.assert_close(solution.value[others], exact[others], rtol=1e-9, atol=1e-9)
    assert bool(solution.value[2].isnan().all())
    assert solution.stats.converged.tolist() == [True, True, False, True]
    assert solution.stats.residual.isnan().tolist() == [False, False, True, False]
    assert solution.result is Result.nonfinite


def test_statistics_are_detached() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    for adjoint in (ImplicitAdjoint(), UnrolledAdjoint()):
        solution = solve(lambda y: 0.5 * y + x, torch.zeros(2, 3), Picard(), adjoint=adjoint)
        assert solution.value.requires_grad
        assert not solution.stats.residual.requires_grad


def test_an_unconverged_solve_warns_by_default() -> None:
    message = r"solve: 2 of 2 samples did not converge in 7 steps \(worst residual .*raise max_st"
    with pytest.warns(ConvergenceWarning, match=message):
        solve(_diverging, torch.zeros(2, 3), Picard(), max_steps=7)


@pytest.mark.parametrize("f", [lambda y: 3 * y + 1, lambda y: y + 1])
def test_a_map_that_does_not_contract_is_called_that(f: Map) -> None:
    with pytest.warns(ConvergenceWarning, match=r"50 steps.*the map does not contract.*bedouin\.d"):
        solve(f, torch.zeros(2, 3), Picard(1e-5), max_steps=50)


def test_a_slow_contraction_and_a_long_sequence_need_more_steps() -> None:
    def shift(y: Tensor) -> Tensor:  # each token follows from the one before it
        return torch.cat([torch.ones_like(y[:, :1]), 2 * y[:, :-1] + 1], 1)

    message = "did not converge in 20 steps.*raise max_steps"
    for f, start in ((lambda y: 0.97 * y + 1, torch.zeros(2, 3)), (shift, torch.zeros(2, 40, 3))):
        with pytest.warns(ConvergenceWarning, match=message):
            solve(f, start, Picard(1e-5), max_steps=20, time_dim=1 if start.dim() == 3 else None)


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


def test_an_unconverged_solve_raises_on_request() -> None:
    assert issubclass(ConvergenceError, RuntimeError)
    with pytest.raises(ConvergenceError, match="solve: 2 of 2 samples did not converge in 7 steps"):
        solve(_diverging, torch.zeros(2, 3), Picard(), max_steps=7, on_unconverged="raise")


def test_an_unconverged_solve_is_ignored_on_request() -> None:
    solution = solve(_diverging, torch.zeros(2, 3), Picard(), max_steps=7, on_unconverged="ignore")
    assert solution.result is Result.max_steps_reached


def test_the_cap_of_an_evaluation_is_the_limit() -> None:
    cap = GammaCap(limit=30)
    solution = solve(
        _diverging, torch.zeros(1, 1), Picard(), max_steps=cap, on_unconverged="ignore"
    )
    assert solution.stats.num_steps.tolist() == [30]


@pytest.mark.parametrize("draw", range(4))
def test_the_cap_of_a_training_call_is_drawn(draw: int) -> None:
    cap = GammaCap(seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = solve(
            _diverging,
            torch.zeros(1, 1),
            Picard(),
            max_steps=cap,
            draw=draw,
            on_unconverged="raise",
        )
    assert solution.stats.num_steps.tolist() == [cap.draw(draw)]
    assert not bool(solution.stats.converged.any())


def test_a_fixed_cap_is_reported_in_training_too() -> None:
    with pytest.warns(ConvergenceWarning):
        solve(_diverging, torch.zeros(1, 1), Picard(), max_steps=5, draw=0)


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"solver": "picard"},
            TypeError,
            r"solver must be a solver object such as Picard.*'picard'",
        ),
        ({"solver": Picard}, TypeError, "solver must be a solver object"),
        (
            {"adjoint": "implicit"},
            TypeError,
            "adjoint must be None or an adjoint object.*'implicit'",
        ),
        ({"adjoint": ImplicitAdjoint}, TypeError, "adjoint must be None or an adjoint object"),
        (
            {"on_unconverged": "warm"},
            ValueError,
            r"on_unconverged must be one of \('warn',.*'warm'",
        ),
        ({"max_steps": 0}, ValueError, "max_steps must be at least 1, got 0"),
        ({"max_steps": 1.5}, TypeError, "max_steps must be an int >= 1 or a Cap, got 1.5"),
        ({"time_dim": 2}, ValueError, "time_dim must be None or 1, got 2"),
        ({"time_dim": -1}, ValueError, "time_dim must be None or 1, got -1"),
        (
            {"y0": torch.zeros(3), "time_dim": 1},
            ValueError,
            r"y0 must have at least 2 axes.*\(3,\)",
        ),
        (
            {"y0": torch.zeros(())},
            ValueError,
            r"y0 must have at least 1 axes, batch first, got \(\)",
        ),
        ({"y0": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "y0 must have a floating dtype"),
        ({"y0": torch.zeros(2, 3, dtype=torch.bool)}, TypeError, "got torch.bool"),
        (
            {"y0": (torch.zeros(2), torch.zeros(2))},
            TypeError,
            r"y0 must be a tensor \(b, ...\), got",
        ),
        ({"draw": "1"}, ValueError, "draw must be None or an int >= 0, got '1'"),
        ({"draw": -1}, ValueError, "draw must be None or an int >= 0, got -1"),
    ],
)
def test_arguments_of_the_wrong_kind(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"y0": torch.zeros(2, 3), "solver": Picard()} | options
    with pytest.raises(error, match=message):
        solve(lambda y: 0.5 * y, **arguments)


@pytest.mark.parametrize("solver", GENERAL)
@torch.no_grad()
def test_a_map_that_writes_into_its_argument_is_refused(solver: Solver) -> None:
    y0 = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="f must not change its argument in place.*y.clone()"):
        solve(lambda y: y.mul_(0.5).add_(1), y0, solver)


@torch.inference_mode()
def test_in_inference_mode_such_a_map_gets_a_copy() -> None:
    y0 = torch.ones(2, 3, dtype=torch.float64)
    solution = solve(lambda y: y.mul_(0.5).add_(1), y0, Picard(1e-12))
    torch.testing.assert_close(solution.value, torch.full_like(y0, 2))
    assert torch.equal(y0, torch.ones_like(y0))


@pytest.mark.parametrize("solver", GENERAL)
def test_a_map_that_changes_the_shape_is_refused(solver: Solver) -> None:
    message = r"f must keep the shape of y: expected \(2, 3\), got \(2, 4\)"
    with pytest.raises(ValueError, match=message):
        solve(lambda y: torch.zeros(2, 4), torch.zeros(2, 3), solver)


@pytest.mark.parametrize("solver", GENERAL)
@pytest.mark.parametrize(
    ("f", "message"),
    [
        (5, "f must be a function of y, got 5"),
        (lambda y: (y,), "f must return a tensor like y, got tuple"),
        (lambda y: None, "f must return a tensor like y, got NoneType"),
        (torch.Tensor.double, "f must keep the dtype of y: expected torch.float32, got torch.flo"),
    ],
)
def test_a_map_that_returns_something_else_is_refused(f: Any, message: str, solver: Solver) -> None:
    with pytest.raises(TypeError, match=message):
        solve(f, torch.zeros(2, 3), solver)


def test_results_of_lower_precision_are_converted() -> None:
    y0 = torch.ones(2, 3)
    solution = solve(lambda y: (0.5 * y + 1).bfloat16(), y0, Picard())
    assert solution.value.dtype == torch.float32
    torch.testing.assert_close(solution.value, torch.full_like(y0, 2.0))


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
def test_zeros_of_the_map_stop_no_solver(
    f: Map, start: list[list[float]], expected: float, solver: Solver
) -> None:
    y0 = torch.tensor(start, dtype=torch.float64)
    solution = solve(f, y0, solver, max_steps=200)
    assert solution.result is Result.converged
    # Picard's error is 1.4 times its tolerance there
    torch.testing.assert_close(solution.value, torch.full_like(y0, expected), rtol=1e-3, atol=1e-9)


def test_a_map_that_is_zero_somewhere_is_finite() -> None:
    start = torch.full((1, 2), 0.5)
    solution = solve(
        lambda y: torch.relu(0.5 - y), start, Picard(), max_steps=2, on_unconverged="ignore"
    )
    assert solution.value.tolist() == [[0.5, 0.5]]
    assert solution.stats.residual.tolist() == [float("inf")]
    assert solution.result is Result.max_steps_reached


@pytest.mark.parametrize("solver", [Anderson(), Broyden()])
def test_torchdeq_solvers_cannot_be_unrolled(solver: Solver) -> None:
    message = f"UnrolledAdjoint cannot differentiate {type(solver).__name__}: use Picard, Jacobi"
    with pytest.raises(TypeError, match=message):
        solve(lambda y: 0.5 * y, torch.zeros(2, 3), solver, adjoint=UnrolledAdjoint())
