"""Caps: draws depend only on the seed and the number of the call."""

import pickle
import statistics

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bedouin.solvers import FixedCap, GammaCap
from bedouin.solvers.caps import as_cap


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


def test_a_fixed_cap_is_its_steps() -> None:
    cap = FixedCap(7)
    assert (cap.limit, cap.draw(0), cap.draw(5), cap.is_random) == (7, 7, 7, False)


def test_a_gamma_cap_is_random_and_has_a_limit() -> None:
    cap = GammaCap(limit=30)
    assert cap.limit == 30 and cap.is_random


def test_caps_are_values() -> None:
    assert GammaCap(seed=1) == GammaCap(seed=1) != GammaCap(seed=2)
    assert pickle.loads(pickle.dumps(GammaCap(2.0, 3.0, 40, 5))) == GammaCap(2.0, 3.0, 40, 5)


def test_an_int_is_a_fixed_cap_and_a_cap_is_itself() -> None:
    cap = GammaCap()
    assert as_cap(12) == FixedCap(12)
    assert as_cap(cap) is cap


def test_a_draw_that_overflows_is_the_limit() -> None:
    assert {GammaCap(scale=1.7e308, limit=9).draw(i) for i in range(20)} == {9}
