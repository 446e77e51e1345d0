"""The warning that comes one call late, with a stand-in for the events of a GPU."""

import copy
import pickle
from typing import Any

import pytest
import torch

from bedouin.solvers import ConvergenceWarning, SolveStats
from bedouin.solvers.deferred import DeferredWarning


class _Event:
    """An event of a device whose copies arrive when the test says so."""

    arrived = False

    def record(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return type(self).arrived


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[_Event]:
    class Event(_Event):
        pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event


def _stats(*converged: bool) -> SolveStats:
    flags = torch.tensor(converged)
    return SolveStats(torch.full_like(flags, 9, dtype=torch.int64), (~flags).float(), flags)


def test_nothing_is_said_before_the_copy_arrives(event: type[_Event]) -> None:
    warning = DeferredWarning()
    warning.schedule(_stats(True, False), "layer 2")
    warning.flush()
    event.arrived = True
    message = r"layer 2 \(an earlier call\): 1 of 2 samples did not converge in 9 steps"
    with pytest.warns(ConvergenceWarning, match=message):
        warning.flush()
    warning.flush()


def test_a_converged_solve_says_nothing(event: type[_Event]) -> None:
    event.arrived = True
    warning = DeferredWarning()
    warning.schedule(_stats(True, True), "layer")
    warning.flush()


def test_a_second_outcome_waits_for_the_first(event: type[_Event]) -> None:
    warning = DeferredWarning()
    warning.schedule(_stats(False), "first")
    warning.schedule(_stats(False), "second")
    event.arrived = True
    with pytest.warns(ConvergenceWarning, match="first"):
        warning.flush()
    warning.flush()


def test_after_a_report_the_next_outcome_is_taken(event: type[_Event]) -> None:
    event.arrived = True
    warning = DeferredWarning()
    for subject in ("first", "second"):
        warning.schedule(_stats(False), subject)
        with pytest.warns(ConvergenceWarning, match=subject):
            warning.flush()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_a_copy_starts_without_pending_outcomes(event: type[_Event], duplicate: Any) -> None:
    warning = DeferredWarning()
    warning.schedule(_stats(False), "layer")
    event.arrived = True
    duplicate(warning).flush()
    with pytest.warns(ConvergenceWarning):
        warning.flush()
