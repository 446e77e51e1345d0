"""Direct: one sweep, its statistics, and the maps that it rejects."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.solvers import Direct, Result, UnrolledAdjoint, solve


class _Swept(NamedTuple):
    """A sweep as a map hands it over."""

    y: Tensor
    defect: Tensor
    scale: Tensor
    magnitude: Tensor
    pivot: Tensor


class _ToyMap:
    """F(y)_t = y_t / 2 + y_{t-1} + x_t, swept token by token."""

    def __init__(self, x: Tensor, error: float = 0.0) -> None:
        self.x, self.error = x, error
        self.unrolled: list[bool] = []

    def __call__(self, y: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        return 0.5 * y + before + self.x

    def sweep(self, unroll: bool, report: object) -> _Swept:
        self.unrolled.append(unroll)
        y = 2 * self.x.cumsum(1) if self.x.shape[1] < 2 else self._loop()
        y = y + self.error
        defect, scale = (self(y) - y).detach().abs().amax(-1), self(y).detach().abs().amax(-1)
        return _Swept(y, defect, scale, scale, torch.full_like(y[:, 0, 0], 0.5))

    def _loop(self) -> Tensor:
        y, tokens = torch.zeros_like(self.x[:, 0]), []
        for x_t in self.x.unbind(1):
            y = 2 * (y + x_t)
            tokens.append(y)
        return torch.stack(tokens, 1)


def _inputs(b: int = 3, t: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(b, t, 2, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_step_and_a_residual_at_rounding_level(dtype: torch.dtype) -> None:
    f = _ToyMap(_inputs(dtype=dtype))
    solution = solve(f, torch.zeros_like(f.x), Direct(), time_dim=1)
    assert solution.result is Result.converged
    assert solution.stats.num_steps.tolist() == [1, 1, 1]
    assert solution.stats.residual.max() < 10 * torch.finfo(dtype).eps
    assert solution.stats.conditioning is not None
    assert solution.stats.conditioning.tolist() == [0.5] * 3
    assert f.unrolled == [False]


def test_neither_start_nor_cap_matter() -> None:
    f = _ToyMap(_inputs())
    first = solve(f, torch.zeros_like(f.x), Direct(), time_dim=1)
    second = solve(f, torch.full_like(f.x, torch.nan), Direct(), max_steps=1, time_dim=1)
    assert torch.equal(first.value, second.value)


def test_a_sweep_that_misses_its_equation_has_not_converged() -> None:
    f = _ToyMap(_inputs(), error=1e-6)
    solution = solve(f, torch.zeros_like(f.x), Direct(), time_dim=1, on_unconverged="ignore")
    assert not bool(solution.stats.converged.any())
    assert solution.result is Result.max_steps_reached


def test_a_nan_fails_its_sample_only() -> None:
    x = _inputs()
    clean = solve(_ToyMap(x), torch.zeros_like(x), Direct(), time_dim=1).value
    x[1, 2] = torch.nan
    solution = solve(_ToyMap(x), torch.zeros_like(x), Direct(), time_dim=1, on_unconverged="ignore")
    assert solution.stats.converged.tolist() == [True, False, True]
    assert solution.stats.residual.isnan().tolist() == [False, True, False]
    assert solution.result is Result.nonfinite
    assert torch.equal(solution.value[[0, 2]], clean[[0, 2]])
    assert torch.equal(solution.value[1, :2], clean[1, :2])


@pytest.mark.parametrize(("b", "t"), [(0, 6), (3, 0)])
def test_empty_input(b: int, t: int) -> None:
    f = _ToyMap(_inputs(b, t))
    f.sweep = lambda unroll, report: _Swept(f.x, *(f.x[..., 0],) * 3, f.x.sum((1, 2)))  # type: ignore[method-assign]
    solution = solve(f, torch.zeros_like(f.x), Direct(), time_dim=1)
    assert solution.value.shape == f.x.shape
    assert solution.stats.num_steps.tolist() == [0] * b
    assert solution.result is Result.converged


def test_unrolled_asks_the_map_to_differentiate_the_loop() -> None:
    f = _ToyMap(_inputs().requires_grad_())
    solution = solve(f, torch.zeros_like(f.x), Direct(), time_dim=1, adjoint=UnrolledAdjoint())
    assert f.unrolled == [True]
    (grad,) = torch.autograd.grad(solution.value[:, -1].sum(), f.x)
    powers = 2.0 ** torch.arange(6, 0, -1, dtype=torch.float64)
    assert torch.equal(grad, powers[None, :, None].expand_as(grad))


def test_a_map_without_a_sweep_is_refused_by_name() -> None:
    message = (
        "Direct needs a map with a method sweep, got function: use Picard, Anderson or Broyden"
    )
    with pytest.raises(TypeError, match=message):
        solve(lambda y: 0.5 * y, torch.ones(2, 3, 1), Direct(), time_dim=1)


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
