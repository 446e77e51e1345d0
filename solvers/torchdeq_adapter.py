"""Anderson and Broyden by torchdeq (arXiv 2310.18605); the only file that imports torchdeq.

torchdeq, imported at the first solve because its import takes time and warns on Python 3.12,
computes the iterates, and the map that it is given (`_GuardedMap`) judges them. This returns z
itself for samples that have converged and for tokens that are not finite, so that neither moves
others. It is scaled to a unit residual per sample, because torchdeq's Anderson regularizes with an
absolute constant; torchdeq is restarted every few steps to keep that scale.

Letters: b batch, t tokens of a sample, c the values of a token.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor

from bedouin.kernels.backend import can_read_device, outside_of_graphs
from bedouin.kernels.checks import check_count, check_number, frozen_options
from bedouin.solvers.base import Problem, Solved, TolerantSolver
from bedouin.solvers.convergence import holds_so_far, largest_so_far, relative_residual
from bedouin.solvers.reporting import Measured


class _GuardedMap:
    """The map in the variable z = y / unit (b, t c), which judges every evaluation.

    budget: evaluations left. nonfinite (b, t): tokens from the first on where F(y0) is not finite.
    best, f_best (b, t, c): the iterate with the smallest defect, and the map's value there.
    smallest (b,): that defect, the largest of all tokens.
    change (b, t): the larger of |F(y0)_s| and the largest defect_s so far, over all s <= t.
    """

    def __init__(self, solver: TolerantSolver, problem: Problem) -> None:
        f, y0 = problem.f, problem.y0
        self.solver, self.f, self.history = solver, f, problem.history
        self.budget = problem.max_steps + 1  # the last one only measures the last iterate
        self.real: Tensor | None = getattr(f, "real", None)
        self.best, self.f_best = y0, f(y0)
        self.nonfinite = ~holds_so_far(torch.isfinite(self.f_best).all(-1))
        self.frozen = torch.zeros_like(self.nonfinite[:, 0])
        self.num_steps = torch.zeros_like(self.frozen, dtype=torch.int64)
        self.smallest = y0.new_full(self.frozen.shape, torch.inf)
        self.change = _finite_largest_so_far(self._size(self.f_best))
        self._judge(y0, self.f_best, ~self.nonfinite)

    def start_round(self) -> Tensor:
        """z (b, t c) at the best iterate, in units of its residual; `__call__` reuses F there."""
        defect = torch.where(self.nonfinite.unsqueeze(-1), 0.0, self.f_best - self.best)
        size = defect.flatten(1).norm(dim=1)
        usable = torch.isfinite(size) & (size > 0)
        self.unit = torch.where(usable, size, 1.0)[:, None, None]
        self.at_start = True
        return (self.best / self.unit).flatten(1)

    def __call__(self, z: Tensor) -> Tensor:  # (b, t c) -> (b, t c)
        z_tokens = z.reshape(self.best.shape)
        f_y, finite = self.f_best, ~self.nonfinite
        if not self.at_start:
            y = (z_tokens * self.unit).to(self.best.dtype)
            y = torch.where(torch.isfinite(y).all(-1, keepdim=True), y, self.best)
            f_y = self.f(y)
            finite = holds_so_far(torch.isfinite(f_y).all(-1))
            self._judge(y, f_y, finite)
        self.at_start = False
        stays = (self.frozen.unsqueeze(1) | ~finite).unsqueeze(-1)
        # z itself, because torchdeq takes only a residual of exactly zero for solved
        return torch.where(stays, z_tokens, (f_y / self.unit).to(z.dtype)).reshape(z.shape)

    def _judge(self, y: Tensor, f_y: Tensor, finite: Tensor) -> None:
        """Measure the defect of y (b, t, c), and count the evaluation; update the best iterate and
        the samples that are frozen. finite: (b, t), whether F(y) is finite up to the token."""
        self.budget -= 1
        self.num_steps = self.num_steps + ~self.frozen
        defect, scale = self._size(f_y - y), self._size(f_y)
        largest = _finite_largest_so_far(scale)
        self.change = torch.maximum(self.change, _finite_largest_so_far(defect))
        # whether y is small enough that a constant defect would not be lost in rounding
        measurable = torch.finfo(largest.dtype).eps * largest <= self.change / 2
        judged = (finite | self.nonfinite).all(1) & measurable.all(1)
        # Quasi-Newton steps on a map without a fixed point, such as y + 1, make y grow until any
        # constant defect is small relative to it. The second bound therefore requires that the
        # defect has decreased from its initial size.
        rtol, atol = self.solver.rtol, self.solver.atol
        relative = torch.minimum(rtol * largest, math.sqrt(rtol) * self.change)
        small = (defect < atol + relative) | self.nonfinite
        done = (small if self.real is None else small | ~self.real).all(1) & judged
        if self.history is not None:
            # later evaluations do not concern the value of a converged sample
            of_best = relative_residual(*self.norms())
            residual = torch.where(judged, relative_residual(defect, scale), torch.inf)
            self.history.append(torch.where(self.frozen, of_best, residual))
        size = torch.where(judged, defect.amax(1), torch.inf)
        better = (done | (size < self.smallest)) & ~self.frozen
        self.best = torch.where(better[:, None, None], y, self.best)
        self.f_best = torch.where(better[:, None, None], f_y, self.f_best)
        self.smallest = torch.where(better, size, self.smallest)
        self.frozen = self.frozen | done

    def norms(self) -> tuple[Tensor, Tensor]:  # (b, t), (b, t), of the best iterate
        return self._size(self.f_best - self.best), self._size(self.f_best)

    def _size(self, v: Tensor) -> Tensor:  # (b, t, c) -> (b, t), 0 where `nonfinite`
        return torch.where(self.nonfinite, 0.0, v.abs().amax(-1))


def _finite_largest_so_far(size: Tensor) -> Tensor:  # (b, t) -> (b, t)
    """max_{s <= t} size_s, where NaN counts as infinite, and infinite as the largest number."""
    return largest_so_far(torch.nan_to_num(size, nan=torch.inf))


class _TorchDEQSolver(TolerantSolver):
    """The base of Anderson and Broyden: rounds of torchdeq until solved or out of steps."""

    can_unroll = False

    @abstractmethod
    def _run(self, guarded: _GuardedMap, z: Tensor) -> None:
        """One round of torchdeq from z (b, t c), of at least one evaluation of the guarded map."""

    @torch.no_grad()
    def solve(self, problem: Problem) -> Solved:
        if torch.compiler.is_compiling():
            return _solve_outside(self, problem)
        y0 = problem.y0
        if not can_read_device(y0):
            raise RuntimeError(
                f"{type(self).__name__} reads the device at every step and cannot run under "
                "torch.func transforms or graph capture, nor on the meta device: use Direct, "
                "Jacobi or Picard"
            )
        if not y0.numel():
            return y0.clone(), Measured.nothing(y0)
        found = _GuardedMap(self, problem)
        while found.budget > 0 and not bool(found.frozen.all()):
            self._run(found, found.start_round())
        value = torch.where(found.nonfinite.unsqueeze(-1), torch.nan, found.best)
        defect, scale = found.norms()
        defect = torch.where(found.nonfinite, torch.nan, defect)
        frozen = found.frozen.unsqueeze(1) & ~found.nonfinite
        steps = found.num_steps.clamp(max=problem.max_steps)
        return value, Measured(defect, scale, None, None, frozen, steps, waited=True)


_solve_outside = outside_of_graphs(
    "bedouin runs Anderson and Broyden outside of the graph, since they read the device at every "
    "step: use Direct, Jacobi or Picard with few steps, or torch.compile with fullgraph=False",
)(_TorchDEQSolver.solve)


@frozen_options
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
        z, steps = z.double(), min(3 * self.memory, guarded.budget + 1)
        options = {"m": self.memory, "lam": self.regularization, "tau": self.damping}
        try:
            anderson_solver(guarded, z, steps, torch.finfo(z.dtype).tiny, "abs", **options)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # the system of a sample with equal residuals is singular, which ends the round for the
            # whole batch; the next round starts at the best iterates
            return


@frozen_options
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
        options = {"LBFGS_thres": min(self.max_rank or steps, steps), "ls": False}
        broyden_solver(guarded, z, steps, torch.finfo(z.dtype).tiny, "abs", **options)
