"""Solver (abstract), the map's protocols, and the one iteration that all iterative solvers share.

Letters: b batch, t tokens of a sample, c the values of a token. Convergence is judged token by
token: t is time where `time_dim=1` (a map that is causal in time), else a sample is one token.
"""

import difflib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from bedouin.kernels.iteration import IterationRule, Progress
from bedouin.kernels.outside import outside_of_graphs
from bedouin.solvers.solution import (
    BackwardStats,
    Result,
    Solution,
    SolveStats,
    can_read_device,
    read_result,
    relative_residual,
)

Map = Callable[[Tensor], Tensor]
TimeDim = Literal[1] | None

CHECK_EVERY = 4
"""Evaluations between two looks of the host at a GPU: a look costs a synchronization, an evaluation
too many costs nothing but itself, since converged tokens stay frozen and steps are counted on the
device. A solve of at most so many steps is never looked at (`Result.unknown`)."""


MAX_TRACED_STEPS = 16
"""Most steps that torch.compile writes out: some hundred nodes each, and none can be spared."""


class SweepResult(Protocol):
    """What a direct sweep hands over: y (b, t, c), the norms (b, t), pivot (b,)."""

    @property
    def y(self) -> Tensor: ...
    @property
    def defect(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor: ...
    @property
    def magnitude(self) -> Tensor: ...
    @property
    def pivot(self) -> Tensor: ...


@runtime_checkable
class BlockMap(Protocol):
    """A map whose local equation can be solved token by token: what `Jacobi` needs."""

    def __call__(self, y: Tensor) -> Tensor: ...

    def block_solve(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """G(y) (b, t, c), each token's local equation solved from the other tokens of y, and the
        smallest pivot (b,)."""


@runtime_checkable
class TriangularMap(Protocol):
    """A map that is block lower-triangular in time: what `Direct` needs."""

    def __call__(self, y: Tensor) -> Tensor: ...

    def sweep(self, unroll: bool, cell: BackwardStats) -> SweepResult:
        """Solve token after token. Its gradient is the exact implicit one, which reports into
        `cell`, or with `unroll` that of back-propagation through the loop."""


class Steps(Protocol):
    """An iteration under way."""

    def advance(self) -> None:
        """Evaluate the map at y, freeze what has converged, move the rest, count the evaluation."""

    def certify(self) -> None:
        """Evaluate the map at y and judge it; y stays, and the evaluation is not counted."""

    def finished(self) -> bool:
        """Whether every sample has converged or failed; looks at the device."""

    @property
    def progress(self) -> Progress: ...


@runtime_checkable
class FusedMap(Protocol):
    """A map that can do whole steps of some solvers: evaluate, judge, freeze and move."""

    def fuse(self, y: Tensor, rule: IterationRule) -> Steps | None:
        """Steps from y (b, t, c); None where the plain loop has to do."""


class Measurement(NamedTuple):
    """One evaluation of the map a solver iterates (F, or G for Jacobi)."""

    f_y: Tensor  # (b, t, c)
    pivot: Tensor | None  # (b,)


SolverT = TypeVar("SolverT", bound=type)


def strict_options(cls: SolverT) -> SolverT:
    """Class decorator: an unknown option is a TypeError that lists the valid names."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    valid = [f.name for f in fields(cls) if f.init]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in valid:
                raise TypeError(unknown_option(cls.__name__, name, valid))
        if len(args) > len(valid):
            raise TypeError(f"{cls.__name__} takes {len(valid)} options {valid}, got {len(args)}")
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def unknown_option(owner: str, name: str, valid: list[str]) -> str:
    """The message for an option that `owner` does not have."""
    near = difflib.get_close_matches(name, valid, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    options = ", ".join(valid) if valid else "no options at all"
    return f"{owner} has no option {name!r}{guess} Valid: {options}"


def check_number(name: str, value: float, low: float, high: float, *, open_low: bool) -> None:
    """ValueError unless low <= value <= high (low < value for `open_low`)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must lie in {bracket}{low}, {high}], got {value!r}")


class Solver(ABC):
    """A way to find y with f(y) = y. Solvers are frozen dataclasses: options only, no state."""

    can_unroll = True
    """Whether back-propagation through the solve is possible."""

    @abstractmethod
    def solve(
        self, f: Map, y0: Tensor, *, max_steps: int, time_dim: TimeDim, unroll: bool
    ) -> Solution:
        """Solve from y0 (b, ...). With `unroll` the value carries the gradient of the loop."""


class IterativeSolver(Solver):
    """A solver that improves all tokens at once, one evaluation of the map a step.

    defect_t = |F(y)_t - y_t| and scale_t = max_{s<=t} |F(y)_s| in the max norm. Token t has
    converged when defect_s < atol + rtol * scale_s for all s <= t; it keeps the y at which that was
    measured.
    """

    rtol: float
    atol: float

    def start(self, y0: Tensor) -> Any:
        """The solver's memory between steps; None for solvers without any. y0: (b, t, c)."""
        return None

    @abstractmethod
    def evaluate(self, f: Map, y: Tensor) -> Measurement:
        """The map that is iterated, at y (b, t, c)."""

    @abstractmethod
    def update(self, y: Tensor, f_y: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """The next iterate and memory."""

    def within_tolerance(
        self,
        defect: Tensor,  # (b, t)
        scale: Tensor,  # (b, t), |F(y)_t|
    ) -> Tensor:  # (b, t)
        """Tokens whose own defect is small enough; the prefix rule is applied by the caller."""
        return defect < self.atol + self.rtol * torch.cummax(scale, dim=1).values

    def rule(self) -> IterationRule | None:
        """What the solver does, for maps that do all of a step themselves; None: nobody knows."""
        return None

    def solve(
        self, f: Map, y0: Tensor, *, max_steps: int, time_dim: TimeDim, unroll: bool
    ) -> Solution:
        if torch.compiler.is_compiling() and max_steps > MAX_TRACED_STEPS:
            return _solve_outside(self, f, y0, max_steps, time_dim, unroll)
        y = _as_tokens(y0, time_dim)
        if y.numel() == 0:
            return _empty_solution(y0)
        steps = self._steps(f, y, y0.shape, unroll)
        # with so few steps a look saves less than it costs: the caller may look later
        readable = can_read_device(y) and not (y.is_cuda and max_steps <= CHECK_EVERY)
        check_every = CHECK_EVERY if y.is_cuda else 1
        for i in range(max_steps):
            steps.advance()
            if readable and (i + 1) % check_every == 0 and steps.finished():
                break
        else:
            steps.certify()
        return _conclude(steps.progress, y0.shape, readable)

    def _steps(self, f: Map, y: Tensor, shape: torch.Size, unroll: bool) -> Steps:
        if y.shape != shape:
            return _PlainSteps(self, _TokenMap(f, shape, y.shape), y)
        rule = self.rule()
        # fused steps leave no graph behind
        if rule is not None and isinstance(f, FusedMap) and not (unroll or torch.is_grad_enabled()):
            return f.fuse(y, rule) or _PlainSteps(self, f, y)
        return _PlainSteps(self, f, y)


@outside_of_graphs(
    f"bedouin runs an iteration of more than {MAX_TRACED_STEPS} steps outside of the graph, "
    "where it can stop early: use Direct, a smaller max_steps, or torch.compile with "
    "fullgraph=False",
)
def _solve_outside(
    solver: IterativeSolver, f: Map, y0: Tensor, max_steps: int, time_dim: TimeDim, unroll: bool
) -> Solution:
    return solver.solve(f, y0, max_steps=max_steps, time_dim=time_dim, unroll=unroll)


class _PlainSteps:
    """Steps of any solver on any map, differentiable."""

    def __init__(self, solver: IterativeSolver, f: Map, y: Tensor) -> None:
        self.solver, self.f = solver, f
        self.memory = solver.start(y)
        frozen = torch.zeros_like(y[..., 0], dtype=torch.bool)
        failed, norm = frozen[:, 0], torch.zeros_like(y[..., 0])
        self.progress = Progress(y, frozen, failed, failed.to(torch.int64), norm, norm, None)

    def advance(self) -> None:
        before = self.progress
        active = ~before.failed & ~before.frozen.all(1)
        measured = self.solver.evaluate(self.f, before.y)
        y_next, self.memory = self.solver.update(before.y, measured.f_y, self.memory)
        now = self._judge(before, measured)
        keep = (now.frozen | now.failed.unsqueeze(1)).unsqueeze(-1)
        y = torch.where(keep, before.y, y_next)
        self.progress = now._replace(y=y, num_steps=before.num_steps + active)

    def certify(self) -> None:
        measured = self.solver.evaluate(self.f, self.progress.y)
        self.progress = self._judge(self.progress, measured)

    def finished(self) -> bool:
        return bool((self.progress.failed | self.progress.frozen.all(1)).all())

    def _judge(self, before: Progress, measured: Measurement) -> Progress:
        f_y = measured.f_y.detach()
        defect = (f_y - before.y.detach()).abs().amax(-1)
        scale = f_y.abs().amax(-1)
        small = self.solver.within_tolerance(defect, scale) | before.frozen
        frozen = (~small).cumsum(1) == 0
        failed = before.failed | _first_open_token_is_nonfinite(frozen, scale)
        norms = defect, scale, measured.pivot
        return Progress(before.y, frozen, failed, before.num_steps, *norms)


def _conclude(progress: Progress, shape: torch.Size, readable: bool) -> Solution:
    lost = (progress.failed.unsqueeze(1) & ~progress.frozen).unsqueeze(-1)
    value = torch.where(lost, torch.nan, progress.y).reshape(shape)
    residual = relative_residual(progress.defect, progress.scale)
    residual = torch.where(progress.failed, torch.nan, residual)
    converged = progress.frozen.all(1)
    # the cell is given because torch.compile cannot trace a default made by a class
    stats = SolveStats(progress.num_steps, residual, converged, progress.pivot, BackwardStats())
    return Solution(value, stats, read_result(stats) if readable else Result.unknown)


class MapWrapper:
    """A map around another one; messages name the inner one, which the user knows."""

    def __init__(self, f: Map) -> None:
        self.f = f


def map_name(f: Map) -> str:
    """The type of the map that the user handed over."""
    while isinstance(f, MapWrapper):
        f = f.f
    return type(f).__name__


class _TokenMap(MapWrapper):
    """`f` on (b, t, c) views of its own shape."""

    def __init__(self, f: Map, shape: torch.Size, tokens: torch.Size) -> None:
        super().__init__(f)
        self.shape, self.tokens = shape, tokens

    def __call__(self, y: Tensor) -> Tensor:
        return self.f(y.reshape(self.shape)).reshape(self.tokens)


def _as_tokens(y: Tensor, time_dim: TimeDim) -> Tensor:
    """(b, ...) as (b, t, c): one token a sample, or axis 1 as time."""
    if time_dim == 1:
        return y.reshape(y.shape[0], y.shape[1], math.prod(y.shape[2:]))
    return y.reshape(y.shape[0], 1, math.prod(y.shape[1:]))


def _first_open_token_is_nonfinite(frozen: Tensor, scale: Tensor) -> Tensor:
    """(b,): a later token may be Inf while the iteration is under way, the first open one not."""
    last = frozen.shape[1] - 1
    first_open = frozen.sum(1, keepdim=True).clamp(max=last)
    return ~torch.isfinite(scale).gather(1, first_open).squeeze(1) & ~frozen.all(1)


def empty_stats(y0: Tensor) -> SolveStats:
    """Statistics for a value without any element: converged after no step."""
    b = y0.shape[0]
    zeros = torch.zeros(b, dtype=y0.dtype, device=y0.device)
    return SolveStats(zeros.to(torch.int64), zeros, torch.ones_like(zeros, dtype=torch.bool))


def _empty_solution(y0: Tensor) -> Solution:
    return Solution(y0.clone(), empty_stats(y0), Result.converged)
