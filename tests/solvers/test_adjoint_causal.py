"""Gradients of maps that are causal in time: Jacobi backward in time, and the reverse sweep.

Letters: b batch, t time, c values of a token.
"""

import pytest
import torch
from tests.toy_map import ToyMap
from torch import Tensor

from bedouin.solvers import (
    Adjoint,
    Anderson,
    Direct,
    ImplicitAdjoint,
    Jacobi,
    Picard,
    Solver,
    solve,
)
from bedouin.solvers.base import ReportBackward
from bedouin.solvers.reporting import SolveStats

EXACT = Picard(rtol=1e-14, atol=1e-15)


def _loss(y: Tensor) -> Tensor:
    return (y * torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).reshape(y.shape).cos()).sum()


class ExactToyMap(ToyMap):
    """The same with a reverse sweep, which reports one step."""

    def attach(self, y_star: Tensor, report: ReportBackward) -> Tensor:
        value, zeros = self.loop(), torch.zeros(y_star.shape[:2])
        value.register_hook(lambda grad: report(zeros, zeros))
        return value


def _toy(kind: type[ToyMap], a: float = -2.0) -> tuple[ToyMap, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 6, 3), (3,)))
    inputs = [v.requires_grad_() for v in (torch.tensor(a, dtype=torch.float64), w, x)]
    return kind(*inputs), inputs


def _toy_gradients(
    kind: type[ToyMap], solver: Solver, adjoint: Adjoint | None, a: float = -2.0
) -> tuple[tuple[Tensor, ...], SolveStats]:
    f, inputs = _toy(kind, a)
    y0 = torch.zeros_like(f.x)
    solution = solve(f, y0, solver, adjoint=adjoint, time_dim=1)
    grads = torch.autograd.grad(_loss(solution.value), inputs)
    backward = solution.stats.backward
    assert backward is not None
    return grads, backward


def _toy_reference(a: float = -2.0) -> tuple[Tensor, ...]:
    f, inputs = _toy(ToyMap, a)
    return torch.autograd.grad(_loss(f.loop()), inputs)


def test_jacobi_backward_in_time_ends_within_t_plus_1_steps() -> None:
    grads, backward = _toy_gradients(ToyMap, Jacobi(1e-13, 0.0), None)
    torch.testing.assert_close(grads, _toy_reference())
    assert int(backward.num_steps.max()) <= 7


@pytest.mark.parametrize("backward", [EXACT, Anderson(1e-13, 0.0), Jacobi(1e-13, 0.0)])
def test_causal_maps_have_exact_gradients_by_every_adjoint_solver(backward: Solver) -> None:
    grads, _ = _toy_gradients(ToyMap, EXACT, ImplicitAdjoint(backward), a=0.4)
    torch.testing.assert_close(grads, _toy_reference(0.4), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("adjoint", [None, ImplicitAdjoint(), ImplicitAdjoint(Direct())])
@pytest.mark.parametrize("solver", [Jacobi(1e-13, 0.0), Picard(1e-13, 0.0)])
def test_a_reverse_sweep_is_used_after_every_solver(
    solver: Solver, adjoint: Adjoint | None
) -> None:
    grads, backward = _toy_gradients(ExactToyMap, solver, adjoint, a=0.4)
    torch.testing.assert_close(grads, _toy_reference(0.4))
    assert backward.num_steps.tolist() == [1, 1]


def test_another_adjoint_solver_is_honoured_despite_the_reverse_sweep() -> None:
    _, backward = _toy_gradients(ExactToyMap, EXACT, ImplicitAdjoint(EXACT), a=0.4)
    assert int(backward.num_steps.min()) > 1
