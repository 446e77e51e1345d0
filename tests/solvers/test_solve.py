"""`solve` on any tensor function: results, reports and errors of every solver; how far a NaN
reaches, histories; what Jacobi and Direct make of a map with a local equation or a sweep.

Letters: b batch, t tokens, c values of a token.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tests.layer_cases import draw
from tests.layer_cases import make as of_table
from tests.messages import Row, of, of_kind, refused
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.kernels.checks import frozen_options
from bedouin.layers.map import StructuredMap
from bedouin.solvers import (
    Anderson,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    Direct,
    GammaCap,
    ImplicitAdjoint,
    Jacobi,
    Picard,
    Result,
    Solution,
    Solver,
    UnrolledAdjoint,
    solve,
)
from bedouin.solvers.base import Map
from bedouin.solvers.iterate import IterativeSolver
from bedouin.testing import assert_close, layer_gradients

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


@torch.no_grad()
def test_under_vmap_nothing_is_read() -> None:
    """Values are those of a loop in test_every_layer_in_torch.py."""

    def result(x: Tensor) -> Any:
        found = solve(lambda y: 0.3 * torch.sin(y) + x, torch.zeros_like(x), Picard(1e-12))
        assert found.result is Result.unknown
        return found.value

    torch.func.vmap(result)(torch.randn(3, 2, 4, dtype=torch.float64))


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


ARGUMENTS: list[Row] = [
    ({"solver": "picard"}, TypeError, "solver must be a solver object such as ...'picard'"),
    ({"adjoint": "implicit"}, TypeError, "adjoint must be None or an adjoint obj...'implicit'"),
    ({"on_unconverged": "warm"}, ValueError, "on_unconverged must be one of ...'warm'"),
    ({"max_steps": 1.5}, TypeError, "max_steps must be an int >= 1 or a Cap, got 1.5"),
    ({"time_dim": 2}, ValueError, "time_dim must be None or 1, got 2"),
    ({"y0": torch.zeros(3), "time_dim": 1}, ValueError, "must have at least 2 axes...(3,)"),
    ({"y0": torch.zeros(())}, ValueError, "y0 must have at least 1 axes, batch fi...got ()"),
    ({"y0": torch.zeros(2, 3).long()}, TypeError, "y0 must have a floating dtype"),
    ({"y0": (torch.zeros(2),) * 2}, TypeError, "y0 must be a tensor (b, ...), got"),
    ({"draw": "1"}, ValueError, "draw must be None or an int >= 0, got '1'"),
    ({"f": 5}, TypeError, "f must be a function of y, got 5"),
]
MAPS: list[Row] = [
    (lambda y: (y,), TypeError, "f must return a tensor like y, got tuple"),
    (Tensor.double, TypeError, "f must keep the dtype of y: expected torch.float32, got"),
    (lambda y: torch.zeros(2, 4), ValueError, "shape of y: expected (2, 3), got (2, 4)"),
    (lambda y: y.mul_(0.5).add_(1), ValueError, "not change its argument in place...y.clone()"),
]
START = torch.zeros(2, 3)
test_arguments = refused(ARGUMENTS, of(solve, f=torch.sin, y0=START, solver=Picard()))
test_maps_that_are_refused = refused(
    MAPS, *(of(solve, y0=START, solver=solver, on_unconverged="ignore") for solver in GENERAL)
)


@torch.inference_mode()
def test_in_inference_mode_a_map_that_writes_into_its_argument_gets_a_copy() -> None:
    y0 = torch.ones(2, 3, dtype=torch.float64)
    solution = solve(lambda y: y.mul_(0.5).add_(1), y0, Picard(1e-12))
    torch.testing.assert_close(solution.value, torch.full_like(y0, 2))
    assert torch.equal(y0, torch.ones_like(y0))


B, T, NAN = 3, 6, torch.nan
EXACT: list[Solver] = [Picard(1e-6), Picard(1e-4, stop_rule="paper"), Jacobi(), Direct()]
MIXING: list[Solver] = [Anderson(1e-10, 0.0), Broyden(1e-10, 0.0)]
ALL = EXACT + MIXING


ZEROS = torch.zeros(B, T, 8, dtype=torch.float64)


def make() -> Any:
    """The map of a layer, which contracts."""
    return of_table("one head").map(draw(B, T))


@torch.no_grad()
def run(f: Map, solver: Solver, y0: Tensor = ZEROS, **options: Any) -> Solution:
    return solve(f, y0, solver, time_dim=1, on_unconverged="ignore", **options)


def evaluation(f: Any, solver: Solver, y: Tensor) -> Any:
    """Of the map that is iterated."""
    return f.block_solve(y)[0] if isinstance(solver, Jacobi) else f(y)


@pytest.mark.parametrize("solver", [*EXACT[:2], *MIXING], ids=str)
def test_a_start_that_is_not_finite_fails_its_sample(solver: Solver) -> None:
    """From its token on, where tokens are not mixed; test_laws.py has other input."""
    f = make()
    clean, y0 = run(f, solver), ZEROS.clone()
    y0[1, 2] = NAN
    solution = run(f, solver, y0)
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
    torch.testing.assert_close(solution.stats.residual, ratio.amax(1), rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize("kind", [Picard, Jacobi, Anderson, Broyden])
@pytest.mark.parametrize("at_fixed_point", [False, True])
def test_zero_tolerances_never_stop_early(kind: Any, at_fixed_point: bool) -> None:
    f = make()
    y0 = run(f, Direct()).value if at_fixed_point else ZEROS
    solution = run(f, kind(0.0, 0.0), y0, max_steps=60)
    assert solution.stats.num_steps.tolist() == [60] * B
    assert solution.stats.residual.max() < 1e-10 and not bool(solution.stats.converged.any())


@pytest.mark.parametrize("solver", ALL, ids=str)
def test_any_start_leads_to_the_same_point(solver: Solver) -> None:
    f = make()
    found = run(f, solver, 1e2 * torch.randn_like(ZEROS)).value
    torch.testing.assert_close(found, run(f, Direct()).value, rtol=1e-3, atol=1e-3)


def test_after_j_steps_of_jacobi_the_first_j_tokens_are_exact() -> None:
    f = make()
    exact = run(f, Direct(), torch.full_like(ZEROS, NAN)).value  # whatever the start
    for steps in range(1, T):
        value = run(f, Jacobi(0.0, 0.0), max_steps=steps).value
        error = (value - exact).abs().amax((0, 2)) / exact.abs().max()
        assert error[:steps].max() < 1e-14 and error[steps:].min() > 1e-12


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
    method = getattr(StructuredMap, name)

    def watched(f: StructuredMap, y: Tensor) -> Any:
        found = method(f, y)
        f_y = found[0] if isinstance(solver, Jacobi) else found
        ratio = (f_y - y).abs().amax(-1) / f_y.abs().amax(-1).cummax(1).values
        seen.append(ratio.amax(1))
        return found

    expected = run(f, solver, max_steps=max_steps)
    monkeypatch.setattr(StructuredMap, name, watched)
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


ONES = torch.ones(2, 3, 1)


def halve(y: Tensor) -> Tensor:
    return 0.5 * y


def solve_halves(solver: Solver, y0: Tensor) -> Tensor:
    return solve(halve, y0, solver).value


def loss(x: Tensor) -> Tensor:
    return solve(lambda y: y / 2 + x, ONES, Picard()).value.sum()


LEAF = torch.ones(2, 3, 1, requires_grad=True)
NEEDS = of_kind(TypeError, [
    (of(solve, halve, ONES, Jacobi(), time_dim=1),
     "Jacobi needs a map with a ...block_solve(y), and time_dim=1, got function: use Picard"),
    (of(solve, make(), ONES, Jacobi()),
     "Jacobi needs a map with a ...block_solve(y), and time_dim=1, got StructuredMap"),
    *((of(solve, halve, ONES, Direct(), time_dim=time_dim),
       "Direct needs a map with a ...sweep, got function: use Picard") for time_dim in (1, None)),
    *((of(solve, halve, ONES, solver, adjoint=UnrolledAdjoint()),
       f"UnrolledAdjoint cannot differentiate {type(solver).__name__}: use Picard, Jacobi")
      for solver in (Anderson(), Broyden())),
    (of(solve, lambda y: y / 2 + LEAF, ONES, Picard(), adjoint=ImplicitAdjoint(Direct())),
     "ImplicitAdjoint(solver=Direct()) needs a map with a reverse sweep, got function"),
]) + of_kind(RuntimeError, [
    *((of(torch.func.vmap(partial(solve_halves, solver)), ONES),
       f"{type(solver).__name__} reads the device at every step and cannot run under")
      for solver in (Anderson(), Broyden())),
    (of(torch.func.grad(loss), ONES), "cannot run under torch.func transforms"),
])  # fmt: skip

test_what_a_solver_or_an_adjoint_needs_is_named = refused(NEEDS)
