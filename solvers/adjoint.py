"""Adjoints: the gradient of a fixed point y* = F(y*, theta).

An adjoint runs the solve that it is handed and returns a solution whose value has a gradient path.
All are once differentiable, and the same in training and evaluation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from bedouin.kernels.backend import is_batched, without_autocast
from bedouin.kernels.once import refuse_forward_mode, refuse_second_derivative
from bedouin.solvers.base import (
    BlockMap,
    Map,
    Solver,
    TimeDim,
    check_number,
    map_name,
    strict_options,
)
from bedouin.solvers.direct import Direct
from bedouin.solvers.reporting import Reporting
from bedouin.solvers.solution import (
    BackwardStats,
    Solution,
    SolveStats,
    can_read_device,
)


@dataclass(frozen=True)
class Problem:
    """One solve, as an adjoint gets it."""

    f: Map
    y0: Tensor
    solver: Solver
    max_steps: int
    time_dim: TimeDim
    reporting: Reporting

    def run(self, unroll: bool = False) -> Solution:
        return self.solver.solve(
            self.f, self.y0, max_steps=self.max_steps, time_dim=self.time_dim, unroll=unroll
        )


@runtime_checkable
class ExactAdjointMap(Protocol):
    """A map that offers the exact reverse sweep."""

    def attach(self, y_star: Tensor, cell: BackwardStats) -> Tensor:
        """y_star with the exact implicit gradient; the reverse sweep reports into `cell`."""


@runtime_checkable
class TransposedBlockMap(Protocol):
    """A map whose adjoint equation can be solved token by token: Jacobi backward in time."""

    def block_transpose(self, y_star: Tensor) -> tuple[Callable[[Tensor], Tensor], ...]:
        """(w -> L^T w, r -> (I - L^T)^-1 r), L the block diagonal of the Jacobian at y_star."""


class _Attach(torch.autograd.Function):
    """The value y_star with the gradient path of `tracked`."""

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
    """The same with the tangent of `tracked`; torch.compile traces no Function with a jvp."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, unused: Tensor | None) -> Tensor:
        return tangent


class _ImplicitGrad(torch.autograd.Function):
    """As `_Attach`, with the gradient first sent through the adjoint solve."""

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any, tracked: Tensor, y_star: Tensor, solve_adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
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


def _attach(tracked: Tensor, y_star: Tensor) -> Tensor:
    function = _Attach if torch.compiler.is_compiling() else _AttachEager
    value: Tensor = function.apply(tracked, y_star)  # type: ignore[no-untyped-call]
    return value


def _attach_implicit(
    tracked: Tensor, y_star: Tensor, solve_adjoint: Callable[[Tensor], Tensor]
) -> Tensor:
    value: Tensor = _ImplicitGrad.apply(tracked, y_star, solve_adjoint)  # type: ignore[no-untyped-call]
    return value


class Adjoint(ABC):
    """How the gradient at a fixed point is computed."""

    @abstractmethod
    def apply(self, problem: Problem) -> Solution:
        """Run the solve; the returned value carries the gradient."""


@strict_options
@dataclass(frozen=True)
class ImplicitAdjoint(Adjoint):
    """Implicit function theorem: w = J^T w + g with J = dF/dy at y*, then the vjp of one step.

    Exact when the forward and the adjoint solve converge; memory of one step, whatever the number
    of iterations. Source: Bai et al., arXiv 1909.01377, theorem 1.

    solver: for the adjoint equation. None: the exact reverse sweep if the map offers it (whatever
        the forward solver), else the forward's solver, tolerances and cap. `Direct()` asks for the
        sweep.
    The adjoint's own solve is reported in `stats.backward`, and `on_unconverged` holds for it as
    for the forward solve: "raise" raises ConvergenceError from backward(), which on a GPU waits for
    the outcome; "warn" warns in backward(), but on a GPU about the reverse sweep one call late,
    from an asynchronous copy; under torch.compile, torch.func transforms and graph capture the
    outcome is not read. A drawn cap below its limit excuses an iterative adjoint that it cuts
    short, not the sweep, which has no cap.
    """

    solver: Solver | None = None

    def __post_init__(self) -> None:
        if self.solver is not None and not isinstance(self.solver, Solver):
            raise TypeError(f"solver must be a Solver or None, got {type(self.solver).__name__}")

    def apply(self, problem: Problem) -> Solution:
        f = problem.f
        sweeps = self.solver is None or isinstance(self.solver, Direct)
        if sweeps and isinstance(f, ExactAdjointMap):
            return self._attach_exact(problem, f)
        if isinstance(self.solver, Direct):
            raise TypeError(
                f"ImplicitAdjoint(solver=Direct()) needs a map with a reverse sweep, got "
                f"{map_name(f)}: use solver=None or an iterative solver"
            )
        with torch.no_grad():
            solution = problem.run()
        if not torch.is_grad_enabled():
            return solution
        return self._attach_iterative(problem, solution)

    def _attach_exact(self, problem: Problem, f: ExactAdjointMap) -> Solution:
        if isinstance(problem.solver, Direct):
            solution = problem.run()
        else:
            with torch.no_grad():
                solution = problem.run()
        cell = solution.stats._backward
        if not torch.compiler.is_compiling():  # whose graphs report nothing, and return the cell
            cell.listen(problem.reporting.sweep)
        if isinstance(problem.solver, Direct) or not torch.is_grad_enabled():
            return solution
        return replace(solution, value=f.attach(solution.value, cell))

    def _attach_iterative(self, problem: Problem, solution: Solution) -> Solution:
        if not can_read_device(solution.value):
            raise RuntimeError(
                "ImplicitAdjoint with an iterative adjoint solve cannot run under torch.compile, "
                "torch.func transforms or graph capture, nor on the meta device: use Direct, or "
                "solver=None"
            )
        y = solution.value.detach().requires_grad_()
        tracked = problem.f(y)
        if not _depends_on_another(tracked, y):
            return solution
        adjoint = _AdjointSolve(problem, self.solver or problem.solver, y, tracked, solution.stats)
        return replace(solution, value=_attach_implicit(tracked, y.detach(), adjoint))


def _depends_on_another(tracked: Tensor, y: Tensor) -> bool:
    """Whether a leaf other than y wants the gradient of `tracked`."""
    if not tracked.requires_grad:
        return False
    seen: set[torch.autograd.graph.Node] = set()
    found: list[torch.autograd.graph.Node | None] = [get_gradient_edge(tracked).node]
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", y) is not y:
            return True
        found.extend(following for following, _ in node.next_functions)
    return False


class _AdjointMap:
    """w -> J^T w + g, flipped in time: J^T is block upper-triangular, its flip lower-triangular."""

    def __init__(self, y: Tensor, tracked: Tensor, grad_output: Tensor, flips: bool) -> None:
        self.y, self.tracked, self.flips = y, tracked, flips
        self.g = self.flip(grad_output)

    def flip(self, w: Tensor) -> Tensor:
        return w.flip(1) if self.flips else w

    def __call__(self, w: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(
            self.tracked, self.y, self.flip(w), retain_graph=True, allow_unused=True
        )
        return self.g if product is None else self.flip(product) + self.g


class _BlockAdjointMap(_AdjointMap):
    """The same for a map with a local equation: Jacobi backward in time."""

    def __init__(
        self, y: Tensor, tracked: Tensor, grad_output: Tensor, f: TransposedBlockMap
    ) -> None:
        super().__init__(y, tracked, grad_output, flips=True)
        self.diagonal, self.invert = f.block_transpose(y.detach())

    def block_solve(self, w: Tensor) -> tuple[Tensor, None]:
        w_in_time = self.flip(w)
        rest = self.flip(self(w)) - self.diagonal(w_in_time)
        return self.flip(self.invert(rest)), None


def _saved_tensors_are_hooked() -> bool:
    """Whether saved_tensors_hooks are on; where torch does not tell, True, which costs a step."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _present_autocast(device: str) -> torch.autocast:
    """A context that restores the present state of autocast on a kind of device."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype, enabled=enabled)


class _AdjointSolve:
    """grad_output -> w, by an iterative solver; reports its statistics."""

    def __init__(
        self, problem: Problem, solver: Solver, y: Tensor, tracked: Tensor, stats: SolveStats
    ) -> None:
        self.problem, self.solver, self.stats = problem, solver, stats
        self.y, self.tracked = y, tracked
        self.hooked, self.autocast = _saved_tensors_are_hooked(), _present_autocast(y.device.type)

    def _map(self, grad_output: Tensor) -> _AdjointMap:
        f, flips = self.problem.f, self.problem.time_dim == 1
        y, tracked = self._evaluation()
        if isinstance(f, TransposedBlockMap) and isinstance(f, BlockMap) and flips:
            return _BlockAdjointMap(y, tracked, grad_output, f)
        return _AdjointMap(y, tracked, grad_output, flips)

    def _evaluation(self) -> tuple[Tensor, Tensor]:
        """y* and F(y*) in a graph that holds its tensors.

        Hooks, such as those of non-reentrant checkpointing, may run the whole forward or a copy
        each time that a graph's tensors are read, here once for each step of the adjoint solve.
        """
        if not self.hooked:
            return self.y, self.tracked
        y = self.y.detach().requires_grad_()
        with torch.enable_grad(), self.autocast:
            return y, self.problem.f(y)

    def __call__(self, grad_output: Tensor) -> Tensor:
        f = self._map(grad_output)
        solution = self.solver.solve(
            f,
            torch.zeros_like(grad_output),
            max_steps=self.problem.max_steps,
            time_dim=self.problem.time_dim,
            unroll=False,
        )
        self.stats._backward.stats = solution.stats
        self.problem.reporting.adjoint(solution.stats, solution.result)
        return f.flip(solution.value)


@strict_options
@dataclass(frozen=True)
class OneStepAdjoint(Adjoint):
    """vjp of one step at y*: w = g ("Jacobian-free").

    Cheap and biased: a descent direction where F contracts enough. Memory of one step.
    Source: arXiv 2503.10799, theorem 3.3; arXiv 2103.12803.
    """

    def apply(self, problem: Problem) -> Solution:
        return PhantomAdjoint(num_steps=1, damping=1.0).apply(problem)


@strict_options
@dataclass(frozen=True)
class PhantomAdjoint(Adjoint):
    """`num_steps` damped differentiable steps from y* (phantom gradient, arXiv 2111.05177).

    y <- (1 - damping) y + damping F(y): between one step and the exact gradient; memory of
    num_steps steps, whatever the number of iterations. The value stays y*. Raises ValueError for
    num_steps < 1 or damping outside (0, 1].
    """

    num_steps: int = 4
    damping: float = 0.8

    def __post_init__(self) -> None:
        if type(self.num_steps) is not int or self.num_steps < 1:
            raise ValueError(f"num_steps must be an int >= 1, got {self.num_steps!r}")
        check_number("damping", self.damping, 0, 1, open_low=True)

    def apply(self, problem: Problem) -> Solution:
        with torch.no_grad():
            solution = problem.run()
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
    """Back-propagation through the solve itself: memory grows with the number of iterations.

    For tests and small problems. With too few steps it is the gradient of those steps, not of the
    fixed point. Anderson and Broyden cannot be unrolled: TypeError.
    """

    def apply(self, problem: Problem) -> Solution:
        if not problem.solver.can_unroll:
            raise TypeError(
                f"UnrolledAdjoint cannot differentiate {type(problem.solver).__name__}: "
                "use Picard, Jacobi or Direct, or another adjoint"
            )
        solution = problem.run(unroll=True)
        if not torch.is_grad_enabled():
            return solution
        return replace(solution, value=_attach(solution.value, solution.value.detach()))
