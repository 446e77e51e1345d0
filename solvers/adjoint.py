"""Adjoints: the gradient of a fixed point y* = F(y*, theta).

An adjoint runs the solve that it is given and returns a solution whose value has a gradient. All
adjoints are once differentiable, and they behave alike in training and in evaluation.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.solvers.adjoint_solve import attach_iterative
from bedouin.solvers.base import (
    Problem,
    Solver,
    check_count,
    check_number,
    map_name,
    offers,
    strict_options,
)
from bedouin.solvers.direct import Direct
from bedouin.solvers.reporting import Reporting
from bedouin.solvers.solution import Solution


class _Attach(torch.autograd.Function):
    """The value y_star, whose gradient is passed on to `tracked`; all tensors are (b, ...)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tracked: Tensor, y_star: Tensor) -> Tensor:
        return y_star.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        sources = [grad_output, *ctx.saved_tensors]
        return (*refuse_second_derivative([grad_output], sources), None)


class _AttachEager(_Attach):
    """`_Attach` with forward mode: the tangent is that of `tracked`. A class of its own, because
    torch.compile cannot trace a Function that has a jvp."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, unused: Tensor | None) -> Tensor:
        return tangent


def _attach(tracked: Tensor, y_star: Tensor) -> Tensor:
    function = _Attach if torch.compiler.is_compiling() else _AttachEager
    value: Tensor = function.apply(tracked, y_star)  # type: ignore[no-untyped-call]
    return value


class Adjoint(ABC):
    """How the gradient at a fixed point is computed."""

    @abstractmethod
    def apply(self, problem: Problem, solver: Solver, reporting: Reporting) -> Solution:
        """Run the solve and return a solution whose value carries the gradient."""


@strict_options
@dataclass(frozen=True)
class ImplicitAdjoint(Adjoint):
    """Implicit function theorem: w = J^T w + g with J = dF/dy at y*, then the vjp of one step.

    Exact if the forward and the adjoint solve converge. Needs the memory of one step, independent
    of the number of iterations. Source: Bai et al., arXiv 1909.01377, theorem 1.

    solver: solves the adjoint equation. None: the exact reverse sweep if the map offers it,
        with any forward solver; otherwise the forward solver with its tolerances and cap.
        `Direct()` requires the reverse sweep.

    The adjoint solve is reported in `stats.backward`, and `on_unconverged` applies to it as to the
    forward solve (see `solve`), with errors and warnings from backward().
    """

    solver: Solver | None = None

    def __post_init__(self) -> None:
        if self.solver is not None and not isinstance(self.solver, Solver):
            raise TypeError(f"solver must be a Solver or None, got {type(self.solver).__name__}")

    def apply(self, problem: Problem, solver: Solver, reporting: Reporting) -> Solution:
        f, is_swept = problem.f, isinstance(solver, Direct)
        by_sweep = self.solver is None or isinstance(self.solver, Direct)
        exact = f if by_sweep and offers(f, "attach") else None
        if exact is None and isinstance(self.solver, Direct):
            raise TypeError(
                f"ImplicitAdjoint(solver=Direct()) needs a map with a reverse sweep, got "
                f"{map_name(f)}: use solver=None or an iterative solver"
            )
        # the direct sweep itself has the exact gradient
        with torch.set_grad_enabled(torch.is_grad_enabled() and exact is not None and is_swept):
            solution = solver.solve(problem)
        cell = solution.stats._backward
        # a compiled graph returns the cell as an output and cannot call a listener
        if exact is not None and not torch.compiler.is_compiling():
            cell.listen(reporting.sweep)
        if not torch.is_grad_enabled() or (exact is not None and is_swept):
            return solution
        if exact is not None:
            return replace(solution, value=exact.attach(solution.value, cell))
        return attach_iterative(problem, self.solver or solver, solution, reporting)


@strict_options
@dataclass(frozen=True)
class OneStepAdjoint(Adjoint):
    """The vjp of one step at y*, that is w = g ("Jacobian-free").

    Cheap and biased: a descent direction if F contracts enough. Needs the memory of one step.
    Source: arXiv 2503.10799, theorem 3.3; arXiv 2103.12803.
    """

    def apply(self, problem: Problem, solver: Solver, reporting: Reporting) -> Solution:
        return PhantomAdjoint(num_steps=1, damping=1.0).apply(problem, solver, reporting)


@strict_options
@dataclass(frozen=True)
class PhantomAdjoint(Adjoint):
    """`num_steps` damped differentiable steps from y* (phantom gradient, arXiv 2111.05177).

    Each step is y <- (1 - damping) y + damping F(y). The gradient lies between that of one step and
    the exact one, and needs the memory of num_steps steps, independent of the number of iterations.
    The value stays y*. Raises ValueError for num_steps < 1 or damping outside (0, 1].
    """

    num_steps: int = 4
    damping: float = 0.8

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps)
        check_number("damping", self.damping, 0, 1, open_low=True)

    def apply(self, problem: Problem, solver: Solver, reporting: Reporting) -> Solution:
        with torch.no_grad():
            solution = solver.solve(problem)
        if not torch.is_grad_enabled():
            return solution
        y = y_star = solution.value.detach()
        for _ in range(self.num_steps):
            f_y = problem.f(y)
            y = f_y if self.damping == 1 else torch.lerp(y, f_y, self.damping)
        return replace(solution, value=_attach(y, y_star))


@strict_options
@dataclass(frozen=True)
class UnrolledAdjoint(Adjoint):
    """Back-propagation through the solve itself, whose memory grows with the number of iterations.

    For tests and small problems. If the solve has not converged, it is the gradient of the steps
    taken, not of the fixed point. Raises TypeError for Anderson and Broyden, which cannot be
    unrolled.
    """

    def apply(self, problem: Problem, solver: Solver, reporting: Reporting) -> Solution:
        if not solver.can_unroll:
            raise TypeError(
                f"UnrolledAdjoint cannot differentiate {type(solver).__name__}: "
                "use Picard, Jacobi or Direct, or another adjoint"
            )
        solution = solver.solve(replace(problem, unroll=True))
        if not torch.is_grad_enabled():
            return solution
        return replace(solution, value=_attach(solution.value, solution.value.detach()))
