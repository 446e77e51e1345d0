"""Warnings that are issued by a later call, when the copy of the outcome is complete.

A copy from a CPU is complete at once; the test that depends on the delay needs a GPU.
"""

import copy
import pickle
from typing import Any

import pytest
import torch

from bedouin.solvers import ConvergenceWarning, SolveStats
from bedouin.solvers.reporting import DeferredWarning


def _stats(*converged: bool) -> SolveStats:
    flags = torch.tensor(converged)
    return SolveStats(torch.full_like(flags, 9, dtype=torch.int64), (~flags).float(), flags)


def test_the_warning_describes_the_earlier_call() -> None:
    warning = DeferredWarning()
    warning.schedule(_stats(True, False), "layer 2")
    message = r"layer 2 \(an earlier call\): 1 of 2 samples did not converge in 9 steps"
    with pytest.warns(ConvergenceWarning, match=message):
        warning.flush()
    warning.flush()


@pytest.mark.gpu
def test_no_warning_before_the_copy_is_complete() -> None:
    warning = DeferredWarning()
    failed = torch.zeros(2, dtype=torch.bool, device="cuda")
    product = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):  # some tenths of a second that the copy has to wait for
        product = (product @ product).clamp(-1, 1)
    steps = torch.full_like(failed, 9, dtype=torch.int64)
    warning.schedule(SolveStats(steps, (~failed).float(), failed), "layer")
    warning.flush()
    assert warning.is_pending("layer")
    torch.cuda.synchronize()
    with pytest.warns(ConvergenceWarning, match="2 of 2 samples"):
        warning.flush()
    assert not warning.is_pending("layer")


class _Elsewhere(torch.Tensor):
    """A tensor on a GPU that is not the current one."""

    is_cuda = True
    device = torch.device("cuda", 1)


def test_the_copy_is_awaited_on_the_device_of_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []

    class Event:
        def record(self, stream: object = None) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    stats = _stats(True, False)
    stats = SolveStats(stats.num_steps, stats.residual, stats.converged.as_subclass(_Elsewhere))
    DeferredWarning().schedule(stats, "layer")
    assert recorded == [torch.device("cuda", 1)]


def test_a_converged_solve_says_nothing() -> None:
    warning = DeferredWarning()
    warning.schedule(_stats(True, True), "layer")
    warning.flush()


def test_a_second_outcome_of_a_subject_waits_for_the_first() -> None:
    warning = DeferredWarning()
    warning.schedule(_stats(False), "layer")
    warning.schedule(_stats(False, False), "layer")
    assert warning.is_pending("layer") and not warning.is_pending("adjoint")
    with pytest.warns(ConvergenceWarning, match="1 of 1 samples"):
        warning.flush()
    warning.flush()


def test_subjects_do_not_wait_for_each_other() -> None:
    warning = DeferredWarning()
    warning.schedule(_stats(False), "layer")
    warning.schedule(_stats(True, False), "adjoint")
    with pytest.warns(ConvergenceWarning) as found:
        warning.flush()
    assert [str(w.message)[:8] for w in found] == ["layer (a", "adjoint "]


def test_what_a_drawn_cap_excuses_is_no_reason_to_warn() -> None:
    warning = DeferredWarning()
    warning.schedule(_stats(False, True), "layer", 9)
    warning.flush()
    warning.schedule(_stats(False, True), "layer", 10)
    with pytest.warns(ConvergenceWarning, match="1 of 2 samples"):
        warning.flush()


def test_the_1st_10th_and_100th_outcome_of_a_subject_warn() -> None:
    warning = DeferredWarning()
    with pytest.warns(ConvergenceWarning) as found:
        for _ in range(150):
            warning.schedule(_stats(False), "layer")
            warning.flush()
            warning.schedule(_stats(True), "layer")
            warning.flush()
    told = [str(w.message).partition("unconverged call ")[2] for w in found]
    assert [text.partition(" ")[0] for text in told] == ["1", "10", "100"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_a_copy_starts_without_pending_outcomes(duplicate: Any) -> None:
    warning = DeferredWarning()
    warning.schedule(_stats(False), "layer")
    duplicate(warning).flush()
    with pytest.warns(ConvergenceWarning):
        warning.flush()
