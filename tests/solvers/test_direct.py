"""Direct: one sweep and its statistics."""

from typing import Any

import pytest
import torch
from tests.toy_map import SweptMap
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.solvers import Direct, Result, Solution, UnrolledAdjoint, solve


def _map(b: int = 3, t: int = 6, dtype: torch.dtype = torch.float64) -> SweptMap:
    return SweptMap(torch.tensor(0.5, dtype=dtype), torch.ones(()), torch.randn(b, t, 2).to(dtype))


def _run(f: SweptMap, y0: Tensor | None = None, **options: Any) -> Solution:
    y0 = torch.zeros_like(f.x) if y0 is None else y0
    return solve(f, y0, Direct(), time_dim=1, on_unconverged="ignore", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_step_and_a_residual_at_rounding_level_whatever_the_start(dtype: torch.dtype) -> None:
    f = _map(dtype=dtype)
    solution = _run(f)
    assert solution.result is Result.converged and f.unrolled is False
    assert solution.stats.num_steps.tolist() == [1, 1, 1]
    assert solution.stats.residual.max() < 10 * torch.finfo(dtype).eps
    again = _run(f, torch.full_like(f.x, torch.nan), max_steps=1)
    assert torch.equal(again.value, solution.value)


def test_a_sweep_that_misses_its_equation_has_not_converged() -> None:
    f = _map()
    f.error = 1e-6
    solution = _run(f)
    assert not bool(solution.stats.converged.any())
    assert solution.result is Result.max_steps_reached


@pytest.mark.parametrize(("b", "t"), [(0, 6), (3, 0)])
def test_empty_input(b: int, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    f = _map(b, t)
    monkeypatch.setattr(f, "loop", lambda: f.x)
    solution = _run(f)
    assert solution.value.shape == f.x.shape
    assert solution.stats.num_steps.tolist() == [0] * b
    assert solution.result is Result.converged


def test_unrolled_asks_the_map_to_differentiate_the_loop() -> None:
    f = _map()
    f.x.requires_grad_()
    solution = _run(f, adjoint=UnrolledAdjoint())
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
    assert layer.stats is not None
    wrong = ~(layer.stats.residual < 0.1)
    assert wrong.any() and not layer.stats.converged[wrong].any()
    assert layer.stats.converged.any()
