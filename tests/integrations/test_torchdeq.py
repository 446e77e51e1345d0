"""Losses of the installed torchdeq on solutions of `solve` and on the map of a layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchdeq.loss import jac_reg

from bedouin import Bedouin, LowRank
from bedouin.solvers import Anderson, Direct, Jacobi, Picard, Solver, solve


def cell_loss(weight: Tensor, x: Tensor) -> Tensor:
    """The penalty on the Jacobian of z -> tanh(W z + x) at its fixed point."""

    def cell(z: Tensor) -> Tensor:
        return torch.tanh(z @ weight + x)

    z = solve(cell, torch.zeros_like(x), Anderson(rtol=1e-12), max_steps=100).value
    found: Tensor = jac_reg(cell(z), z, vecs=2)
    return found


def layer_loss(layer: Bedouin, x: Tensor, solver: Solver) -> Any:
    """The same of a layer's map, which must be the map that the layer solves."""
    f = layer.map(x)
    y0 = torch.zeros(*x.shape[:2], layer.d_inner, dtype=x.dtype)
    y = solve(f, y0, solver, max_steps=500, time_dim=1).value
    torch.testing.assert_close(f(y), y, rtol=1e-9, atol=1e-9)
    return jac_reg(f(y), y, vecs=2)


def assert_gradient(loss: Callable[[], Tensor], weight: Tensor) -> None:
    """That of the loss, which sees the weight directly and through the fixed point, against a
    difference quotient."""

    def value() -> Tensor:
        torch.manual_seed(0)  # of the random vectors of the penalty
        return loss()

    (gradient,) = torch.autograd.grad(value(), weight)
    direction, size, values = torch.randn_like(weight), 1e-5, []
    for step in (size, -2 * size):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
        values.append(value().item())
    difference = (values[0] - values[1]) / (2 * size)
    assert (gradient * direction).sum().item() == pytest.approx(difference, rel=1e-5)


def test_jac_reg_of_a_solution() -> None:
    weight = (0.3 * torch.randn(5, 5, dtype=torch.float64) / 5**0.5).requires_grad_()
    x = torch.randn(3, 5, dtype=torch.float64)
    assert_gradient(lambda: cell_loss(weight, x), weight)


@pytest.mark.parametrize("solver", [Direct(), Jacobi(1e-12), Picard(1e-12)], ids=str)
@pytest.mark.parametrize("options", [{}, {"mixer": LowRank(1)}, {"num_heads": 2}], ids=str)
def test_jac_reg_of_the_map_of_a_layer(options: dict[str, Any], solver: Solver) -> None:
    layer = Bedouin(3, d_state=2, feedback_init=0.5, dtype=torch.float64, **options)
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    assert_gradient(lambda: layer_loss(layer, x, solver), layer.in_proj.weight)
    assert layer.stats is None and layer.draws.count == 0
