"""Anderson and Broyden, by torchdeq (arXiv 2310.18605): the only file that imports it.

torchdeq proposes iterates; this file decides. It hands torchdeq a guarded map that

* measures convergence as every solver here does, but not against a size that the iterates only
  reached by diverging (`_Guard._tolerance`), and answers "solved" (a zero residual) for samples
  that converged, so that they neither move nor hold up others;
* answers "solved" for tokens that are not finite, so that a NaN touches nothing before it;
* is scaled to a unit residual per sample, because torchdeq's Anderson regularizes with an absolute
  constant, and starts anew every few steps to keep that scale;
* answers the first call of a round from memory, because every round starts where one ended;
* is never called on an empty batch, which torchdeq cannot take.

Letters: b batch, t tokens of a sample, c the values of a token.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torchdeq.solver.anderson import anderson_solver
from torchdeq.solver.broyden import broyden_solver

from bedouin.solvers.base import (
    Map,
    Solver,
    TimeDim,
    TokenMap,
    as_tokens,
    check_number,
    strict_options,
)
from bedouin.solvers.convergence import (
    ATOL,
    holds_so_far,
    largest_so_far,
    relative_residual,
)
from bedouin.solvers.solution import (
    Solution,
    SolveStats,
    can_read_device,
    empty_solution,
    read_result,
)


def _solved(z: Tensor) -> float:
    """torchdeq stops below this residual; the guarded map answers with exact zeros. Not a constant,
    which the dtype of z might round to zero."""
    return torch.finfo(z.dtype).tiny


class _Guard:
    """The map as torchdeq sees it: z = y / unit, with the bookkeeping of every evaluation.

    change (b, t): the larger of |F(y0)_s| and the largest defect_s so far, over all s <= t.
    """

    def __init__(self, f: Map, y0: Tensor, rtol: float, atol: float, budget: int) -> None:
        self.f, self.rtol, self.atol, self.budget = f, rtol, atol, budget
        b, t, _ = y0.shape
        self.best = self.f_best = y0
        self.lowest = y0.new_full((b,), torch.inf)
        self.lost = torch.zeros(b, t, dtype=torch.bool, device=y0.device)
        self.frozen = self.lost[:, 0].clone()
        self.num_steps = torch.zeros(b, dtype=torch.int64, device=y0.device)
        self.change = y0.new_zeros(b, t)
        self.evaluate(y0, first=True)

    def start_round(self) -> Tensor:
        """z at the best iterate, in units of its residual; its image is not computed again."""
        difference = self.f_best - self.best
        size = torch.where(self.lost.unsqueeze(-1), 0.0, difference).flatten(1).norm(dim=1)
        usable = torch.isfinite(size) & (size > 0)
        self.unit = torch.where(usable, size, 1.0)[:, None, None]
        self.at_start = True
        return (self.best / self.unit).flatten(1)

    @property
    def finished(self) -> bool:
        return self.budget <= 0 or bool(self.frozen.all())

    def evaluate(self, y: Tensor, first: bool = False) -> tuple[Tensor, Tensor]:
        """F(y), and the tokens (b, t, 1) that stay: of a solved sample, or not finite."""
        self.budget -= 1
        self.num_steps = self.num_steps + ~self.frozen
        y = torch.where(torch.isfinite(y).all(-1, keepdim=True), y, self.best)
        f_y = self.f(y)
        finite = holds_so_far(torch.isfinite(f_y).all(-1))
        if first:
            self.lost = ~finite
            self.change = self._largest_so_far(f_y.abs().amax(-1))
        self._judge(y, f_y, finite)
        return f_y, (self.frozen.unsqueeze(1) | ~finite).unsqueeze(-1)

    def _judge(self, y: Tensor, f_y: Tensor, finite: Tensor) -> None:
        defect = torch.where(self.lost, 0.0, (f_y - y).abs().amax(-1))
        scale = torch.where(self.lost, 0.0, f_y.abs().amax(-1))
        largest = self._largest_so_far(scale)
        self.change = torch.maximum(self.change, self._largest_so_far(defect))
        judged = (finite | self.lost).all(1) & self._is_measurable(largest)
        small = defect < self._tolerance(largest)
        done = (small | self.lost).all(1) & judged
        residual = torch.where(judged, relative_residual(defect, scale), torch.inf)
        better = (done | (residual < self.lowest)) & ~self.frozen
        self.best = torch.where(better[:, None, None], y, self.best)
        self.f_best = torch.where(better[:, None, None], f_y, self.f_best)
        self.lowest = torch.where(better, residual, self.lowest)
        self.frozen = self.frozen | done

    def _tolerance(self, largest: Tensor) -> Tensor:
        """(b, t): atol + rtol scale, of which rtol scale counts up to sqrt(rtol) `change`.

        Quasi-Newton steps on a map without a fixed point, such as y + 1, make y grow until any
        constant defect is small beside it. So the defect must also have come down from its start.
        An iterate up to 1 / sqrt(rtol) times as large as `change` is judged by rtol scale alone.
        """
        relative = torch.minimum(self.rtol * largest, math.sqrt(self.rtol) * self.change)
        return self.atol + relative

    def _is_measurable(self, largest: Tensor) -> Tensor:
        """(b,): whether y is small enough that rounding leaves something of a constant defect."""
        eps = torch.finfo(largest.dtype).eps
        return (eps * largest <= self.change / 2).all(1)

    def _largest_so_far(self, size: Tensor) -> Tensor:
        """max_{s <= t} size_s, over the finite values where those that are not were lost."""
        kept = torch.where(self.lost, 0.0, torch.nan_to_num(size, nan=torch.inf))
        return largest_so_far(kept)

    def __call__(self, z: Tensor) -> Tensor:
        z_tokens = z.reshape(self.best.shape)
        if self.at_start:
            self.at_start = False
            f_y, stays = self.f_best, (self.frozen.unsqueeze(1) | self.lost).unsqueeze(-1)
        else:
            f_y, stays = self.evaluate((z_tokens * self.unit).to(self.best.dtype))
        # z itself for what stays: a rounding error away from it would not count as solved
        return torch.where(stays, z_tokens, (f_y / self.unit).to(z.dtype)).reshape(z.shape)


class _TorchDEQSolver(Solver):
    """What Anderson and Broyden share: rounds of torchdeq until solved or out of steps."""

    can_unroll = False
    rtol: float
    atol: float

    @abstractmethod
    def _run(self, guard: _Guard, z: Tensor) -> None:
        """One round of torchdeq from z (b, t c), of at least one evaluation; see the guard."""

    @torch.no_grad()
    def solve(
        self, f: Map, y0: Tensor, *, max_steps: int, time_dim: TimeDim, unroll: bool
    ) -> Solution:
        if not can_read_device(y0):
            raise RuntimeError(
                f"{type(self).__name__} reads the device at every step and cannot run under torch."
                "compile, torch.func transforms or graph capture, nor on the meta device: use "
                "Direct, Jacobi or Picard"
            )
        y = as_tokens(y0, time_dim)
        if y.numel() == 0:
            return empty_solution(y0)
        f_tokens = f if y.shape == y0.shape else TokenMap(f, y0.shape, y.shape)
        # as everywhere, the evaluation that measures the last iterate is not a step
        guard = _Guard(f_tokens, y, self.rtol, self.atol, max_steps + 1)
        while not guard.finished:
            self._run(guard, guard.start_round())
        return self._conclude(guard, y0, max_steps)

    def _conclude(self, guard: _Guard, y0: Tensor, max_steps: int) -> Solution:
        failed = guard.lost.any(1)
        value = torch.where(guard.lost.unsqueeze(-1), torch.nan, guard.best).reshape(y0.shape)
        residual = torch.where(failed, torch.nan, guard.lowest)
        num_steps = guard.num_steps.clamp(max=max_steps)
        stats = SolveStats(num_steps, residual, guard.frozen & ~failed)
        return Solution(value, stats, read_result(stats))


@strict_options
@dataclass(frozen=True)
class Anderson(_TorchDEQSolver):
    """Anderson acceleration: the next iterate mixes the last `memory` ones.

    For general maps (an ordinary DEQ) that contract slowly. On a Bedouin layer with feedback it
    does worse than Picard, because F is nilpotent in time rather than slowly contracting; use
    Direct or Jacobi there. It mixes tokens: an output is causal, and independent of its neighbours
    in the batch, only to tolerance.

    rtol, atol: a sample has converged when every token has (see `Picard`), and the defect has also
        come down to sqrt(rtol) times the larger of |f(y0)| and the largest defect so far, so that
        iterates that grow without bound do not pass.
    memory: iterates mixed; regularization: relative to the residual at the start of a round;
    damping: torchdeq's tau, in (0, 1].
    """

    rtol: float = 1e-4
    atol: float = ATOL
    memory: int = 6
    regularization: float = 1e-8
    damping: float = 1.0

    def __post_init__(self) -> None:
        check_number("rtol", self.rtol, 0, 1e6, open_low=False)
        check_number("atol", self.atol, 0, 1e6, open_low=False)
        check_number("regularization", self.regularization, 0, 1e6, open_low=True)
        check_number("damping", self.damping, 0, 1, open_low=True)
        if type(self.memory) is not int or self.memory < 2:
            raise ValueError(f"memory must be an int >= 2, got {self.memory!r}")

    def _run(self, guard: _Guard, z: Tensor) -> None:
        z = z.double()  # in float32 rounding of the normal equations drowns the regularization
        try:
            anderson_solver(
                guard,
                z,
                max_iter=min(3 * self.memory, guard.budget + 1),
                tol=_solved(z),
                stop_mode="abs",
                m=self.memory,
                lam=self.regularization,
                tau=self.damping,
            )
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # one sample's residuals are all alike: the others go on from their best iterates
            return


@strict_options
@dataclass(frozen=True)
class Broyden(_TorchDEQSolver):
    """Broyden's quasi-Newton method with a low-rank inverse Jacobian.

    For general maps that do not contract; it needs O(b size rank) memory. On a Bedouin layer with
    feedback it does worse than Picard; use Direct or Jacobi there. It mixes tokens: an output is
    causal, and independent of its neighbours in the batch, only to tolerance.

    rtol, atol: a sample has converged when every token has (see `Picard`), and the defect has also
        come down to sqrt(rtol) times the larger of |f(y0)| and the largest defect so far, so that
        iterates that grow without bound do not pass.
    max_rank: updates kept, None for all.
    """

    rtol: float = 1e-4
    atol: float = ATOL
    max_rank: int | None = None

    def __post_init__(self) -> None:
        check_number("rtol", self.rtol, 0, 1e6, open_low=False)
        check_number("atol", self.atol, 0, 1e6, open_low=False)
        if self.max_rank is not None and (type(self.max_rank) is not int or self.max_rank < 1):
            raise ValueError(f"max_rank must be None or an int >= 1, got {self.max_rank!r}")

    def _run(self, guard: _Guard, z: Tensor) -> None:
        steps = guard.budget
        broyden_solver(
            guard,
            z,
            max_iter=steps,
            tol=_solved(z),
            stop_mode="abs",
            LBFGS_thres=min(self.max_rank or steps, steps),
            ls=False,
        )
