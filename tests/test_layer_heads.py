"""Layers of several heads: H heads are H layers of one head on the slices."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tests.layer_cases import PAIRS, drawn, random_layer
from torch import Tensor

from bedouin import Bedouin, BedouinState, FixedPointRNN, Initialization
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.mixers import NoMixing
from bedouin.layers.options import choose_num_heads
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Broyden,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    Picard,
    Solver,
    SolveStats,
    solve,
)
from bedouin.testing import assert_close, find_fixed_point

M, D = 4, 8
# found by hypothesis: 1.07e-12, in a gradient whose terms cancel to a thousandth of their size
RTOL, TINY = 3e-12, 1e-18


def test_heads_have_at_most_128_channels_by_default() -> None:
    """For every inner width that has a divisor from 32 to 128, the largest of them."""
    for d in range(16, 2049):
        divisors = [p for p in range(32, 129) if d % p == 0]
        assert d // choose_num_heads(None, d) == max(divisors, default=d)
    for kind in (Bedouin, FixedPointRNN):
        for d_model, heads in ((16, 1), (64, 1), (96, 2), (128, 2), (192, 3), (139, 1), (512, 8)):
            assert kind(d_model, device="meta").num_heads == heads


def slice_of(
    name: str,
    value: Tensor,  # a parameter of a layer of several heads, or its gradient
    num_heads: int,
    j: int,
) -> Tensor:
    """The part of a parameter that belongs to head j, in the shape that one head has."""
    p = D // num_heads
    if name == "in_proj.weight":
        return value.reshape(-1, num_heads, p, M)[:, j].flatten(0, 1)
    if name == "out_proj.weight":
        return value.reshape(M, num_heads, p)[:, j]
    if name in ("x_proj.weight", "y_proj.weight", "b_proj.weight"):
        return value[j]
    return value.reshape(num_heads, -1, *value.shape[1:])[j]


def make_heads(
    num_heads: int, seed: int, **fixed: Any
) -> tuple[FixedPointLayer, list[FixedPointLayer]]:
    """A random layer of several heads, and a layer of one head for each of its slices."""
    fixed = {"d_model": M} | fixed
    layer = random_layer(
        random.Random(seed), num_heads=num_heads, expand=D / M, d_conv=None, **fixed
    )
    parts = []
    for j in range(num_heads):
        expand = D / num_heads / M
        part = random_layer(random.Random(seed), num_heads=1, expand=expand, d_conv=None, **fixed)
        named = [(n, v) for n, v in layer.named_parameters() if not n.startswith("mixer.")]
        own = {n: slice_of(n, v, num_heads, j) for n, v in named}
        part.load_state_dict(own, strict=False)
        parts.append(part)
    return layer, parts


def slice_state(state: BedouinState, num_heads: int, j: int) -> BedouinState:
    return BedouinState(*(v.unflatten(1, (num_heads, -1))[:, j] for v in state))


@pytest.mark.parametrize(
    ("solver", "adjoint"),
    [
        *PAIRS,
        (Picard(damping=0.8, patience=2), ImplicitAdjoint(Picard())),
        (Picard(rtol=0.1, stop_rule="paper"), OneStepAdjoint()),
    ],
    ids=str,
)
@drawn(8, st.sampled_from([2, 4]), st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 4))
def test_heads_are_layers_of_one_head_on_the_slices(
    solver: Solver, adjoint: Adjoint | None, num_heads: int, seed: int, b: int, t: int
) -> None:
    options = {"solver": solver, "adjoint": adjoint, "max_steps": 20, "feedback_init": 0.1}
    layer, parts = make_heads(num_heads, seed, **options)
    # the normal equations of Anderson, which is stopped at rtol 1e-4, amplify rounding errors
    rtol = 1e-10 if isinstance(solver, Anderson) else RTOL
    x = torch.randn(b, t, M, dtype=torch.float64, requires_grad=True)
    ssm = 0.1 * torch.randn(b, D, layer.d_state, dtype=torch.float64)
    state = BedouinState(ssm.requires_grad_(), (0.1 * ssm.detach().sum(-1)).requires_grad_())

    inputs = {"x": x, "state.ssm": state.ssm, "state.y": state.y}
    output, new = layer(x, state, return_state=True)
    weights = [torch.randn_like(v) for v in (output, *new)]
    grads = gradients(weights, (output, *new), dict(layer.named_parameters()) | inputs)

    outputs, states, of_inputs = [], [], []
    for j, part in enumerate(parts):
        o, s = part(x, slice_state(state, num_heads, j), return_state=True)
        own = weights[0], *slice_state(BedouinState(*weights[1:]), num_heads, j)
        expected = gradients(own, (o, *s), dict(part.named_parameters()) | inputs)
        for name, _ in part.named_parameters():
            actual = slice_of(name, grads[name], num_heads, j)
            assert_close(f"gradient of {name}, head {j}", actual, expected[name], rtol, TINY)
        outputs.append(o)
        states.append(s)
        of_inputs.append(expected)
    assert_close("output", output, sum_of(outputs), rtol)
    for name in ("ssm", "y"):
        together = torch.cat([getattr(s, name) for s in states], 1)
        assert_close(f"state.{name}", getattr(new, name), together, rtol)
    for name in inputs:
        together = sum_of([found[name] for found in of_inputs])
        assert_close(f"gradient of {name}", grads[name], together, rtol, TINY)
    check_statistics(layer.stats, [part.stats for part in parts])


def gradients(
    weights: Sequence[Tensor], values: Sequence[Tensor], named: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Of the sum of weights * values."""
    total = sum_of([(w * v).sum() for w, v in zip(weights, values, strict=True)])
    found = torch.autograd.grad(total, list(named.values()), materialize_grads=True)
    return dict(zip(named, found, strict=True))


def sum_of(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum(0)


def check_statistics(stats: SolveStats | None, parts: Sequence[SolveStats | None]) -> None:
    """Those of a sample of several heads: the worst over its heads."""
    own = [part for part in parts if part is not None]
    if stats is None:
        assert not own
        return
    assert torch.equal(stats.num_steps, torch.stack([s.num_steps for s in own]).amax(0))
    assert torch.equal(stats.converged, torch.stack([s.converged for s in own]).all(0))
    residual = torch.stack([s.residual for s in own]).amax(0)
    # what an exact solve leaves is rounding, of which small pivots make 4e-14 and more
    assert_close("residual", stats.residual, residual, 1e-6, 1e-12)
    if stats.conditioning is not None:
        pivots = torch.stack([s.conditioning for s in own if s.conditioning is not None])
        assert_close("conditioning", stats.conditioning, pivots.amin(0), 1e-10)
    check_statistics(stats.backward, [part.backward for part in own])


def test_parameters_of_one_head_are_those_of_the_paper() -> None:
    d, r = 128, 128 + 2 * 16 + 2 * (128 + 1)
    shapes = {n: tuple(v.shape) for n, v in Bedouin(64, num_heads=1).named_parameters()}
    assert shapes == {
        "A_log": (d, 16), "D": (d,), "dt_bias": (d,), "norm.weight": (d,), "raw_bias": (r,),
        "in_proj.weight": (2 * d, 64), "x_proj.weight": (r + d, d), "y_proj.weight": (r + d, d),
        "out_proj.weight": (64, d),
    }  # fmt: skip


def test_each_head_is_drawn_like_a_layer_of_its_size() -> None:
    layer = Bedouin(64, num_heads=4, initialization=Initialization(0.0), feedback_init=0.5)
    bound, p = 32**-0.5, 32
    assert layer.y_proj is not None and layer.raw_bias is not None
    own = layer.x_proj.weight[:, p:], 2 * layer.y_proj.weight, layer.raw_bias.unflatten(0, (4, -1))
    for weight in own:
        for head in weight:
            assert 0.9 * bound < head.abs().max() <= bound
    assert not layer.x_proj.weight[:, :p].any()


def test_the_rates_of_heads_are_spaced_geometrically() -> None:
    rates_of_ends = Initialization(rates=(1.0, 1e-3))
    layer = Bedouin(8, d_state=2, num_heads=4, initialization=rates_of_ends, dtype=torch.float64)
    for _ in range(2):
        rates = layer.A_log.exp().unflatten(0, (4, 4))
        expected = torch.tensor([1.0, 0.1, 0.01, 0.001])[:, None, None] * torch.tensor([1.0, 2.0])
        assert_close("rates", rates, expected.double().expand(4, 4, 2), 1e-5)
        layer.reset_parameters()
    for scale in (0.5, (0.5, 0.1)):  # the first of a pair for a single head
        one = Bedouin(4, d_state=2, num_heads=1, initialization=Initialization(rates=scale))
        assert_close("one head", one.A_log.exp(), torch.tensor([0.5, 1.0]).expand(8, 2), 1e-5)
    Bedouin(4, decay="griffin", initialization=Initialization(rates=(1, 1.0)))


def four_heads(**options: Any) -> tuple[Bedouin, int]:
    """A layer of four heads, and the channels of a head."""
    sizes: dict[str, Any] = {"num_heads": 4, "d_state": 4, "feedback_init": 4.0}
    layer = Bedouin(8, mixer=NoMixing(), dtype=torch.float64, **sizes, **options)
    return layer, layer.head_dim


@pytest.mark.parametrize(
    "solver", [Picard(), Picard(stop_rule="paper"), Jacobi(), Anderson(), Broyden()]
)
def test_a_small_head_converges_by_itself(solver: Solver) -> None:
    """In the map of all heads, of which the others are a million times as large."""
    torch.manual_seed(0)
    layer, own = four_heads(on_unconverged="ignore")
    with torch.no_grad():
        layer.in_proj.weight[own : layer.d_inner] *= 1e6
        layer.x_proj.weight[1:] *= 1e-6
    x = torch.randn(3, 24, 8, dtype=torch.float64)
    exact = find_fixed_point(layer, x).y[..., :own]
    assert exact.abs().max() < 10
    start = torch.zeros(3, 24, layer.d_inner, dtype=torch.float64)
    options: dict[str, Any] = {"max_steps": 60, "on_unconverged": "ignore"}
    found = solve(layer.map(x), start, solver, time_dim=1, **options)
    errors = found.value[..., :own] - exact
    for error, size, converged in zip(errors, exact, found.stats.converged, strict=True):
        assert error.abs().max() < 0.01 * size.abs().max() or not converged
    if isinstance(solver, Jacobi):
        assert found.stats.converged.all() and found.stats.num_steps.min() > 10
