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

from bedouin.kernels import direct
from bedouin.kernels.backend import Backend, has_values
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
    """y (b, t, d) -> F(y) for any mixer, as Picard, Anderson and Broyden require. `split` turns raw
    values (..., r) into the scan's inputs; `lengths` are the tokens before the padding of each
    sample, where the layer makes Delta 0, None without padding."""

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
        # computed when they are first read: kernels need none of them. functools.cached_property
        # has a lock in Python 3.11, which torch.compile cannot trace
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
                self.operands.check()
                self._wide = self.operands.wide()
        return self._wide

    @property
    def mixer_values(self) -> tuple[Tensor, ...]:
        """The values of `_named_values` in the dtype of A; none where a layout describes them."""
        if self.parameterization.layout is not None:
            return ()
        if self._mixer_values is None:
            dtype = self.operands.A.dtype
            with torch.enable_grad():  # as in `wide`
                named = _named_values(self.mixer, dtype)
                self._mixer_values = tuple(value.to(dtype) for _, value in named)
        return self._mixer_values

    def fed(self, y: Tensor) -> Tensor:  # (b, t, d) -> (b, t, r)
        """The raw values with the feedback W^y norm(y_{t-1}), at first that of the state."""
        return with_feedback(y, self.wide, self.parameterization)

    def __call__(self, y: Tensor) -> Tensor:  # (b, t, d) -> (b, t, d)
        """F(y)."""
        return self._without_padding(self._scan(y)[0])

    def _without_padding(self, v: Tensor) -> Tensor:  # (b, t, d) -> (b, t, d)
        """v, where the values of the padding are 0: solvers that combine all tokens see these."""
        return v if self.real is None else zero_outside(self.real, v)

    def memory(self, y: Tensor) -> Tensor:  # (b, t, d) -> (b, d, n)
        """h after the last token of y."""
        return self._scan(y)[1]

    def _scan(self, y: Tensor) -> tuple[Tensor, Tensor]:  # (b, t, d) -> (b, t, d), (b, d, n)
        x, (delta, B, C, mixer_raw) = self.wide.x, self.split(self.fed(y))
        if self.mixer_values:
            mixed = _call(_Mix(self.mixer), self.mixer_values, mixer_raw, x, y)
        else:
            mixed = self.mixer.mix(mixer_raw, x, y)
        return selective_scan(mixed, delta, self.operands.A, B, C, **self._scan_options())

    def _scan_options(self) -> dict[str, Any]:
        options = self.parameterization
        scales = {"input_scale": options.input_scale, "eigenvalues": options.eigenvalues}
        return {"h0": self.wide.start()[0], "backend": self.backend, **scales}


def _named_values(module: nn.Module, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """Names and values of the parameters, and of floating buffers of another dtype."""
    buffers = module.named_buffers()
    others = [(n, v) for n, v in buffers if v.is_floating_point() and v.dtype != dtype]
    return [*module.named_parameters(), *others]


def _call(module: nn.Module, values: Sequence[Tensor], raw: Tensor, *args: Tensor) -> Any:
    """module(raw, *args) with `values` in place of what `_named_values` lists."""
    names = (name for name, _ in _named_values(module, raw.dtype))
    named = dict(zip(names, values, strict=True))
    return torch.func.functional_call(module, named, (raw, *args))


class _Mix(nn.Module):
    """The method `mix` of a mixer as a module, which `functional_call` requires."""

    def __init__(self, mixer: ChannelMixer) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, raw: Tensor, x: Tensor, y: Tensor) -> Tensor:  # as ChannelMixer.mix
        return self.mixer.mix(raw, x, y)


class MixerBind:
    """raw (..., r) -> Delta, B, C, e, U, M, computed with the given values of the mixer. Not a
    method of the map, because an autograd graph refers to this object and the map to a tensor of
    that graph: Python's garbage collector never frees such a cycle."""

    def __init__(self, split: Callable[[Tensor], ScanInputs], mixer: ChannelMixer) -> None:
        self.split, self.mixer = split, mixer

    def __call__(self, raw: Tensor, *mixer_values: Tensor) -> Coefficients:  # (..., r), any shapes
        delta, B, C, mixer_raw = self.split(raw)
        values = mixer_values
        form = _call(self.mixer, values, mixer_raw) if values else self.mixer(mixer_raw)
        return Coefficients(delta, B, C, *WYForm(*form).of_channels(delta.shape[-1]))


class StructuredMap(FixedPointMap):
    """F with a mixer of the form (e, U, M), as Direct, Jacobi and the exact adjoint require."""

    _swept: direct.Sweep | None = None  # the last sweep

    @property
    def bind(self) -> MixerBind:
        """How raw values become coefficients, for the operations of kernels.direct."""
        return MixerBind(self.split, self.mixer)

    def _local(
        self, y: Tensor
    ) -> tuple[Tensor, Coefficients, Tensor | None, Tensor, direct.LocalFactors]:  # (b, t, d)
        """x, the coefficients for y, e or None for 0, sigma (b, t, d), and the factors."""
        x, found = self.wide.x, self.bind(self.fed(y), *self.mixer_values)
        diagonal = self.parameterization.diagonal(found.e)
        # except for the coupled scale, s has no state axis and does not depend on A, so that one
        # column of A is enough
        options = self.parameterization
        coupled = options.input_scale == "one_minus_decay"
        A = self.operands.A if coupled else self.operands.A[..., :1]
        if A.dim() == 3:
            A = per_sample(A, len(x)).unsqueeze(1)
        decay, s = discretize(found.delta, A, options.input_scale, options.eigenvalues)
        sigma, gap = direct.input_gain(s, found.B, found.C), None
        if options.layout is None:  # for mixers with e
            gap = direct.gain_gap(decay, found.B, found.C, options)
        factors = direct.factor_local(sigma, diagonal, found.U, found.M, gap)
        return x, found, diagonal, sigma, factors

    def sweep(self, unroll: bool, report: direct.ReportBackward | None = None) -> direct.Sweep:
        """The exact solve; `unroll` differentiates the loop instead of the fixed point."""
        options = self.operands, self.parameterization, self.bind, self.mixer_values
        if unroll:
            self._swept = direct.direct_sweep_reference(*options)
        else:
            self._swept = direct.direct_sweep(*options, report=report, backend=self.backend)
        return self._swept

    def memory(self, y: Tensor) -> Tensor:  # (b, t, d) -> (b, d, n)
        """h after the last token of y, without another scan for the result of the last sweep."""
        swept = self._swept
        return swept.h if swept is not None and swept.y is y else super().memory(y)

    def attach(self, y_star: Tensor, report: direct.ReportBackward | None = None) -> Tensor:
        """y_star (b, t, d) with the exact implicit gradient."""
        arguments = self.operands, self.parameterization, self.bind, self.mixer_values
        options: dict[str, Any] = {"report": report, "backend": self.backend}
        return direct.direct_sweep(*arguments, y_star=y_star, **options).y

    def fuse(self, y: Tensor, rule: IterationRule) -> Any:  # y: (b, t, d)
        """An iteration in kernels; None for a rule, mixer or tensors that these do not support.
        Raises ValueError if backend="triton" cannot run."""
        if not has_values(y):
            return None
        arguments = self.operands, y, self.parameterization, self.mixer_values, rule
        return fuse_iteration(*arguments, lengths=self.lengths, backend=self.backend)

    def block_solve(self, y: Tensor) -> tuple[Tensor, Tensor]:  # y: (b, t, d)
        """G(y) (b, t, d), the solutions of the local equations, and the least pivot (b,)."""
        x, (delta, B, C, _, U, M), diagonal, _, factors = self._local(y)
        mixed, A = mix_channels(x, y, diagonal, U, M), self.operands.A
        options = self._scan_options()
        p, _ = selective_scan(mixed, delta, A, B, C, exclusive=True, **options)
        # the pivots of padding are 1, the largest that a pivot is
        pivot = direct.smallest_pivot(factors).amin(1)
        return self._without_padding(direct.solve_local(p, factors, x)), pivot

    def block_transpose(self, y_star: Tensor) -> tuple[Callable[[Tensor], Tensor], ...]:
        """w -> L^T w and r -> (I - L^T)^-1 r, where L_t = diag(sigma_t) (I - Q_t) at y_star."""
        with torch.no_grad():
            _, found, diagonal, sigma, factors = self._local(y_star)

        def apply(w: Tensor) -> Tensor:
            return apply_complement_transposed(sigma * w, diagonal, found.U, found.M)

        def invert(r: Tensor) -> Tensor:
            return direct.solve_local_transposed(r, factors)

        return apply, invert


class MapOfHeads:
    """F of all heads, (b, t, H d) -> (b, t, H d), with their channels side by side. No head reads
    another: solvers take them apart, each a sample of the map `apart()`."""

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
