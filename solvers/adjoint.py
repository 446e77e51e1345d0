"""Adjoints: the gradient of a fixed point y* = F(y*, theta).

An adjoint runs the solve that it is given and returns its value with a gradient. All adjoints are
once differentiable, and they behave alike in training and in evaluation.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import can_read_device, is_batched, outside_of_graphs, without_autocast
from bedouin.kernels.checks import check_count, check_number, frozen_options
from bedouin.kernels.operation import refuse_forward_mode, refuse_second_derivative
from bedouin.solvers.base import Problem, Solved, Solver, map_name, offers
from bedouin.solvers.direct import Direct
from bedouin.solvers.reporting import Report


class _Attach(torch.autograd.Function):
    """The value y_star, whose gradient g is passed on to `tracked`, or with the function `solve`
    its result, the solution w of the adjoint equation for g; all tensors are (b, t, c)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tracked: Tensor, y_star: Tensor, solve: Any) -> Tensor:
        return y_star.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.solve = inputs[2]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        w, sources = grad_output, [grad_output, *ctx.saved_tensors]
        if ctx.solve is not None:
            if is_batched(grad_output):
                raise RuntimeError(
                    "ImplicitAdjoint with an iterative solve takes one cotangent at a time, not "
                    "those of is_grads_batched=True or jacobian(vectorize=True): use Direct or "
                    "solver=None, or a loop over the cotangents"
                )
            with torch.no_grad(), without_autocast(grad_output.device):
                w = ctx.solve(grad_output)
        return (*refuse_second_derivative([w], sources), None, None)


class _AttachEager(_Attach):
    """`_Attach` with forward mode: the tangent is that of `tracked`. A class of its own, because
    torch.compile cannot trace a Function that has a jvp."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *unused: None) -> Tensor:
        return tangent if ctx.solve is None else refuse_forward_mode(ctx)


def _attach(tracked: Tensor, y_star: Tensor, solve: Any = None) -> Tensor:
    function = _Attach if torch.compiler.is_compiling() else _AttachEager
    value: Tensor = function.apply(tracked, y_star, solve)  # type: ignore[no-untyped-call]
    return value


class Adjoint(ABC):
    """How the gradient at a fixed point is computed."""

    @abstractmethod
    def apply(self, problem: Problem, solver: Solver, report: Report) -> Solved:
        """Run the solve and return its value with the gradient, and what it measured. `report`
        takes what an adjoint solve measures."""


@frozen_options
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

    def apply(self, problem: Problem, solver: Solver, report: Report) -> Solved:
        f: Any = problem.f
        by_sweep = self.solver is None or isinstance(self.solver, Direct)
        is_exact = by_sweep and offers(f, "attach")
        if isinstance(self.solver, Direct) and not is_exact:
            raise TypeError(
                f"ImplicitAdjoint(solver=Direct()) needs a map with a reverse sweep, got "
                f"{map_name(f)}: use solver=None or an iterative solver"
            )
        # the direct sweep itself has the exact gradient
        is_swept = is_exact and isinstance(solver, Direct)
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_swept):
            value, measured = solver.solve(problem)
        if torch.is_grad_enabled() and not is_swept:
            if is_exact:
                value = f.attach(value, problem.report)
            else:
                value = _attach_iterative(problem, self.solver or solver, value, report)
        return value, measured


@frozen_options
class OneStepAdjoint(Adjoint):
    """The vjp of one step at y*, that is w = g ("Jacobian-free").

    Cheap and biased: a descent direction if F contracts enough. Needs the memory of one step.
    Source: arXiv 2503.10799, theorem 3.3; arXiv 2103.12803.
    """

    def apply(self, problem: Problem, solver: Solver, report: Report) -> Solved:
        return PhantomAdjoint(num_steps=1, damping=1.0).apply(problem, solver, report)


@frozen_options
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

    def apply(self, problem: Problem, solver: Solver, report: Report) -> Solved:
        with torch.no_grad():
            y_star, measured = solver.solve(problem)
        if not torch.is_grad_enabled():
            return y_star, measured
        y = y_star
        for _ in range(self.num_steps):
            f_y = problem.f(y)
            y = f_y if self.damping == 1 else torch.lerp(y, f_y, self.damping)
        return _attach(y, y_star), measured


@frozen_options
class UnrolledAdjoint(Adjoint):
    """Back-propagation through the solve itself, whose memory grows with the number of iterations.

    For tests and small problems. If the solve has not converged, it is the gradient of the steps
    taken, not of the fixed point. Raises TypeError for Anderson and Broyden, which cannot be
    unrolled.
    """

    def apply(self, problem: Problem, solver: Solver, report: Report) -> Solved:
        if not solver.can_unroll:
            raise TypeError(
                f"UnrolledAdjoint cannot differentiate {type(solver).__name__}: "
                "use Picard, Jacobi or Direct, or another adjoint"
            )
        value, measured = solver.solve(replace(problem, unroll=True))
        return (_attach(value, value.detach()) if torch.is_grad_enabled() else value), measured


def _attach_iterative(problem: Problem, solver: Solver, y_star: Tensor, report: Report) -> Tensor:
    """y_star (b, ...) with a gradient: in the backward pass, `solver` solves the adjoint equation
    in at most as many steps as the problem."""
    if torch.compiler.is_compiling():
        return _attach_outside(problem, solver, y_star, report)
    if not can_read_device(y_star):
        raise RuntimeError(
            "ImplicitAdjoint with an iterative adjoint solve cannot run under torch.func "
            "transforms or graph capture, nor on the meta device: use Direct, or solver=None"
        )
    y_star, device = y_star.detach(), y_star.device.type
    tracked = problem.f(y_star)
    if not tracked.requires_grad:
        return y_star
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    autocast = torch.autocast(device, dtype, enabled=enabled)  # that of the forward pass

    def solve(grad_output: Tensor) -> Tensor:  # (b, ...) -> (b, ...)
        # The map is evaluated once more, for its Jacobian. Each step reads all tensors that this
        # evaluation saves, which hooks such as those of checkpointing would recompute each time.
        y = y_star.clone().requires_grad_()
        kind = _BlockAdjointMap if offers(problem.f, "block_transpose") else _AdjointMap
        with torch.enable_grad(), autocast:
            adjoint = kind(problem, y, grad_output)
        start = torch.zeros_like(grad_output)
        w, measured = solver.solve(Problem(adjoint, start, problem.max_steps))
        report.take_adjoint(measured)
        return w.flip(1)

    return _attach(tracked, y_star, solve)


_attach_outside = outside_of_graphs(
    "bedouin runs an iterative adjoint solve outside of the graph, where it can stop early: use "
    "ImplicitAdjoint() with a HouseholderProduct, OneStepAdjoint, or torch.compile with "
    "fullgraph=False",
)(_attach_iterative)


class _AdjointMap:
    """w -> J^T w + g, where g is `grad_output`, reversed along time: J^T is block upper-triangular
    in time, so that the reversed map is causal, as the convergence test assumes."""

    def __init__(self, problem: Problem, y: Tensor, grad_output: Tensor) -> None:  # (b, t, c) each
        self.y, self.f_y, self.g = y, problem.f(y), grad_output.flip(1)
        real: Tensor | None = getattr(problem.f, "real", None)
        self.real = None if real is None else real.flip(1)

    def __call__(self, w: Tensor) -> Tensor:  # (b, t, c) -> (b, t, c)
        (product,) = torch.autograd.grad(
            self.f_y, self.y, w.flip(1), retain_graph=True, allow_unused=True
        )
        return self.g if product is None else product.flip(1) + self.g


class _BlockAdjointMap(_AdjointMap):
    """The adjoint map of a map whose local equation can be solved, for Jacobi backward in time."""

    def __init__(self, problem: Problem, y: Tensor, grad_output: Tensor) -> None:
        super().__init__(problem, y, grad_output)
        f: Any = problem.f
        self.diagonal, self.invert = f.block_transpose(y.detach())

    def block_solve(self, w: Tensor) -> tuple[Tensor, None]:  # w: (b, t, c)
        return self.invert(self(w).flip(1) - self.diagonal(w.flip(1))).flip(1), None
