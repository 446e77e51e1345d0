"""Gradients at a fixed point: exact ones agree, biased ones have a similar direction.

Letters: b batch, t time, c values of a sample or token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.layer_cases import CPU, make
from tests.modes import LiveBytes
from torch import Tensor

from bedouin.layers.map import StructuredMap
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solution,
    Solver,
    UnrolledAdjoint,
    solve,
)
from bedouin.testing import assert_close

EXACT = Picard(rtol=1e-14, atol=1e-15)
SOLVERS: list[Solver] = [EXACT, Anderson(1e-13, 1e-15), Broyden(1e-13, 1e-15)]
ADJOINTS: list[Adjoint] = [ImplicitAdjoint(), OneStepAdjoint(), PhantomAdjoint(), UnrolledAdjoint()]


@dataclass(frozen=True)
class Cell:
    """y -> tanh(W y + U x): a DEQ with parameters W (c, c), U (c, c) and input x (b, c)."""

    W: Tensor
    U: Tensor
    x: Tensor

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.W, self.U, self.x

    def __call__(self, y: Tensor) -> Tensor:
        return torch.tanh(y @ self.W.T + self.x @ self.U.T)


def _cell(b: int = 3, c: int = 5, gain: float = 0.7) -> Cell:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    W, U, x = draw(c, c), draw(c, c), draw(b, c)
    W = gain * W / torch.linalg.matrix_norm(W, 2)
    return Cell(*(v.requires_grad_() for v in (W, U, x)))


def _solve(f: Cell, solver: Solver, adjoint: Adjoint | None, **options: Any) -> Solution:
    options = {"max_steps": 500} | options
    return solve(f, torch.zeros_like(f.x), solver, adjoint=adjoint, **options)


def _loss(y: Tensor) -> Tensor:
    return (y * torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).reshape(y.shape).cos()).sum()


def _gradients(solver: Solver, adjoint: Adjoint | None, **options: Any) -> tuple[Tensor, ...]:
    f = _cell()
    return torch.autograd.grad(_loss(_solve(f, solver, adjoint, **options).value), f.parameters)


def _cosine(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    flat_a, flat_b = (torch.cat([v.flatten() for v in vs]) for vs in (a, b))
    return float(flat_a @ flat_b / (flat_a.norm() * flat_b.norm()))


@pytest.mark.parametrize(
    ("solver", "adjoint", "other"),
    [
        *(
            (solver, ImplicitAdjoint(backward), UnrolledAdjoint())
            for solver in SOLVERS
            for backward in (None, *SOLVERS)
        ),
        (EXACT, PhantomAdjoint(200, 0.9), ImplicitAdjoint()),
        (EXACT, PhantomAdjoint(1, 1.0), OneStepAdjoint()),
    ],
)
def test_adjoints_that_agree(solver: Solver, adjoint: Adjoint, other: Adjoint) -> None:
    actual, expected = _gradients(solver, adjoint), _gradients(EXACT, other)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_cheap_adjoints_differ_and_point_the_same_way() -> None:
    exact = _gradients(EXACT, ImplicitAdjoint())
    one_step = _cosine(_gradients(EXACT, OneStepAdjoint()), exact)
    phantom = _cosine(_gradients(EXACT, PhantomAdjoint()), exact)
    assert 0.7 < one_step < phantom < 1 - 1e-6 and phantom > 0.95


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_the_value_does_not_depend_on_the_adjoint_and_is_tracked_if_needed(
    adjoint: Adjoint,
) -> None:
    f = _cell()
    value = _solve(f, Picard(), adjoint).value
    assert value.requires_grad and torch.equal(value, _solve(f, Picard(), None).value)
    with torch.no_grad():
        without = _solve(f, Picard(), adjoint).value
    assert torch.equal(without, value) and not without.requires_grad
    constant = Cell(*(v.detach() for v in f.parameters))
    assert not _solve(constant, Picard(), adjoint).value.requires_grad


@pytest.mark.parametrize("adjoint", [ImplicitAdjoint(), OneStepAdjoint(), UnrolledAdjoint()])
def test_a_map_that_ignores_its_argument_has_the_gradient_of_its_value(adjoint: Adjoint) -> None:
    parameter = torch.ones(2, 3, requires_grad=True)
    for f, expected in ((lambda y: parameter, 1.0), (lambda y: (2 * parameter).sin().asin(), 2.0)):
        value = solve(f, torch.zeros(2, 3), Picard(), adjoint=adjoint).value
        (grad,) = torch.autograd.grad(value.sum(), parameter)
        torch.testing.assert_close(grad.abs(), torch.full((2, 3), expected))


def test_an_unconverged_backward_warns_or_raises() -> None:
    """Of a forward solve that is at its fixed point from the start, with a slow adjoint."""
    rate = torch.tensor(0.99, dtype=torch.float64, requires_grad=True)
    y0 = torch.zeros(2, 3, dtype=torch.float64)

    def backward(policy: Any) -> None:
        options: dict[str, Any] = {"max_steps": 5, "on_unconverged": policy}
        solve(lambda y: rate * y, y0, Picard(), **options).value.sum().backward()

    message = "solve, adjoint solve: 2 of 2 samples did not converge in 5 steps"
    with pytest.warns(ConvergenceWarning, match=message):
        backward("warn")
    with pytest.raises(ConvergenceError, match=message):
        backward("raise")
    backward("ignore")


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("loss", [_loss, lambda y: _loss(y.square())])
def test_the_second_derivative_raises_however_it_is_asked_for(
    adjoint: Adjoint, loss: Callable[[Tensor], Tensor]
) -> None:
    f = _cell()
    value = _solve(f, Picard(), adjoint).value
    grads = torch.autograd.grad(loss(value), f.parameters, create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="once differentiable"):
            torch.autograd.grad(grad.square().sum(), f.parameters, retain_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        grads[0].sum().backward()


def test_a_nan_sample_leaves_the_gradients_of_the_others_alone() -> None:
    clean = _gradients(EXACT, None)[-1]
    f = _cell()
    x = f.x.detach().clone()
    x[1] = torch.nan
    f = Cell(f.W, f.U, x.requires_grad_())
    value = _solve(f, EXACT, None, on_unconverged="ignore").value
    (grad,) = torch.autograd.grad(_loss(value), x)
    torch.testing.assert_close(grad[[0, 2]], clean[[0, 2]], rtol=1e-10, atol=1e-12)


# -- at the y that three steps have reached, which is no fixed point

ENDLESS: list[Solver] = [
    Picard(0.0, 0.0),
    Picard(0.0, 0.0, damping=0.6),
    Picard(0.0, stop_rule="paper"),
    Jacobi(0.0, 0.0),
]


@pytest.mark.parametrize("solver", ENDLESS, ids=str)
@pytest.mark.parametrize("exact", [True, False], ids=["implicit", "one step"])
@pytest.mark.parametrize(
    "name", ["one head", "heads", "coupled", "full", "paper", "no feedback", "vector"]
)
def test_after_three_steps_the_gradient_is_linearized_at_the_y_that_was_returned(
    name: str, exact: bool, solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(dF/dtheta)^T w with w = (I - J^T)^-1 g, or w = g, from the dense Jacobian of F at that y; no
    token is solved anew for it."""
    layer = make(name, CPU._replace(m=3))
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    start = torch.zeros(2, 6, layer.d_inner, dtype=torch.float64)
    monkeypatch.setattr(StructuredMap, "sweep", None)
    adjoint = ImplicitAdjoint() if exact else OneStepAdjoint()
    given: dict[str, Any] = {"max_steps": 3, "adjoint": adjoint, "on_unconverged": "ignore"}
    y = solve(layer.map(x), start, solver, time_dim=1, **given).value
    named = {"x": x} | {n: p for n, p in layer.named_parameters() if "out_proj" not in n}
    grads = torch.autograd.grad(_loss(y), list(named.values()), allow_unused=True)

    y_3, f = y.detach().requires_grad_(), layer.map(x)
    f_y = f(y_3)
    assert (f_y - y_3).detach().abs().max() > 1e-9
    w = torch.autograd.grad(_loss(y_3), y_3)[0].flatten()
    if exact:
        jacobian = torch.autograd.functional.jacobian(f, y_3.detach()).reshape(len(w), len(w))
        w = torch.linalg.solve(torch.eye(len(w), dtype=w.dtype) - jacobian.mT, w)
    expected = torch.autograd.grad(f_y, list(named.values()), w.view_as(f_y), allow_unused=True)
    for parameter, ours, theirs in zip(named, grads, expected, strict=True):
        assert (ours is None or not ours.any()) if theirs is None else ours is not None
        if theirs is not None and ours is not None:
            assert_close(parameter, ours, theirs, 1e-9, atol=1e-12)


# -- memory: that of one step, except for UnrolledAdjoint

BATCH, WIDTH = 4, 64


def _peak(adjoint: Adjoint, solver: Solver, num_steps: int) -> int:
    """Bytes alive at once in forward and backward with exactly num_steps iterations."""
    f, options = _cell(BATCH, WIDTH), {"max_steps": num_steps, "on_unconverged": "ignore"}
    with LiveBytes() as live:
        value = _solve(f, solver, adjoint, **options).value
        torch.autograd.grad(value.square().sum(), f.parameters)
    return int(live.peak)


@pytest.mark.parametrize("adjoint", [ImplicitAdjoint(), OneStepAdjoint(), PhantomAdjoint()])
@pytest.mark.parametrize("solver", [Picard(0.0, 0.0), Anderson(0.0, 0.0, memory=3)])
def test_memory_is_that_of_one_step_whatever_their_number(adjoint: Adjoint, solver: Solver) -> None:
    assert _peak(adjoint, solver, 32) <= _peak(adjoint, solver, 8)


def test_memory_of_the_unrolled_adjoint_grows() -> None:
    few, many = (_peak(UnrolledAdjoint(), Picard(0.0, 0.0), steps) for steps in (20, 80))
    assert many - few >= 60 * BATCH * WIDTH * 8
