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


def test_picard_fails_where_jacobi_does_not() -> None:
    f = _toy()
    assert not bool(_run(f, Picard()).stats.converged.any())
    assert _run(f, Jacobi()).result is Result.converged


def test_after_j_steps_the_first_j_tokens_are_exact() -> None:
    f = _toy(t=9)
    for steps in range(1, 9):
        value = _run(f, Jacobi(rtol=0.0, atol=0.0), max_steps=steps).value
        assert torch.equal(value[:, :steps], f.loop()[:, :steps])
        assert not torch.equal(value[:, steps:], f.loop()[:, steps:])


def test_any_start_leads_to_the_same_point() -> None:
    f = _toy()
    start = 1e3 * torch.randn_like(f.x)
    solution = solve(f, start, Jacobi(1e-12), time_dim=1)
    torch.testing.assert_close(solution.value, f.loop())


def test_the_smallest_pivot_is_reported() -> None:
    conditioning = _run(_toy(gain=0.75), Jacobi()).stats.conditioning
    assert conditioning is not None and conditioning.tolist() == [0.25, 0.25]


def test_the_residual_is_that_of_its_own_map() -> None:
    f = _toy()
    solution = _run(f, Jacobi(), max_steps=3)
    g_y = f.block_solve(solution.value)[0]
    defect = (g_y - solution.value).abs().amax(-1)
    scale = g_y.abs().amax(-1).cummax(1).values
    torch.testing.assert_close(solution.stats.residual, (defect / scale).amax(1))


def test_a_singular_sample_is_contained() -> None:
    f = _toy(b=3)
    clean = _run(f, Jacobi())
    f.x[1, 3] = torch.inf
    solution = _run(f, Jacobi())
    assert torch.equal(solution.value[[0, 2]], clean.value[[0, 2]])
    assert torch.equal(solution.value[1, :3], clean.value[1, :3])
    assert bool(solution.value[1, 3:].isnan().all())
    assert solution.stats.converged.tolist() == [True, False, True]
    assert solution.result is Result.nonfinite


def test_a_plain_function_is_refused_by_name() -> None:
    message = (
        r"Jacobi needs a map with a method block_solve\(y\), and time_dim=1, got function: use"
    )
    for time_dim in (None, 1):
        with pytest.raises(TypeError, match=message):
            solve(lambda y: 0.5 * y, torch.ones(2, 3, 1), Jacobi(), time_dim=time_dim)


def test_a_map_with_structure_needs_the_time_axis_named() -> None:
    f = _toy()
    with pytest.raises(TypeError, match=r"and time_dim=1, got ToyMap"):
        solve(f, torch.zeros_like(f.x), Jacobi())
