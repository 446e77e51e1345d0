"""What a solve returns: residuals, outcome and message."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.solvers import Picard, Result, SolveStats, solve
from bedouin.solvers.reporting import (
    BackwardStats,
    DeferredStats,
    accepted,
    can_read_device,
    join_parts,
    read_result,
    unconverged_message,
)

INF, NAN = torch.inf, torch.nan


def _stats(converged: list[bool], residual: list[float]) -> SolveStats:
    steps = torch.arange(1, len(converged) + 1)
    return SolveStats(steps, torch.tensor(residual), torch.tensor(converged))


@pytest.mark.parametrize(
    ("converged", "residual", "result"),
    [
        ([True, True], [1e-5, 0.0], Result.converged),
        ([], [], Result.converged),
        ([True, False], [1e-5, 0.1], Result.max_steps_reached),
        ([False, False], [0.1, NAN], Result.nonfinite),
        ([False, False], [0.1, INF], Result.max_steps_reached),
    ],
)
def test_the_outcome(converged: list[bool], residual: list[float], result: Result) -> None:
    assert read_result(_stats(converged, residual)) is result


def test_the_message_is_about_the_samples_that_did_not_converge() -> None:
    stats = _stats([False, True, False], [0.25, 0.5, 0.125])
    message = unconverged_message(stats, "layer 3")
    assert message.startswith("layer 3: 2 of 3 samples did not converge in 3 steps")
    assert "(worst residual 2.5e-01)" in message and "raise max_steps" in message
    message = unconverged_message(_stats([False, True, True], [0.25, 0.5, 0.125]), "layer 3")
    assert "1 of 3 samples did not converge in 1 steps (worst residual 2.5e-01)" in message


@pytest.mark.parametrize("residual", [[1e-6, NAN, 1e-5], [0.25, NAN, 0.5]])
def test_a_sample_that_is_not_finite_is_the_worst(residual: list[float]) -> None:
    stats = _stats([residual[0] < 1e-3, False, True], residual)
    message = unconverged_message(stats, "solve")
    assert "(worst residual not finite)" in message and "NaN or Inf" in message
    # what has no pivots has no conditioning to look at
    assert "use Direct or Jacobi" in message and "bedouin.diagnose" in message
    assert "stats.conditioning" not in message
    stats = dataclasses.replace(stats, conditioning=torch.zeros(3))
    message = unconverged_message(stats, "solve")
    assert "stats.conditioning" in message and "bedouin.diagnose" not in message


def test_the_message_about_an_exact_solve_counts_no_steps() -> None:
    stats = _stats([True, False, True], [0.0, NAN, 0.0])
    message = unconverged_message(stats, "Bedouin, adjoint solve", exact=True)
    expected = "Bedouin, adjoint solve: 1 of 3 samples did not converge: their exact solve is not"
    assert message.startswith(f"{expected} finite: check the loss") and "steps" not in message
    stats = dataclasses.replace(_stats([False], [0.5]), conditioning=torch.zeros(1))
    message = unconverged_message(stats, "Bedouin", exact=True)
    assert "is not accurate (worst residual 5.0e-01): check stats.conditioning" in message


def test_the_message_tells_rounding_and_expansion_from_too_few_steps() -> None:
    stats = _stats([True, False, False], [0.0, 0.5, 0.5])
    assert "raise max_steps" in unconverged_message(stats, "solve")
    stalled = dataclasses.replace(stats, _stalled=torch.tensor([False, False, True]))
    message = unconverged_message(stalled, "solve")
    assert "the map does not contract" in message and "raise max_steps" not in message
    assert "rounding" in unconverged_message(_stats([False], [1e-6]), "solve")


def test_samples_that_a_drawn_cap_cuts_short_are_accepted() -> None:
    stats = _stats([False, True, False, False, False], [0.1, 0.0, NAN, 0.2, INF])
    assert accepted(stats, None).tolist() == [False, True, False, False, False]
    # the numbers of steps are 1 .. 5; values with an infinite relative residual are finite
    assert accepted(stats, 4).tolist() == [False, True, False, True, True]
    message = unconverged_message(stats, "solve", 1)
    assert "1 of 5 samples" in message and "not finite" in message


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
    x = torch.ones(1, 1, requires_grad=True)
    first, second = (solve(lambda y: y / 2 + x, torch.zeros(1, 1), Picard()) for _ in range(2))
    first.value.sum().backward()
    assert first.stats.backward is not None and second.stats.backward is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_copies_hold_deferred_statistics_themselves(duplicate: Any) -> None:
    """What computes and who listens may be anything, here functions that no pickle can hold."""
    cell = BackwardStats()
    heard: list[BackwardStats] = []
    cell.listen(heard.append)
    cell.defer(lambda: _stats([True], [0.25]))
    assert heard == [cell]
    stats = duplicate(SolveStats(*(torch.zeros(1),) * 3, None, cell))
    assert stats.backward is not None and stats.backward.residual.tolist() == [0.25]


def test_statistics_are_computed_once() -> None:
    cell, calls = BackwardStats(), []

    def compute() -> SolveStats:
        calls.append(1)
        return _stats([True], [0.0])

    cell.defer(compute)
    assert cell.stats is cell.stats and calls == [1]


def test_values_may_be_read_except_under_a_transform() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(can_read_device(x))
        return x

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2))
    assert seen == [True, False]


def test_deferred_statistics_are_those_of_the_parts_joined() -> None:
    residual, pivot = torch.tensor([0.1, 0.2, 0.4, 0.3]), torch.tensor([0.5, 1.0, 0.25, 0.75])
    converged = torch.tensor([True, True, False, True])
    cell = BackwardStats()
    plain = SolveStats(torch.ones(4, dtype=torch.int64), residual, converged, pivot, cell)
    expected = join_parts(plain, 2)
    stats = join_parts(DeferredStats(None, residual, converged, pivot, cell), 2)
    assert isinstance(stats, DeferredStats) and "_plain" not in vars(stats)
    assert stats.verdict is converged and "_plain" not in vars(stats)
    copies = stats, stats.plain, copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))
    for one in (*copies, dataclasses.replace(stats.plain), stats.without_cell()):
        for name in ("num_steps", "residual", "converged", "conditioning"):
            assert torch.equal(getattr(one, name), getattr(expected, name)), name
        assert one.history is None and one.backward is None
    assert repr(stats).startswith("DeferredStats(num_steps=tensor")
    cell.stats = DeferredStats(None, residual, converged)
    assert stats.backward is not None and stats.backward.residual.tolist() == [
        pytest.approx(0.4),
        pytest.approx(0.3),
    ]
