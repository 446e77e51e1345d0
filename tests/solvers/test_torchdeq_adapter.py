"""Anderson and Broyden through torchdeq: convergence, counting, and corrections of torchdeq.

Letters: b batch, t tokens, c values of a token.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.solvers import Anderson, Broyden, Picard, Result, Solution, solve
from bedouin.solvers.base import Map, Solver

BOTH = [Anderson(), Broyden()]
TIGHT = [Anderson(rtol=1e-10, atol=0.0), Broyden(rtol=1e-10, atol=0.0)]


class _Counted:
    """tanh(W y + x), the cell of a DEQ, with the number of its evaluations."""

    def __init__(
        self, b: int = 3, c: int = 20, gain: float = 0.9, dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        W = torch.randn(c, c, generator=generator, dtype=torch.float64)
        self.W = (gain * W / torch.linalg.matrix_norm(W, 2)).to(dtype)
        self.x = torch.randn(b, c, generator=generator, dtype=torch.float64).to(dtype)
        self.calls = 0

    def __call__(self, y: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(y @ self.W.T + self.x)


def _run(f: Map, y0: Tensor, solver: Solver, max_steps: int = 100, **options: Any) -> Solution:
    with torch.no_grad():
        return solve(f, y0, solver, max_steps=max_steps, on_unconverged="ignore", **options)


def _residual(f: Map, y: Tensor) -> Tensor:
    f_y = f(y)
    return (f_y - y).abs().amax(1) / f_y.abs().amax(1)


@pytest.mark.parametrize("solver", TIGHT)
def test_a_slow_contraction_takes_fewer_steps_than_picard(solver: Solver) -> None:
    rate = torch.linspace(-0.99, 0.99, 8, dtype=torch.float64)

    def f(y: Tensor) -> Tensor:
        return rate * y + 1

    y0 = torch.zeros(2, 8, dtype=torch.float64)
    accelerated = _run(f, y0, solver, 2000)
    plain = _run(f, y0, Picard(1e-10, 0.0), 5000)
    assert accelerated.result is plain.result is Result.converged
    assert 3 * int(accelerated.stats.num_steps.max()) < int(plain.stats.num_steps.min())
    torch.testing.assert_close(accelerated.value, (1 / (1 - rate)).expand(2, 8), rtol=1e-7, atol=0)


@pytest.mark.parametrize("solver", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_steps_improve_on_the_start_and_none_is_spent_after_convergence(
    solver: Solver, dtype: torch.dtype
) -> None:
    f = _Counted(dtype=dtype)
    start = _residual(f, torch.zeros_like(f.x))
    for max_steps in (1, 2, 3, 100):
        f.calls = 0
        solution = _run(f, torch.zeros_like(f.x), solver, max_steps)
        assert solution.value.dtype == dtype
        if max_steps < 100:
            assert f.calls == max_steps + 1
            assert solution.stats.num_steps.tolist() == [max_steps] * 3
            assert bool((solution.stats.residual < 0.7**max_steps * start).all())
    assert solution.result is Result.converged
    assert f.calls <= int(solution.stats.num_steps.max()) + 1


@pytest.mark.parametrize("solver", BOTH)
@pytest.mark.parametrize("size", [2.0**-20, 1e-2, 2.0**20])
def test_the_size_of_the_values_does_not_matter(solver: Any, size: float) -> None:
    """Anderson's regularization is absolute in torchdeq; here |y| may be anything."""
    f, solver = _Counted(), type(solver)(rtol=1e-10, atol=0.0)
    y0 = torch.zeros_like(f.x)
    plain, scaled = _run(f, y0, solver), _run(lambda y: size * f(y / size), y0, solver)
    assert scaled.result is Result.converged
    assert torch.equal(scaled.stats.num_steps, plain.stats.num_steps)
    torch.testing.assert_close(scaled.value / size, plain.value)


@pytest.mark.parametrize("solver", BOTH)
def test_a_sample_that_converged_is_left_alone(solver: Solver) -> None:
    rate = torch.tensor([[0.0], [0.98]], dtype=torch.float64) * torch.linspace(
        -1, 1, 6, dtype=torch.float64
    )
    solution = _run(lambda y: rate * y + 1, torch.zeros(2, 6, dtype=torch.float64), solver)
    fast, slow = solution.stats.num_steps.tolist()
    assert fast == 2 and slow > 4
    assert torch.equal(solution.value[0], torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", BOTH)
def test_more_memory_than_values_does_not_raise(solver: Solver, dtype: torch.dtype) -> None:
    """One value a sample: the residuals are multiples of each other, a singular least squares."""
    slope = torch.tensor([[0.5], [-1.2], [2.0]], dtype=dtype)
    solution = _run(lambda y: slope * y + 1, torch.zeros(3, 1, dtype=dtype), solver)
    assert solution.result is Result.converged
    torch.testing.assert_close(solution.value, 1 / (1 - slope), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_neighbour_with_singular_normal_equations_costs_no_steps(dtype: torch.dtype) -> None:
    rate = torch.linspace(-0.9, 0.95, 6, dtype=dtype)

    def f(y: Tensor) -> Tensor:
        return torch.stack([rate * y[0] + 1, y[1] + 1])

    y0, solver = torch.zeros(2, 6, dtype=dtype), Anderson(1e-5, 0.0)
    together = _run(f, y0, solver)
    alone = _run(lambda y: rate * y + 1, y0, solver)
    assert together.stats.num_steps[0] == alone.stats.num_steps[0]
    torch.testing.assert_close(together.value[0], alone.value[0], rtol=1e-4, atol=0)


UNBOUNDED = {
    "y + 1": lambda y: y + 1,
    "y + (1, 2, 3)": lambda y: y + torch.tensor([1, 2, 3], dtype=y.dtype),
    "y + 2 + sin y": lambda y: y + 2 + torch.sin(y),
}


@pytest.mark.parametrize(
    ("name", "tolerance", "dtype"),
    # every name with every tolerance, and the dtypes in turn
    [
        (name, tolerance, (torch.float32, torch.float64)[(i + j) % 2])
        for i, name in enumerate(UNBOUNDED)
        for j, tolerance in enumerate([(1e-4, 1e-8), (0.1, 0.0), (0.0, 1e-6)])
    ],
)
@pytest.mark.parametrize("kind", [Anderson, Broyden])
def test_iterates_that_grow_without_bound_fail_alone(
    kind: Any, name: str, tolerance: tuple[float, float], dtype: torch.dtype
) -> None:
    def f(y: Tensor) -> Tensor:
        return torch.stack([UNBOUNDED[name](y[0]), 0.5 * y[1] + 1])

    solution = _run(f, torch.zeros(2, 3, dtype=dtype), kind(*tolerance), 200)
    assert solution.stats.converged.tolist() == [False, True]
    torch.testing.assert_close(solution.value[1], torch.full_like(solution.value[1], 2))


@pytest.mark.parametrize("tolerance", [(1e-4, 1e-8), (0.1, 0.0), (0.0, 1e-2)])
@pytest.mark.parametrize("kind", [Anderson, Broyden])
def test_a_fixed_point_far_from_the_start_is_found(
    kind: Any, tolerance: tuple[float, float]
) -> None:
    """1,000 and 20,000 times as far as the first step, and from a start beside the fixed point."""
    rate = torch.tensor([[0.999], [1.00005], [0.999], [-1.0]])
    y0 = torch.tensor([[0.0], [0.0], [999.0], [0.5]])
    solution = solve(lambda y: rate * y + 1, y0, kind(*tolerance), on_unconverged="raise")
    exact = 1 / (1 - rate)
    assert bool(((solution.value - exact).abs() < 0.1 * exact.abs()).all())


@pytest.mark.parametrize("solver", BOTH)
def test_a_transform_is_refused(solver: Solver) -> None:
    message = f"{type(solver).__name__} reads the device at every step and cannot run under"
    with pytest.raises(RuntimeError, match=message):
        torch.func.vmap(lambda y: _run(lambda v: 0.5 * v, y, solver).value)(torch.ones(2, 3, 1))


def test_anderson_honours_its_damping() -> None:
    """With two evaluations per round the damped step is the only one taken."""
    f = _Counted()
    damped = _run(f, torch.zeros_like(f.x), Anderson(memory=2, damping=0.5), 3)
    plain = _run(f, torch.zeros_like(f.x), Anderson(memory=2), 3)
    assert not torch.equal(damped.value, plain.value)


def test_broyden_converges_with_few_updates_kept() -> None:
    f = _Counted(gain=0.5)
    solution = _run(f, torch.zeros_like(f.x), Broyden(1e-8, 0.0, max_rank=5))
    assert solution.result is Result.converged
    assert int(solution.stats.num_steps.min()) > 6
