"""The map F of a layer on one input: y -> F(y), with the structure that solvers use.

    raw_t  = raw^x_t + W^y norm(y_{t-1})           Delta, B, C and Q from raw_t
    x~_t   = Q_t (x_t - y_t) + y_t                 channel mixing
    h_t    = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T
    F(y)_t = h_t C_t

Letters: b batch, t time, d channels, n state per channel, r raw values. A layer of several heads
folds them into the batch (layers/heads.py); d are then the channels of a head.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bedouin.kernels.backend import Backend, has_values
from bedouin.kernels.direct import (
    LocalFactors,
    ReportBackward,
    Sweep,
    direct_sweep,
    direct_sweep_reference,
    factor_local,
    gain_gap,
    input_gain,
    smallest_pivot,
    solve_local,
    solve_local_transposed,
)
from bedouin.kernels.feedback import with_feedback
from bedouin.kernels.heads import fold, per_sample, unfold
from bedouin.kernels.householder import apply_complement_transposed, mix_channels
from bedouin.kernels.iteration import IterationRule, fuse_iteration
from bedouin.kernels.operands import Coefficients, Operands, Parameterization
from bedouin.kernels.scan import discretize, selective_scan
from bedouin.layers.mixers import ChannelMixer, WYForm
from bedouin.packing import tokens_before, zero_outside


class ScanInputs(NamedTuple):
    """The inputs of the scan other than x~, and the raw values of the mixer."""

    delta: Tensor  # (..., d)
    B: Tensor  # (..., n)
    C: Tensor  # (..., n)
    mixer_raw: Tensor  # (..., raw size of the mixer)


class FixedPointMap:
    """y (b, t, d) -> F(y) for any mixer, as Picard, Anderson and Broyden require.

    `split` turns raw values (..., r) into the scan's inputs. `lengths` are the tokens before the
    padding of each sample, None without padding, in which the layer makes Delta 0.
    """

    def __init__(
        self,
        operands: Operands,
        parameterization: Parameterization,
        mixer: ChannelMixer,
        split: Callable[[Tensor], ScanInputs],
        backend: Backend,
        lengths: Tensor | None = None,  # (b,)
    ) -> None:
        self.operands, self.parameterization = operands, parameterization
        self.mixer, self.split, self.backend = mixer, split, backend
        self.lengths = lengths
        # these are computed when they are first read: the kernels need none of them
        self._real: Tensor | None = None
        self._wide: Operands | None = None
        self._mixer_values: tuple[Tensor, ...] | None = None

    def apart(self) -> "FixedPointMap":
        """The map of which each head is a sample."""
        return self

    @property
    def real(self) -> Tensor | None:  # (b, t)
        """Which tokens come before the padding; None: all."""
        if self._real is None and self.lengths is not None:
            self._real = tokens_before(self.lengths, self.operands.x.shape[1])
        return self._real

    @property
    def wide(self) -> Operands:
        """`Operands.wide` for plain torch; the kernels read `operands` directly."""
        if self._wide is None:
            # cached with its graph, because later calls may record gradients if the first does not
            with torch.enable_grad():
                self.operands.check(self.parameterization.feeds_x)
                self._wide = self.operands.wide()
        return self._wide

    @property
    def mixer_values(self) -> tuple[Tensor, ...]:
        """The values of `_named_values` for the mixer, in the dtype of A; none where a layout
        describes it."""
        if self.parameterization.layout is not None:
            return ()
        if self._mixer_values is None:
            dtype = self.operands.A.dtype
            # cached with its graph, for the reason given in `wide`
            with torch.enable_grad():
                named = _named_values(self.mixer, dtype)
                self._mixer_values = tuple(value.to(dtype) for _, value in named)
        return self._mixer_values

    def fed(self, y: Tensor) -> tuple[Tensor, Tensor]:  # (b, t, d) -> (b, t, d), (b, t, r)
        """x and the raw values with the feedback W^y norm(y_{t-1}), where the y before the first
        token is that of the state."""
        return with_feedback(y, self.wide, self.parameterization)

    def __call__(self, y: Tensor) -> Tensor:  # (b, t, d) -> (b, t, d)
        """F(y)."""
        tensors, options = self._scan_arguments(y)
        return self._without_padding(selective_scan(*tensors, **options)[0])

    def _without_padding(self, v: Tensor) -> Tensor:  # (b, t, d) -> (b, t, d)
        """v, where the values of the padding are 0: solvers that combine all tokens see these."""
        return v if self.real is None else zero_outside(self.real, v)

    def memory(self, y: Tensor) -> Tensor:  # (b, t, d) -> (b, d, n)
        """h after the last token of y."""
        tensors, options = self._scan_arguments(y)
        return selective_scan(*tensors, **options)[1]

    def _scan_arguments(self, y: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The arguments of the scan whose results are F(y) and the memory, for y (b, t, d)."""
        x, raw = self.fed(y)
        delta, B, C, mixer_raw = self.split(raw)
        mixed = self._mix(mixer_raw, x, y)
        return (mixed, delta, self.operands.A, B, C), self._scan_options()

    def _scan_options(self) -> dict[str, Any]:
        return {
            "h0": self.wide.start()[0],
            "input_scale": self.parameterization.input_scale,
            "eigenvalues": self.parameterization.eigenvalues,
            "backend": self.backend,
        }

    def _mix(
        self, raw: Tensor, x: Tensor, y: Tensor
    ) -> Tensor:  # (b, t, raw size of the mixer), (b, t, d), (b, t, d) -> (b, t, d)
        """x~."""
        if not self.mixer_values:
            return self.mixer.mix(raw, x, y)
        mixed: Tensor = _call(_Mix(self.mixer), self.mixer_values, raw, x, y)
        return mixed


def _named_values(module: nn.Module, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """Names and values of the parameters, and of the buffers of a floating dtype other than
    `dtype`; the other buffers need no conversion."""
    buffers = module.named_buffers()
    others = [(n, v) for n, v in buffers if v.is_floating_point() and v.dtype != dtype]
    return [*module.named_parameters(), *others]


def _call(
    module: nn.Module,
    values: Sequence[Tensor],  # any shapes
    raw: Tensor,  # (..., raw size of the mixer)
    *args: Tensor,  # (..., d)
) -> Any:
    """module(raw, *args) with `values` in place of what `_named_values` lists."""
    names = (name for name, _ in _named_values(module, raw.dtype))
    named = dict(zip(names, values, strict=True))
    return torch.func.functional_call(module, named, (raw, *args))


class _Mix(nn.Module):
    """The method `mix` of a mixer as a module, which `functional_call` requires."""

    def __init__(self, mixer: ChannelMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(
        self, raw: Tensor, x: Tensor, y: Tensor
    ) -> Tensor:  # (b, t, raw size of the mixer), (b, t, d), (b, t, d) -> (b, t, d)
        return self.mixer.mix(raw, x, y)


class MixerBind:
    """raw (..., r) -> Delta, B, C, e, U, M, computed with the given values of the mixer.

    Not a method of the map, because an autograd graph refers to this object and the map refers to a
    tensor of that graph: Python's garbage collector never frees a cycle through an autograd graph.
    """

    def __init__(self, split: Callable[[Tensor], ScanInputs], mixer: ChannelMixer) -> None:
        self.split, self.mixer = split, mixer

    def __call__(
        self,
        raw: Tensor,  # (..., r)
        *mixer_values: Tensor,  # any shapes
    ) -> Coefficients:
        delta, B, C, mixer_raw = self.split(raw)
        values = mixer_values
        form = _call(self.mixer, values, mixer_raw) if values else self.mixer(mixer_raw)
        no_erase = raw[..., :0]
        return Coefficients(delta, B, C, *WYForm(*form).of_channels(delta.shape[-1]), no_erase)


class StructuredMap(FixedPointMap):
    """F with a mixer of the form (e, U, M), as Direct, Jacobi and the exact adjoint require."""

    _swept: Sweep | None = None
    """The last sweep."""

    @property
    def bind(self) -> MixerBind:
        """How raw values become coefficients, for the operations of kernels.direct."""
        return MixerBind(self.split, self.mixer)

    def _local(
        self, y: Tensor
    ) -> tuple[Tensor, Coefficients, Tensor | None, Tensor, LocalFactors]:  # (b, t, d)
        """x and the coefficients of all tokens for the feedback that y gives, e or None where it is
        0, sigma (b, t, d), and the factors of the local equations."""
        x, raw = self.fed(y)
        found = self.bind(raw, *self.mixer_values)
        diagonal = self.parameterization.diagonal(found.e)
        sigma, gap = self._input_gain(found.delta, found.B, found.C)
        return x, found, diagonal, sigma, factor_local(sigma, diagonal, found.U, found.M, gap)

    def sweep(self, unroll: bool, report: ReportBackward | None = None) -> Sweep:
        """The exact solve; `unroll` differentiates the loop instead of the fixed point."""
        options = self.operands, self.parameterization, self.bind, self.mixer_values
        if unroll:
            self._swept = direct_sweep_reference(*options)
        else:
            self._swept = direct_sweep(*options, report=report, backend=self.backend)
        return self._swept

    def memory(self, y: Tensor) -> Tensor:  # (b, t, d) -> (b, d, n)
        """h after the last token of y, without another scan if y is the result of the last
        sweep."""
        swept = self._swept
        return swept.h if swept is not None and swept.y is y else super().memory(y)

    def attach(
        self, y_star: Tensor, report: ReportBackward | None = None
    ) -> Tensor:  # (b, t, d) -> (b, t, d)
        """y_star with the exact implicit gradient."""
        arguments = self.operands, self.parameterization, self.bind, self.mixer_values
        options: dict[str, Any] = {"report": report, "backend": self.backend}
        return direct_sweep(*arguments, y_star=y_star, **options).y

    def fuse(self, y: Tensor, rule: IterationRule) -> Any:  # y: (b, t, d)
        """An iteration in kernels, or None if these do not support the rule or this map, whose
        mixer must be a HouseholderProduct, and for tensors without values. Raises ValueError if
        backend="triton" cannot run."""
        if not has_values(y):
            return None
        arguments = self.operands, y, self.parameterization, self.mixer_values, rule
        return fuse_iteration(*arguments, lengths=self.lengths, backend=self.backend)

    def block_solve(self, y: Tensor) -> tuple[Tensor, Tensor]:  # y: (b, t, d)
        """G(y) (b, t, d), and the smallest pivot (b,). G solves the local equation of each token,
        with its memory and its feedback computed from y."""
        x, (delta, B, C, _, U, M, _), diagonal, _, factors = self._local(y)
        mixed, A = mix_channels(x, y, diagonal, U, M), self.operands.A
        options = self._scan_options()
        p, _ = selective_scan(mixed, delta, A, B, C, exclusive=True, **options)
        # the pivots of padding are 1, the largest that a pivot is
        pivot = smallest_pivot(factors).amin(1)
        return self._without_padding(solve_local(p, factors, x)), pivot

    def block_transpose(self, y_star: Tensor) -> tuple[Callable[[Tensor], Tensor], ...]:
        """The functions w -> L^T w and r -> (I - L^T)^-1 r of values like y_star (b, t, d),
        L_t = diag(sigma_t) (I - Q_t) at y_star."""
        with torch.no_grad():
            _, found, diagonal, sigma, factors = self._local(y_star)

        def apply(w: Tensor) -> Tensor:
            return apply_complement_transposed(sigma * w, diagonal, found.U, found.M)

        def invert(r: Tensor) -> Tensor:
            return solve_local_transposed(r, factors)

        return apply, invert

    def _input_gain(
        self, delta: Tensor, B: Tensor, C: Tensor
    ) -> tuple[Tensor, Tensor | None]:  # (b, t, d), (b, t, n), (b, t, n)
        """sigma (b, t, d), and for mixers with e also 1 - sigma (b, t, d) from `gain_gap`."""
        options = self.parameterization
        # except for the coupled scale, s has no state axis and does not depend on A, so that one
        # column of A is enough
        coupled = options.input_scale == "one_minus_decay"
        A = self.operands.A if coupled else self.operands.A[..., :1]
        if A.dim() == 3:
            A = per_sample(A, delta.shape[0]).unsqueeze(1)
        decay, s = discretize(delta, A, options.input_scale, options.eigenvalues)
        gap = gain_gap(decay, B, C, options) if options.layout is None else None
        return input_gain(s, B, C), gap


class MapOfHeads:
    """F of all heads, (b, t, H d) -> (b, t, H d), with their channels side by side.

    No head reads another, so that solvers take them apart: each is a sample of the map `apart()`.
    """

    def __init__(self, of_samples: FixedPointMap, num_heads: int) -> None:
        self.of_samples, self.parts = of_samples, num_heads

    def __call__(self, y: Tensor) -> Tensor:  # (b, t, H d) -> (b, t, H d)
        """F(y)."""
        return self.unfolded(self.of_samples(self.folded(y)))

    def apart(self) -> FixedPointMap:
        return self.of_samples

    def folded(self, y: Tensor) -> Tensor:  # (b, t, H d) -> (H b, t, d)
        """y of each head."""
        return fold(y, self.parts)

    def unfolded(self, y: Tensor) -> Tensor:  # (H b, t, d) -> (b, t, H d)
        """The inverse of `folded`."""
        return unfold(y, self.parts)


def of_all_heads(f: FixedPointMap, num_heads: int) -> FixedPointMap | MapOfHeads:
    """The map of a layer of so many heads, from that of its folded samples."""
    return f if num_heads == 1 else MapOfHeads(f, num_heads)
