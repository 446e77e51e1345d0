"""What a solve measured, its statistics and message, and warnings that a later call issues.

A copy from a CPU is complete at once; the test that depends on the delay needs a GPU.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bedouin.solvers import (
    ConvergenceError,
    ConvergenceWarning,
    Picard,
    Result,
    Solution,
    SolveStats,
    solve,
)
from bedouin.solvers.reporting import (
    Caller,
    DeferredWarning,
    Measured,
    Outcome,
    Report,
    failure_message,
)

INF, NAN = torch.inf, torch.nan
COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))]


def measure(converged: list[bool], residual: list[float], **others: Any) -> Measured:
    """Of an iteration of one token a sample, which took 1, 2, 3, ... steps."""
    flags, defect = torch.tensor(converged, dtype=torch.bool), torch.tensor(residual)
    scale = torch.where(defect == INF, 0.0, 1.0)
    norms = torch.where(defect == INF, 1.0, defect)[:, None], scale[:, None]
    steps = torch.arange(1, 1 + len(flags))
    return replace(Measured(*norms, frozen=flags[:, None], num_steps=steps), **others)


def outcome_of(measured: Measured, *arguments: Any) -> Outcome:
    outcome = Outcome(*arguments)
    outcome.take(measured)
    return outcome


# -- statistics


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
def test_the_result(converged: list[bool], residual: list[float], result: Result) -> None:
    solution = Solution(torch.zeros(len(residual), 1), outcome_of(measure(converged, residual)))
    assert solution.result is result
    torch.testing.assert_close(solution.stats.residual, torch.tensor(residual), equal_nan=True)


@pytest.mark.parametrize(
    ("defect", "scale", "expected"),
    [
        ([1.0, 1.0], [2.0, 4.0], 0.5),
        ([0.0, 1.0], [8.0, 1.0], 0.125),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 3.0], [0.0, 6.0], 0.5),
        ([1.0, 0.0], [0.0, 1.0], INF),
        ([1.0, NAN], [1.0, NAN], NAN),
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
    stats = Measured(torch.tensor([defect]), torch.tensor([scale])).statistics()
    torch.testing.assert_close(stats.residual, torch.tensor([expected]), equal_nan=True)


def test_an_exact_solve_has_one_step_and_converges_within_rounding_of_its_largest_term() -> None:
    eps = torch.finfo(torch.float32).eps
    # the fifth is explained by rounding, but as large as F(y)
    last = [1e-7, 0.05, 0.05, 0.0, 1.0, NAN]
    defect = torch.tensor([[0.0, v] for v in last])
    magnitude = torch.zeros(6, 2)
    magnitude[:, 0] = torch.tensor([0.0, 0.0, 2 / eps, 0.0, 2 / eps, 0.0])
    magnitude[3, 1] = NAN
    pivot = torch.tensor([[1.0, 0.5], [1.0, NAN], [INF, 1.0]]).repeat(2, 1)
    found: Any = Measured(defect, torch.ones(6, 2), pivot, magnitude).statistics()
    assert found.num_steps.tolist() == [1] * 6
    assert found.converged.tolist() == [True, False, True, False, False, False]
    assert found.conditioning.tolist() == [0.5, 1.0, 1.0] * 2


def test_a_solve_backward_in_time_is_judged_from_its_last_token_on() -> None:
    measured = Measured(torch.tensor([[1e-6, 0.0]]), torch.tensor([[0.0, 1.0]]), backward=True)
    stats = measured.statistics()
    assert stats.converged.tolist() == [True] and stats.residual.item() == pytest.approx(1e-6)


@pytest.mark.parametrize("duplicate", [lambda v: v, *COPIES])
def test_statistics_are_reduced_once_and_backward_comes_when_it_is_there(duplicate: Any) -> None:
    adjoint = Outcome()
    outcome = outcome_of(measure([True], [0.25]), 1, adjoint)
    assert outcome.stats is outcome.stats and outcome.stats.backward is None
    adjoint.take(measure([False], [0.5]))
    stats = duplicate(outcome).stats
    assert stats.residual.tolist() == [0.25] and stats.backward.residual.tolist() == [0.5]
    assert repr(stats).startswith("SolveStats(num_steps=tensor")
    assert outcome_of(measure([True], [0.0])).stats.backward is None


def test_two_solves_do_not_share_their_backward_statistics() -> None:
    x = torch.ones(1, 1, requires_grad=True)
    first, second = (solve(lambda y: y / 2 + x, torch.zeros(1, 1), Picard()) for _ in range(2))
    first.value.sum().backward()
    assert first.stats.backward is not None and second.stats.backward is None
    assert SolveStats(*(torch.zeros(1),) * 3).backward is None


# -- messages

NO_FRONT = torch.tensor([0, 0, 0]), torch.tensor([0.5, 0.5, 0.5])
PIVOTS = {"pivot": torch.zeros(3)}
EXACT = {"frozen": None, "num_steps": None}
OF_2 = "2 of 3 samples did not converge in 3 steps (worst residual 2.5e-01)"
OF_1 = "1 of 3 samples did not converge in 1 steps (worst residual 2.5e-01)"
EXACTLY = "did not converge: their exact solve is not"
INACCURATE = f"{EXACTLY} accurate (worst residual 5.0e-01): check stats.conditioning"


@pytest.mark.parametrize(
    ("residual", "others", "contained", "missing"),
    [
        ([0.25, 0.0, 0.125], {}, OF_2, ""),
        ([0.25, 0.0, 0.125], {}, "raise max_steps", "does not contract"),
        ([0.25, 0.0, 0.0], {}, OF_1, ""),
        ([0.5, 0.0, 0.5], {"halfway": NO_FRONT}, "the map does not contract", "raise max_steps"),
        ([0.5, 0.0, 0.4], {"halfway": NO_FRONT}, "the map does not contract", ""),
        ([0.4, 0.0, 0.4], {"halfway": NO_FRONT}, "raise max_steps", "does not contract"),
        ([1e-6, 0.0, 1e-6], {}, "as small as rounding errors allow", "raise max_steps"),
        # a sample that is not finite is the worst; what has no pivots has no conditioning
        ([1e-6, 0.0, NAN], {}, "(worst residual not finite): a sample became NaN or Inf", ""),
        ([0.25, 0.0, NAN], {}, "use Direct or Jacobi, if it", "stats.conditioning"),
        ([0.25, 0.0, NAN], PIVOTS, "stats.conditioning", "bedouin.diagnose"),
        ([0.0, NAN, 0.0], EXACT, f"{EXACTLY} finite: check the loss", "steps"),
        ([0.0, 0.5, 0.0], EXACT | PIVOTS, INACCURATE, ""),
        ([0.0, NAN, 0.0], EXACT | PIVOTS, "NaN or Inf: check its input and the size", "the loss"),
    ],
)
def test_the_message_about_the_samples_that_did_not_converge(
    residual: list[float], others: dict[str, Any], contained: str, missing: str
) -> None:
    measured = measure([r == 0 for r in residual], residual, **others)
    message = failure_message(measured, 1, None, "layer 3")
    assert message.startswith("layer 3: ") and contained in message
    assert not missing or missing not in message


# -- warnings of a later call


def schedule(warning: DeferredWarning, subject: str, *converged: bool) -> None:
    warning.schedule(torch.tensor(converged), subject, lambda: f"{subject} failed")


def test_what_fails_is_told_once_by_the_next_flush_and_no_second_one_is_scheduled() -> None:
    warning = DeferredWarning()
    schedule(warning, "layer", True, False)
    schedule(warning, "layer", True, True)
    schedule(warning, "adjoint", False)
    assert warning.is_pending("layer") and not warning.is_pending("other")
    with pytest.warns(ConvergenceWarning) as found:
        warning.flush()
    assert [str(w.message).partition(" (")[0] for w in found] == ["layer failed", "adjoint failed"]
    warning.flush()
    schedule(warning, "layer", True, True)
    warning.flush()


@pytest.mark.gpu
def test_no_warning_before_the_copy_is_complete() -> None:
    warning = DeferredWarning()
    failed = torch.zeros(2, dtype=torch.bool, device="cuda")
    product = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):  # some tenths of a second that the copy has to wait for
        product = (product @ product).clamp(-1, 1)
    warning.schedule(failed, "layer", lambda: "2 of 2 samples")
    warning.flush()
    assert warning.is_pending("layer")
    torch.cuda.synchronize()
    with pytest.warns(ConvergenceWarning, match="2 of 2 samples"):
        warning.flush()
    assert not warning.is_pending("layer")


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a GPU, not the current one."""

    is_cuda = True
    device = torch.device("cuda", 1)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams on which events were recorded, all of which have completed."""
    recorded: list[object] = []

    class Event:
        def record(self, stream: object = None) -> None:
            recorded.append(stream)

        def query(self) -> bool:
            return True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return recorded


def test_on_a_gpu_a_solve_is_reported_one_call_late_unless_it_waited(events: list[object]) -> None:
    norms = torch.tensor([[0.0], [1.0]]).as_subclass(Elsewhere), torch.ones(2, 1)
    for policy in ("ignore", "warn", "raise"):
        warning = DeferredWarning(every=True)
        report = Report(Caller("layer", warning), policy, None)
        report.forward.take(Measured(*norms))
        if policy == "raise":
            with pytest.raises(ConvergenceError, match="layer: 1 of 2 samples") as caught:
                report.check_forward()
            assert caught.value.stats is report.forward.stats
            continue
        report.check_forward()
        assert warning.is_pending("layer") == (policy == "warn")
    # awaited on the device of the outcome
    assert events == [torch.device("cuda", 1)]
    report = Report(Caller("layer", warning), "warn", None)
    report.forward.take(Measured(*norms, waited=True))
    with pytest.warns(ConvergenceWarning, match="layer: 1 of 2 samples"):
        report.check_forward()
    report.forward.take(Measured(*norms))
    report.check_forward()
    with pytest.warns(ConvergenceWarning, match=r"layer \(an earlier call\): 1 of 2 samples"):
        warning.flush()


def test_statistics_of_a_captured_solve_are_those_of_the_last_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defect, outcome = torch.tensor([[0.5]]), Outcome()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    outcome.take(Measured(defect.as_subclass(Elsewhere), torch.ones(1, 1)))
    assert outcome.stats.residual.tolist() == [0.5]
    defect.fill_(0.25)
    assert outcome.stats.residual.tolist() == [0.25]


def test_the_1st_10th_and_100th_outcome_of_a_subject_warn() -> None:
    warning = DeferredWarning()
    with pytest.warns(ConvergenceWarning) as found:
        for i in range(300):
            schedule(warning, "layer", i % 2 == 0)
            warning.flush()
    told = [str(w.message).partition("unconverged call ")[2] for w in found]
    assert [text.partition(" ")[0] for text in told] == ["1", "10", "100"]


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copy_starts_without_pending_outcomes(duplicate: Any) -> None:
    warning = DeferredWarning()
    warning.schedule(torch.tensor([False]), "layer", str)
    duplicate(warning).flush()
    with pytest.warns(ConvergenceWarning):
        warning.flush()
