"""What a solve measures and returns, and what is said if it did not converge: nothing, a warning or
an error.

Statistics are reduced when they are read. Warnings of one layer are rate-limited, and on a GPU they
come without synchronization.
Letters: b batch, t tokens of a sample, q samples of a map, b times the parts of a sample.
"""

import enum
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_stack
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from bedouin.kernels.backend import can_read_device, is_recomputation
from bedouin.solvers.convergence import front, relative_residual, within_rounding

OnUnconverged = Literal["warn", "raise", "ignore"]

SKIPPED_PACKAGES = ("bedouin", "torch")
"""A warning points at the innermost caller outside these packages. Module.__call__ and backward of
torch lie between the user's line and this package."""


class ConvergenceError(RuntimeError):
    """A solve with on_unconverged="raise" did not converge. `stats` are that solve's SolveStats."""

    stats: "SolveStats | None" = None


class ConvergenceWarning(UserWarning):
    """A solve with on_unconverged="warn" did not converge.

    It points at the line that called into this package. A layer warns about its 1st, 10th, 100th,
    ... call that did not converge, and counts forward and adjoint solves separately; `solve`
    called directly warns every time.
    """


class Result(enum.Enum):
    """Outcome of a solve over all its samples; `message` is a sentence for the user."""

    converged = "every sample converged"
    max_steps_reached = (
        "not every sample converged in the steps allowed: loosen rtol, raise max_steps if the map "
        "contracts, lower Picard's damping factor, or use Direct or Jacobi where they fit the map"
    )
    nonfinite = "a sample became NaN or Inf: check its input and the size of its weights"
    unknown = "not read from the device (compiled, vmapped or captured): see stats.converged"

    @property
    def message(self) -> str:
        return self.value


SINGULAR = "stats.conditioning (0 means a singular token: use beta_max=1 or a bounded input_scale)"
OTHER_SOLVERS = (
    "use Direct or Jacobi, if it has their structure, or a smaller damping factor of Picard; "
    "bedouin.diagnose(layer, x) compares the solvers of a layer"
)
STALLED = (
    "the map does not contract, since the defect did not shrink in the second half of the steps, "
    f"and more steps will not help: {OTHER_SOLVERS}"
)
ROUNDED = "the residual is as small as rounding errors allow: loosen rtol, or use a wider dtype"

FLOOR = 100  # eps; a residual of so many, or less, is the rounding error of an iteration


@dataclass(frozen=True)
class SolveStats:
    """Statistics of one solve, each of shape (b,) and detached.

    num_steps: evaluations of the map until the sample froze; for Jacobi at most t + 1, the last of
        which only confirms convergence; 1 for Direct.
    residual: max over tokens of defect_t / scale_t at the returned value (solvers.convergence),
        dimensionless. Infinite if the scale is 0 and the defect is not, NaN if a value is not
        finite. It bounds the defect, not the distance to the fixed point. With Picard's
        stop_rule="paper" it is that of the last step, whose F(y) is the returned value.
    converged: whether every token of the sample converged by the criterion of its solver.
    conditioning: smallest pivot of the sample's local systems (Direct, Jacobi), else None.
    history: the residual at each evaluation of the map, (evaluations, b), with record_history of
        `solve` or of a layer, else None. Anderson and Broyden, which return their best iterate, may
        end with another one.
    """

    num_steps: Tensor  # (b,) int64
    residual: Tensor  # (b,)
    converged: Tensor  # (b,) bool
    conditioning: Tensor | None = None  # (b,)
    history: Tensor | None = None  # (evaluations, b)
    _adjoint: "Outcome | None" = field(default=None, repr=False, compare=False)

    @property
    def backward(self) -> "SolveStats | None":
        """The statistics of the adjoint solve after the backward pass, None before it."""
        backward: SolveStats | None = None if self._adjoint is None else self._adjoint.stats
        return backward

    def accepted(self, cut_at: int | None) -> Tensor:
        """(b,) bool: samples that need no report: converged, or finite and stopped by `cut_at`
        steps, a random training cap below its limit. `cut_at` None: no such cap limited the
        solve."""
        if cut_at is None:
            return self.converged
        return self.converged | (~self.residual.isnan() & (self.num_steps >= cut_at))


@dataclass(frozen=True)
class Measured:
    """What a solve has measured, detached, mostly of each token; `statistics` are reduced from it
    when they are read, since on a GPU each is a launch.

    magnitude: the largest terms in the sums of F(y)_t, for an exact solve, which has converged if
        its defects are rounding errors. frozen: the tokens of an iteration that have converged.
    halfway: the `front` after half of the steps. backward: whether the solve began with the last
        token. waited: whether the host has waited for the device, so that reading it costs little.
    """

    defect: Tensor  # (q, t)
    scale: Tensor  # (q, t), |F(y)_t|
    pivot: Tensor | None = None  # (q,) or (q, t)
    magnitude: Tensor | None = None  # (q, t); None: as the scale
    frozen: Tensor | None = None  # (q, t)
    num_steps: Tensor | None = None  # (q,) int64; None: 1, of an exact solve
    real: Tensor | None = None  # (q, t), as of a map
    history: Tensor | None = None  # (evaluations, q)
    halfway: tuple[Tensor, Tensor] | None = None  # (q,), (q,)
    backward: bool = False
    waited: bool = False

    @staticmethod
    def nothing(y: Tensor) -> "Measured":  # y: (b, ...), without any element
        """Of a solve of nothing, which has converged after 0 steps."""
        norms = torch.zeros(y.shape[0], 0, dtype=y.dtype, device=y.device)
        return Measured(norms, norms, num_steps=torch.zeros_like(norms.sum(1), dtype=torch.int64))

    @property
    def converged(self) -> Tensor:  # (q,)
        if self.frozen is not None:
            return self.frozen.all(1)
        scale = self.scale if self.magnitude is None else self.magnitude
        return within_rounding(*(self._in_order(v) for v in (self.defect, self.scale, scale)))

    def _in_order(self, v: Tensor) -> Tensor:  # (q, t) -> (q, t)
        """v without padding, in the order of the solve."""
        v = v if self.real is None else torch.where(self.real, v, 0.0)
        return v.flip(1) if self.backward else v

    @torch.no_grad()
    def statistics(self, num_parts: int = 1, adjoint: "Outcome | None" = None) -> SolveStats:
        """Those of samples, of their worst parts: part j of sample i of b has row j b + i."""
        residual = relative_residual(self._in_order(self.defect), self._in_order(self.scale))
        steps, pivot, history = self.num_steps, self.pivot, self.history
        steps = torch.ones_like(residual, dtype=torch.int64) if steps is None else steps
        if self.real is not None:
            steps = steps * self.real.any(1)  # a sample without tokens takes none
        if pivot is not None and pivot.dim() == 2:
            # a token after a singular one is NaN, which must not hide the pivot of that
            pivot = torch.nan_to_num(pivot, nan=torch.inf).amin(1)
        found: list[Any] = [steps, residual, self.converged, pivot, history]
        if num_parts > 1:
            worst: list[Any] = [torch.amax, torch.amax, torch.all, torch.amin, torch.amax]
            parts = [None if v is None else v.unflatten(-1, (num_parts, -1)) for v in found]
            found = [None if v is None else f(v, -2) for f, v in zip(worst, parts, strict=True)]
        steps, residual, converged, pivot, history = found
        return SolveStats(steps, residual, converged, pivot, history, adjoint)

    def has_stalled(self) -> bool:
        """Whether a sample came no nearer to convergence in the second half of its steps."""
        if self.halfway is None or self.frozen is None:
            return False
        (before, defect_before), (count, defect) = self.halfway, front(self.frozen, self.defect)
        nearer = (count > before) | ((count == before) & (defect < defect_before))
        return bool((~self.converged & ~nearer).any())


class Outcome:
    """What a solve measured, once it has run, and its statistics, reduced when they are first read.
    adjoint: the outcome of the adjoint solve, if this is that of a forward solve."""

    measured: Measured | None = None

    def __init__(self, num_parts: int = 1, adjoint: "Outcome | None" = None) -> None:
        self.num_parts, self.adjoint = num_parts, adjoint
        self._stats: SolveStats | None = None

    def take(self, measured: Measured) -> None:
        self.measured, self._stats = measured, None
        # each replay of a graph that is being captured writes other numbers to the same tensors
        may_capture = measured.defect.is_cuda and not torch.compiler.is_compiling()
        self._changes = may_capture and torch.cuda.is_current_stream_capturing()

    @property
    def stats(self) -> Any:
        """SolveStats; None before the solve."""
        if self.measured is not None and (self._stats is None or self._changes):
            self._stats = self.measured.statistics(self.num_parts, self.adjoint)
        return self._stats


@dataclass(frozen=True)
class Solution:
    """The value, statistics and outcome of a solve."""

    value: Tensor  # the shape of y0
    outcome: Outcome = field(repr=False)

    @property
    def stats(self) -> SolveStats:
        stats: SolveStats = self.outcome.stats
        return stats

    @property
    def result(self) -> Result:
        """Synchronizes with a GPU."""
        if not can_read_device(self.value):
            return Result.unknown
        if bool(self.stats.converged.all()):
            return Result.converged
        failed = ~self.stats.converged & self.stats.residual.isnan()
        return Result.nonfinite if bool(failed.any()) else Result.max_steps_reached


def failure_message(measured: Measured, num_parts: int, cut_at: int | None, subject: str) -> str:
    """One line about the samples that are not `accepted`: their number, steps and worst residual,
    and what to do; reads the device."""
    stats = measured.statistics(num_parts)
    open_samples = ~stats.accepted(cut_at)
    count, b = int(open_samples.sum()), len(open_samples)
    residual, steps = stats.residual[open_samples], stats.num_steps[open_samples]
    finite, has_pivots = not bool(residual.isnan().any()), stats.conditioning is not None
    worst = residual.max().item()
    found = f"worst residual {worst:.1e}" if finite else "worst residual not finite"
    what = f"{subject}: {count} of {b} samples did not converge"
    if measured.num_steps is None:  # an exact solve
        fault = f"not accurate ({found})" if finite else "not finite"
        remedy = "check " if finite else f"{Result.nonfinite.message}, and "
        if not has_pivots:
            remedy = "check the loss and its gradient, and of a forward solve by Direct or Jacobi "
        return f"{what}: their exact solve is {fault}: {remedy}{SINGULAR}"
    if not finite:
        diverged = f"; if the map does not contract, {OTHER_SOLVERS}"
        advice = Result.nonfinite.message + (f", and {SINGULAR}" if has_pivots else diverged)
    elif worst <= FLOOR * torch.finfo(residual.dtype).eps:
        advice = ROUNDED
    else:
        advice = STALLED if measured.has_stalled() else Result.max_steps_reached.message
    return f"{what} in {int(steps.max())} steps ({found}): {advice}"


class DeferredWarning:
    """Warns about solves of a layer that did not converge: the 1st, 10th, 100th, ... of each
    subject, which is the name of what was solved, or every one if `every`. A copy of the layer
    starts with counts of zero and without pending outcomes."""

    def __init__(self, every: bool = False) -> None:
        self._every = every
        # an outcome, its copy on the host, whose event is None if it came from a CPU, the message
        self._pending: dict[str, tuple[Tensor, Tensor, Any, Callable[[], str]]] = {}
        self._counts: Counter[str] = Counter()

    def __reduce__(self) -> tuple[type["DeferredWarning"], tuple[bool]]:
        return DeferredWarning, (self._every,)  # for copies and pickles

    def is_pending(self, subject: str) -> bool:
        """Whether an outcome is being copied; until `flush` reads it, no other is scheduled."""
        return subject in self._pending

    def schedule(self, outcome: Tensor, subject: str, message: Callable[[], str]) -> None:
        """Start to copy an outcome, bool, to the host; `message` tells what is not true."""
        if self.is_pending(subject):
            return
        copy, event = outcome.to("cpu", non_blocking=True), None
        if outcome.is_cuda:
            event = torch.cuda.Event()
            # the stream of the copy, whose device need not be the current one
            event.record(torch.cuda.current_stream(outcome.device))
        self._pending[subject] = outcome, copy, event, message

    def flush(self) -> None:
        """Warn about scheduled outcomes whose copy is complete; under torch.compile do nothing."""
        if torch.compiler.is_compiling():
            return  # a graph that depends on pending outcomes would be recompiled when they change
        for subject, (outcome, copy, event, message) in list(self._pending.items()):
            # a graph capture fails if it queries an event recorded outside it
            if can_read_device(outcome) and (event is None or event.query()):
                del self._pending[subject]
                if not bool(copy.all()):
                    self.warn(message(), subject)

    def warn(self, message: str, subject: str) -> None:
        """Warn about this call for `subject`, with its number, if it is one of those above."""
        if not self._every:
            self._counts[subject] += 1
            count = self._counts[subject]
            if str(count).strip("0") != "1":
                return  # not a power of ten
            message += f" (unconverged call {count} of this layer; next warning at {10 * count})"
        warnings.warn(message, ConvergenceWarning, stacklevel=stacklevel(sys._getframe()))


def stacklevel(frame: FrameType) -> int:
    """The stacklevel, for a warning from `frame`, of the innermost caller outside
    `SKIPPED_PACKAGES`."""
    names = (str(outer.f_globals.get("__name__", "")) for outer, _ in walk_stack(frame.f_back))
    packages = enumerate((name.partition(".")[0] for name in names), 2)
    return next((level for level, package in packages if package not in SKIPPED_PACKAGES), 1)


@dataclass(frozen=True)
class Caller:
    """Who runs a solve. draw, record_history: as in `solve`. record: receives the outcome before a
    failure is reported. num_parts: how many of the map's samples are one of the caller's."""

    subject: str
    deferred: DeferredWarning
    draw: int | None = None
    record: Callable[[Outcome], None] | None = None
    num_parts: int = 1
    record_history: bool = False


class Report:
    """The outcomes of the forward and the adjoint solve of one call, and what is said of them.
    cut_at: the cap of this call if it was drawn and is below its limit, else None. Finite samples
    that it stops are recorded in the statistics but not reported."""

    def __init__(self, caller: Caller, policy: OnUnconverged, cut_at: int | None) -> None:
        self.subject, self.warnings, self.policy = caller.subject, caller.deferred, policy
        self.cut_at, self.adjoint = cut_at, Outcome(caller.num_parts)
        self.forward = Outcome(caller.num_parts, self.adjoint)

    def check_forward(self) -> None:
        """Report the forward solve; that of a recomputed call would have raised the first time."""
        if self.policy == "raise" or not is_recomputation():
            self._check(self.forward, self.subject)

    def take_adjoint(self, measured: Measured) -> None:
        self.adjoint.take(measured)
        self._check(self.adjoint, f"{self.subject}, adjoint solve")

    def take_reverse_sweep(self, defect: Tensor, scale: Tensor) -> None:  # (q, t), (q, t)
        if can_read_device(defect):
            self.take_adjoint(Measured(defect, scale, backward=True))

    def _check(self, outcome: Outcome, subject: str) -> None:
        measured = outcome.measured
        if self.policy == "ignore" or measured is None or not can_read_device(measured.defect):
            return
        cut_at = None if measured.num_steps is None else self.cut_at
        message = partial(failure_message, measured, outcome.num_parts, cut_at)
        if self.policy == "warn" and measured.defect.is_cuda and not measured.waited:
            if not self.warnings.is_pending(subject):
                later = partial(message, f"{subject} (an earlier call)")
                read = measured.converged if cut_at is None else outcome.stats.accepted(cut_at)
                self.warnings.schedule(read, subject, later)
        elif not bool(outcome.stats.accepted(cut_at).all()):
            if self.policy == "raise":
                error = ConvergenceError(message(subject))
                error.stats = outcome.stats
                raise error
            self.warnings.warn(message(subject), subject)
