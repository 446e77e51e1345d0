"""bedouin.integrations.torchdeq and `solve` against the installed torchdeq."""

from typing import Any

import pytest
import torch
import torchdeq
from torch import Tensor
from torchdeq.loss import jac_reg

import bedouin.integrations.torchdeq  # noqa: F401
from bedouin.integrations.torchdeq import as_torchdeq
from bedouin.solvers import Anderson, Broyden, Direct, Picard, solve

NAMES = ["bedouin_picard", "bedouin_anderson", "bedouin_broyden"]


class Cell(torch.nn.Module):
    """z -> tanh(W z + x), a contraction."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(0.3 * torch.randn(5, 5, dtype=torch.float64) / 5**0.5)
        self.x = torch.randn(3, 5, dtype=torch.float64)

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight + self.x)


@pytest.fixture
def cell() -> Cell:
    return Cell()


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("core", ["sliced", "indexing"])
@pytest.mark.parametrize("stop_mode", ["abs", "rel"])
def test_deq_with_our_solvers(cell: Cell, name: str, core: str, stop_mode: str) -> None:
    deq = torchdeq.get_deq(
        core=core,
        ift=True,
        f_solver=name,
        b_solver=name,
        f_tol=1e-12,
        b_tol=1e-12,
        f_stop_mode=stop_mode,
        b_stop_mode=stop_mode,
        f_max_iter=60,
        b_max_iter=60,
    )
    start = torch.zeros_like(cell.x)
    (z,), info = deq(cell, start)
    expected = solve(cell, start, Picard(rtol=1e-13), max_steps=100).value
    same(z, expected)
    gradients = [torch.autograd.grad(v.square().sum(), cell.weight)[0] for v in (z, expected)]
    same(*gradients)
    assert info["abs_lowest"].shape == (3,) and bool((info["abs_lowest"] < 1e-10).all())
    assert bool((info["nstep"] > 1).all()) and bool((info["nstep"] < 60).all())


def test_indexed_values_are_those_of_the_iteration(cell: Cell) -> None:
    solver = as_torchdeq(Picard())
    zero = torch.zeros_like(cell.x)
    z, indexed, stat = solver(cell, zero, max_iter=50, tol=1e-10, indexing=[1, 2, 45])
    with torch.no_grad():
        torch.testing.assert_close(indexed[0], cell(zero))
        torch.testing.assert_close(indexed[1], cell(cell(zero)))
    assert torch.equal(indexed[2], z) and int(stat["nstep"].max()) < 45


def test_damping_and_return_final(cell: Cell) -> None:
    zero = torch.zeros_like(cell.x)
    solver = torchdeq.solver.get_solver("bedouin_picard")
    z, _, stat = solver(cell, zero, max_iter=3, tol=1e3, tau=0.5, return_final=True)
    expected = zero
    for _ in range(3):
        expected = torch.lerp(expected, cell(expected), 0.5)
    same(z, expected.detach())
    assert stat["nstep"].tolist() == [3.0] * 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tolerance": 1}, TypeError, "has no option 'tolerance'"),
        ({"stop_mode": "both"}, ValueError, "stop_mode must be one of"),
        ({"tau": 0.5}, ValueError, "tau must be 1.0 for Broyden, got 0.5"),
        ({"max_iter": 0}, ValueError, "max_iter must be"),
    ],
)
def test_errors(cell: Cell, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_torchdeq(Broyden())(cell, torch.zeros_like(cell.x), **options)
    with pytest.raises(TypeError, match="Direct needs a map with a method sweep"):
        as_torchdeq(Direct())(cell, torch.zeros_like(cell.x))
    with pytest.raises(TypeError, match="solver must be a solver"):
        as_torchdeq("picard")  # type: ignore[arg-type]


def test_jac_reg_of_a_solution(cell: Cell) -> None:
    # the loss sees the weight directly and through the fixed point
    def loss() -> Tensor:
        z = solve(cell, torch.zeros_like(cell.x), Anderson(rtol=1e-12), max_steps=100).value
        torch.manual_seed(0)
        found: Tensor = jac_reg(cell(z), z, vecs=2)
        return found

    (gradient,) = torch.autograd.grad(loss(), cell.weight)
    direction, size = torch.randn_like(cell.weight), 1e-5
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            cell.weight.add_(direction, alpha=sign * size)
        values.append(loss().item())
        with torch.no_grad():
            cell.weight.sub_(direction, alpha=sign * size)
    difference = (values[0] - values[1]) / (2 * size)
    assert (gradient * direction).sum().item() == pytest.approx(difference, rel=1e-5)


def test_jac_reg_of_a_tuple(cell: Cell) -> None:
    def f(y: Any) -> tuple[Tensor, Tensor]:
        return cell(y[1]), y[0] / 2

    start = (torch.zeros_like(cell.x), torch.zeros_like(cell.x))
    y = solve(f, start, Picard(rtol=1e-10)).value
    # y0 depends on y1 by the cell, y1 on y0 by 1 / 2
    loss = jac_reg(f(y)[0], y[1]) + jac_reg(f(y)[1], y[0])
    loss.backward()
    assert cell.weight.grad is not None and bool(cell.weight.grad.abs().sum() > 0)
