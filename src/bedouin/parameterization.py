"""Conversion of a layer's arguments: solve options, mixer, layout, weights and initial values.

Letters: b batch, t time, d channels of a head, r raw values, f raw values with feedback, H heads.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend
from bedouin.kernels.checks import check_number, positive_int, strict_options
from bedouin.kernels.scan import InputScale
from bedouin.mixers import MAX_DENSE, ChannelMixer, HouseholderProduct, NoMixing, kernel_gap
from bedouin.parameters import inverse_softplus
from bedouin.solvers import Adjoint, Cap, Direct, Jacobi, Picard, Solver
from bedouin.solvers.caps import as_cap
from bedouin.solvers.reporting import OnUnconverged
from bedouin.solvers.solve import SolveOptions

Decay = Literal["mamba", "griffin"]
RNNDecay = Literal["sigmoid", "griffin"]
OutputStage = Literal["norm", "paper"]
Projection = Literal["inner", "input"]
FeedbackScope = Literal["head", "layer"]

X = "x"
"""The name in `feedback` of the mixer's input, which is no raw value."""

FEEDBACK_NORM_EPS = 1e-5
GRIFFIN_RANGE = (0.9, 0.999)
GRIFFIN_SHARPNESS = 8.0

LARGE_DELTA = 100.0
"""Delta = softplus(raw) is assumed to stay below this in training."""


@strict_options
@dataclass(frozen=True)
class Initialization:
    """Initial values of a Bedouin, as factors on its usual ones.

    delta_from_x: of the weights from x to Delta. With 0, the paper's choice for copying, Delta
        initially depends on its bias and feedback alone.
    rates: of the decay rates exp(A_log) = 1 .. n of mamba's decay; below 1 memory is longer. A pair
        is that of the first and of the last head; those between are spaced geometrically, and one
        head has the first. Must be 1 with griffin's decay.
    memory_heads: how many heads, the last ones, begin as a memory: their D and their feedback W^y
        are zero before training. Associative recall is then learned in two thirds of the steps
        (examples/results/initial-values). At most the heads of the layer.
    memory_rates: as `rates`, of the memory heads alone, `rates` then being those of the others;
        None: `rates` are those of all heads.
    memory_delta: factor on Delta of the memory heads: with more than 1 what they write is larger at
        first, and they are learned sooner. Must be 1 with griffin's decay.

    Raises ValueError for rates that are neither a number nor a pair, for memory_rates or
    memory_delta without memory heads, and for values out of range, TypeError for memory_heads that
    is not an int.
    """

    delta_from_x: float = 1.0
    rates: float | tuple[float, float] = 1.0
    memory_heads: int = 0
    memory_rates: float | tuple[float, float] | None = None
    memory_delta: float = 1.0

    def __post_init__(self) -> None:
        check_number("delta_from_x", self.delta_from_x, 0, 1e3, open_low=False)
        if self.memory_heads != 0 or isinstance(self.memory_heads, bool):
            positive_int("memory_heads", self.memory_heads, " or 0")
        if self.memory_rates is not None and not self.memory_heads:
            raise ValueError(
                f"memory_rates must be None with memory_heads=0, got {self.memory_rates!r}: give "
                "rates, or memory heads"
            )
        check_number("memory_delta", self.memory_delta, 0, 1e3, open_low=True)
        if self.memory_delta != 1 and not self.memory_heads:
            raise ValueError(
                f"memory_delta must be 1 with memory_heads=0, got {self.memory_delta}: give memory "
                "heads"
            )
        for name in ("rates", "memory_rates"):
            value: Any = getattr(self, name)
            if isinstance(value, list):  # a pair of a file
                value = tuple(value)
                object.__setattr__(self, name, value)
            ends = _ends(1.0 if value is None else value)
            if len(ends) != 2:
                raise ValueError(
                    f"{name} must be a number, or a pair (first head, last head), got {value!r}"
                )
            for rate in ends:
                check_number(name, rate, 0, math.inf, open_low=True)

    def A_log(self, num_heads: int, head_dim: int, like: Tensor) -> Tensor:  # (H p, n), as `like`
        """Mamba's initial A_log, log(1 .. n), plus the logarithm of each head's factor."""
        groups = [(self.rates, num_heads)]
        if self.memory_rates is not None:
            first = num_heads - self.memory_heads
            groups = [(self.rates, first), (self.memory_rates, self.memory_heads)]
        parts = []
        for rates, count in groups:
            first_shift, last_shift = (math.log(rate) for rate in _ends(rates))
            parts.append(torch.linspace(first_shift, last_shift, count, device=like.device))
        shifts = torch.cat(parts)
        states = torch.arange(1, like.shape[1] + 1, device=like.device)
        return states.log() + shifts.repeat_interleave(head_dim).unsqueeze(1)


def _ends(rates: float | tuple[float, float]) -> tuple[float, float]:
    """The factors of the first and of the last head."""
    return rates if isinstance(rates, tuple) else (rates, rates)


def choose_solver(solver: Solver | str, is_structured: bool) -> Solver:
    """`solver`, or for "auto" Direct if the mixer has the form (e, U, M) and Picard otherwise.

    The choice depends on neither b, t nor the device: Direct was faster than Jacobi on H100s with
    feedback (16 iterations at 64 x 256, forward and backward: 23 ms, Direct 11.8) and without it
    (forward at 8 x 4096: 8.9 ms, Direct 6.3; examples/results/benchmark).
    """
    if solver == "auto":
        return Direct() if is_structured else Picard()
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver must be 'auto' or a solver object such as Direct() or Picard(), got {solver!r}"
        )
    return solver


class SolveArguments(NamedTuple):
    """Arguments of a layer's constructor."""

    solver: Solver | Literal["auto"]
    adjoint: Adjoint | None
    max_steps: int | Cap
    on_unconverged: OnUnconverged
    backend: Backend

    def options(self, mixer: ChannelMixer, head_dim: int) -> SolveOptions:
        """SolveOptions; raises the errors of the constructor."""
        structured = mixer.is_structured(head_dim)
        chosen, cap = choose_solver(self.solver, structured), as_cap(self.max_steps)
        options = SolveOptions(chosen, self.adjoint, cap, self.on_unconverged, self.backend)
        check_structure(mixer, head_dim, options)
        return options


def check_structure(mixer: ChannelMixer, head_dim: int, options: SolveOptions) -> None:
    """Raise TypeError if a solver needs the form (e, U, M), which the mixer does not have."""
    if mixer.is_structured(head_dim):
        return
    adjoint_solver = getattr(options.adjoint, "solver", None)
    for name, solver in (("solver", options.solver), ("the adjoint's solver", adjoint_solver)):
        if isinstance(solver, Direct | Jacobi):
            raise TypeError(
                f"{name} must work without the form (e, U, M), which the mixer "
                f"{type(mixer).__name__} does not have, got {solver}: use Picard, Anderson or "
                "Broyden, a StructuredMixer such as HouseholderProduct or LowRank, or a mixer with "
                f"a method dense and heads of at most {MAX_DENSE} channels, got {head_dim}"
            )


GetT = TypeVar("GetT")
SetT = TypeVar("SetT")


class SolveOption(Generic[GetT, SetT]):
    """A field of a layer's `solve_options` as a settable attribute of the layer.

    convert: from the layer and what is set, the value of the field.
    """

    def __init__(
        self, field: str, convert: Callable[[Any, SetT], Any] = lambda layer, value: value
    ) -> None:
        self.field, self.convert = field, convert

    def __get__(self, layer: Any, owner: type | None = None) -> GetT:
        value: GetT = getattr(layer.solve_options, self.field)
        return value

    def __set__(self, layer: Any, value: SetT) -> None:
        changes: dict[str, Any] = {self.field: self.convert(layer, value)}
        options = replace(layer.solve_options, **changes)
        check_structure(layer.mixer, layer.head_dim, options)
        layer.solve_options = options


def make_mixer(
    mixer: ChannelMixer | None, num_householder: int | None, beta_max: float | None
) -> ChannelMixer:
    """`mixer`, or if it is None a HouseholderProduct, by default with 2 reflections and beta_max 1,
    which for 0 reflections is NoMixing.

    Raises ValueError if both are given, TypeError if `mixer` is not a ChannelMixer.
    """
    if mixer is None:
        k = 2 if num_householder is None else num_householder
        if k == 0 and not isinstance(k, bool):
            if beta_max is not None:
                raise ValueError(
                    "beta_max is that of reflections, of which num_householder=0 has none, got "
                    f"{beta_max!r}: leave it out"
                )
            return NoMixing()
        return HouseholderProduct(k, 1.0 if beta_max is None else beta_max)
    given = {"num_householder": num_householder, "beta_max": beta_max}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is shorthand for mixer=HouseholderProduct(...): give it or mixer, not both"
            )
    if not isinstance(mixer, ChannelMixer):
        raise TypeError(f"mixer must be a ChannelMixer such as LowRank(2), got {mixer!r}")
    return mixer


def warn_of_singular_systems(mixer: ChannelMixer, decay: Decay, input_scale: InputScale) -> None:
    """Issue a UserWarning, for the caller of a layer's constructor, if the layer's local systems
    I - (B . C) diag(s) (I - Q) can become singular because s = Delta is unbounded.

    |B . C| <= 1 and, for k reflections, |I - Q| <= k beta_max. They are therefore invertible as
    long as Delta < 1 / (k beta_max), and nothing is said if that is at least `LARGE_DELTA`.
    """
    if input_scale != "delta" or decay != "mamba":
        return
    # NoMixing is the product of no reflections; a subclass may compute another Q
    if (
        isinstance(mixer, HouseholderProduct)
        and kernel_gap(mixer) is None
        and mixer.num_householder * mixer.beta_max * LARGE_DELTA <= 1
    ):
        return
    warnings.warn(
        f"input_scale='delta' with {type(mixer).__name__} can make local systems singular in "
        "training, and gradients infinite or NaN (see stats.conditioning): use "
        "input_scale='bounded_delta', or mixer=NoMixing()",
        UserWarning,
        stacklevel=4,  # this function, the constructor, its check of the options, the caller
    )


def split_named(v: Tensor, sizes: Mapping[str, int], axis: int = -1) -> dict[str, Tensor]:
    """The parts of v, of any shape, along an axis by their names."""
    return dict(zip(sizes, v.split(list(sizes.values()), axis), strict=True))


def split_feedback_weight(
    weight: Tensor,  # (s + p, c) or (H, s + p, c): the s rows of `feedback` and, last, of the gate
    feedback: tuple[str, ...],
    sizes: dict[str, int],
    p: int,
) -> tuple[Tensor | None, Tensor]:
    """W^y of the loop (f, c) or (H, f, c) and W^y of the gate (p, c) or (H, p, c); c is p, or the
    channels of all heads.

    `sizes` are those of all components, in the order of the raw values. The f rows are those of the
    components up to the last one with feedback, zero for the components in between without, and
    then those of x if it is fed back. The first is None if `feedback` names components of size 0
    alone.
    """
    fed = {name: p if name == X else sizes[name] for name in feedback}
    if not any(fed.values()):
        return None, weight
    # the gradient of one split is one concatenation
    loop, gate = weight.split([sum(fed.values()), p], -2)
    names = tuple(sizes)
    raw_names = [name for name in feedback if name != X]
    first = names[: names.index(raw_names[-1]) + 1] if raw_names else ()
    if tuple(raw_names) == first:
        return loop, gate
    rows = split_named(loop, fed, -2)
    *heads, _, c = gate.shape
    blocks = [
        rows[name] if name in rows else gate.new_zeros(*heads, sizes[name], c) for name in first
    ]
    return torch.cat([*blocks, *(rows[name] for name in rows if name == X)], -2), gate


def griffin_omega(like: Tensor) -> Tensor:  # any shape -> as `like`
    """Random omega for which the decay at Delta = 1, exp(-8 softplus(omega)), is uniform in
    [0.9, 0.999]."""
    decay = torch.empty_like(like).uniform_(*GRIFFIN_RANGE)
    return inverse_softplus(-decay.log() / GRIFFIN_SHARPNESS)
