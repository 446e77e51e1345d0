"""Options of the fixed-point layers: initial values, mixers, heads, and how a solve is done.

Letters: d d_inner, H num_heads, p = d / H channels of a head, n d_state.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.checks import positive_int
from bedouin.kernels.checks import check_number, frozen_options
from bedouin.kernels.scan import InputScale
from bedouin.layers.common import REMOVED
from bedouin.layers.mixers import MAX_DENSE, ChannelMixer, HouseholderProduct, NoMixing, kernel_gap
from bedouin.solvers import Direct, Jacobi, Picard, Solver
from bedouin.solvers.solve import SolveOptions

Decay = Literal["mamba", "griffin", "sigmoid"]

FEEDBACK_NORM_EPS = 1e-5
GRIFFIN_RANGE, GRIFFIN_SHARPNESS = (0.9, 0.999), 8.0
LEAST_HEAD, MOST_HEAD = 32, 128  # channels of a head by default


@frozen_options
class Initialization:
    """Initial values of a Bedouin, as factors on its usual ones.

    delta_from_x: of the weights from x to Delta. With 0, the paper's choice for copying, Delta
        initially depends on its bias and feedback alone.
    rates: of the decay rates exp(A_log) = 1 .. n of mamba's decay; below 1 memory is longer, but
        the state can grow (see `input_scale` of Bedouin). A pair is that of the first and the last
        head, with geometric steps between; one head has the first. Must be 1 with griffin's decay.

    Raises ValueError for rates that are neither a number nor a pair, and for values out of range.
    """

    absent_options: ClassVar[dict[str, str]] = dict.fromkeys(
        ("memory_heads", "memory_rates", "memory_delta"), REMOVED
    )

    delta_from_x: float = 1.0
    rates: float | tuple[float, float] = 1.0

    def __post_init__(self) -> None:
        check_number("delta_from_x", self.delta_from_x, 0, 1e3, open_low=False)
        if isinstance(self.rates, list):  # a pair of a file
            object.__setattr__(self, "rates", tuple(self.rates))
        ends = self.rates if isinstance(self.rates, tuple) else (self.rates,) * 2
        if len(ends) != 2:
            raise ValueError(
                f"rates must be a number, or a pair (first head, last head), got {self.rates!r}"
            )
        for rate in ends:
            check_number("rates", rate, 0, math.inf, open_low=True)

    def A_log(self, num_heads: int, head_dim: int, like: Tensor) -> Tensor:  # (H p, n), as `like`
        """Mamba's initial A_log, log(1 .. n), plus the logarithm of each head's factor."""
        ends = self.rates if isinstance(self.rates, tuple) else (self.rates, self.rates)
        first, last = map(math.log, ends)
        shifts = torch.linspace(first, last, num_heads, device=like.device)
        states = torch.arange(1, like.shape[1] + 1, device=like.device)
        return states.log() + shifts.repeat_interleave(head_dim).unsqueeze(1)


def check_initialization(value: object, decay: str) -> Initialization:
    """`value`, or for None the usual initial values; an error for one that does not fit."""
    if value is None:
        return Initialization()
    if not isinstance(value, Initialization):
        raise TypeError(
            "initialization must be None or an Initialization such as Initialization(rates="
            f"0.1), got {value!r}"
        )
    if decay != "mamba" and value.rates not in (1, (1, 1)):
        raise ValueError(
            f"initialization.rates must be 1 with decay {decay!r}, got {value.rates!r}: use "
            "decay='mamba', whose rates -A they multiply"
        )
    return value


def split_feedback_weight(
    weight: Tensor, feedback: tuple[str, ...], sizes: dict[str, int], p: int
) -> tuple[Tensor | None, Tensor]:  # (s + p, p) or (H, s + p, p): rows of `feedback`, then the gate
    """W^y of the loop (r, p) or (H, r, p), None if `feedback` names components of size 0 alone, and
    of the gate (p, p) or (H, p, p). `sizes` are those of all components, in the order of the r raw
    values; the rows of those without feedback are zero."""
    fed = [sizes[name] for name in feedback]
    if not any(fed):
        return None, weight
    # the gradient of one split is one concatenation
    loop, gate = weight.split([sum(fed), p], -2)
    first = tuple(sizes)[: list(sizes).index(feedback[-1]) + 1]
    if feedback != first:
        rows, heads = dict(zip(feedback, loop.split(fed, -2), strict=True)), gate.shape[:-2]
        blocks = [rows.get(name, gate.new_zeros(*heads, sizes[name], p)) for name in first]
        loop = torch.cat(blocks, -2)
    missing = sum(sizes.values()) - loop.shape[-2]
    return F.pad(loop, (0, 0, 0, missing)) if missing else loop, gate


def inner_size(expand: float, d_model: int) -> int:
    """d = expand * m. Raises ValueError unless it is a whole number."""
    check_number("expand", expand, 0, 1e3, open_low=True)
    d = round(expand * d_model)
    if d < 1 or not math.isclose(d, expand * d_model, rel_tol=1e-9):
        found, near = f"{expand} * {d_model} = {expand * d_model:.6g}", max(d, 1)
        raise ValueError(
            "expand * d_model must be a whole number of channels, at least 1, got "
            f"{found}: for {near} use expand={near} / {d_model}"
        )
    return d


def choose_num_heads(num_heads: int | None, d_inner: int) -> int:
    """H: `num_heads`, or for None as few heads of 32 to 128 channels as divide d_inner, for which
    there are kernels, else 1. Heads of 128 learn A5 better than smaller ones, and copying better
    than one head (examples/results/heads). Raises TypeError for a value that is no int, ValueError
    for one that does not divide d_inner."""
    if num_heads is None:
        sizes = range(min(MOST_HEAD, d_inner), LEAST_HEAD - 1, -1)
        return next((d_inner // p for p in sizes if d_inner % p == 0), 1)
    positive_int("num_heads", num_heads)
    if d_inner % num_heads:
        raise ValueError(
            f"num_heads must divide d_inner = expand * d_model = {d_inner}, got {num_heads}: use "
            "one of its divisors, for example 1, or None for the default"
        )
    return num_heads


def ordered_subset(
    name: str, values: Collection[str], valid: tuple[str, ...], absent: Mapping[str, str]
) -> tuple[str, ...]:
    """The names in `values` in the order of `valid`; ValueError for another, with its reason."""
    is_collection = isinstance(values, Iterable) and not isinstance(values, str | Mapping)
    # a list, because an iterator can be read only once
    names = list(values) if is_collection else [None]
    for gone in (v for v in absent if v in names):
        raise ValueError(f"{name} must not contain {gone!r}, got {values!r}: {absent[gone]}")
    if not all(v in valid for v in names):
        raise ValueError(f"{name} must be a collection of names from {valid}, got {values!r}")
    return tuple(v for v in valid if v in names)


def make_mixer(
    mixer: ChannelMixer | None, num_householder: int | None, beta_max: float | None
) -> ChannelMixer:
    """`mixer`, or for None a HouseholderProduct, which without reflections is NoMixing. Raises
    ValueError if both are given, TypeError if `mixer` is not a ChannelMixer."""
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
    for name, value in {"num_householder": num_householder, "beta_max": beta_max}.items():
        if value is not None:
            raise ValueError(
                f"{name} is shorthand for mixer=HouseholderProduct(...): give it or mixer, not both"
            )
    if not isinstance(mixer, ChannelMixer):
        raise TypeError(f"mixer must be a ChannelMixer such as LowRank(2), got {mixer!r}")
    return mixer


def warn_of_singular_systems(mixer: ChannelMixer, decay: str, input_scale: InputScale) -> None:
    """Issue a UserWarning, for the caller of a layer's constructor, if the local systems I - (B .
    C) diag(s) (I - Q) can become singular because s = Delta is unbounded: |B . C| <= 1 and |I - Q|
    <= k beta_max, so they are invertible while Delta < 1 / (k beta_max)."""
    if input_scale != "delta" or decay != "mamba":
        return
    # Delta is assumed to stay below 100 in training; a subclass may compute another Q
    small = isinstance(mixer, HouseholderProduct) and mixer.num_householder * mixer.beta_max <= 0.01
    if small and kernel_gap(mixer) is None:
        return
    warnings.warn(
        f"input_scale='delta' with {type(mixer).__name__} can make local systems singular in "
        "training, and gradients infinite or NaN (see stats.conditioning): use "
        "input_scale='bounded_delta', or mixer=NoMixing()",
        UserWarning,
        stacklevel=4,  # this function, the constructor, its check of the options, the caller
    )


def choose_solver(solver: Solver | str, is_structured: bool) -> Solver:
    """`solver`, or for "auto" Direct if the mixer has the form (e, U, M) and Picard otherwise.
    Direct is faster than Jacobi with feedback and without it (examples/results/benchmark)."""
    if solver == "auto":
        return Direct() if is_structured else Picard()
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver must be 'auto' or a solver object such as Direct() or Picard(), got {solver!r}"
        )
    return solver


def check_structure(mixer: ChannelMixer, head_dim: int, options: SolveOptions) -> SolveOptions:
    """`options`; TypeError if a solver needs the form (e, U, M), which the mixer does not have."""
    adjoint_solver = getattr(options.adjoint, "solver", None)
    for name, solver in (("solver", options.solver), ("the adjoint's solver", adjoint_solver)):
        if isinstance(solver, Direct | Jacobi) and not mixer.is_structured(head_dim):
            raise TypeError(
                f"{name} must work without the form (e, U, M), which the mixer "
                f"{type(mixer).__name__} does not have, got {solver}: use Picard, Anderson or "
                "Broyden, a StructuredMixer such as HouseholderProduct or LowRank, or a mixer with "
                f"a method dense and heads of at most {MAX_DENSE} channels (this layer: {head_dim})"
            )
    return options


GetT = TypeVar("GetT")
SetT = TypeVar("SetT")


class SolveOption(Generic[GetT, SetT]):
    """A field of a layer's `solve_options` as a settable attribute of the layer. convert: from the
    layer and what is set, the value of the field."""

    def __init__(self, field: str, convert: Callable[[Any, SetT], Any] = lambda _, v: v) -> None:
        self.field, self.convert = field, convert

    def __get__(self, layer: Any, owner: type | None = None) -> GetT:
        value: GetT = getattr(layer.solve_options, self.field)
        return value

    def __set__(self, layer: Any, value: SetT) -> None:
        changes: dict[str, Any] = {self.field: self.convert(layer, value)}
        changed = replace(layer.solve_options, **changes)
        layer.solve_options = check_structure(layer.mixer, layer.head_dim, changed)
