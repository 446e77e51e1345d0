"""The solvers of this library under the names of torchdeq.

    import bedouin.integrations.torchdeq
    deq = torchdeq.get_deq(f_solver="bedouin_anderson", f_tol=1e-6, f_stop_mode="rel")

The import registers bedouin_picard, bedouin_anderson and bedouin_broyden with their options at
their defaults; `as_torchdeq` makes such a function of a solver with other options. Source:
TorchDEQ, arXiv 2310.18605.

Letters: b batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torchdeq.solver import register_solver
from torchdeq.solver.stat import SolverStat

from bedouin.checks import one_of, positive_int
from bedouin.solvers import Anderson, Broyden, Picard, Solver, SolveStep, solve
from bedouin.solvers.base import unknown_option

TorchDEQSolver = Callable[..., tuple[Tensor, list[Tensor], SolverStat]]
_OPTIONS = ("max_iter", "tol", "stop_mode", "indexing", "tau", "return_final")


def as_torchdeq(solver: Solver) -> TorchDEQSolver:
    """`solver` as a function for `torchdeq.solver.register_solver`.

        register_solver("anderson_10", as_torchdeq(Anderson(memory=10)))

    The function is called as torchdeq calls its own:

    max_iter: most evaluations of the map. tol, stop_mode: take the place of atol ("abs") or of
        rtol ("rel"), the other one being 0. A sample converges by itself, and its norm is the
        largest absolute value, where torchdeq waits for all samples and takes the 2-norm.
    indexing: numbers of evaluations, from 1, at which the values are also returned; after
        convergence, the solution.
    tau: the damping; must be 1.0 for a solver without damping.
    return_final: whether to take all max_iter steps.

    It returns the solution, the list of indexed values, and torchdeq's SolverStat, whose errors are
    those of the solution in torchdeq's norms. Unknown names raise TypeError, where torchdeq ignores
    them.
    """
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be a solver such as Anderson(), got {solver!r}")
    return _TorchDEQFunction(solver)


@dataclass(frozen=True)
class _TorchDEQFunction:
    solver: Solver

    @torch.no_grad()
    def __call__(
        self,
        func: Callable[[Tensor], Tensor],
        x0: Tensor,  # (b, ...)
        max_iter: int = 50,
        tol: float = 1e-3,
        stop_mode: str = "abs",
        indexing: list[int] | None = None,
        tau: float = 1.0,
        return_final: bool = False,
        **unknown: Any,
    ) -> tuple[Tensor, list[Tensor], SolverStat]:
        for name in unknown:
            raise TypeError(unknown_option("the solver", name, list(_OPTIONS)))
        tol = 0.0 if return_final else tol
        solver = self._configured(one_of("stop_mode", stop_mode, ("abs", "rel")), tol, tau)
        kept: dict[int, Tensor] = {}

        def keep(step: SolveStep) -> None:
            # evaluation i is made at the value after i steps
            if indexing and step.index in indexing:
                kept[step.index] = step.value

        solution = solve(
            func,
            x0,
            solver,
            max_steps=positive_int("max_iter", int(max_iter)),
            on_unconverged="ignore",
            callback=keep,
        )
        z = solution.value
        stat = SolverStat.from_final_step(*_rows(z, func(z)))
        stat["nstep"] = solution.stats.num_steps.to(z.dtype)
        return z, [kept.get(i, z) for i in indexing or ()], stat

    def _configured(self, stop_mode: str, tol: float, tau: float) -> Solver:
        """The solver with torchdeq's tolerance and damping."""
        names = [field.name for field in fields(self.solver)]  # type: ignore[arg-type]
        options: dict[str, float] = {}
        if "rtol" in names:
            options = {"rtol": 0.0, "atol": 0.0} | {{"rel": "rtol", "abs": "atol"}[stop_mode]: tol}
        if "damping" in names:
            options["damping"] = float(tau)
        elif tau != 1.0:
            raise ValueError(f"tau must be 1.0 for {type(self.solver).__name__}, got {tau}")
        changed: Any = replace(self.solver, **options)  # type: ignore[type-var]
        found: Solver = changed
        return found


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with at least two axes, as torchdeq's norms need them."""
    return tuple(t if t.dim() > 1 else t.unsqueeze(1) for t in tensors)


for _name, _solver in (("picard", Picard()), ("anderson", Anderson()), ("broyden", Broyden())):
    register_solver(f"bedouin_{_name}", as_torchdeq(_solver))
