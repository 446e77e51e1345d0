"""The convergence rule: prefixes, tolerances, rounding and the residual."""

import pytest
import torch

from bedouin.solvers.convergence import (
    relative_residual,
    within_rounding,
)

INF, NAN = torch.inf, torch.nan


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
