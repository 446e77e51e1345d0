"""Anderson and Broyden by torchdeq (arXiv 2310.18605); the only file that imports torchdeq.

torchdeq, which is imported at the first solve because its import takes time and warns on Python
3.12, computes the iterates, and the map that it is given (`_GuardedMap`) judges them by the rule of
all solvers here, except that a scale which the iterates reached by diverging does not count. It
returns z itself for samples that have converged and for tokens that are not finite, so that neither
moves others. It is scaled to a unit residual per sample, because torchdeq's Anderson regularizes
with an absolute constant; torchdeq is restarted every few steps to keep that scale.

Letters: b batch, t tokens of a sample, c the values of a token, p its parts.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bedouin.kernels.outside import outside_of_graphs
from bedouin.solvers.base import (
    Map,
    Problem,
    TolerantSolver,
    check_count,
    check_number,
    counted_parts,
    counted_tokens,
    strict_options,
)
from bedouin.solvers.convergence import (
    holds_so_far,
    in_all_parts,
    largest_of_parts,
    largest_so_far,
    reported_residual,
    sizes_of_parts,
)
from bedouin.solvers.solution import (
    Solution,
    SolveStats,
    can_read_device,
    empty_solution,
    read_result,
)


class _GuardedMap:
    """The map in the variable z = y / unit (b, t c), which judges every evaluation.

    budget: evaluations left.
    best, f_best (b, t, c): the iterate with the lowest residual, and the map's value there.
    lowest, smallest (b,): that residual, and the largest defect there, which decides among equal
        residuals.
    nonfinite (b, t): tokens at which F(y0) is not finite, and all after them.
    frozen (b,): samples that have converged.
    num_steps (b,): evaluations until the sample was frozen.
    change (b p, t): of each part, the larger of |F(y0)_s| and the largest defect_s so far, over
        all s <= t.
    """

    def __init__(
        self,
        f: Map,
        y0: Tensor,  # (b, t, c)
        rtol: float,
        atol: float,
        budget: int,
        history: list[Tensor] | None = None,
    ) -> None:
        self.history = history
        self.f, self.rtol, self.atol, self.budget = f, rtol, atol, budget
        self.real, self.parts = counted_tokens(f), counted_parts(f)
        b, t, _ = y0.shape
        self.best = self.f_best = y0
        self.lowest = self.smallest = y0.new_full((b,), torch.inf)
        self.nonfinite = torch.zeros(b, t, dtype=torch.bool, device=y0.device)
        self.frozen = self.nonfinite[:, 0].clone()
        self.num_steps = torch.zeros(b, dtype=torch.int64, device=y0.device)
        self.change = y0.new_zeros(b * self.parts, t)
        self.evaluate(y0, first=True)

    def start_round(self) -> Tensor:
        """z (b, t c) at the best iterate, in units of its residual; `__call__` reuses F there."""
        difference = self.f_best - self.best
        defect = torch.where(self.nonfinite.unsqueeze(-1), 0.0, difference)
        size = defect.flatten(1).norm(dim=1)
        usable = torch.isfinite(size) & (size > 0)
        self.unit = torch.where(usable, size, 1.0)[:, None, None]
        self.at_start = True
        return (self.best / self.unit).flatten(1)

    @property
    def finished(self) -> bool:
        """Whether all samples have converged or no evaluation is left; reads the device."""
        return self.budget <= 0 or bool(self.frozen.all())

    def evaluate(self, y: Tensor, first: bool = False) -> tuple[Tensor, Tensor]:
        """F(y) (b, t, c), and the tokens (b, t, 1) that must not move: of a converged sample, or
        not finite."""
        self.budget -= 1
        self.num_steps = self.num_steps + ~self.frozen
        y = torch.where(torch.isfinite(y).all(-1, keepdim=True), y, self.best)
        f_y = self.f(y)
        finite = holds_so_far(torch.isfinite(f_y).all(-1))
        if first:
            self.nonfinite, self.f_best = ~finite, f_y
            self.change = _finite_largest_so_far(self._sizes(f_y))
        self._judge(y, f_y, finite)
        return f_y, (self.frozen.unsqueeze(1) | ~finite).unsqueeze(-1)

    def _judge(self, y: Tensor, f_y: Tensor, finite: Tensor) -> None:
        """Measure the defect of y (b, t, c); update the best iterate and the samples that are
        frozen. finite: (b, t), whether F(y) is finite up to the token."""
        defect, scale = self._sizes(f_y - y), self._sizes(f_y)
        largest = _finite_largest_so_far(scale)
        self.change = torch.maximum(self.change, _finite_largest_so_far(defect))
        # whether y is small enough that a constant defect would not be lost in rounding
        measurable = (torch.finfo(largest.dtype).eps * largest <= self.change / 2).all(1)
        judged = (finite | self.nonfinite).all(1) & in_all_parts(measurable, self.parts)
        # Quasi-Newton steps on a map without a fixed point, such as y + 1, make y grow until any
        # constant defect is small relative to it. The second bound therefore requires that the
        # defect has decreased from its initial size.
        relative = torch.minimum(self.rtol * largest, math.sqrt(self.rtol) * self.change)
        small = in_all_parts(defect < self.atol + relative, self.parts) | self.nonfinite
        done = (small if self.real is None else small | ~self.real).all(1) & judged
        residual = largest_of_parts(reported_residual(defect, scale), self.parts)
        residual = torch.where(judged, residual, torch.inf)
        if self.history is not None:
            # later evaluations do not concern the value of a converged sample
            self.history.append(torch.where(self.frozen, self.lowest, residual))
        # the residual is 1 for all iterates of y / 2
        size = torch.where(judged, largest_of_parts(defect, self.parts).amax(1), torch.inf)
        lower = (residual < self.lowest) | ((residual == self.lowest) & (size < self.smallest))
        better = (done | lower) & ~self.frozen
        self.best = torch.where(better[:, None, None], y, self.best)
        self.f_best = torch.where(better[:, None, None], f_y, self.f_best)
        self.lowest = torch.where(better, residual, self.lowest)
        self.smallest = torch.where(better, size, self.smallest)
        self.frozen = self.frozen | done

    def _sizes(self, v: Tensor) -> Tensor:  # (b, t, c) -> (b p, t)
        """The max norm of each part of every token, 0 for the tokens in `nonfinite`."""
        left_out = self.nonfinite.repeat_interleave(self.parts, 0)
        return torch.where(left_out, 0.0, sizes_of_parts(v, self.parts))

    def __call__(self, z: Tensor) -> Tensor:  # (b, t c) -> (b, t c)
        z_tokens = z.reshape(self.best.shape)
        if self.at_start:
            self.at_start = False
            f_y, stays = self.f_best, (self.frozen.unsqueeze(1) | self.nonfinite).unsqueeze(-1)
        else:
            f_y, stays = self.evaluate((z_tokens * self.unit).to(self.best.dtype))
        # z itself, because torchdeq takes only a residual of exactly zero for solved
        return torch.where(stays, z_tokens, (f_y / self.unit).to(z.dtype)).reshape(z.shape)


def _finite_largest_so_far(size: Tensor) -> Tensor:  # (b p, t) -> (b p, t)
    """max_{s <= t} size_s, where NaN counts as infinite, and infinite as the largest number."""
    return largest_so_far(torch.nan_to_num(size, nan=torch.inf))


class _TorchDEQSolver(TolerantSolver):
    """The base of Anderson and Broyden: rounds of torchdeq until solved or out of steps."""

    can_unroll = False

    @abstractmethod
    def _run(self, guarded: _GuardedMap, z: Tensor) -> None:
        """One round of torchdeq from z (b, t c), of at least one evaluation of the guarded map."""

    @torch.no_grad()
    def solve(self, problem: Problem) -> Solution:
        if torch.compiler.is_compiling():
            return _solve_outside(self, problem)
        y0, max_steps = problem.y0, problem.max_steps
        if not can_read_device(y0):
            raise RuntimeError(
                f"{type(self).__name__} reads the device at every step and cannot run under "
                "torch.func transforms or graph capture, nor on the meta device: use Direct, "
                "Jacobi or Picard"
            )
        f, y = problem.tokens()
        if y.numel() == 0:
            return empty_solution(y0.clone())
        # one evaluation more than steps: the one that only measures the last iterate
        guarded = _GuardedMap(f, y, self.rtol, self.atol, max_steps + 1, problem.history)
        while not guarded.finished:
            self._run(guarded, guarded.start_round())
        failed = guarded.nonfinite.any(1)
        value = torch.where(guarded.nonfinite.unsqueeze(-1), torch.nan, guarded.best)
        residual = torch.where(failed, torch.nan, guarded.lowest)
        num_steps = guarded.num_steps.clamp(max=max_steps)
        stats = SolveStats(num_steps, residual, guarded.frozen & ~failed)
        return Solution(value.reshape(y0.shape), stats, read_result(stats))


@outside_of_graphs(
    "bedouin runs Anderson and Broyden outside of the graph, since they read the device at every "
    "step: use Direct, Jacobi or Picard with few steps, or torch.compile with fullgraph=False",
)
def _solve_outside(solver: _TorchDEQSolver, problem: Problem) -> Solution:
    return solver.solve(problem)


@strict_options
@dataclass(frozen=True)
class Anderson(_TorchDEQSolver):
    """Anderson acceleration: the next iterate is a combination of the last `memory` ones.

    For general maps (an ordinary deep equilibrium model) that contract slowly. On a Bedouin layer
    with feedback it does worse than Picard, because F is nilpotent in time rather than slowly
    contracting; use Direct or Jacobi there.

    rtol, atol: a sample has converged when every token has (see `Picard`) and its defect has
        decreased to sqrt(rtol) times the larger of |f(y0)| and the largest defect so far, so
        that iterates which grow without bound do not converge.
    memory: iterates combined, >= 2.
    regularization: of the least-squares problem, relative to the residual at the start of a round.
    damping: torchdeq's tau, in (0, 1].

    It mixes tokens: an output is causal, and independent of the other samples in the batch, only to
    tolerance. Raises ValueError for values out of range, and RuntimeError in `solve` if the device
    cannot be read (torch.func transforms, graph capture, the meta device).
    """

    memory: int = 6
    regularization: float = 1e-8
    damping: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("regularization", self.regularization, 0, 1e6, open_low=True)
        check_number("damping", self.damping, 0, 1, open_low=True)
        check_count("memory", self.memory, 2)

    def _run(self, guarded: _GuardedMap, z: Tensor) -> None:
        from torchdeq.solver.anderson import anderson_solver

        # in float32 the rounding errors of the normal equations exceed the regularization
        z = z.double()
        try:
            anderson_solver(
                guarded,
                z,
                max_iter=min(3 * self.memory, guarded.budget + 1),
                tol=torch.finfo(z.dtype).tiny,
                stop_mode="abs",
                m=self.memory,
                lam=self.regularization,
                tau=self.damping,
            )
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # the system of a sample with equal residuals is singular, which ends the round for the
            # whole batch; the next round starts at the best iterates
            return


@strict_options
@dataclass(frozen=True)
class Broyden(_TorchDEQSolver):
    """Broyden's quasi-Newton method with a low-rank inverse Jacobian.

    For general maps that do not contract; needs O(b t c max_rank) memory. On a Bedouin layer with
    feedback it does worse than Picard; use Direct or Jacobi there.

    rtol, atol: as of `Anderson`.
    max_rank: rank-one updates kept, None for all.

    It mixes tokens, and raises errors, as `Anderson`.
    """

    max_rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_rank", self.max_rank, optional=True)

    def _run(self, guarded: _GuardedMap, z: Tensor) -> None:
        from torchdeq.solver.broyden import broyden_solver

        steps = guarded.budget
        broyden_solver(
            guarded,
            z,
            max_iter=steps,
            tol=torch.finfo(z.dtype).tiny,
            stop_mode="abs",
            LBFGS_thres=min(self.max_rank or steps, steps),
            ls=False,
        )
