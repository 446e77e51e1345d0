"""What a solve returns: residuals, outcome, and the sentence that the user reads."""

import pytest
import torch
from torch import Tensor

from bedouin.solvers import Result, SolveStats
from bedouin.solvers.solution import (
    BackwardStats,
    can_read_device,
    describe,
    read_result,
    relative_residual,
)

INF, NAN = torch.inf, torch.nan


def _stats(converged: list[bool], residual: list[float]) -> SolveStats:
    steps = torch.arange(1, len(converged) + 1)
    return SolveStats(steps, torch.tensor(residual), torch.tensor(converged))


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
    ],
)
def test_the_residual_is_relative_to_the_largest_value_so_far(
    defect: list[float], scale: list[float], expected: float
) -> None:
    actual = relative_residual(torch.tensor([defect]), torch.tensor([scale]))
    torch.testing.assert_close(actual, torch.tensor([expected]), equal_nan=True)


def test_the_residual_of_no_tokens_is_zero() -> None:
    assert relative_residual(torch.empty(3, 0), torch.empty(3, 0)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("converged", "residual", "result"),
    [
        ([True, True], [1e-5, 0.0], Result.converged),
        ([], [], Result.converged),
        ([True, False], [1e-5, 0.1], Result.max_steps_reached),
        ([False, False], [0.1, NAN], Result.nonfinite),
    ],
)
def test_the_outcome(converged: list[bool], residual: list[float], result: Result) -> None:
    assert read_result(_stats(converged, residual)) is result


def test_the_message_counts_samples_and_names_the_worst() -> None:
    stats = _stats([True, False, False], [1e-6, 0.25, NAN])
    message = describe(stats, Result.nonfinite, "layer 3")
    assert message.startswith("layer 3: 2 of 3 samples did not converge in 3 steps")
    assert "(worst residual 2.5e-01)" in message
    assert "stats.conditioning" in message


def test_the_message_without_a_finite_residual() -> None:
    message = describe(_stats([False], [NAN]), Result.nonfinite, "solve")
    assert "worst residual not finite" in message


def test_every_result_says_something_different() -> None:
    assert len({result.message for result in Result}) == 4
    assert "raise max_steps" in Result.max_steps_reached.message


def test_backward_is_none_until_an_adjoint_reports() -> None:
    cell = BackwardStats()
    stats = SolveStats(*(torch.zeros(1),) * 3, None, cell)
    assert stats.backward is None
    cell.stats = _stats([True], [0.0])
    assert stats.backward is cell.stats


def test_two_statistics_do_not_share_their_backward_cell() -> None:
    first, second = _stats([True], [0.0]), _stats([True], [0.0])
    first._backward.stats = second
    assert second.backward is None


def test_values_may_be_read_except_under_a_transform() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(can_read_device(x))
        return x

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2))
    assert seen == [True, False]
