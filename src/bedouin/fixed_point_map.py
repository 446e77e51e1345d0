"""The map F of a layer on one input: y -> F(y), with the structure that solvers use.

    raw_t = raw^x_t + W^y norm(y_{t-1})            Delta, B, C, Q and beta^e from raw_t
    x~_t  = Q_t (x_t - y_t) + y_t                  channel mixing
    h_t   = (lambda_t * h_{t-1}) (I - beta^e_t B_t B_t^T) + (s_t * x~_t) B_t^T
    F(y)_t = h_t C_t

Letters: b batch, t time, d channels, n state per channel, r raw values. A layer of several heads
folds them into the batch (bedouin.heads); d are then the channels of a head.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
from bedouin.kernels.direct.layout import activate_delta
from bedouin.kernels.feedback import reads_all_heads, with_feedback
from bedouin.kernels.heads import count_heads, fold, per_sample, unfold
from bedouin.kernels.householder import apply_complement_transposed, mix_channels, unit
from bedouin.kernels.iteration import IterationRule, fuse_iteration
from bedouin.kernels.operands import Coefficients, Operands, Parameterization, RawLayout
from bedouin.kernels.scan import discretize, selective_scan
from bedouin.mixers import ChannelMixer, WYForm
from bedouin.packing import tokens_before, zero_outside
from bedouin.staged_sweep import Stage, sweep_in_stages, with_known_feedback


class ScanInputs(NamedTuple):
    """The inputs of the scan other than x~, and the raw values of the mixer."""

    delta: Tensor  # (..., d)
    B: Tensor  # (..., n)
    C: Tensor  # (..., n)
    mixer_raw: Tensor  # (..., raw size of the mixer)
    erase: Tensor  # (..., 1), beta^e; (..., 0) where no memory is erased


def split_by_layout(
    layout: RawLayout,
    sizes: tuple[int, int],  # d, n
    raw: Tensor,  # (..., r)
) -> ScanInputs:
    """The raw values that the layout describes; those between C and beta^e are left to the mixer,
    whatever reflections the layout has."""
    d, n = sizes
    before = [d, n, n] if layout.selective else [d]
    last = 1 if layout.erase else 0
    delta, *BC, mixer_raw, erase = raw.split(
        [*before, raw.shape[-1] - sum(before) - last, last], -1
    )
    ones = torch.ones_like(raw[..., :1])
    B, C = (unit(v) for v in BC) if BC else (ones, ones)
    erase = layout.erase * torch.sigmoid(erase)
    return ScanInputs(activate_delta(layout, delta), B, C, mixer_raw, erase)


class FixedPointMap:
    """y (b, t, d) -> F(y) for any mixer, as Picard, Anderson and Broyden require.

    `split` turns raw values (..., r) into the scan's inputs. `lengths` are the numbers of tokens
    before the padding of each sample; None: there is no padding. The layer makes Delta 0 in the
    padding, so that the memory passes through it. With `joined` heads, for feedback_scope="layer",
    y and F(y) are (b / joined, t, joined d), the channels of the heads side by side. The W^y of
    `operands` is that of the first `fed_heads` heads; None: all have feedback.
    """

    def __init__(
        self,
        operands: Operands,
        parameterization: Parameterization,
        mixer: ChannelMixer,
        split: Callable[[Tensor], ScanInputs],
        backend: Backend,
        lengths: Tensor | None = None,  # (b,)
        joined: int = 1,
        fed_heads: int | None = None,
    ) -> None:
        self.operands, self.parameterization = operands, parameterization
        self.mixer, self.split, self.backend = mixer, split, backend
        self.lengths, self.joined, self.fed_heads = lengths, joined, fed_heads
        # these are computed when they are first read: the kernels need none of them
        self._real: Tensor | None = None
        self._wide: Operands | None = None
        self._mixer_values: tuple[Tensor, ...] | None = None

    def joining(self, num_heads: int) -> Self:
        """The same map, with so many heads joined."""
        found = copy.copy(self)
        found.joined, found._real = num_heads, None
        return found

    @property
    def parts(self) -> int:
        """The joined heads, if none reads another, so that solvers take them apart."""
        W_y = self.operands.W_y
        cross = W_y is not None and reads_all_heads(W_y, self.operands.A.shape[-2])
        return 1 if cross else self.joined

    def apart(self) -> Self:
        """The map of which each head is a sample."""
        return self.joining(1)

    @property
    def real(self) -> Tensor | None:  # (b / joined, t)
        """Which tokens come before the padding; None: all."""
        if self._real is None and self.lengths is not None:
            b, t = self.operands.x.shape[:2]
            self._real = tokens_before(self.lengths[: b // self.joined], t)
        return self._real

    @property
    def whole(self) -> Operands:
        """The operands, with rows of zeros in W^y for heads without feedback."""
        W_y = self.operands.W_y
        if W_y is None or self.fed_heads is None:
            return self.operands
        without = count_heads(self.operands.A) - self.fed_heads
        return self.operands._replace(W_y=F.pad(W_y, (0, 0, 0, 0, 0, without)))

    @property
    def wide(self) -> Operands:
        """`Operands.wide` of `whole`, for plain torch; the kernels read `operands` directly."""
        if self._wide is None:
            # cached with its graph, because later calls may record gradients if the first does not
            with torch.enable_grad():
                whole = self.whole
                whole.check(self.parameterization.feeds_x)
                self._wide = whole.wide()
        return self._wide

    @property
    def mixer_values(self) -> tuple[Tensor, ...]:
        """The values of `_named_values` for the mixer, cast to the dtype of A; none of a mixer that
        a layout describes, of which only the raw values enter."""
        if self.parameterization.layout is not None:
            return ()
        if self._mixer_values is None:
            dtype = self.operands.A.dtype
            # cached with its graph, for the reason given in `wide`
            with torch.enable_grad():
                named = _named_values(self.mixer, dtype)
                self._mixer_values = tuple(value.to(dtype) for _, value in named)
        return self._mixer_values

    def fed(
        self,
        y: Tensor,  # (b, t, d)
    ) -> tuple[Tensor, Tensor]:  # (b, t, d), (b, t, r)
        """x and the raw values with the feedback W^y norm(y_{t-1}), where the y before the first
        token is that of the state."""
        return with_feedback(y, self.wide, self.parameterization)

    def __call__(self, y: Tensor) -> Tensor:  # of joined heads -> of joined heads
        """F(y)."""
        tensors, options = self._scan_arguments(fold(y, self.joined))
        return self._unfolded(selective_scan(*tensors, **options)[0])

    def _unfolded(self, v: Tensor) -> Tensor:  # (b, t, d) -> of joined heads
        """v, where the values of the padding are 0: solvers that combine all tokens see these."""
        v = unfold(v, self.joined)
        return v if self.real is None else zero_outside(self.real, v)

    def folded(self, y: Tensor) -> Tensor:  # of joined heads -> (b, t, d)
        """y of each head."""
        return fold(y, self.joined)

    def unfolded(self, y: Tensor) -> Tensor:  # (b, t, d) -> of joined heads
        """The inverse of `folded`."""
        return unfold(y, self.joined)

    def memory(self, y: Tensor) -> Tensor:  # of joined heads -> (b, d, n)
        """h after the last token of y."""
        tensors, options = self._scan_arguments(fold(y, self.joined))
        return selective_scan(*tensors, **options)[1]

    def _scan_arguments(self, y: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The arguments of the scan whose results are F(y) and the memory, for y (b, t, d)."""
        x, raw = self.fed(y)
        delta, B, C, mixer_raw, erase = self.split(raw)
        mixed = self._mix(mixer_raw, x, y)
        return (mixed, delta, self.operands.A, B, C), self._scan_options(erase)

    def _scan_options(self, erase: Tensor) -> dict[str, Any]:  # erase: (b, t, 1) or (b, t, 0)
        return {
            "h0": self.wide.start()[0],
            "input_scale": self.parameterization.input_scale,
            "eigenvalues": self.parameterization.eigenvalues,
            "erase": erase if erase.shape[-1] else None,
            "backend": self.backend,
        }

    def _mix(
        self,
        raw: Tensor,  # (b, t, raw size of the mixer)
        x: Tensor,  # (b, t, d)
        y: Tensor,  # (b, t, d)
    ) -> Tensor:  # (b, t, d)
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
        self,
        raw: Tensor,  # (b, t, raw size of the mixer)
        x: Tensor,  # (b, t, d)
        y: Tensor,  # (b, t, d)
    ) -> Tensor:  # (b, t, d)
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
        delta, B, C, mixer_raw, erase = self.split(raw)
        values = mixer_values
        form = _call(self.mixer, values, mixer_raw) if values else self.mixer(mixer_raw)
        return Coefficients(delta, B, C, *WYForm(*form).of_channels(delta.shape[-1]), erase)


def _of_stages(
    report: ReportBackward,
    samples: Mapping[Stage, int],
) -> dict[Stage, ReportBackward]:
    """Reports of stages with so many samples, each of which reports all of them; a stage whose
    reverse sweep has not run counts as one without defects."""
    found: dict[Stage, tuple[Tensor, Tensor]] = {}

    def report_stage(stage: Stage, defect: Tensor, scale: Tensor) -> None:  # (its b, t) each
        found[stage] = defect, scale
        zeros = {name: (defect.new_zeros(b, defect.shape[1]),) * 2 for name, b in samples.items()}
        report(*map(torch.cat, zip(*(zeros | found).values(), strict=True)))

    return {stage: partial(report_stage, stage) for stage in samples}


class StructuredMap(FixedPointMap):
    """F with a mixer of the form (e, U, M), as Direct, Jacobi and the exact adjoint require."""

    _swept: Sweep | None = None
    """The last sweep, of each head as samples of its own."""
    _y: Tensor | None = None
    """Its result, of joined heads."""

    @property
    def bind(self) -> MixerBind:
        """How raw values become coefficients, for the operations of kernels.direct."""
        return MixerBind(self.split, self.mixer)

    def _local(
        self,
        y: Tensor,  # (b, t, d)
    ) -> tuple[Tensor, Coefficients, Tensor | None, Tensor, LocalFactors]:
        """x and the coefficients of all tokens for the feedback that y gives, e or None where it is
        0, sigma (b, t, d), and the factors of the local equations."""
        x, raw = self.fed(y)
        found = self.bind(raw, *self.mixer_values)
        diagonal = self.parameterization.diagonal(found.e)
        sigma, gap = self._input_gain(found.delta, found.B, found.C)
        return x, found, diagonal, sigma, factor_local(sigma, diagonal, found.U, found.M, gap)

    def sweep(self, unroll: bool, report: ReportBackward | None = None) -> Sweep:
        """The exact solve; `unroll` differentiates the loop instead of the fixed point."""
        operands, fed_heads = self.operands, self.fed_heads
        if operands.x.shape[1] <= 1 and (self.joined > 1 or fed_heads is not None):
            call = self.parameterization, fed_heads, self.backend
            operands, fed_heads = with_known_feedback(operands, *call), None
        options = self.parameterization, self.bind, self.mixer_values
        report = self._of_samples(report)
        if fed_heads is not None and operands.W_y is not None:
            swept = self._sweep_stages(fed_heads, unroll, report)
        elif unroll:
            swept = direct_sweep_reference(operands, *options)
        else:
            swept = direct_sweep(operands, *options, report=report, backend=self.backend)
        self._swept, self._y = swept, unfold(swept.y, self.joined)
        if self.joined == 1:
            return swept
        names = "defect", "scale", "magnitude"
        largest = {name: self._by_head(getattr(swept, name)).amax(0) for name in names}
        # NaN after a singular token must not hide its pivot
        pivot = self._by_head(swept.pivot.nan_to_num(nan=torch.inf)).amin(0)
        return swept._replace(y=self._y, pivot=pivot, **largest)

    def _of_samples(self, report: ReportBackward | None) -> ReportBackward | None:
        """A report of (b, t) for that of joined heads, of which each token has the largest
        norms."""
        if report is None or self.joined == 1:
            return report
        by_head, whole = self._by_head, report
        return lambda *norms: whole(*(by_head(v).amax(0) for v in norms))

    def _sweep_stages(self, fed_heads: int, unroll: bool, report: ReportBackward | None) -> Sweep:
        """The sweep of heads of which the first have feedback."""
        options = self.parameterization, self.bind, self.mixer_values
        b = self.operands.x.shape[0]
        fed = fed_heads * (b // count_heads(self.operands.A))
        reports = {} if report is None else _of_stages(report, {"fed": fed, "others": b - fed})

        def sweep_once(stage: Stage, part: Operands) -> Sweep:
            if unroll:
                return direct_sweep_reference(part, *options)
            report = reports.get(stage)
            return direct_sweep(part, *options, report=report, backend=self.backend)

        call = self.operands, self.parameterization, fed_heads, self.backend
        return sweep_in_stages(sweep_once, *call)

    def _by_head(self, v: Tensor) -> Tensor:  # (b, ...) -> (joined, b / joined, ...)
        return v.reshape(self.joined, v.shape[0] // self.joined, *v.shape[1:])

    def folded(self, y: Tensor) -> Tensor:  # of joined heads -> (b, t, d)
        """y of each head, without a copy if y is the result of the last sweep."""
        known = self._sweep_to(y)
        return super().folded(y) if known is None else known.y

    def memory(self, y: Tensor) -> Tensor:  # of joined heads -> (b, d, n)
        """h after the last token of y, without another scan if y is the result of the last
        sweep."""
        known = self._sweep_to(y)
        return super().memory(y) if known is None else known.h

    def _sweep_to(self, y: Tensor) -> Sweep | None:
        """The last sweep, if y is its result."""
        return self._swept if self._y is y else None

    def attach(
        self,
        y_star: Tensor,  # of joined heads
        report: ReportBackward | None = None,
    ) -> Tensor:  # likewise
        """y_star with the exact implicit gradient."""
        y_star = fold(y_star, self.joined)
        arguments = self.whole, self.parameterization, self.bind, self.mixer_values
        options: dict[str, Any] = {"report": self._of_samples(report), "backend": self.backend}
        return unfold(direct_sweep(*arguments, y_star=y_star, **options).y, self.joined)

    def fuse(self, y: Tensor, rule: IterationRule) -> Any:  # y: (b, t, d)
        """An iteration in kernels, or None if these do not support the rule or this map, whose
        mixer must be a HouseholderProduct, for joined heads and for tensors without values. Raises
        ValueError if backend="triton" cannot run."""
        if self.joined > 1 or not has_values(y):
            return None
        arguments = self.whole, y, self.parameterization, self.mixer_values, rule
        return fuse_iteration(*arguments, lengths=self.lengths, backend=self.backend)

    def block_solve(self, y: Tensor) -> tuple[Tensor, Tensor]:  # y: of joined heads
        """G(y), as y, and the smallest pivot (b / joined,). G solves the local equation of each
        token, with its memory and its feedback computed from y."""
        y = fold(y, self.joined)
        x, (delta, B, C, _, U, M, erase), diagonal, _, factors = self._local(y)
        mixed, A = mix_channels(x, y, diagonal, U, M), self.operands.A
        options = self._scan_options(erase)
        p, _ = selective_scan(mixed, delta, A, B, C, exclusive=True, **options)
        # the pivots of padding are 1, the largest that a pivot is
        pivot = self._by_head(smallest_pivot(factors).amin(1)).amin(0)
        return self._unfolded(solve_local(p, factors, x)), pivot

    def block_transpose(self, y_star: Tensor) -> tuple[Callable[[Tensor], Tensor], ...]:
        """The functions w -> L^T w and r -> (I - L^T)^-1 r of values like y_star, (b, t, d) or of
        joined heads, L_t = diag(sigma_t) (I - Q_t) at y_star."""
        with torch.no_grad():
            _, found, diagonal, sigma, factors = self._local(fold(y_star, self.joined))

        def apply(w: Tensor) -> Tensor:
            w = sigma * fold(w, self.joined)
            return unfold(apply_complement_transposed(w, diagonal, found.U, found.M), self.joined)

        def invert(r: Tensor) -> Tensor:
            return unfold(solve_local_transposed(fold(r, self.joined), factors), self.joined)

        return apply, invert

    def _input_gain(
        self,
        delta: Tensor,  # (b, t, d)
        B: Tensor,  # (b, t, n)
        C: Tensor,  # (b, t, n)
    ) -> tuple[Tensor, Tensor | None]:
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
