"""Block-Jacobi on a toy map with a local equation. Letters: b batch, t time, c values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.toy_map import ToyMap

from bedouin.solvers import Jacobi, Picard, Result, Solution, solve


def _toy(b: int = 2, t: int = 7, gain: float = 1.9, seed: int = 0) -> ToyMap:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(b, t, 3, dtype=torch.float64, generator=generator)
    return ToyMap(torch.tensor(gain, dtype=torch.float64), torch.tensor(3.0), x)


def _run(f: ToyMap, solver: Jacobi | Picard, max_steps: int = 100) -> Solution:
    y0 = torch.zeros_like(f.x)
    return solve(f, y0, solver, max_steps=max_steps, time_dim=1, on_unconverged="ignore")


@settings(max_examples=25)
@given(t=st.integers(1, 12), gain=st.floats(-3, 3), seed=st.integers(0, 99))
def test_it_ends_within_t_plus_1_steps_whatever_the_gain(t: int, gain: float, seed: int) -> None:
    if abs(1 - gain) < 0.1:
        gain = 2.0
    f = _toy(t=t, gain=gain, seed=seed)
    solution = _run(f, Jacobi(rtol=1e-12, atol=0.0))
    assert solution.result is Result.converged
    assert int(solution.stats.num_steps.max()) <= t + 1
    torch.testing.assert_close(solution.value, f.loop(), rtol=1e-12, atol=1e-12)


def test_after_j_steps_the_first_j_tokens_are_exact() -> None:
    f = _toy(t=9)
    for steps in range(1, 9):
        value = _run(f, Jacobi(rtol=0.0, atol=0.0), max_steps=steps).value
        assert torch.equal(value[:, :steps], f.loop()[:, :steps])
        assert not torch.equal(value[:, steps:], f.loop()[:, steps:])


def test_a_map_with_structure_needs_the_time_axis_named() -> None:
    f = _toy()
    with pytest.raises(TypeError, match=r"and time_dim=1, got ToyMap"):
        solve(f, torch.zeros_like(f.x), Jacobi())
