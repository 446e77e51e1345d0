"""`diagnose`: what the solve of a layer is like on an input, in numbers, a table and a figure.

Letters: b batch, t time, m d_model, H num_heads, p head_dim.
"""

import copy
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from bedouin import solvers, testing
from bedouin.kernels.checks import check_number
from bedouin.kernels.heads import fold
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.map import StructuredMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL_PIVOT = 0.05  # below this pivot a local solve loses more than a decimal digit
LARGE_BIAS = 0.1  # above this relative difference a gradient is not that of the loss
POWER_STEPS = 40  # products of the power iteration, of which the last half is averaged


@dataclass(frozen=True, eq=False)
class SolverRun:
    """One solver on the input, by its rtol and the options that are not the default. stats: with
    their history, (evaluations, b). error: of its output against that of the exact solve, relative,
    in the max norm; NaN if the mixer has no exact solve."""

    name: str
    stats: solvers.SolveStats
    error: float

    @property
    def steps(self) -> int:
        """The most evaluations of the map that a sample took."""
        return int(self.stats.num_steps.max())

    @property
    def converged(self) -> float:
        """The share of samples that converged, in [0, 1]."""
        return self.stats.converged.double().mean().item()


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `diagnose` measured; `str` is a table, `plot` draws a figure.

    layer: the layer's class, solver and adjoint. shape, dtype: of the input (b, t, m).
    pivots: the smallest pivot of each sample's local systems, at most 1; 0 is a singular token.
    contraction: the spectral radius of diag(sigma_t)(I - Q_t), the largest of all tokens and heads,
        by which each step of undamped Picard shrinks its error in the end; above 1 it diverges.
        Both are None for a mixer without the form (e, U, M).
    growth: the logarithm of the growth of a perturbation of the state over the first tokens
        (`bedouin.testing.log_growth`). lyapunov: its mean a token; above 0 the layer is chaotic.
    rtol: the tolerance of the solvers. runs: each solver on the input, the layer's own first.
    bias, cosine: |g - g*| / |g*| in the 2-norm and the angle's cosine, of the gradients g of all
        parameters by the layer's solver and adjoint and the exact g*, both in float64, for a random
        linear loss; NaN if g* is zero.
    decode_gap: `step` token by token against one call, relative, in the max norm.
    advice: sentences about what to change, at least one.
    """

    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pivots: Tensor | None  # (b,)
    contraction: float | None
    growth: Tensor  # (t, b)
    lyapunov: Tensor  # (b,)
    rtol: float
    runs: tuple[SolverRun, ...]
    bias: float
    cosine: float
    decode_gap: float
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        b, t, m = self.shape
        lyapunov, last = self.lyapunov.max().item(), self.growth[-1].max().item()
        rows = {}
        if self.pivots is not None:
            pivots = f"{self.pivots.min():.3g} (median of samples {self.pivots.median():.3g})"
            rows["smallest pivot"] = pivots
        if self.contraction is not None:
            rows["contraction of Picard"] = f"{self.contraction:.3g} a step, in the end"
        # e^last with two digits, also where it overflows
        times = f"10^{last / math.log(10):.1f}" if abs(last) >= 7 else f"{math.exp(last):.2g}"
        times = f"{times} times" if math.isfinite(last) else "0" if last < 0 else str(last)
        rows["growth of a perturbation"] = f"{times} after {t} tokens"
        median = self.lyapunov.median()
        rows["Lyapunov exponent"] = f"{lyapunov:+.4f} a token (median {median:+.4f})"
        rows["gradient bias"] = f"{self.bias:.1e} (cosine {self.cosine:.4f})"
        rows["decoding against one call"] = f"{self.decode_gap:.1e}"
        lines = [f"{self.layer} on ({b}, {t}, {m}), {str(self.dtype).removeprefix('torch.')}"]
        lines += [f"  {name:<28}{value}" for name, value in rows.items()]
        width = max(28, *(len(run.name) + 2 for run in self.runs))
        head = f"  {'solver':<{width}}{'steps':>6}{'converged':>11}{'residual':>10}{'error':>10}"
        lines += ["", head]
        lines += [
            f"  {run.name:<{width}}{run.steps:>6}{run.converged:>11.0%}"
            f"{run.stats.residual.max().item():>10.1e}"
            f"{'-' if math.isnan(run.error) else f'{run.error:.1e}':>10}"
            for run in self.runs
        ]
        return "\n".join([*lines, "", *(f"  - {sentence}" for sentence in self.advice)])

    def plot(self, path: str | Path) -> "Figure":
        """Write a figure of growth, residuals, pivots and exponents to `path`, in the format of its
        suffix, and return it. Needs matplotlib."""
        from matplotlib import rcParams
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

        # the colour can be seen on a dark background, too
        dotted = {"color": rcParams["axes.edgecolor"], "linestyle": ":"}
        figure = Figure(figsize=(10, 7), layout="constrained")
        figure.suptitle(self.layer)
        over_time, over_steps, pivots, exponents = figure.subplots(2, 2).flat
        over_time.plot(range(1, len(self.growth) + 1), self.growth.cpu() / math.log(10))
        over_time.set(
            xlabel="token", ylabel="log10 of the growth", title="Perturbation of the state"
        )
        for run in self.runs:
            assert run.stats.history is not None
            worst = run.stats.history.amax(1).cpu()
            over_steps.plot(range(1, len(worst) + 1), worst, marker=".", label=run.name)
        over_steps.axhline(self.rtol, **dotted, label="tolerance")
        over_steps.set(xscale="log", yscale="log", xlabel="step", title="Largest residual")
        over_steps.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        over_steps.xaxis.set_major_formatter("{x:g}")
        over_steps.xaxis.set_minor_formatter(NullFormatter())
        # beside the axes, since curves may be anywhere in them
        over_steps.legend(fontsize="small", bbox_to_anchor=(1, 1), loc="upper left")
        for axes, values, line, title in (
            (pivots, self.pivots, SMALL_PIVOT, "Smallest pivot"),
            (exponents, self.lyapunov, 0.0, "Lyapunov exponent a token"),
        ):
            if values is None:
                axes.set_axis_off()
                continue
            axes.plot(values.cpu().sort().values, marker=".")
            axes.axhline(line, **dotted)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel="sample, in order", title=title)
        figure.savefig(path)
        return figure


def diagnose(
    layer: FixedPointLayer, x: Tensor, *, rtol: float | None = None, max_steps: int | None = None
) -> Diagnosis:  # (b, t, m), b >= 1, t >= 1
    """Measure how well the solve of `layer` works on x, and what each solver needs for it.

    Pivots, solvers and the decoder are measured in the layer's dtype and backend, growth and
    gradients in float64, with copies of the layer in evaluation mode, whose hooks are not called.
    Takes about the time of 20 calls and t steps; a few samples are enough.

    Args:
        layer: a Bedouin or FixedPointRNN; of a model, one of its layers.
        x: what the layer is called with, without padding.
        rtol: the tolerance of the iterative solvers; None: that of the layer's own solver, and
            1e-4 for Direct, which has none.
        max_steps: the cap of the iterative solvers; None: the limit of the layer's own.

    Raises TypeError for another kind of layer, ValueError for x without tokens, and as a call.
    """
    testing.check_layer(layer)
    layer.check_input(x, rank=3)
    if not x.numel():
        raise ValueError(f"x must have at least one sample and token, got {tuple(x.shape)}")
    rtol = getattr(layer.solver, "rtol", 1e-4) if rtol is None else rtol
    check_number("rtol", rtol, 0, 1e6, open_low=False)
    probe, x = _copy(layer), x.detach()
    if max_steps is not None:
        probe.cap = solvers.FixedCap(max_steps)
    growth, runs = testing.log_growth(probe, x), _run_solvers(probe, x, rtol)
    direct = next((run for run in runs if run.name == _short(solvers.Direct())), None)
    wide, wide_x = _copy(layer).double(), x.double()
    gradients = testing.layer_gradients(wide, wide_x)
    wide.cap = solvers.FixedCap(10_000)
    # for a mixer without an exact solve, one to rounding
    solver = solvers.Direct() if wide.is_structured else solvers.Picard(rtol=1e-13)
    exact = testing.layer_gradients(wide, wide_x, solvers.ImplicitAdjoint(), solver=solver)
    bias, cosine = testing.compare_gradients(gradients, exact)
    solve = f"{_short(layer.solver)}, {_short(layer.adjoint or solvers.ImplicitAdjoint())}"
    found = Diagnosis(
        layer=f"{type(layer).__name__}, {solve}",
        shape=tuple(x.shape),
        dtype=x.dtype,
        pivots=None if direct is None else direct.stats.conditioning,
        contraction=_contraction(probe, x),
        growth=growth,
        lyapunov=testing.exponent(growth),
        rtol=rtol,
        runs=runs,
        bias=bias,
        cosine=cosine,
        decode_gap=testing.decode_gap(_copy(layer), x),
    )
    return replace(found, advice=tuple(_advice(found, layer)))


def _copy(layer: FixedPointLayer) -> FixedPointLayer:
    """A copy in evaluation mode that neither warns nor calls the hooks of the layer."""
    # what hooks refer to, a whole model perhaps, is not copied either
    memo = {id(own): type(own)() for own in (layer._forward_hooks, layer._forward_pre_hooks)}
    probe = copy.deepcopy(layer, cast(Any, memo))
    probe.on_unconverged, probe.record_history = "ignore", False
    return probe.requires_grad_(True).eval()


@torch.no_grad()
def _run_solvers(probe: FixedPointLayer, x: Tensor, rtol: float) -> tuple[SolverRun, ...]:
    """The layer's own solver, and all others that take its mixer, on x (b, t, m)."""
    probe = testing.copy_with(probe, record_history=True, adjoint=None)
    chosen, structured = [probe.solver], probe.is_structured
    chosen += [solvers.Direct(), solvers.Jacobi(rtol=rtol)] if structured else []
    chosen += [kind(rtol=rtol) for kind in (solvers.Picard, solvers.Anderson, solvers.Broyden)]
    found: dict[solvers.Solver, tuple[solvers.SolveStats, Tensor]] = {}
    for solver in chosen:
        if solver not in found:
            probe.solver = solver
            output = probe(x)
            assert probe.stats is not None
            found[solver] = probe.stats, output
    reference = found[solvers.Direct()][1] if structured else None

    def error(y: Tensor) -> float:
        return math.nan if reference is None else testing.relative_error(y, reference)

    return tuple(SolverRun(_short(v), stats, error(y)) for v, (stats, y) in found.items())


def _short(options: object) -> str:
    """A solver or adjoint with its rtol and the options that are not the default."""
    given = [(f.name, getattr(options, f.name), f.default) for f in fields(cast(Any, options))]
    shown = [f"{name}={v!r}" for name, v, default in given if name == "rtol" or v != default]
    return f"{type(options).__name__}({', '.join(shown)})"


@torch.no_grad()
def _contraction(probe: FixedPointLayer, x: Tensor) -> float | None:  # x: (b, t, m)
    """The largest spectral radius of a token's diag(sigma)(I - Q) at the fixed point."""
    if not probe.is_structured:
        return None
    found = testing.find_fixed_point(probe, x, solver=solvers.Direct())
    f = found.f.apart()
    assert isinstance(f, StructuredMap)
    apply, _ = f.block_transpose(fold(found.y, probe.num_heads))
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(found.y.shape, generator=generator, dtype=torch.float64).to(found.y)
    w, total = fold(v, probe.num_heads), torch.zeros((), dtype=v.dtype, device=v.device)
    for i in range(POWER_STEPS):
        w = apply(w)
        norm = w.norm(dim=-1, keepdim=True)
        w = w / torch.where(norm == 0, 1.0, norm)
        total = total + norm.log() if 2 * i >= POWER_STEPS else total
    return (2 * total / POWER_STEPS).exp().max().item()


def _advice(found: Diagnosis, layer: FixedPointLayer) -> list[str]:
    """Sentences about what to change."""
    t = found.shape[1]
    advice, own, lyapunov = [], found.runs[0], found.lyapunov.max().item()
    is_exact = isinstance(layer.solver, solvers.Direct)
    if own.converged < 1:
        better = [run for run in found.runs[1:] if run.converged == 1]
        names = " or ".join(f"{run.name} ({run.steps} steps)" for run in better[:3])
        last = "check input, pivots and growth" if is_exact else "raise max_steps, or loosen rtol"
        remedy = f"use {names}" if better else last
        advice.append(f"{own.name} does not converge on {1 - own.converged:.0%}: {remedy}.")
    elif layer.is_structured and not is_exact and own.steps > t / 2:
        advice.append(
            f"{own.name} takes {own.steps} steps for {t} tokens: Direct takes one sweep and is "
            "exact."
        )
    if found.contraction is not None and found.contraction >= 1:
        advice.append(
            f"Undamped Picard does not contract ({found.contraction:.3g}): use Direct, Jacobi, or "
            "a damping below 1."
        )
    if found.pivots is not None and not found.pivots.min() >= SMALL_PIVOT:
        advice.append(
            f"A local system is nearly singular (pivot {found.pivots.min():.1e}): use beta_max=1, "
            'input_scale="bounded_delta" or "one_minus_decay", or a lower learning rate.'
        )
    if lyapunov > 0 and found.growth[-1].max() > math.log(100):
        advice.append(
            f"The layer is chaotic here: a difference grows {math.exp(lyapunov):.3g} times a "
            "token. Parallel solvers then need about as many steps as tokens, and rounding decides "
            "the output of long sequences: use a smaller feedback_init, feedback_norm=True, "
            "decay rates of at least 1 (A_log >= 0), or gradient clipping."
        )
    elif lyapunov < -1:
        advice.append(
            f"The state forgets {math.exp(-lyapunov):.3g}-fold a token: use a smaller step Delta "
            "(dt_bias) if the task needs a longer memory."
        )
    if not found.bias <= LARGE_BIAS:
        advice.append(
            f"The gradient is off by {found.bias:.1e} of its size: use adjoint=ImplicitAdjoint(), "
            "a smaller rtol, or solver=Direct()."
        )
    loose = max(1e-4, 100 * torch.finfo(found.dtype).eps)
    if not found.decode_gap <= loose:
        narrow = f"a wider dtype than {str(found.dtype).removeprefix('torch.')}"
        remedy = narrow if is_exact else "Direct, or a smaller rtol"
        advice.append(f"Decoding differs from one call by {found.decode_gap:.1e}: use {remedy}.")
    return advice or [f"Nothing to change: the solve is exact to tolerance over {t} tokens."]
