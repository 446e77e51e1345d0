"""What a solve returns: its value, statistics, outcome with a message for the user, and its steps.

Letters: b batch, t tokens of a sample, q parts of a sample.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from bedouin.kernels.backend import is_batched


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
    unknown = (
        "not read from the device (compiled, vmapped, captured, or asynchronous): see "
        "stats.converged"
    )

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


class BackwardStats:
    """A mutable cell for the statistics of the adjoint solve, which runs after the forward solve.

    num_parts: the q with which `join_parts` reduces what the cell receives. A copy keeps the
    statistics, without the deferred computation and the listener.
    """

    num_parts = 1

    def __init__(self) -> None:
        self._stats: SolveStats | None = None
        self._pending: Callable[[], SolveStats] | None = None
        self._listener: Callable[[BackwardStats], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_stats": self.stats, "_pending": None, "_listener": None}

    @property
    def stats(self) -> "SolveStats | None":
        """The statistics, computed now if they were deferred; None before the backward pass."""
        if self._pending is not None:
            self.stats = self._pending()
        return self._stats

    @stats.setter
    def stats(self, stats: "SolveStats") -> None:
        self._stats, self._pending = join_parts(stats, self.num_parts), None

    def listen(self, listener: "Callable[[BackwardStats], None]") -> None:
        """Call `listener` with this cell whenever statistics are deferred."""
        self._listener = listener

    def defer(self, compute: "Callable[[], SolveStats]") -> None:
        """Let `compute` return the statistics when they are first read; it runs at most once."""
        self._pending = compute
        if self._listener is not None:
            self._listener(self)


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
    _backward: BackwardStats = field(default_factory=BackwardStats, repr=False, compare=False)
    history: Tensor | None = None  # (evaluations, b)
    _stalled: Tensor | None = field(default=None, repr=False, compare=False)
    """(b,) bool, for messages: the sample did not converge, and came no nearer to that in the
    second half of its steps. None where nobody has looked."""

    @property
    def backward(self) -> "SolveStats | None":
        """The statistics of the adjoint solve after the backward pass, None before it."""
        return self._backward.stats

    @property
    def verdict(self) -> Tensor:
        """`converged`, or before it is computed that of the samples' parts: if all of one are true,
        so are all of the other."""
        return self.converged

    @property
    def plain(self) -> "SolveStats":
        """These statistics as an object for `dataclasses.replace`."""
        return self

    def without_cell(self) -> "SolveStats":
        """The same statistics without those of the adjoint solve and the history."""
        return replace(self, _backward=BackwardStats(), history=None)


def _of_plain(name: str) -> Any:
    return property(lambda stats: getattr(stats.plain, name))


class DeferredStats(SolveStats):
    """Statistics of an exact solve, computed from those of the samples' parts when they are first
    read, since on a GPU each is a launch. A copy has plain ones."""

    _found: tuple[Tensor | None, Tensor, Tensor, Tensor | None]
    _num_parts: int

    def __init__(
        self,
        num_steps: Tensor | None,  # (q b,); None: ones
        residual: Tensor,  # (q b,)
        converged: Tensor,  # (q b,) bool
        conditioning: Tensor | None = None,  # (q b,)
        backward: BackwardStats | None = None,
        num_parts: int = 1,
    ) -> None:
        # bypasses the frozen `__setattr__`; the other fields are properties here
        found, cell = (num_steps, residual, converged, conditioning), backward or BackwardStats()
        self.__dict__.update(_found=found, _num_parts=num_parts, _backward=cell)

    def __reduce__(self) -> tuple[type[SolveStats], tuple[Any, ...]]:
        return SolveStats, tuple(getattr(self.plain, item.name) for item in fields(SolveStats))

    def of_parts(self, num_parts: int) -> "DeferredStats":
        """What `join_parts` returns."""
        return DeferredStats(*self._found, self._backward, num_parts)

    def without_cell(self) -> "DeferredStats":
        return DeferredStats(*self._found, None, self._num_parts)

    @property
    def plain(self) -> SolveStats:
        return self._plain

    @cached_property
    def _plain(self) -> SolveStats:
        num_steps, residual, converged, pivot = self._found
        if num_steps is None:
            num_steps = torch.ones_like(residual, dtype=torch.int64)
        stats = SolveStats(num_steps, residual, converged, pivot, self._backward)
        return join_parts(stats, self._num_parts)

    num_steps = _of_plain("num_steps")
    residual = _of_plain("residual")
    converged = _of_plain("converged")
    conditioning = _of_plain("conditioning")

    @property
    def verdict(self) -> Tensor:
        return self._found[2]


@dataclass(frozen=True)
class Solution:
    """The value, statistics and outcome of a solve."""

    value: Tensor  # the shape of y0
    stats: SolveStats
    result: Result


def with_history(solution: Solution, residuals: list[Tensor]) -> Solution:
    """`solution` with the residuals (b,) of all evaluations in its statistics."""
    none = solution.stats.residual.new_empty(0, *solution.stats.residual.shape)
    history = torch.stack(residuals).detach() if residuals else none
    return replace(solution, stats=replace(solution.stats.plain, history=history))


def join_parts(stats: SolveStats, num_parts: int) -> SolveStats:
    """Statistics of b samples from those of their parts, (q b,), where part j of sample i has index
    j b + i: the most steps, the largest residual, now and in the history, all converged, the
    smallest pivot."""
    if num_parts == 1:
        return stats
    if isinstance(stats, DeferredStats):
        stats._backward.num_parts = num_parts
        return stats.of_parts(num_parts)
    steps, residual, converged = (
        v.unflatten(0, (num_parts, -1)) for v in (stats.num_steps, stats.residual, stats.converged)
    )
    pivot = stats.conditioning
    if pivot is not None:
        pivot = pivot.unflatten(0, (num_parts, -1)).amin(0)
    reduced = steps.amax(0), residual.amax(0), converged.all(0), pivot
    history = stats.history
    if history is not None:
        history = history.unflatten(1, (num_parts, -1)).amax(1)
    stalled = stats._stalled
    if stalled is not None:
        stalled = stalled.unflatten(0, (num_parts, -1)).any(0)
    stats._backward.num_parts = num_parts
    return SolveStats(*reduced, stats._backward, history, stalled)


def empty_solution(y: Tensor) -> Solution:  # y: (b, ...)
    """The solution y of a problem without any element: converged after 0 steps."""
    zeros = torch.zeros(y.shape[0], dtype=y.dtype, device=y.device)
    stats = SolveStats(zeros.to(torch.int64), zeros, torch.ones_like(zeros, dtype=torch.bool))
    return Solution(y, stats, Result.converged)


def has_values(tensor: Tensor) -> bool:
    """Whether `tensor` (any shape) holds numbers, unlike those of the meta device and of
    FakeTensorMode."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def can_read_device(tensor: Tensor) -> bool:
    """Whether the host may read the values of `tensor` (any shape).

    Not under torch.compile, torch.func transforms or graph capture, not for batched cotangents, and
    not where there are no values.
    """
    if not has_values(tensor) or torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or is_batched(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def read_result(stats: SolveStats) -> Result:
    """The outcome of a solve; synchronizes with a GPU."""
    if bool(stats.verdict.all()):
        return Result.converged
    failed = ~stats.converged & stats.residual.isnan()
    return Result.nonfinite if bool(failed.any()) else Result.max_steps_reached


def accepted(stats: SolveStats, cut_at: int | None) -> Tensor:
    """(b,) bool: samples that need no report: converged, or finite and stopped by `cut_at` steps.

    cut_at: a random training cap below its limit; None if no such cap limited the solve.
    """
    if cut_at is None:
        return stats.converged
    return stats.converged | (~stats.residual.isnan() & (stats.num_steps >= cut_at))


def unconverged_message(
    stats: SolveStats, subject: str, cut_at: int | None = None, *, exact: bool = False
) -> str:
    """One line about the samples that are not `accepted`: their number, steps and worst residual,
    and what to do. exact: whether the solve takes one step by definition."""
    open_samples = ~accepted(stats, cut_at)
    count, b = int(open_samples.sum()), open_samples.numel()
    residual, steps = stats.residual[open_samples], stats.num_steps[open_samples]
    finite = not bool(residual.isnan().any())
    worst = residual.max().item() if finite and count else 0.0
    found = f"worst residual {worst:.1e}" if finite and count else "worst residual not finite"
    what = f"{subject}: {count} of {b} samples did not converge"
    if exact:
        fault = f"not accurate ({found})" if finite else "not finite"
        return f"{what}: their exact solve is {fault}: {_exact_advice(stats, finite)}"
    if not finite:
        singular = f"{Result.nonfinite.message}, and {SINGULAR}"
        diverged = f"{Result.nonfinite.message}; if the map does not contract, {OTHER_SOLVERS}"
        advice = diverged if stats.conditioning is None else singular
    elif count and worst <= FLOOR * torch.finfo(residual.dtype).eps:
        advice = ROUNDED
    elif stats._stalled is not None and bool((stats._stalled & open_samples).any()):
        advice = STALLED
    else:
        advice = Result.max_steps_reached.message
    return f"{what} in {int(steps.max()) if count else 0} steps ({found}): {advice}"


def _exact_advice(stats: SolveStats, finite: bool) -> str:
    if stats.conditioning is None:
        what = "check the loss and its gradient, and of a forward solve by Direct or Jacobi "
    elif finite:
        what = "check "
    else:
        what = f"{Result.nonfinite.message}, and "
    return what + SINGULAR
