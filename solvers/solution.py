"""What a solve measures and returns: statistics, outcome, and the message for the user.

Letters: b batch, t tokens of a sample, q = b times the parts of a sample, its heads.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import can_read_device
from bedouin.solvers.convergence import front, relative_residual, within_rounding


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
        "not every sample converged in the steps allowed: raise max_steps, loosen rtol, lower the "
        "damping factor of Picard, or use Direct or Jacobi where the map has their structure"
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

FLOOR = 100
"""A residual of so many eps, or less, is the rounding error of an iteration."""


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
        return None if self._adjoint is None else self._adjoint.stats

    def accepted(self, cut_at: int | None) -> Tensor:
        """(b,) bool: samples that need no report: converged, or finite and stopped by `cut_at`
        steps, a random training cap below its limit; None if no such cap limited the solve."""
        if cut_at is None:
            return self.converged
        return self.converged | (~self.residual.isnan() & (self.num_steps >= cut_at))


class Measured(NamedTuple):
    """What a solve has measured, mostly of each token; `statistics` are reduced from it when they
    are read, since on a GPU each is a launch. All tensors are detached.

    magnitude: the largest terms in the sums of F(y)_t, for an exact solve, which has converged if
        its defects are rounding errors. frozen: the tokens of an iteration that have converged.
    real: as of a map. halfway: the `front` after half of the steps. backward: whether the solve
    began with the last token. waited: whether the host has waited for the device in the solve, so
    that reading the outcome costs it little.
    """

    defect: Tensor  # (q, t)
    scale: Tensor  # (q, t), |F(y)_t|
    pivot: Tensor | None = None  # (q,) or (q, t)
    magnitude: Tensor | None = None  # (q, t); None: as the scale
    frozen: Tensor | None = None  # (q, t)
    num_steps: Tensor | None = None  # (q,) int64; None: 1
    real: Tensor | None = None  # (q, t)
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
    def is_exact(self) -> bool:
        """Whether the solve takes one step by definition."""
        return self.num_steps is None

    @property
    def converged(self) -> Tensor:  # (q,)
        if self.frozen is not None:
            return self.frozen.all(1)
        scale = self.scale if self.magnitude is None else self.magnitude
        return within_rounding(*(self._in_order(v) for v in (self.defect, self.scale, scale)))

    def accepted(self, cut_at: int | None) -> Tensor:  # (q,)
        """`SolveStats.accepted` of each row, without the statistics where these are not needed."""
        return self.converged if cut_at is None else self.statistics().accepted(cut_at)

    def _in_order(self, v: Tensor) -> Tensor:  # (q, t) -> (q, t)
        """v without padding, in the order of the solve."""
        v = v if self.real is None else torch.where(self.real, v, 0.0)
        return v.flip(1) if self.backward else v

    @torch.no_grad()
    def statistics(self, num_parts: int = 1, adjoint: "Outcome | None" = None) -> SolveStats:
        """Statistics of b samples, those of their worst parts: part j of sample i has row
        j b + i."""
        residual = relative_residual(self._in_order(self.defect), self._in_order(self.scale))
        steps, pivot, history = self.num_steps, self.pivot, self.history
        if steps is None:
            steps = torch.ones_like(residual, dtype=torch.int64)
        if self.real is not None:
            steps = steps * self.real.any(1)  # a sample without tokens takes none
        if pivot is not None and pivot.dim() == 2:
            # a token after a singular one is NaN, which must not hide the pivot of that
            pivot = torch.nan_to_num(pivot, nan=torch.inf).amin(1)
        found = [steps, residual, self.converged, pivot, history]
        if num_parts > 1:
            parts = [None if v is None else v.unflatten(-1, (num_parts, -1)) for v in found]
            worst = torch.amax, torch.amax, torch.all, torch.amin, torch.amax
            found = [None if v is None else f(v, -2) for f, v in zip(worst, parts, strict=True)]
        return SolveStats(*found, adjoint)

    def has_stalled(self) -> bool:
        """Whether a sample did not converge, and came no nearer to that in the second half of its
        steps; reads the device."""
        if self.halfway is None or self.frozen is None:
            return False
        (before, defect_before), (count, defect) = self.halfway, front(self.frozen, self.defect)
        nearer = (count > before) | ((count == before) & (defect < defect_before))
        return bool((~self.converged & ~nearer).any())


class Outcome:
    """What a solve measured, once it has run, and its statistics, reduced when they are first read.

    num_parts: as of `Measured.statistics`. adjoint: the outcome of the adjoint solve, if this is
    that of a forward solve.
    """

    measured: Measured | None = None
    _stats: SolveStats | None = None

    def __init__(self, num_parts: int = 1, adjoint: "Outcome | None" = None) -> None:
        self.num_parts, self.adjoint = num_parts, adjoint

    def take(self, measured: Measured) -> None:
        """Set what the solve measured."""
        self.measured, self._stats = measured, None
        # each replay of a graph that is being captured writes other numbers to the same tensors
        may_capture = measured.defect.is_cuda and not torch.compiler.is_compiling()
        self._changes = may_capture and torch.cuda.is_current_stream_capturing()

    @property
    def stats(self) -> SolveStats | None:
        """None before the solve."""
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
        stats = self.outcome.stats
        assert stats is not None
        return stats

    @property
    def result(self) -> Result:
        """Synchronizes with a GPU."""
        return read_result(self.stats) if can_read_device(self.value) else Result.unknown


def read_result(stats: SolveStats) -> Result:
    """The outcome of a solve; synchronizes with a GPU."""
    if bool(stats.converged.all()):
        return Result.converged
    failed = ~stats.converged & stats.residual.isnan()
    return Result.nonfinite if bool(failed.any()) else Result.max_steps_reached


def failure_message(measured: Measured, num_parts: int, cut_at: int | None, subject: str) -> str:
    """One line about the samples that are not `accepted`: their number, steps and worst residual,
    and what to do; reads the device."""
    stats = measured.statistics(num_parts)
    open_samples = ~stats.accepted(cut_at)
    count, b = int(open_samples.sum()), open_samples.numel()
    residual, steps = stats.residual[open_samples], stats.num_steps[open_samples]
    finite, has_pivots = not bool(residual.isnan().any()), stats.conditioning is not None
    worst = residual.max().item() if finite and count else 0.0
    found = f"worst residual {worst:.1e}" if finite and count else "worst residual not finite"
    what = f"{subject}: {count} of {b} samples did not converge"
    if measured.is_exact:
        fault = f"not accurate ({found})" if finite else "not finite"
        remedy = "check " if finite else f"{Result.nonfinite.message}, and "
        if not has_pivots:
            remedy = "check the loss and its gradient, and of a forward solve by Direct or Jacobi "
        return f"{what}: their exact solve is {fault}: {remedy}{SINGULAR}"
    if not finite:
        remedy = (
            f", and {SINGULAR}"
            if has_pivots
            else f"; if the map does not contract, {OTHER_SOLVERS}"
        )
        advice = Result.nonfinite.message + remedy
    elif count and worst <= FLOOR * torch.finfo(residual.dtype).eps:
        advice = ROUNDED
    else:
        advice = STALLED if measured.has_stalled() else Result.max_steps_reached.message
    return f"{what} in {int(steps.max()) if count else 0} steps ({found}): {advice}"
