"""Options of solvers, adjoints and caps: every error names the option and what it may be; draws of
caps depend only on the seed and the number of the call."""

import pickle
import re
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    UnrolledAdjoint,
)
from bedouin.solvers.caps import as_cap

NAN, INF = float("nan"), float("inf")

VALUES: list[tuple[Any, dict[str, Any], str]] = [
    (Picard, {"rtol": -1e-3}, "rtol must lie in [0, 1000000.0], got -0.001"),
    (Picard, {"rtol": NAN}, "rtol must be a finite number, got nan"),
    (Picard, {"atol": -1}, "atol must lie in"),
    (Picard, {"atol": True}, "atol must be a finite number, got True"),
    (Picard, {"damping": 0.0}, "damping must lie in (0, 1], got 0.0"),
    (Picard, {"shrink": 0}, "shrink must lie in (0, 1], got 0"),
    (Picard, {"patience": 0}, "patience must be None or an int >= 1, got 0"),
    (Picard, {"stop_rule": "lowest"}, "stop_rule must be one of ('prefix', 'paper'), got 'lowest'"),
    (Jacobi, {"rtol": -1.0}, "rtol must lie in"),
    (Jacobi, {"atol": INF}, "atol must be a finite number, got inf"),
    (Anderson, {"rtol": -1.0}, "rtol must lie in"),
    (Anderson, {"atol": NAN}, "atol must be a finite number"),
    (Anderson, {"memory": 1}, "memory must be an int >= 2, got 1"),
    (Anderson, {"regularization": 0.0}, "regularization must lie in (0, 1000000.0], got 0.0"),
    (Anderson, {"damping": 0.0}, "damping must lie in (0, 1], got 0.0"),
    (Broyden, {"rtol": "1"}, "rtol must be a finite number, got '1'"),
    (Broyden, {"atol": -1}, "atol must lie in"),
    (Broyden, {"max_rank": 0}, "max_rank must be None or an int >= 1, got 0"),
    (PhantomAdjoint, {"num_steps": 0}, "num_steps must be an int >= 1, got 0"),
    (PhantomAdjoint, {"damping": 0.0}, "damping must lie in (0, 1], got 0.0"),
    *(
        (GammaCap, {name: value}, f"{name} must lie in (0, inf], got {value!r}")
        for name in ("shape", "scale")
        for value in (0.0, -1.0)
    ),
    *(
        (GammaCap, {name: value}, f"{name} must be a finite number, got {value!r}")
        for name in ("shape", "scale")
        for value in (True, "4", None, 1j, INF, NAN)
    ),
    (FixedCap, {"steps": 0}, "must be at least 1, got 0"),
    (GammaCap, {"limit": 0}, "must be at least 1, got 0"),
    (as_cap, {"max_steps": 0}, "must be at least 1, got 0"),
]

TYPES: list[tuple[Any, dict[str, Any], str]] = [
    (Picard, {"max_iter": 9}, "Picard has no option 'max_iter'. Valid: rtol, atol, damping"),
    (Jacobi, {"damping": 0.5}, "Jacobi has no option 'damping'. Valid: rtol, atol"),
    (Direct, {"rtol": 1e-3}, "Direct has no option 'rtol'. Valid: no options at all"),
    (Anderson, {"memry": 3}, "Anderson has no option 'memry'; did you mean 'memory'?"),
    (Broyden, {"rank": 3}, "Broyden has no option 'rank'; did you mean 'max_rank'?"),
    (ImplicitAdjoint, {"solver": "picard"}, "solver must be a Solver or None, got s"),
    (ImplicitAdjoint, {"solvr": 1}, "no option 'solvr'; did you mean 'solver'"),
    (OneStepAdjoint, {"steps": 1}, "OneStepAdjoint has no option 'steps'"),
    (UnrolledAdjoint, {"steps": 1}, "Valid: no options at all"),
    (PhantomAdjoint, {"damp": 1.0}, "did you mean 'damping'"),
    (FixedCap, {"limit": 1}, "FixedCap has no option 'limit'. Valid: steps"),
    (GammaCap, {"foo": 1}, "GammaCap has no option 'foo'. Valid: shape, scale, limit, seed"),
    *(
        (GammaCap, {"seed": seed}, f"seed must be an int, got {seed!r}")
        for seed in (1.5, True, "0", None)
    ),
    *(
        (make, {name: wrong}, "must be an int >= 1 or a Cap, got")
        for make, name in ((FixedCap, "steps"), (GammaCap, "limit"), (as_cap, "max_steps"))
        for wrong in (2.0, True, "10", None)
    ),
    (Cap, {}, "abstract"),
]


@pytest.mark.parametrize(("make", "options", "message"), VALUES)
def test_values_out_of_range(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)


@pytest.mark.parametrize(("make", "options", "message"), TYPES)
def test_unknown_options_and_wrong_types(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make(**options)


def test_near_names_and_too_many_options() -> None:
    message = r"Picard has no option 'tol'; did you mean '[ar]tol'\? Valid: rtol, atol,"
    with pytest.raises(TypeError, match=message):
        Picard(tol=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Picard takes 6 options \['rtol', .*\], got 7"):
        Picard(*range(7))
    with pytest.raises(TypeError, match=r"Direct takes 0 options \[\], got 1"):
        Direct(1e-3)  # type: ignore[call-arg]


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
