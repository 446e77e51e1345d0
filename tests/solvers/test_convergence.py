"""The convergence rule: prefixes, tolerances, rounding and the residual."""

import pytest
import torch

from bedouin.solvers.convergence import (
    first_open_token_is_nonfinite,
    holds_so_far,
    in_all_parts,
    largest_of_parts,
    largest_so_far,
    relative_residual,
    reported_residual,
    sizes_of_parts,
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
    torch.testing.assert_close(
        actual, torch.tensor([[1.0, 3.0, 3.0], [1.0, NAN, NAN]]), equal_nan=True
    )


def test_a_tolerance_is_a_strict_bound_that_no_nan_satisfies() -> None:
    defect = torch.tensor([[0.0, 0.5, 0.75, NAN]])
    largest = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    assert within_tolerance(defect, largest, 0.5, 0.25).tolist() == [[True, True, False, False]]


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
    one = torch.ones(5, 2)
    # the last is explained, but as large as F(y)
    defect = torch.tensor([[0.0, eps], [0.0, 0.05], [0.0, 0.05], [0.0, 0.0], [0.0, 1.0]])
    magnitude = torch.tensor([[0.0, 0.0], [0.0, 0.0], [2 / eps, 0.0], [0.0, NAN], [2 / eps, 0.0]])
    assert within_rounding(defect, one, magnitude).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("defect", "scale", "expected"),
    [
        ([1.0, 1.0], [2.0, 4.0], 0.5),
        ([0.0, 1.0], [8.0, 1.0], 0.125),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 3.0], [0.0, 6.0], 0.5),
        ([1.0, NAN], [1.0, NAN], NAN),
        ([1.0, INF], [1.0, INF], NAN),
        ([1.0, 0.0], [0.0, 1.0], NAN),
        ([0.0, 0.0], [1.0, NAN], NAN),
        ([0.0, 0.0], [INF, 1.0], NAN),
    ],
)
def test_the_residual_is_relative_to_the_largest_value_so_far(
    defect: list[float], scale: list[float], expected: float
) -> None:
    actual = relative_residual(torch.tensor([defect]), torch.tensor([scale]))
    torch.testing.assert_close(actual, torch.tensor([expected]), equal_nan=True)


@pytest.mark.parametrize(
    ("defect", "scale", "expected"),
    [
        ([1.0, 0.0], [0.0, 1.0], INF),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 1.0], [2.0, 4.0], 0.5),
        ([1.0, INF], [0.0, INF], NAN),
        ([NAN, 1.0], [NAN, 1.0], NAN),
        ([0.0, 0.0], [1.0, NAN], NAN),
        ([0.0, 0.0], [INF, 1.0], NAN),
    ],
)
def test_the_reported_residual_is_nan_only_for_values_that_are_not_finite(
    defect: list[float], scale: list[float], expected: float
) -> None:
    actual = reported_residual(torch.tensor([defect]), torch.tensor([scale]))
    torch.testing.assert_close(actual, torch.tensor([expected]), equal_nan=True)


def test_the_residual_of_no_tokens_is_zero() -> None:
    assert relative_residual(torch.empty(3, 0), torch.empty(3, 0)).tolist() == [0.0, 0.0, 0.0]


def test_each_part_of_a_token_has_a_size_of_its_own() -> None:
    v = torch.tensor([[[1.0, -2.0, 30.0, 4.0], [5.0, 6.0, -7.0, NAN]], [[0.0] * 4] * 2])
    actual = sizes_of_parts(v, 2)
    expected = torch.tensor([[2.0, 6.0], [30.0, NAN], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(actual, expected, equal_nan=True)
    torch.testing.assert_close(sizes_of_parts(v, 1), v.abs().amax(-1), equal_nan=True)
    largest = largest_of_parts(actual, 2)
    torch.testing.assert_close(largest, torch.tensor([[30.0, NAN], [0.0, 0.0]]), equal_nan=True)
    assert in_all_parts(actual > 2, 2).tolist() == [[False, False], [False, False]]
    assert in_all_parts(actual >= 0, 2).tolist() == [[True, False], [True, True]]
    assert torch.equal(in_all_parts(actual > 2, 1), actual > 2)
