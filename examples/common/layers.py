"""Options of the fixed point that all training scripts share, and the baselines by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from torch import nn

from bedouin import NoMixing, baselines
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Broyden,
    Cap,
    Direct,
    FixedCap,
    GammaCap,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solver,
    UnrolledAdjoint,
)
from common.checks import Count, Range, check_types

Baseline = Literal["lstm", "mamba", "deltanet", "gated_deltanet", "deltaproduct", "attention"]

BASELINES: dict[str, Callable[..., nn.Module]] = {
    "lstm": baselines.LSTM,
    "mamba": baselines.Mamba,
    "deltanet": baselines.DeltaNet,
    "gated_deltanet": partial(baselines.DeltaNet, gated=True),
    "deltaproduct": baselines.DeltaProduct,
    "attention": baselines.Attention,
}
TAKES: dict[str, tuple[str, ...]] = {
    "lstm": (),
    "mamba": ("d_state", "eigenvalues"),
    "deltanet": ("num_heads", "eigenvalues"),
    "gated_deltanet": ("num_heads", "eigenvalues"),
    "deltaproduct": ("num_heads", "num_householder", "eigenvalues"),
    "attention": ("num_heads",),
}
"""The options of Bedouin that a baseline takes as well."""

Tolerance = Annotated[float, Range(0, 1e6, "[]")]
_OfGamma = Annotated[float, Range(0, 1e6, "(]")]


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """How the fixed point and its gradient are computed."""

    solver: Literal["auto", "direct", "jacobi", "picard", "anderson", "broyden"] = "auto"
    """How the fixed point is found; auto lets the layer choose."""
    rtol: Tolerance = 1e-4
    """Relative tolerance of the iterative solvers; unused by auto and direct."""
    atol: Tolerance = 1e-30
    """Absolute tolerance of the iterative solvers; unused by auto and direct."""
    solver_steps: Count = 100
    """Steps that an iterative solver may take."""
    train_solver_steps: Count | None = None
    """Steps that it may take in training, at most --solver-steps; None: --solver-steps."""
    gamma_cap: tuple[_OfGamma, _OfGamma] | None = None
    """Shape and scale of a Gamma distribution from which the steps of each training call are drawn,
    at most --solver-steps; the paper's are 4 1."""
    adjoint: Literal["implicit", "one_step", "phantom", "unrolled"] = "implicit"
    """How the gradient of the fixed point is computed."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.train_solver_steps is not None and self.gamma_cap is not None:
            raise ValueError(
                "--gamma-cap draws the steps in training: leave out --train-solver-steps"
            )
        if (self.train_solver_steps or 1) > self.solver_steps:
            raise ValueError(
                f"--train-solver-steps must be at most --solver-steps = {self.solver_steps}, got "
                f"{self.train_solver_steps}"
            )


@dataclass(frozen=True)
class TrainCap(Cap):
    """At most `steps` steps in training, at most `limit` in evaluation."""

    steps: int = 16
    limit: int = 100  # a field with a default implements the abstract property

    @property
    def is_random(self) -> bool:
        return self.steps < self.limit

    def draw(self, index: int) -> int:
        return self.steps


def mixer_options(num_householder: int, beta_max: float) -> dict[str, Any]:
    """The options of Bedouin's mixer: so many reflections, or for 0 no mixing."""
    if num_householder:
        return {"num_householder": num_householder, "beta_max": beta_max}
    return {"mixer": NoMixing()}


def build_cap(options: SolverOptions) -> Cap:
    """The cap that the flags describe."""
    if options.gamma_cap is not None:
        return GammaCap(*options.gamma_cap, limit=options.solver_steps)
    if options.train_solver_steps is not None:
        return TrainCap(options.train_solver_steps, options.solver_steps)
    return FixedCap(options.solver_steps)


def build_solver(options: SolverOptions) -> Solver | Literal["auto"]:
    """The solver that the flags name, with their tolerances."""
    match options.solver:
        case "auto":
            return "auto"
        case "direct":
            return Direct()
        case "jacobi":
            return Jacobi(rtol=options.rtol, atol=options.atol)
        case "picard":
            return Picard(rtol=options.rtol, atol=options.atol)
        case "anderson":
            return Anderson(rtol=options.rtol, atol=options.atol)
        case "broyden":
            return Broyden(rtol=options.rtol, atol=options.atol)


def build_adjoint(options: SolverOptions) -> Adjoint:
    """The adjoint that the flags name."""
    match options.adjoint:
        case "implicit":
            return ImplicitAdjoint()
        case "one_step":
            return OneStepAdjoint()
        case "phantom":
            return PhantomAdjoint(num_steps=4, damping=0.5)
        case "unrolled":
            return UnrolledAdjoint()


def fixed_point_options(options: SolverOptions) -> dict[str, Any]:
    """Solver, adjoint and cap as arguments of the layer."""
    return {
        "solver": build_solver(options),
        "adjoint": build_adjoint(options),
        "max_steps": build_cap(options),
    }


def count(module: nn.Module) -> int:
    """The number of parameters; a tensor that two modules share counts once."""
    return sum(parameter.numel() for parameter in module.parameters())
