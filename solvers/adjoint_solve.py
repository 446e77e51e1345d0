"""The adjoint equation w = J^T w + g, J = dF/dy at y*, solved by an iterative solver."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from bedouin.kernels.backend import is_batched, without_autocast
from bedouin.kernels.double_backward import refuse_forward_mode, refuse_second_derivative
from bedouin.kernels.outside import outside_of_graphs
from bedouin.solvers.base import (
    BlockMap,
    GraphMap,
    Problem,
    Solver,
    TransposedBlockMap,
    counted_tokens,
)
from bedouin.solvers.reporting import Reporting
from bedouin.solvers.solution import Solution, can_read_device


def attach_iterative(
    problem: Problem, solver: Solver, solution: Solution, reporting: Reporting
) -> Solution:
    """`solution` with a gradient: in the backward pass, `solver` solves the adjoint equation."""
    if torch.compiler.is_compiling():
        f = problem.f
        if isinstance(f, GraphMap):
            found = f.attach_in_graph(solver, solution.value.detach(), problem.max_steps)
            if found is not None:
                return replace(solution, value=found)
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
    hooked, autocast = _saved_tensors_are_hooked(), _present_autocast(y.device.type)

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
    "bedouin runs an iterative adjoint solve outside of the graph, where it can stop early, unless "
    "it is one of Picard or Jacobi for a HouseholderProduct: use that, OneStepAdjoint, or "
    "torch.compile with fullgraph=False",
)
def _attach_outside(*arguments: Any) -> Solution:
    return attach_iterative(*arguments)


def _saved_tensors_are_hooked() -> bool:
    """Whether saved_tensors_hooks are active. True also where this torch cannot tell, which costs
    one more evaluation of the map."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _present_autocast(device: str) -> torch.autocast:
    """A context that restores the present autocast state of a device type."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype, enabled=enabled)


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
    ) -> None:
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
    given = y, tracked, grad_output, flips, counted_tokens(f)
    if isinstance(f, TransposedBlockMap) and isinstance(f, BlockMap) and flips:
        blocks = _BlockAdjointMap(*given)
        blocks.diagonal, blocks.invert = f.block_transpose(y.detach())
        adjoint: _AdjointMap = blocks
    else:
        adjoint = _AdjointMap(*given)
    start = torch.zeros_like(grad_output)
    solution = solver.solve(Problem(adjoint, start, problem.max_steps, problem.time_dim))
    return adjoint.flip(solution.value), solution
