"""The convergence rule: prefixes, tolerances, rounding and the residual."""

import pytest
import torch

from bedouin.solvers.convergence import (
    first_open_token_is_nonfinite,
    front,
    holds_so_far,
    largest_so_far,
    relative_residual,
    within_rounding,
    within_tolerance,
)

INF, NAN = torch.inf, torch.nan


def test_a_condition_holds_so_far_until_it_first_fails() -> None:
    condition = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
    expected = [[True, False, False], [True, True, True], [False, False, False]]
    assert holds_so_far(condition).tolist() == expected


def test_the_largest_so_far_keeps_a_nan() -> None:
    actual = largest_so_far(torch.tensor([[1.0, 3.0, 2.0], [1.0, NAN, 2.0]]))
    expected = torch.tensor([[1.0, 3.0, 3.0], [1.0, NAN, NAN]])
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_a_tolerance_is_a_strict_bound_that_no_nan_satisfies() -> None:
    defect = torch.tensor([[0.0, 0.5, 0.75, NAN]])
    largest = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    assert within_tolerance(defect, largest, 0.5, 0.25).tolist() == [[True, True, False, False]]


def test_the_front_is_the_first_token_that_is_not_frozen() -> None:
    frozen = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    count, first = front(frozen, torch.arange(9.0).reshape(3, 3))
    assert count.tolist() == [1, 3, 0] and first.tolist() == [1.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("frozen", "scale", "expected"),
    [
        ([True, False, False], [1.0, 1.0, INF], False),
        ([True, False, False], [1.0, INF, 1.0], True),
        ([True, False, False], [NAN, 1.0, 1.0], False),
        ([True, True, True], [1.0, 1.0, NAN], False),
    ],
)
def test_a_sample_fails_at_its_first_open_token_only(
    frozen: list[bool], scale: list[float], expected: bool
) -> None:
    actual = first_open_token_is_nonfinite(torch.tensor([frozen]), torch.tensor([scale]))
    assert actual.tolist() == [expected]


def test_rounding_explains_a_defect_in_units_of_the_largest_term() -> None:
    eps = torch.finfo(torch.float32).eps
    # the last is explained, but as large as F(y)
    defect = torch.tensor([[0.0, eps], [0.0, 0.05], [0.0, 0.05], [0.0, 0.0], [0.0, 1.0]])
    magnitude = torch.tensor([[0.0, 0.0], [0.0, 0.0], [2 / eps, 0.0], [0.0, NAN], [2 / eps, 0.0]])
    found = within_rounding(defect, torch.ones(5, 2), magnitude)
    assert found.tolist() == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("defect", "scale", "expected"),
    [
        ([1.0, 1.0], [2.0, 4.0], 0.5),
        ([0.0, 1.0], [8.0, 1.0], 0.125),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 3.0], [0.0, 6.0], 0.5),
        ([1.0, 0.0], [0.0, 1.0], INF),
        ([1.0, NAN], [1.0, NAN], NAN),
        ([NAN, 1.0], [NAN, 1.0], NAN),
        ([1.0, INF], [1.0, INF], NAN),
        ([1.0, INF], [0.0, INF], NAN),
        ([0.0, 0.0], [1.0, NAN], NAN),
        ([0.0, 0.0], [INF, 1.0], NAN),
        ([], [], 0.0),
    ],
)
def test_the_residual_is_relative_to_the_largest_value_so_far(
    defect: list[float], scale: list[float], expected: float
) -> None:
    """NaN only for values that are not finite."""
    actual = relative_residual(torch.tensor([defect]), torch.tensor([scale]))
    torch.testing.assert_close(actual, torch.tensor([expected]), equal_nan=True)
