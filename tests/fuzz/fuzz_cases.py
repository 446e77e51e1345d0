"""Random layers, inputs and states for the laws beside this file, and how exactly these must hold.

Letters: b batch, t time, m d_model.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor

from bedouin import (
    Bedouin,
    BedouinState,
    FixedPointRNN,
    Initialization,
    Kronecker,
    Monarch,
    NoMixing,
)
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.mixers import ChannelMixer, HouseholderProduct, LowRank
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Broyden,
    Direct,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solver,
    SolveStats,
    UnrolledAdjoint,
)
from bedouin.testing import assert_close, find_fixed_point, measure_growth

CASES = int(os.environ.get("FUZZ_CASES", "5000"))
"""The cases of a run with -m fuzz, of all laws together."""
FEW = 6
"""The cases of each law in the default run."""
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
"""The rtol of iterative solvers: a solve is at least float32, whatever the layer's dtype."""
ATOL = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Outputs may be small differences of terms that are not, and which are rounded."""
Draw = Callable[..., Any]


class Diagonal(ChannelMixer):
    """Q = diag(sigmoid(raw)), with no declared structure: neither Direct nor Jacobi takes it."""

    def raw_size(self, d_inner: int) -> int:
        return d_inner

    def complement(self, raw: Tensor, v: Tensor) -> Tensor:
        return torch.sigmoid(-raw) * v


@dataclass(frozen=True)
class Case:
    """A layer and what it is called with."""

    layer: FixedPointLayer
    x: Tensor  # (b, t, m)
    state: BedouinState | None  # of b samples

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype


def draw_solver(draw: Draw, dtype: torch.dtype) -> Solver:
    kind = draw(st.sampled_from([Direct, Picard, Jacobi, Anderson, Broyden]))
    if kind is Direct:
        return Direct()
    options: dict[str, Any] = {"rtol": TOLERANCE[dtype]}
    if kind is Picard:
        options |= draw(
            st.sampled_from([{}, {"damping": 0.7}, {"patience": 3}, {"stop_rule": "paper"}])
        )
    solver: Solver = kind(**options)
    return solver


def draw_adjoint(draw: Draw, dtype: torch.dtype) -> Adjoint | None:
    make: Callable[[], Adjoint | None] = draw(
        st.sampled_from(
            [
                lambda: None,
                lambda: ImplicitAdjoint(draw_solver(draw, dtype)),
                OneStepAdjoint,
                PhantomAdjoint,
                UnrolledAdjoint,
            ]
        )
    )
    return make()


def draw_options(draw: Draw, kind: type) -> dict[str, Any]:
    """The options of a layer's constructor other than those of its solve."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    d_model, expand = draw(st.integers(1, 5)), one(1, 2)
    d = d_model * expand
    options: dict[str, Any] = {
        "d_model": d_model,
        "expand": expand,
        "num_heads": one(*(h for h in range(1, d + 1) if d % h == 0)),
        "mixer": one(
            HouseholderProduct(1, 0.5), HouseholderProduct(2), HouseholderProduct(4),
            HouseholderProduct(2, 2.0), NoMixing(), LowRank(1), LowRank(3), Kronecker(), Monarch(),
            Diagonal(),
        ),
        "d_conv": one(None, None, 1, 3),
        "eigenvalues": one("positive", "full"),
        "feedback_norm": one(True, False),
        "feedback_init": one(0.1, 0.0, 1.0),
        "norm_eps": one(1e-5, 1e-2),
        "backend": one("auto", "reference"),
        "layer_idx": one(None, 3),
    }  # fmt: skip
    if kind is FixedPointRNN:
        return options | {"decay": one("sigmoid", "griffin"), "feedback": one(("mixer",), ())}
    names = st.sampled_from(["delta", "B", "C", "mixer"])
    feedback, decay = tuple(draw(st.lists(names, unique=True))), one("mamba", "griffin")
    return options | {
        "d_state": one(1, 2, 5),
        "decay": decay,
        "initialization": Initialization(
            one(1.0, 0.0), one(1.0, 0.1, (2.0, 0.5)) if decay == "mamba" else 1.0
        ),
        "input_scale": one("delta", "bounded_delta", "one_minus_decay"),
        "feedback": feedback,
    }


def fits(mixer: ChannelMixer, solver: Solver, adjoint: Adjoint | None) -> bool:
    """Whether these go together: Direct and Jacobi need a structured mixer, and steps of Anderson
    and Broyden cannot be unrolled."""
    if isinstance(adjoint, UnrolledAdjoint) and isinstance(solver, Anderson | Broyden):
        return False
    by = adjoint.solver if isinstance(adjoint, ImplicitAdjoint) else None
    needs = isinstance(solver, Direct | Jacobi) or isinstance(by, Direct | Jacobi)
    return mixer.is_structured(1) or not needs


@st.composite
def cases(draw: Draw) -> Case:
    kind = draw(st.sampled_from([Bedouin, FixedPointRNN]))
    narrow = [torch.float32, torch.bfloat16, torch.float16]
    dtype = draw(st.sampled_from([torch.float64] * 3 + narrow))
    options = draw_options(draw, kind)
    solver, adjoint = draw_solver(draw, dtype), draw_adjoint(draw, dtype)
    hypothesis.assume(fits(options["mixer"], solver, adjoint))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    layer = kind(
        options.pop("d_model"), **options, solver=solver, adjoint=adjoint, max_steps=150,
        on_unconverged="ignore", dtype=dtype,
    )  # fmt: skip
    b, t = draw(st.integers(0, 3)), draw(st.integers(0, 8))
    hypothesis.note(f"{layer}\nbeside: {options}, dtype={dtype}, b={b}, t={t}")
    with torch.no_grad():
        layer.dt_bias.add_(draw(st.sampled_from([0.0, 3.0])))
    layer.train(draw(st.booleans()))
    x = draw_input(draw, b, t, layer.d_model).to(dtype)
    state = random_state(layer, b) if draw(st.booleans()) else None
    return Case(layer, x, state)


def draw_input(draw: Draw, b: int, t: int, m: int) -> Tensor:
    """Values of any size, zeros among them, in memory of any order."""
    scale: float = draw(st.sampled_from([1.0, 1.0, 1e-6, 1e2]))
    x = scale * torch.randn(b, t, m)
    if draw(st.booleans()):
        x[:, ::2] = 0
    order = draw(st.sampled_from(["packed", "transposed", "expanded", "strided"]))
    hypothesis.note(f"x is {order}")
    if order == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if order == "expanded":
        return x[:1].expand(min(b, 1) * b, t, m)
    return x.repeat(1, 2, 1)[:, ::2] if order == "strided" and t else x


def random_state(layer: FixedPointLayer, b: int) -> BedouinState:
    return BedouinState(*(0.1 * torch.randn_like(v) for v in layer.init_state(b)))


def call(case: Case, *args: Any, **options: Any) -> tuple[Tensor, BedouinState, SolveStats]:
    """The layer's results without gradients."""
    with torch.no_grad():
        output, state = case.layer(*args, return_state=True, **options)
    assert case.layer.stats is not None
    return output, state, case.layer.stats


def digits(case: Case, x: Tensor, *all_stats: SolveStats) -> float:
    """The relative error that rounding and the solver's tolerance explain.

    Rejects cases in which a solve has not converged or too few digits are left to compare.
    """
    solver = case.layer.solver
    hypothesis.assume(all(bool(stats.converged.all()) for stats in all_stats))
    growth = max(
        (
            measure_growth(case.layer, x[[i]], state=sample(case.state, i), num_directions=1)
            for i in range(len(x))
        ),
        default=1.0,
    )
    pivots = [stats.conditioning for stats in all_stats if stats.conditioning is not None]
    pivot = min([1.0, *(p.min().item() for p in pivots if p.numel())])
    unit = ROUNDING[case.dtype]
    if not isinstance(solver, Direct):
        unit = max(unit, 1e3 * TOLERANCE[case.dtype])
        # a solve is judged by the norm over all tokens, an output by that of its own token
        sizes = find_fixed_point(case.layer, x, state=case.state).y.norm(dim=-1).double()
        sizes = sizes[sizes > 0]
        unit *= (sizes.max() / sizes.min()).item() if sizes.numel() else 1.0
    error = unit * growth / pivot
    hypothesis.assume(error < 0.3)
    return float(error)


def sample(state: BedouinState | None, i: int) -> Any:
    return None if state is None else state[[i]]


def compare(case: Case, names: str, found: Any, expected: Any, error: float) -> None:
    # a state has a window if the layer has a convolution
    named = [*names.split(), "conv"][: len(found)]
    for name, a, e in zip(named, found, expected, strict=True):
        assert_close(name, a, e, error, ATOL[case.dtype])
