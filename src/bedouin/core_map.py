"""A call of a layer whose projection, sweep and output stage are one operation.

It is the exact solve of a layer in eager mode, on Triton kernels. Every other call takes the parts
one by one, with the same results up to rounding.

Letters: b batch, t time, d d_inner, n d_state, w = 2 d, or d without z, H num_heads,
p = d / H head_dim; b' = H b folded samples (bedouin.heads).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bedouin.fixed_point_map import FixedPointMap, StructuredMap, make_reporter
from bedouin.gated_stage import GatedStage
from bedouin.heads import HeadLinear, fold_state
from bedouin.joined_heads import JoinedHeads
from bedouin.kernels.backend import choose_backend, is_transformed
from bedouin.kernels.core import CoreOptions, CoreRun, CoreTensors, core_operation, flatten
from bedouin.kernels.decode import DecayKind
from bedouin.kernels.direct import (
    Sweep,
    choose_chunk_of,
    choose_chunk_of_heads,
    fits_phases,
    holds_head,
    unsupported_sizes,
)
from bedouin.kernels.guard import KernelDoesNotFit, answer
from bedouin.kernels.heads import unfold
from bedouin.kernels.launch import accumulator
from bedouin.kernels.operands import Parameterization, RawLayout
from bedouin.kernels.output import MAX_CHANNELS
from bedouin.mixers import ChannelMixer
from bedouin.packing import Packing
from bedouin.parameterization import OutputStage
from bedouin.solvers import Direct, ImplicitAdjoint
from bedouin.solvers.solution import BackwardStats, DeferredStats, can_read_device
from bedouin.solvers.solve import SolveOptions
from bedouin.state import BedouinState
from bedouin.wrapped import is_plain, norm_parameters

# here, because the compiler warns about caches, and traces other calls of the function
_unsupported_sizes = lru_cache(maxsize=256)(unsupported_sizes)


class CoreLayer(Protocol):
    """What a fused call uses of a layer, which this module therefore need not import."""

    has_fused_step: ClassVar[bool]
    has_drive: ClassVar[bool]

    @property
    def components(self) -> tuple[str, ...]: ...

    @property
    def feedback_norm_eps(self) -> float | None: ...

    backend: Any
    d_state: int
    num_heads: int
    head_dim: int
    unfused: str | None
    feedback: tuple[str, ...]
    output: OutputStage
    mixer: ChannelMixer
    norm: nn.RMSNorm | None
    x_proj: Any
    y_proj: nn.Linear | HeadLinear | None
    dt_bias: nn.Parameter
    raw_bias: nn.Parameter | None
    D: nn.Parameter

    def layout(self) -> RawLayout | None: ...
    def parameterization(self) -> Parameterization: ...
    def decay_parameter(self) -> tuple[DecayKind, float, Tensor | None]: ...


def takes_core(
    layer: CoreLayer,
    projected: Tensor,  # (b, t, w)
    options: SolveOptions,
    cast_to: torch.dtype | None,  # by autocast
) -> bool:
    """Whether a `CoreMap` can solve this call.

    Raises ValueError if backend="triton" cannot run.
    """
    if torch.compiler.is_compiling() or is_transformed() or not projected.numel():
        return False
    # exactly this class: a subclass may compute its coefficients in another way
    if not vars(type(layer)).get("has_fused_step", False) or layer.has_drive:
        return False
    if layer.unfused is not None:
        return False
    # its W^y has rows for the first components, without others between them
    if layer.feedback != layer.components[: len(layer.feedback)]:
        return False
    adjoint = options.adjoint
    is_exact = adjoint is None or (
        type(adjoint) is ImplicitAdjoint and isinstance(adjoint.solver, Direct | None)
    )
    if type(options.solver) is not Direct or not is_exact:
        return False
    layout, y_proj = layer.layout(), layer.y_proj
    if layout is None or not is_plain(layer.x_proj) or not (y_proj is None or is_plain(y_proj)):
        return False
    p, n, dtype = layer.head_dim, layer.d_state, cast_to or layer.D.dtype
    if projected.dtype != dtype or p > MAX_CHANNELS:
        return False
    wide, device = accumulator(dtype), projected.device
    unsupported = _unsupported_sizes(layout.num_householder, p, n, dtype, dtype, wide)
    if unsupported is not None and options.backend != "triton":
        return False
    if choose_backend(options.backend, device, dtype, unsupported) != "triton":
        return False
    if len(layer.feedback) == 1 and fits_phases(p, n, wide, layer.parameterization()):
        # feedback of Delta alone: the sweep of the phases is an operation of its own
        return False
    if layer.num_heads == 1 or y_proj is None:
        # these kernels take at least one reflection
        return layout.num_householder > 0
    return holds_head(p, n, layout, wide, dtype, device)


class CoreSweep(NamedTuple):
    """The results of a sweep that `Direct` reads."""

    y: Tensor  # (b', t, p)
    statistics: Tensor  # (4, b', t): defect, scale, magnitude, pivot
    residual: Tensor  # (b',)
    pivot: Tensor  # (b',), the smallest
    converged: Tensor  # (b',)

    @property
    def defect(self) -> Tensor:  # (b', t)
        return self.statistics[0]

    @property
    def scale(self) -> Tensor:  # (b', t)
        return self.statistics[1]

    @property
    def magnitude(self) -> Tensor:  # (b', t)
        return self.statistics[2]


class _Reporter:
    """Puts the statistics of a reverse sweep into a cell."""

    __slots__ = ("_cell",)

    def __init__(self, cell: BackwardStats) -> None:
        self._cell = cell

    def wants_summary(
        self,
        like: Tensor,  # any shape
    ) -> bool:
        return self._cell.is_read_at_once() and can_read_device(like)

    def __call__(
        self,
        statistics: Tensor,  # (2, b', t)
        steps: Tensor,  # (b',), or empty
        residual: Tensor,  # (b',), or empty
        converged: Tensor,  # (b',), or empty
    ) -> None:
        if steps.numel():
            self._cell.defer(partial(DeferredStats, steps, residual, converged))
        else:
            make_reporter(self._cell)(*statistics.unbind())


class CoreMap:
    """The map of a fused call: its sweep computes the layer's output stage, too."""

    def __init__(
        self,
        layer: CoreLayer,
        projected: Tensor,  # (b, t, w)
        state: BedouinState | None,
        cast_to: torch.dtype | None,  # by autocast
        packing: Packing | None,
        separate: Callable[[], tuple[FixedPointMap | JoinedHeads, Tensor, GatedStage]],
    ) -> None:
        """`separate` makes the map of the same call in separate operations, and more."""
        self._layer, self._projected = layer, projected
        self._dtype, self._separate = cast_to or layer.D.dtype, separate
        self._packing = packing
        self._before = None if state is None else fold_state(state, layer.num_heads)
        self._run: CoreRun | None = None
        # where the operation's kernels do not fit: the map, and the gated output
        self._parts: tuple[StructuredMap, Tensor] | None = None

    @property
    def start(self) -> Tensor:
        """What Direct takes for the start of the solve, of which it reads that it is not empty: a
        tensor (b, t, w) instead of (b', t, p)."""
        return self._projected

    @property
    def lengths(self) -> Tensor | None:  # (b',)
        """The numbers of tokens before the padding of each sample; None: there is no padding."""
        packing, heads = self._packing, self._layer.num_heads
        return None if packing is None else packing.padded_lengths(heads)

    @property
    def y0(self) -> Tensor | None:  # (b', p)
        """The output before the first token; None: zeros."""
        return None if self._before is None else self._before.y

    @property
    def hidden(self) -> Tensor:
        """The gated output (b, t, d), after the sweep."""
        if self._parts is not None:
            return self._parts[1]
        assert self._run is not None
        return self._run.hidden

    def __call__(
        self,
        y: Tensor,  # (b', t, p)
    ) -> Tensor:  # (b', t, p)
        """F(y)."""
        return self._separate()[0](y)

    def sweep(self, unroll: bool, cell: BackwardStats) -> CoreSweep | Sweep:
        """The exact solve, and the output stage for its result."""
        assert not unroll, "takes_core demands the implicit adjoint"
        layer, packing = self._layer, self._packing
        decay, sharpness, parameter = layer.decay_parameter()
        assert parameter is not None and decay != "one"
        y_proj, D = layer.y_proj, layer.D
        W_x, W_y = layer.x_proj.weight, None if y_proj is None else y_proj.weight
        if layer.num_heads == 1:
            # outside, because the operation would hold large gradients in both dtypes at once, and
            # with them all that it has saved
            W_x, W_y = W_x.to(self._dtype), None if W_y is None else W_y.to(self._dtype)
        weight, eps = norm_parameters(layer.norm)
        heads, p, n = layer.num_heads, layer.head_dim, layer.d_state
        before = self._before
        h0, y0 = (None, None) if before is None else (before.ssm, before.y)
        tensors = CoreTensors(self._projected, W_x, W_y, parameter, D, weight, h0, y0)
        (b, t, _), feedback = self._projected.shape, W_y is not None
        if heads == 1:
            kept = choose_chunk_of(b, p, n, feedback=feedback)
        else:
            kept = choose_chunk_of_heads(heads * b, t, p, n, feedback=feedback)
        options = CoreOptions(layer.parameterization(), decay, sharpness, eps, kept)
        biases, real = (layer.dt_bias, layer.raw_bias), None if packing is None else packing.real
        try:
            output = core_operation(*tensors, *biases, real, *flatten(options))
        except KernelDoesNotFit as error:
            return self._sweep_separately(error, cell)
        run = self._run = CoreRun.of(output, _Reporter(cell))
        residual, pivot = run.summary.unbind()
        return CoreSweep(run.y, run.statistics, residual, pivot, run.converged)

    def _sweep_separately(self, error: KernelDoesNotFit, cell: BackwardStats) -> Sweep:
        """The same in separate operations, each of which may find that its kernels fit."""
        answer(error, self._layer.backend)
        f, _, stage = self._separate()
        assert isinstance(f, StructuredMap)
        swept = f.sweep(False, cell)
        self._parts = f, unfold(stage.gated(self._layer, swept.y), self._layer.num_heads)
        return swept

    def memory(
        self,
        y: Tensor,  # (b', t, p), the result of the sweep
    ) -> Tensor:  # (b', p, n)
        """h after the last token."""
        if self._parts is not None:
            return self._parts[0].memory(y)
        assert self._run is not None
        return self._run.h

    def attach(
        self,
        y_star: Tensor,  # (b', t, p)
        cell: BackwardStats,
    ) -> Tensor:  # (b', t, p)
        """y_star with the exact implicit gradient."""
        f = self._separate()[0]
        assert isinstance(f, StructuredMap)
        return f.attach(y_star, cell)
