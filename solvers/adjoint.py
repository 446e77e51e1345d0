"""Adjoints: the gradient of a fixed point y* = F(y*, theta).

An adjoint runs the solve that it is given and returns a solution whose value has a gradient. All
adjoints are once differentiable, and they behave alike in training and in evaluation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from bedouin.kernels.backend import is_batched, without_autocast
from bedouin.kernels.double_backward import refuse_forward_mode, refuse_second_derivative
from bedouin.kernels.outside import outside_of_graphs
from bedouin.solvers.base import (
    BlockMap,
    Problem,
    Solver,
    TransposedBlockMap,
    check_count,
    check_number,
    counted_parts,
    counted_tokens,
    map_name,
    offers,
    strict_options,
)
from bedouin.solvers.direct import Direct
from bedouin.solvers.reporting import Reporting
from bedouin.solvers.solution import Solution, can_read_device


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
        return _attach_iterative(problem, self.solver or solver, solution, reporting)


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


def _attach_iterative(
    problem: Problem, solver: Solver, solution: Solution, reporting: Reporting
) -> Solution:
    """`solution` with a gradient: in the backward pass, `solver` solves the adjoint equation."""
    if torch.compiler.is_compiling():
        return _attach_outside(problem, solver, solution, reporting)
    if not can_read_device(solution.value):
        raise RuntimeError(
            "ImplicitAdjoint with an iterative adjoint solve cannot run under torch.func "
            "transforms or graph capture, nor on the meta device: use Direct, or solver=None"
        )
    y, stats = solution.value.detach().requires_grad_(), solution.stats
    tracked = problem.f(y)
    if not _depends_on_another(tracked, y):
        return solution
    hooked, device = _saved_tensors_are_hooked(), y.device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    autocast = torch.autocast(device, dtype, enabled=enabled)  # that of the forward pass

    def solve(grad_output: Tensor) -> Tensor:  # (b, ...) -> (b, ...)
        point = y, tracked
        if hooked:
            # Hooks such as those of non-reentrant checkpointing may recompute the forward pass, or
            # copy, whenever a saved tensor is read, and each step of the adjoint solve reads all of
            # them. So the map is evaluated once more, outside of the hooks.
            y_again = y.detach().requires_grad_()
            with torch.enable_grad(), autocast:
                point = y_again, problem.f(y_again)
        w, adjoint = solve_adjoint(problem, solver, *point, grad_output)
        cell = stats._backward
        cell.stats = adjoint.stats
        assert cell.stats is not None
        reporting.adjoint(cell.stats, adjoint.result)
        return w

    value: Tensor = _ImplicitGrad.apply(tracked, y.detach(), solve)  # type: ignore[no-untyped-call]
    return replace(solution, value=value)


@outside_of_graphs(
    "bedouin runs an iterative adjoint solve outside of the graph, where it can stop early: use "
    "ImplicitAdjoint() with a HouseholderProduct, OneStepAdjoint, or torch.compile with "
    "fullgraph=False",
)
def _attach_outside(*arguments: Any) -> Solution:
    return _attach_iterative(*arguments)


def _saved_tensors_are_hooked() -> bool:
    """Whether saved_tensors_hooks are active. True also where torch has no test for it,
    which costs one more evaluation of the map."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _depends_on_another(tracked: Tensor, y: Tensor) -> bool:
    """Whether a leaf of the graph other than y (b, ...) receives a gradient from `tracked`."""
    if not tracked.requires_grad:
        return False
    seen: set[Node] = set()
    found: list[Node | None] = [get_gradient_edge(tracked).node]
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", y) is not y:
            return True
        found.extend(following for following, _ in node.next_functions)
    return False


class _ImplicitGrad(torch.autograd.Function):
    """The value y_star on the graph of `tracked`, which receives w, the solution of the adjoint
    equation for the incoming gradient, instead of that gradient itself."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any,
        tracked: Tensor,  # (b, ...), F(y*)
        y_star: Tensor,  # (b, ...)
        solve_adjoint: Callable[[Tensor], Tensor],
    ) -> Tensor:  # (b, ...)
        ctx.solve_adjoint = solve_adjoint
        ctx.save_for_backward(tracked)
        return y_star.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if is_batched(grad_output):
            raise RuntimeError(
                "ImplicitAdjoint with an iterative solve takes one cotangent at a time, not "
                "those of is_grads_batched=True or jacobian(vectorize=True): use Direct or "
                "solver=None, or a loop over the cotangents"
            )
        with torch.no_grad(), without_autocast(grad_output.device):
            w = ctx.solve_adjoint(grad_output)
        sources = [grad_output, *ctx.saved_tensors]
        return (*refuse_second_derivative([w], sources), None, None)


class _AdjointMap:
    """w -> J^T w + g, where g is `grad_output`.

    With `flips`, w and g are reversed along time: J^T is block upper-triangular in time, so that
    the reversed map is lower-triangular, as the convergence test of a causal map assumes.
    """

    def __init__(
        self,
        y: Tensor,  # (b, ...)
        tracked: Tensor,  # (b, ...), F(y)
        grad_output: Tensor,  # (b, ...)
        flips: bool,
        real: Tensor | None,  # (b, t), of a map with padding
        parts: int,
    ) -> None:
        self.parts = parts
        self.y, self.tracked, self.flips = y, tracked, flips
        self.g = self.flip(grad_output)
        self.real = None if real is None else self.flip(real)

    def flip(self, w: Tensor) -> Tensor:  # (b, ...) -> (b, ...)
        return w.flip(1) if self.flips else w

    def __call__(self, w: Tensor) -> Tensor:  # (b, ...) -> (b, ...)
        (product,) = torch.autograd.grad(
            self.tracked, self.y, self.flip(w), retain_graph=True, allow_unused=True
        )
        return self.g if product is None else self.flip(product) + self.g


class _BlockAdjointMap(_AdjointMap):
    """The adjoint map of a map whose local equation can be solved, for Jacobi backward in time."""

    diagonal: Callable[[Tensor], Tensor]
    invert: Callable[[Tensor], Tensor]

    def block_solve(self, w: Tensor) -> tuple[Tensor, None]:  # w: (b, t, c)
        w_in_time = self.flip(w)
        rest = self.flip(self(w)) - self.diagonal(w_in_time)
        return self.flip(self.invert(rest)), None


def solve_adjoint(
    problem: Problem,
    solver: Solver,
    y: Tensor,  # (b, ...), y*
    tracked: Tensor,  # (b, ...), F(y*), on a graph from y
    grad_output: Tensor,  # (b, ...)
) -> tuple[Tensor, Solution]:
    """w = J^T w + grad_output, (b, ...), and the solution of the map that was iterated, in at most
    as many steps as the problem."""
    f, flips = problem.f, problem.time_dim == 1
    given = y, tracked, grad_output, flips, counted_tokens(f), counted_parts(f)
    if isinstance(f, TransposedBlockMap) and isinstance(f, BlockMap) and flips:
        blocks = _BlockAdjointMap(*given)
        blocks.diagonal, blocks.invert = f.block_transpose(y.detach())
        adjoint: _AdjointMap = blocks
    else:
        adjoint = _AdjointMap(*given)
    start = torch.zeros_like(grad_output)
    solution = solver.solve(Problem(adjoint, start, problem.max_steps, problem.time_dim))
    return adjoint.flip(solution.value), solution
