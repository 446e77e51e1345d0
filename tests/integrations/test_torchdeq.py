"""torchdeq's penalty on the Jacobian of the map of a layer, at its fixed point."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchdeq.loss import jac_reg

from bedouin import Bedouin, LowRank
from bedouin.solvers import Anderson, Direct, Jacobi, Picard, Solver, solve

SOLVERS = [Direct(), Jacobi(1e-12), Picard(1e-12), Anderson(1e-12)]


def penalty(layer: Bedouin, x: Tensor, solver: Solver) -> Any:
    """That of the layer's map, which must be the map that the layer solves."""
    f = layer.map(x)
    y0 = torch.zeros(*x.shape[:2], layer.d_inner, dtype=x.dtype)
    y = solve(f, y0, solver, max_steps=500, time_dim=1).value
    torch.testing.assert_close(f(y), y, rtol=1e-9, atol=1e-9)
    torch.manual_seed(0)  # of the random vectors
    return jac_reg(f(y), y, vecs=2)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("options", [{}, {"mixer": LowRank(1)}, {"num_heads": 2}], ids=str)
def test_jac_reg_of_the_map_of_a_layer(options: dict[str, Any], solver: Solver) -> None:
    """Its gradient, which sees the weight directly and through the fixed point, against a
    difference quotient."""
    layer = Bedouin(3, d_state=2, feedback_init=0.5, dtype=torch.float64, **options)
    x, weight = torch.randn(2, 4, 3, dtype=torch.float64), layer.in_proj.weight
    (gradient,) = torch.autograd.grad(penalty(layer, x, solver), weight)
    direction, size, values = torch.randn_like(weight), 1e-5, []
    for step in (size, -2 * size):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
        values.append(penalty(layer, x, solver).item())
    difference = (values[0] - values[1]) / (2 * size)
    assert (gradient * direction).sum().item() == pytest.approx(difference, rel=1e-5)
    assert layer.stats is None and layer.draws.count == 0
