"""Fixed points y* = f(y*): solvers, gradients and caps, each a separate argument of `solve`."""

from bedouin.solvers.adjoint import (
    Adjoint,
    ImplicitAdjoint,
    OneStepAdjoint,
    PhantomAdjoint,
    UnrolledAdjoint,
)
from bedouin.solvers.base import Solver
from bedouin.solvers.caps import Cap, FixedCap, GammaCap
from bedouin.solvers.direct import Direct
from bedouin.solvers.jacobi import Jacobi
from bedouin.solvers.picard import Picard
from bedouin.solvers.reporting import (
    ConvergenceError,
    ConvergenceWarning,
    Result,
    Solution,
    SolveStats,
)
from bedouin.solvers.solve import solve
from bedouin.solvers.torchdeq_adapter import Anderson, Broyden

__all__ = [
    "Adjoint",
    "Anderson",
    "Broyden",
    "Cap",
    "ConvergenceError",
    "ConvergenceWarning",
    "Direct",
    "FixedCap",
    "GammaCap",
    "ImplicitAdjoint",
    "Jacobi",
    "OneStepAdjoint",
    "PhantomAdjoint",
    "Picard",
    "Result",
    "Solution",
    "SolveStats",
    "Solver",
    "UnrolledAdjoint",
    "solve",
]
