"""An assertion for tests, and measurements of layers that are defined as a fixed point.

Feedback amplifies rounding errors. Two ways to compute the same values therefore agree up to the
growth of a perturbation of the input (`measure_growth`).
Letters: b batch, t time, m d_model, d d_inner, n d_state.
"""

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from bedouin.kernels.backend import without_autocast
from bedouin.kernels.heads import unfold
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.map import FixedPointMap, MapOfHeads, of_all_heads
from bedouin.layers.stages import gated, project, solving, state_before
from bedouin.packing import find_packing
from bedouin.solvers import Adjoint, Direct, Picard, Solver, SolveStats
from bedouin.state import BedouinState

__all__ = [
    "FixedPoint",
    "assert_close",
    "decode_gap",
    "find_fixed_point",
    "layer_gradients",
    "log_growth",
    "lyapunov",
    "measure_growth",
    "relative_error",
]

LayerT = TypeVar("LayerT", bound=FixedPointLayer)


def relative_error(actual: Tensor, expected: Tensor) -> float:  # any shape, the same for both
    """max|actual - expected| / max|expected|, or the absolute error if `expected` is zero; inf if
    non-finite entries differ."""
    found, scale = _distance(actual, expected)
    return found.max().item() / (scale or 1.0) if found.numel() else 0.0


def _distance(actual: Tensor, expected: Tensor) -> tuple[Tensor, float]:
    """|actual - expected|, 0 where both are not finite and equal, inf where one is NaN; and the
    largest finite |expected|."""
    a, e = actual.detach().to(torch.float64), expected.detach().to(torch.float64)
    found = torch.where((a == e) | (a.isnan() & e.isnan()), 0.0, (a - e).abs())
    scale = torch.where(e.isfinite(), e.abs(), 0.0).max().item() if e.numel() else 0.0
    return torch.where(found.isnan(), torch.inf, found), scale


@dataclass(frozen=True)
class FixedPoint:
    """A fixed point that a solver found, with its map."""

    f: FixedPointMap | MapOfHeads
    y: Tensor  # (b, t, d)
    output: Tensor  # (b, t, m), the layer's output
    stats: SolveStats

    @property
    @torch.no_grad()
    def residual(self) -> Tensor:
        """max_t |F(y)_t - y_t| / max|F(y)| (b,), from a new evaluation of the layer's map."""
        f_y = self.f(self.y)
        scale = f_y.abs().amax((1, 2))
        return (f_y - self.y).abs().amax((1, 2)) / torch.where(scale == 0, 1.0, scale)


def check_layer(layer: object) -> None:
    """Raise TypeError unless the layer is defined by a fixed point."""
    if not isinstance(layer, FixedPointLayer):
        raise TypeError(
            f"layer must be a Bedouin or FixedPointRNN, got {type(layer).__name__}: of a model, "
            "pass one of its layers and what that layer is called with"
        )


@torch.no_grad()
def find_fixed_point(
    layer: FixedPointLayer,
    x: Tensor,  # (b, t, m), t >= 1
    *,
    solver: Solver | None = None,
    state: BedouinState | None = None,
) -> FixedPoint:
    """Run a copy of `layer` on x with `solver` (None: the layer's own), without warnings."""
    check_layer(layer)
    probe = copy_with(layer, solver=solver or layer.solver, on_unconverged="ignore")
    probe.check_input(x, rank=3)
    before = state_before(probe, state, find_packing(x))
    projected = project(probe, x, before, None)
    with without_autocast(x.device):
        options, f = probe.solve_options, projected.f
        y = options.solve(f, *solving(probe, f, options)).value
        hidden = gated(probe, projected, y)
    assert probe.stats is not None
    heads = probe.num_heads
    found = of_all_heads(f, heads), unfold(y, heads), probe.out_proj(hidden), probe.stats
    return FixedPoint(*found)


@torch.no_grad()
def measure_growth(
    layer: FixedPointLayer,
    x: Tensor,  # (b, t, m)
    *,
    state: BedouinState | None = None,
    seed: int = 0,
    num_directions: int = 3,
) -> float:
    """The factor by which a relative perturbation of the input grows in the result. max|r(x + dx) -
    r(x)| / max|r(x)| / 1e-9, the maximum over results r (output and fixed point) and over a few
    random dx with max|dx| = 1e-9 max|x|. At least 1; inf if a result is not finite. Computed with
    copies in float64 and in evaluation mode, by `Direct` if the mixer allows it. Raises TypeError
    for another kind of layer."""
    check_layer(layer)
    if x.numel() == 0:
        return 1.0
    probe = copy_with(layer, on_unconverged="ignore").double().eval()
    x = x.detach().double()
    solver = Direct() if probe.is_structured else probe.solver
    state = None if state is None else state.detach().to(torch.float64)
    generator = torch.Generator().manual_seed(seed)
    base = find_fixed_point(probe, x, solver=solver, state=state)
    growth, size = 1.0, 1e-9
    for _ in range(num_directions):
        direction = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        dx = size * x.abs().max() * direction / direction.abs().max()
        moved = find_fixed_point(probe, x + dx, solver=solver, state=state)
        pairs = ((moved.output, base.output), (moved.y, base.y))
        if not all(bool(r.isfinite().all()) for pair in pairs for r in pair):
            return float("inf")
        growth = max([growth, *(relative_error(r, r0) / size for r, r0 in pairs)])
    return growth


def layer_gradients(
    layer: FixedPointLayer,
    x: Tensor,  # (b, t, m)
    adjoint: Adjoint | None = None,
    *,
    solver: Solver | None = None,
    state: BedouinState | None = None,
) -> dict[str, Tensor]:
    """Gradients of a random linear function of output and new state, by name: those of the
    parameters, "x", and, if a state is given, "state.ssm", "state.y" and "state.conv". The function
    depends on the shapes alone. `adjoint` or `solver` None: the layer's own."""
    probe = copy_with(layer, adjoint=adjoint or layer.adjoint, solver=solver or layer.solver)
    named = dict(probe.named_parameters()) | {"x": x.detach().clone().requires_grad_()}
    if state is not None:
        state = BedouinState(*(s.detach().clone().requires_grad_() for s in state.tensors))
        named |= {f"state.{name}": v for name, v in state._asdict().items()}
    output, after = probe(named["x"], state=state, return_state=True)
    generator, loss = torch.Generator().manual_seed(0), output.new_zeros(())
    for value in (output, *after.tensors):
        weight = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        loss = loss + (weight.to(value) * value).sum().to(loss.dtype)
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(loss, list(named.values()), **options)
    return dict(zip(named, grads, strict=True))


def compare_gradients(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, float]:
    """|a - b| / |b| in the 2-norm, and the cosine of the angle between a and b, of the gradients of
    all parameters, as `layer_gradients` returns them. NaN where a norm is zero."""
    u, v = (
        torch.cat([grad.flatten().double() for name, grad in found.items() if name != "x"])
        for found in (a, b)
    )
    size = v.norm()
    return ((u - v).norm() / size).item(), (u @ v / (u.norm() * size)).item()


@torch.no_grad()
def decode_gap(layer: FixedPointLayer, x: Tensor) -> float:  # x: (b, t, m)
    """The relative error, in the max norm, of `step` token by token against one call on x, of a
    copy in evaluation mode, because a random cap would stop the call early."""
    probe = copy_with(layer, on_unconverged="ignore").eval()
    expected = probe(x)
    state, steps = probe.init_state(x.shape[0]), []
    for t in range(x.shape[1]):
        y_t, state = probe.step(x[:, t], state)
        steps.append(y_t)
    return relative_error(torch.stack(steps, 1), expected) if steps else 0.0


@torch.no_grad()
def log_growth(
    layer: FixedPointLayer, x: Tensor, *, num_directions: int = 8
) -> Tensor:  # (b, t, m), t >= 1 -> (t, b)
    """log |J_t ... J_1 v|, where J_s is the Jacobian of token s, from the state before it to the
    state after it, at the states that x leads to from zero: the largest of a few random unit
    vectors v, in the 2-norm of the whole state; -inf where all of them have become 0. J v is a
    difference quotient in float64 over 1e-7 of the last state's length, by `Direct` if it can."""
    probe = copy_with(layer, on_unconverged="ignore").double().eval()
    probe.solver = Direct() if probe.is_structured else Picard(rtol=1e-13)
    x, b, one = x.detach().double(), len(x), probe.init_state(1)
    last = _flat_state(probe(x, return_state=True)[1]).norm(dim=1, keepdim=True)
    size = 1e-7 * torch.where(last.isfinite() & (last > 0), last, 1.0)
    base = _flat_state(one).repeat(b, 1)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(num_directions, *base.shape, generator=generator, dtype=x.dtype).to(x)
    v, total, rows = v / v.norm(dim=2, keepdim=True), x.new_zeros(()), []
    for x_t in x.unbind(1):
        states = torch.cat([base, (base + size * v).flatten(0, 1)])
        parts = zip(states.split([v[0].numel() for v in one.tensors], 1), one.tensors, strict=True)
        before = BedouinState(*(part.reshape(-1, *of.shape[1:]) for part, of in parts))
        after = _flat_state(probe.step(x_t.repeat(1 + num_directions, 1), before)[1])
        base, v = after[:b], (after[b:].unflatten(0, (-1, b)) - after[:b]) / size
        norm = v.norm(dim=2, keepdim=True)
        v, total = v / torch.where(norm == 0, 1.0, norm), total + norm.squeeze(2).log()
        rows.append(total.amax(0))
    return torch.stack(rows)


def _flat_state(state: BedouinState) -> Tensor:  # (b, numbers of a state)
    return torch.cat([v.flatten(1) for v in state.tensors], 1)


def lyapunov(layer: FixedPointLayer, x: Tensor) -> Tensor:  # (b, t, m), t >= 1 -> (b,)
    """The largest Lyapunov exponent of each sample: the growth of `log_growth` a token. Above 0
    small differences grow over time, below 0 they are forgotten. The first quarter of the tokens,
    in which the vectors turn to the direction that grows most, is left out. Raises TypeError for
    another kind of layer, ValueError for x without tokens."""
    check_layer(layer)
    if x.dim() != 3 or not x.shape[0] or not x.shape[1]:
        raise ValueError(f"x must have shape (b, t, m) with b, t >= 1, got {tuple(x.shape)}")
    return exponent(log_growth(layer, x))


def exponent(growth: Tensor) -> Tensor:  # (t, b), of `log_growth` -> (b,)
    """The growth a token over the last three quarters of the tokens."""
    t, first = len(growth), len(growth) // 4
    before = growth[first - 1] if first else torch.zeros_like(growth[0])
    return torch.where(growth[-1] == -torch.inf, -torch.inf, (growth[-1] - before) / (t - first))


def copy_with(layer: LayerT, **attributes: Any) -> LayerT:
    """A copy of the layer with the given attributes."""
    probe = copy.deepcopy(layer)
    for name, value in attributes.items():
        setattr(probe, name, value)
    return probe


def assert_close(
    name: str, actual: Tensor, expected: Tensor, rtol: float = 1e-10, atol: float = 0.0
) -> None:  # any shape, the same for both
    """Raise AssertionError unless shapes and dtypes are equal and max|actual - expected| <= atol +
    rtol max|expected|, where NaN equals NaN. The message names the worst index."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, not {expected.dtype}")
    found, scale = _distance(actual, expected)
    worst = found.max().item() if found.numel() else 0.0
    if worst <= atol + rtol * scale:
        return
    index = tuple(int(i) for i in torch.unravel_index(found.flatten().argmax(), found.shape))
    raise AssertionError(
        f"{name}: relative error {worst / (scale or 1.0):.2e} > {rtol:.1e} (largest expected "
        f"{scale:.2e}), worst at {index}: {actual[index].item():.17g}, expected "
        f"{expected[index].item():.17g}"
    )
