"""Options of solvers, adjoints and caps: every error names the option and what it may be; draws of
caps depend only on the seed and the number of the call; Anderson and Broyden through torchdeq.

Letters: b batch, t tokens, c values of a token.
"""

import pickle
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import of, of_kind, refused
from torch import Tensor

from bedouin.solvers import (
    Anderson,
    Broyden,
    Cap,
    Direct,
    FixedCap,
    GammaCap,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Result,
    Solution,
    UnrolledAdjoint,
    solve,
)
from bedouin.solvers.base import Map, Solver
from bedouin.solvers.caps import as_cap

NAN, INF = float("nan"), float("inf")
KINDS: dict[type[Any], str] = {
    **dict.fromkeys((Picard, Jacobi, Anderson, Broyden), "rtol, atol"),
    **dict.fromkeys((Direct, OneStepAdjoint, UnrolledAdjoint), "no options at all"),
    **{ImplicitAdjoint: "solver", PhantomAdjoint: "num_steps, damping"},
    **{FixedCap: "steps", GammaCap: "shape, scale, limit, seed"},
}
"""With the names of their options, or the first of them."""

VALUES = of_kind(ValueError, [
    (of(Picard, rtol=-1e-3), "rtol must lie in [0, 1000000.0], got -0.001"),
    (of(Picard, rtol=NAN), "rtol must be a finite number, got nan"),
    (of(Picard, atol=-1), "atol must lie in"),
    (of(Picard, damping=0.0), "damping must lie in (0, 1], got 0.0"),
    (of(Picard, shrink=0), "shrink must lie in (0, 1], got 0"),
    (of(Picard, patience=0), "patience must be None or an int >= 1, got 0"),
    (of(Picard, stop_rule="lowest"), "stop_rule must be one of ('prefix', 'paper'), got 'lowest'"),
    (of(Jacobi, atol=INF), "atol must be a finite number, got inf"),
    (of(Anderson, rtol=-1.0), "rtol must lie in"),
    (of(Anderson, memory=1), "memory must be an int >= 2, got 1"),
    (of(Anderson, regularization=0.0), "regularization must lie in (0, 1000000.0], got 0.0"),
    (of(Anderson, damping=0.0), "damping must lie in (0, 1], got 0.0"),
    (of(Broyden, rtol="1"), "rtol must be a finite number, got '1'"),
    (of(Broyden, max_rank=0), "max_rank must be None or an int >= 1, got 0"),
    (of(PhantomAdjoint, num_steps=0), "num_steps must be an int >= 1, got 0"),
    (of(PhantomAdjoint, damping=0.0), "damping must lie in (0, 1], got 0.0"),
    *((of(GammaCap, **{name: value}), f"{name} must lie in (0, inf], got {value!r}")
      for name in ("shape", "scale") for value in (0.0, -1.0)),
    *((of(GammaCap, **{name: value}), f"{name} must be a finite number, got {value!r}")
      for name in ("shape", "scale") for value in (True, "4", None, 1j, INF, NAN)),
    (of(FixedCap, steps=0), "must be at least 1, got 0"),
    (of(GammaCap, limit=0), "must be at least 1, got 0"),
    (of(as_cap, max_steps=0), "must be at least 1, got 0"),
])  # fmt: skip
TYPES = of_kind(TypeError, [
    *((of(kind, foo=1), f"{kind.__name__} has no option 'foo'. Valid: {valid}")
      for kind, valid in KINDS.items()),
    (of(ImplicitAdjoint, solver="picard"), "solver must be a Solver or None, got s"),
    *((of(GammaCap, seed=seed), f"seed must be an int, got {seed!r}")
      for seed in (1.5, True, "0", None)),
    *((of(make, **{name: wrong}), "must be an int >= 1 or a Cap, got")
      for make, name in ((FixedCap, "steps"), (GammaCap, "limit"), (as_cap, "max_steps"))
      for wrong in (2.0, True, "10", None)),
    (of(Cap), "abstract"),
    (of(Picard, tol=1), "Picard has no option 'tol'; did you mean '...tol'? Valid: rtol, atol,"),
    (of(Picard, *range(7)), "Picard takes 6 options ['rtol', ...], got 7"),
    (of(Direct, 1e-3), "Direct takes 0 options [], got 1"),
])  # fmt: skip

test_wrong_options = refused(VALUES + TYPES)


# -- caps


def test_a_draw_depends_on_seed_and_number_alone() -> None:
    cap = GammaCap(seed=3)
    first = [cap.draw(i) for i in range(50)]
    torch.manual_seed(99)
    assert [GammaCap(seed=3).draw(i) for i in reversed(range(50))] == first[::-1]
    assert [GammaCap(seed=4).draw(i) for i in range(50)] != first
    assert len(set(first)) > 3


def test_the_first_draws_are_the_same_on_every_machine() -> None:
    assert [GammaCap().draw(i) for i in range(8)] == [7, 4, 3, 3, 4, 4, 4, 2]


def test_draws_have_the_mean_of_the_distribution() -> None:
    draws = [GammaCap().draw(i) for i in range(4000)]
    # rounding up adds one half to Gamma(4, 1), whose mean is 4 and whose deviation is 2
    assert abs(statistics.mean(draws) - 4.5) < 0.15
    assert abs(statistics.stdev(draws) - 2) < 0.15


@settings(max_examples=30)
@given(
    shape=st.floats(0.05, 20),
    scale=st.floats(0.05, 20),
    limit=st.integers(1, 12),
    index=st.integers(0, 2**40),
)
def test_draws_stay_within_one_and_the_limit(
    shape: float, scale: float, limit: int, index: int
) -> None:
    assert 1 <= GammaCap(shape, scale, limit).draw(index) <= limit


def test_caps_are_values() -> None:
    fixed, cap = FixedCap(7), GammaCap(2.0, 3.0, 40, 5)
    assert (fixed.limit, fixed.draw(0), fixed.draw(5), fixed.is_random) == (7, 7, 7, False)
    assert cap.limit == 40 and cap.is_random
    assert GammaCap(seed=1) == GammaCap(seed=1) != GammaCap(seed=2)
    assert pickle.loads(pickle.dumps(cap)) == cap == as_cap(cap)
    assert as_cap(12) == FixedCap(12)


def test_a_draw_that_overflows_is_the_limit() -> None:
    assert {GammaCap(scale=1.7e308, limit=9).draw(i) for i in range(20)} == {9}


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
    # relative to F(y), at y = 0
    start = torch.ones(3, dtype=dtype)
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
