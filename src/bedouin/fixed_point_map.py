"""The map F of a layer on one input: y -> F(y), with the structure that solvers use.

    raw_t = raw^x_t + W^y norm(y_{t-1})            Delta, B, C and Q from raw_t
    x~_t  = Q_t (x_t - y_t) + y_t                  channel mixing
    h_t   = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T
    F(y)_t = h_t C_t

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bedouin.kernels.backend import Backend
from bedouin.kernels.direct import (
    ROUNDING,
    Coefficients,
    RawLayout,
    Sweep,
    SweepOptions,
    direct_sweep,
    direct_sweep_reference,
    factor_local,
    gain_gap,
    input_gain,
    project_feedback,
    smallest_pivot,
    solve_local,
    solve_local_transposed,
    start_tensors,
)
from bedouin.kernels.householder import apply_complement_transposed, mix_channels
from bedouin.kernels.iteration import (
    FusedIteration,
    IterationInputs,
    IterationRule,
    choose_iteration,
)
from bedouin.kernels.scan import Eigenvalues, InputScale, discretize, selective_scan
from bedouin.mixers import ChannelMixer
from bedouin.solvers.convergence import relative_residual
from bedouin.solvers.solution import BackwardStats, SolveStats, can_read_device


class ScanInputs(NamedTuple):
    """What the scan of a token needs besides x~, and the raw values of the mixer."""

    delta: Tensor  # (..., d)
    B: Tensor  # (..., n)
    C: Tensor  # (..., n)
    mixer_raw: Tensor  # (..., raw size of the mixer)


@dataclass(frozen=True)
class MapInputs:
    """Everything that does not change while a layer looks for its fixed point.

    x and raw may have a lower dtype than A, whose dtype the state and the iterates have.
    """

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r), from x
    W_y: Tensor | None  # (r, d)
    A: Tensor  # (d, n)
    h0: Tensor | None  # (b, d, n); None: zeros
    y0: Tensor | None  # (b, d); None: zeros


class FixedPointMap:
    """y (b, t, d) -> F(y) for any mixer: what Picard, Anderson and Broyden need."""

    def __init__(
        self,
        inputs: MapInputs,
        mixer: ChannelMixer,
        split: Callable[[Tensor], ScanInputs],
        *,
        input_scale: InputScale,
        eigenvalues: Eigenvalues,
        feedback_norm_eps: float | None,
        backend: Backend,
        layout: RawLayout | None = None,
    ) -> None:
        self.inputs, self.mixer, self.split, self.backend = inputs, mixer, split, backend
        self.input_scale, self.eigenvalues = input_scale, eigenvalues
        self.feedback_norm_eps, self.layout = feedback_norm_eps, layout
        self._wide: tuple[Tensor, Tensor] | None = None
        self._mixer_values: tuple[Tensor, ...] | None = None

    @property
    def start(self) -> tuple[Tensor, Tensor]:
        """h0 and y0 as tensors, None replaced by zeros."""
        i = self.inputs
        return start_tensors(i.h0, i.y0, i.x, i.A)

    @property
    def wide(self) -> tuple[Tensor, Tensor]:
        """x and raw in the dtype of A, for plain torch; the kernels read them as they are."""
        if self._wide is None:
            inputs = self.inputs
            # kept for calls that record gradients, though the first may record none
            with torch.enable_grad():
                self._wide = inputs.x.to(inputs.A.dtype), inputs.raw.to(inputs.A.dtype)
        return self._wide

    @property
    def mixer_values(self) -> tuple[Tensor, ...]:
        """`_named_values` of the mixer in the dtype of A: what they meet has it."""
        if self._mixer_values is None:
            dtype = self.inputs.A.dtype
            # as in `wide`
            with torch.enable_grad():
                named = _named_values(self.mixer, dtype)
                self._mixer_values = tuple(value.to(dtype) for _, value in named)
        return self._mixer_values

    def _mix(self, raw: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """x~."""
        if not self.mixer_values:
            return self.mixer.mix(raw, x, y)
        mixed: Tensor = _call(_Mix(self.mixer), self.mixer_values, raw, x, y)
        return mixed

    def raw(self, y: Tensor) -> Tensor:
        """raw^x + W^y norm(y_{t-1}) (b, t, r); the first token sees the incoming state."""
        inputs, (_, raw) = self.inputs, self.wide
        if inputs.W_y is None or y.shape[1] == 0:
            return raw
        before = torch.cat([self.start[1].unsqueeze(1), y[:, :-1]], dim=1)
        return raw + project_feedback(before, inputs.W_y, self.feedback_norm_eps)

    def evaluate(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """F(y) and the memory after the last token."""
        x, _ = self.wide
        delta, B, C, mixer_raw = self.split(self.raw(y))
        mixed = self._mix(mixer_raw, x, y)
        return self._scan(mixed, delta, B, C, exclusive=False)

    def __call__(self, y: Tensor) -> Tensor:
        return self.evaluate(y)[0]

    def memory(self, y: Tensor) -> Tensor:
        """h (b, d, n) after the last token of y."""
        return self.evaluate(y)[1]

    def _scan(
        self, mixed: Tensor, delta: Tensor, B: Tensor, C: Tensor, *, exclusive: bool
    ) -> tuple[Tensor, Tensor]:
        return selective_scan(
            mixed,
            delta,
            self.inputs.A,
            B,
            C,
            self.start[0],
            input_scale=self.input_scale,
            eigenvalues=self.eigenvalues,
            exclusive=exclusive,
            backend=self.backend,
        )


def _named_values(module: nn.Module, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """Parameters, and buffers that have another floating dtype than `dtype`: others stay."""
    buffers = module.named_buffers()
    others = [(n, v) for n, v in buffers if v.is_floating_point() and v.dtype != dtype]
    return [*module.named_parameters(), *others]


def _call(module: nn.Module, values: Sequence[Tensor], raw: Tensor, *args: Tensor) -> Any:
    """module(raw, *args) with `values` for what `_named_values` lists."""
    names = (name for name, _ in _named_values(module, raw.dtype))
    named = dict(zip(names, values, strict=True))
    return torch.func.functional_call(module, named, (raw, *args))


class _Mix(nn.Module):
    """The method `mix` of a mixer as a module, which functional calls need."""

    def __init__(self, mixer: ChannelMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, raw: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.mixer.mix(raw, x, y)


class Bind:
    """raw (..., r) -> Delta, B, C, e, U, M, with the mixer's parameters as they are given.

    Not a method of the map: an autograd graph holds this object, the map holds a tensor of that
    graph, and a circle through a graph is never collected.
    """

    def __init__(self, split: Callable[[Tensor], ScanInputs], mixer: ChannelMixer) -> None:
        self.split, self.mixer = split, mixer

    def __call__(self, raw: Tensor, *mixer_values: Tensor) -> Coefficients:
        delta, B, C, mixer_raw = self.split(raw)
        if not mixer_values:
            return Coefficients(delta, B, C, *self.mixer(mixer_raw))
        return Coefficients(delta, B, C, *_call(self.mixer, mixer_values, mixer_raw))


def _reverse_stats(defect: Tensor, scale: Tensor) -> SolveStats:
    # the reverse sweep meets the last token first
    with torch.no_grad():
        residual = relative_residual(defect.flip(1), scale.flip(1))
        converged = residual < ROUNDING * torch.finfo(residual.dtype).eps
        return SolveStats(torch.ones_like(residual, dtype=torch.int64), residual, converged)


class StructuredMap(FixedPointMap):
    """F with a mixer of the form (e, U, M): Direct, Jacobi and the exact adjoint work on it."""

    _swept: Sweep | None = None

    def coefficients(self, y: Tensor) -> Coefficients:
        """Delta, B, C, e, U, M of all tokens for the feedback that y gives."""
        return Bind(self.split, self.mixer)(self.raw(y), *self.mixer_values)

    @property
    def _sweep_arguments(
        self,
    ) -> tuple[
        Tensor,
        Tensor,
        Tensor | None,
        Tensor,
        Tensor | None,
        Tensor | None,
        tuple[Tensor, ...],
        SweepOptions,
    ]:
        i = self.inputs
        return i.x, i.raw, i.W_y, i.A, i.h0, i.y0, self.mixer_values, self._options

    @property
    def _options(self) -> SweepOptions:
        return SweepOptions(
            Bind(self.split, self.mixer),
            self.input_scale,
            self.eigenvalues,
            self.feedback_norm_eps,
            self.layout,
        )

    def sweep(self, unroll: bool, cell: BackwardStats) -> Sweep:
        """The exact solve; `unroll` differentiates the loop instead of the fixed point."""
        if unroll:
            _, _, W_y, A, _, _, parameters, options = self._sweep_arguments
            operands = (*self.wide, W_y, A, *self.start)
            self._swept = direct_sweep_reference(*operands, parameters, options)
        else:
            report = self._reporter(cell)
            self._swept = direct_sweep(*self._sweep_arguments, report=report, backend=self.backend)
        return self._swept

    def memory(self, y: Tensor) -> Tensor:
        """As for any map, without a second pass where the last sweep gave y."""
        if self._swept is not None and self._swept.y is y:
            return self._swept.h
        return super().memory(y)

    def attach(self, y_star: Tensor, cell: BackwardStats) -> Tensor:
        """y_star with the exact implicit gradient."""
        report = self._reporter(cell)
        arguments = self._sweep_arguments
        return direct_sweep(*arguments, y_star=y_star, report=report, backend=self.backend).y

    def _reporter(self, cell: BackwardStats) -> Callable[[Tensor, Tensor], None]:
        def report(defect: Tensor, scale: Tensor) -> None:
            if can_read_device(defect):
                cell.defer(partial(_reverse_stats, defect, scale))

        return report

    def fuse(self, y: Tensor, rule: IterationRule) -> FusedIteration | None:
        """Steps on the device alone where the kernels cover this map (HouseholderProduct) and the
        rule; None: the plain loop. Raises ValueError where backend="triton" cannot run them."""
        x, raw, W_y, A, _, _, parameters, options = self._sweep_arguments
        operands = IterationInputs(x, raw, W_y, A, *self.start)
        if choose_iteration(self.backend, operands, y, parameters, options, rule) == "reference":
            return None
        return FusedIteration(operands, y, options, rule)

    def block_solve(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """G(y): each token's local equation solved from what memory and feedback hold in y."""
        x, _ = self.wide
        delta, B, C, e, U, M = self.coefficients(y)
        diagonal = self._options.diagonal(e)
        mixed = mix_channels(x, y, diagonal, U, M)
        p, _ = self._scan(mixed, delta, B, C, exclusive=True)
        sigma, gap = self._input_gain(delta, B, C)
        factors = factor_local(sigma, diagonal, U, M, gap)
        return solve_local(p, factors, x), smallest_pivot(factors).amin(1)

    def block_transpose(self, y_star: Tensor) -> tuple[Callable[[Tensor], Tensor], ...]:
        """(w -> L^T w, r -> (I - L^T)^-1 r), L_t = diag(sigma_t)(I - Q_t), at y_star."""
        with torch.no_grad():
            delta, B, C, e, U, M = self.coefficients(y_star)
            diagonal = self._options.diagonal(e)
            sigma, gap = self._input_gain(delta, B, C)
            factors = factor_local(sigma, diagonal, U, M, gap)

        def apply(w: Tensor) -> Tensor:
            return apply_complement_transposed(sigma * w, diagonal, U, M)

        def invert(r: Tensor) -> Tensor:
            return solve_local_transposed(r, factors)

        return apply, invert

    def _input_gain(self, delta: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor | None]:
        """sigma, and 1 - sigma as `gain_gap` has it, for mixers with e."""
        # but for the coupled scale s has no state axis: A does not enter, so spare the decay
        coupled = self.input_scale == "one_minus_decay"
        A = self.inputs.A if coupled else self.inputs.A[:, :1]
        decay, s = discretize(delta, A, self.input_scale, self.eigenvalues)
        options = self._options
        gap = gain_gap(decay, B, C, options) if options.layout is None else None
        return input_gain(s, B, C), gap
