"""The layers against their equations, written out token by token with explicit matrices; layers of
H heads are H layers of one head on the slices.

The oracle knows nothing of the local equation, WY forms or scans: Q_t is a product of d x d
matrices, and since F(y)_t is affine in y_t given the past, y_t is found from d + 1 evaluations of
the definition.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.layer_cases import PAIRS, RNGS, drawn, random_layer, random_state
from torch import Tensor
from torch.nn.functional import silu, softplus

from bedouin import (
    Bedouin,
    BedouinState,
    FixedPointRNN,
    HouseholderProduct,
    Initialization,
    Kronecker,
    LowRank,
    Monarch,
)
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.options import choose_num_heads
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Broyden,
    Direct,
    Jacobi,
    Picard,
    Solver,
    SolveStats,
    solve,
)
from bedouin.testing import assert_close, find_fixed_point, measure_growth


def unit(v: Tensor) -> Tensor:
    return v / (v.pow(2).sum() + len(v) * 1e-6).sqrt()


def rms(v: Tensor, eps: float) -> Tensor:
    return v / (v.pow(2).mean() + eps).sqrt()


def dense_Q(layer: FixedPointLayer, raw: Tensor) -> Tensor:
    """Q (d, d) from the mixer's raw values: k vectors of length d, then k strengths."""
    d, mixer = layer.d_inner, layer.mixer
    if isinstance(mixer, Kronecker | Monarch):
        return mixer.dense(raw)  # whose definition is in test_mixers.py
    k = len(raw) // (d + 1)
    vectors = [unit(raw[i * d : (i + 1) * d]) for i in range(k)]
    strengths = torch.sigmoid(raw[k * d :])
    if isinstance(mixer, LowRank):
        parts = [a * torch.outer(u, u) for a, u in zip(strengths, vectors, strict=True)]
        return torch.stack(parts).sum(0)
    assert isinstance(mixer, HouseholderProduct)
    Q = torch.eye(d, dtype=raw.dtype)
    for a, u in zip(strengths, vectors, strict=True):
        Q = Q @ (torch.eye(d, dtype=raw.dtype) - mixer.beta_max * a * torch.outer(u, u))
    return Q


@dataclass
class Token:
    """The coefficients from the raw values of one token; decay and scale are (d, n)."""

    decay: Tensor
    scale: Tensor
    B: Tensor
    C: Tensor
    Q: Tensor
    x: Tensor

    def next_memory(self, h: Tensor, y: Tensor) -> Tensor:
        mixed = self.Q @ (self.x - y) + y
        return self.decay * h + self.scale * torch.outer(mixed, self.B)


def bedouin_token(layer: Bedouin, raw: dict[str, Tensor], x: Tensor) -> Token:
    delta: Tensor
    if layer.decay == "mamba":
        delta = softplus(raw["delta"])
        decay = torch.exp(-torch.exp(layer.get_parameter("A_log")) * delta[:, None])
    else:
        delta = torch.sigmoid(raw["delta"])
        decay = torch.exp(-8 * softplus(layer.get_parameter("omega")) * delta[:, None])
    if layer.eigenvalues == "full":
        decay = 2 * decay - 1
    scale = {
        "delta": delta[:, None].expand_as(decay),
        "bounded_delta": (delta / (1 + delta))[:, None].expand_as(decay),
        "one_minus_decay": 1 - decay.abs(),
    }[layer.input_scale]
    return Token(decay, scale, unit(raw["B"]), unit(raw["C"]), dense_Q(layer, raw["mixer"]), x)


def rnn_token(layer: FixedPointRNN, raw: dict[str, Tensor], x: Tensor) -> Token:
    gate = torch.sigmoid(raw["decay"])
    decay = torch.exp(-8 * softplus(layer.omega[:, 0]) * gate) if layer.decay == "griffin" else gate
    if layer.eigenvalues == "full":
        decay = 2 * decay - 1
    one = torch.ones(1, dtype=x.dtype)
    b_x = silu(layer.b_proj.weight @ x) * x
    column = decay[:, None]
    return Token(column, 1 - column.abs(), one, one, dense_Q(layer, raw["mixer"]), b_x)


class Oracle:
    """One sample of a layer, by the equations."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        d, n = layer.d_inner, layer.d_state
        if isinstance(layer, Bedouin):
            self.sizes = {"delta": d, "B": n, "C": n, "mixer": layer.mixer.raw_size(d)}
        else:
            self.sizes = {"decay": d, "mixer": layer.mixer.raw_size(d)}

    def raw(self, x: Tensor, y_before: Tensor) -> dict[str, Tensor]:
        """W^x x_t + bias + W^y norm(y_{t-1}), by component; "gate" comes last."""
        layer, sizes = self.layer, self.sizes | {"gate": self.layer.d_inner}
        first = next(iter(sizes))
        raw = dict(zip(sizes, (layer.x_proj.weight @ x).split(list(sizes.values())), strict=True))
        raw[first] = raw[first] + layer.dt_bias
        if layer.raw_bias is not None:
            others = [name for name in sizes if name != first]
            parts = layer.raw_bias.split([sizes[name] for name in others])
            raw |= {name: raw[name] + b for name, b in zip(others, parts, strict=True)}
        if layer.feedback:
            seen = rms(y_before, 1e-5) if layer.feedback_norm else y_before
            fed = [*layer.feedback, "gate"]
            parts = (layer.y_proj.weight @ seen).split([sizes[name] for name in fed])
            raw |= {name: raw[name] + p for name, p in zip(fed, parts, strict=True)}
        return raw

    def token(self, x: Tensor, y_before: Tensor) -> tuple[Token, Tensor]:
        raw = self.raw(x, y_before)
        if isinstance(self.layer, Bedouin):
            return bedouin_token(self.layer, raw, x), raw["gate"]
        return rnn_token(self.layer, raw, x), raw["gate"]

    def evaluate(self, x: Tensor, y: Tensor, h: Tensor, y_before: Tensor) -> Tensor:
        """F(y) (t, d) for any y (t, d)."""
        rows = []
        for x_t, y_t in zip(x, y, strict=True):
            token, _ = self.token(x_t, y_before)
            h, y_before = token.next_memory(h, y_t), y_t
            rows.append(h @ token.C)
        return torch.stack(rows)

    def __call__(self, u: Tensor, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(output (t, m), fixed point (t, d), last memory (d, n))."""
        outputs, ys = [], []
        for u_t in u:
            x, z = self.project(u_t)
            token, gate = self.token(x, y)
            y = self.solve_token(token, h)
            h = token.next_memory(h, y)
            ys.append(y)
            outputs.append(self.output(x, z, gate, y))
        return torch.stack(outputs), torch.stack(ys), h

    def project(self, u: Tensor) -> tuple[Tensor, Tensor]:
        both = self.layer.in_proj.weight @ u
        return both[: self.layer.d_inner], both[self.layer.d_inner :]

    def solve_token(self, token: Token, h: Tensor) -> Any:
        d = self.layer.d_inner
        basis = torch.eye(d, dtype=h.dtype)
        constant = token.next_memory(h, torch.zeros_like(basis[0])) @ token.C
        columns = [token.next_memory(h, e) @ token.C - constant for e in basis]
        return torch.linalg.solve(basis - torch.stack(columns, 1), constant)

    def output(self, x: Tensor, z: Tensor, gate: Tensor, y: Tensor) -> Any:
        layer = self.layer
        skipped = y + layer.D * x
        if layer.norm is None:
            return layer.out_proj.weight @ (gate * silu(skipped))
        normed = rms(skipped, layer.norm.eps) * layer.norm.weight
        return layer.out_proj.weight @ (silu(gate + z) * normed)


def spread(layer: FixedPointLayer) -> FixedPointLayer:
    """Give every parameter that starts at a constant a random value."""
    with torch.no_grad():
        layer.D.normal_()
        layer.dt_bias.add_(torch.randn_like(layer.dt_bias))
        if layer.norm is not None:
            layer.norm.weight.normal_()
    return layer


def assert_oracle(layer: FixedPointLayer, b: int, t: int) -> None:
    """Output, fixed point, state and F itself are those of the equations."""
    x = torch.randn(b, t, layer.d_model, dtype=torch.float64)
    state = random_state(layer, b, 0.5)
    growth = measure_growth(layer, x, state=state)
    found = find_fixed_point(layer, x, solver=Direct(), state=state)
    _, new_state = layer(x, state=state, return_state=True)
    oracle, trial = Oracle(layer), torch.randn_like(found.y)
    for i in range(b):
        output, y, h = oracle(x[i], state.ssm[i], state.y[i])
        assert_close("output", found.output[i], output, 1e-11 * growth)
        assert_close("fixed point", found.y[i], y, 1e-11 * growth)
        assert_close("state.ssm", new_state.ssm[i], h, 1e-11 * growth)
        assert_close("state.y", new_state.y[i], y[-1], 1e-11 * growth)
        drive = torch.stack([oracle.project(u)[0] for u in x[i]])
        F_trial = oracle.evaluate(drive, trial[i], state.ssm[i], state.y[i])
        assert_close("F(y)", found.f(trial)[i], F_trial, 1e-12)


@torch.no_grad()
@drawn(40, RNGS, st.integers(1, 3), st.integers(1, 5))
def test_a_layer_is_what_its_equations_say(rng: random.Random, b: int, t: int) -> None:
    # the equations are those of one head, to which the tests below reduce several heads
    layer = spread(random_layer(rng, solver=Direct(), num_heads=1, d_conv=None))
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    assert_oracle(layer, b, t)


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2, 4])
def test_from_paper_is_the_papers_parameterization_and_solve(k: int) -> None:
    """Griffin, s = Delta, beta = 2 sigmoid(alpha), feedback in B, C, Q and gate, bias on Delta
    only, no norms, gate * SiLU(y + D x): each enters the oracle through the layer's options."""
    layer = Bedouin.from_paper(
        3, d_state=4, num_householder=k, solver=Direct(), dtype=torch.float64
    )
    assert isinstance(layer.mixer, HouseholderProduct)
    assert (layer.mixer.beta_max, layer.mixer.num_householder) == (2.0, k)
    assert (layer.decay, layer.input_scale, layer.eigenvalues) == ("griffin", "delta", "positive")
    assert layer.feedback == ("B", "C", "mixer") and not layer.feedback_norm
    assert layer.output == "paper" and layer.norm is None and layer.raw_bias is None
    assert layer.in_proj.out_features == layer.d_inner
    assert_oracle(spread(layer), b=2, t=5)
    layer = Bedouin.from_paper(4)
    assert layer.solver == Picard(rtol=0.1, stop_rule="paper")
    assert type(layer.adjoint).__name__ == "OneStepAdjoint"
    assert layer.cap.limit == 100


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


@pytest.mark.parametrize(("solver", "adjoint"), PAIRS, ids=str)
@drawn(8, st.sampled_from([2, 4]), st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 4))
def test_heads_are_layers_of_one_head_on_the_slices(
    solver: Solver, adjoint: Adjoint | None, num_heads: int, seed: int, b: int, t: int
) -> None:
    options = {"solver": solver, "adjoint": adjoint, "max_steps": 20, "feedback_init": 0.1}
    layer, parts = make_heads(num_heads, seed, **options)
    # quasi-Newton steps, which are stopped at rtol 1e-4, amplify rounding errors
    rtol = 1e-10 if isinstance(solver, Anderson | Broyden) else RTOL
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


def test_each_head_is_drawn_like_a_layer_of_its_size() -> None:
    layer: Any = Bedouin(64, num_heads=4, initialization=Initialization(0.0), feedback_init=0.5)
    bound, p = 32**-0.5, 32
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


@pytest.mark.parametrize(
    "solver", [Picard(), Picard(stop_rule="paper"), Jacobi(), Anderson(), Broyden()]
)
def test_in_the_map_of_all_heads_each_head_converges_by_itself(solver: Solver) -> None:
    """As in a call of the layer."""
    options: dict[str, Any] = {"max_steps": 60, "on_unconverged": "ignore"}
    layer = Bedouin(8, num_heads=4, feedback_init=4.0, dtype=torch.float64, **options)
    with torch.no_grad():
        layer.in_proj.weight[layer.head_dim : layer.d_inner] *= 1e3
    x = torch.randn(3, 24, 8, dtype=torch.float64)
    start = torch.zeros(3, 24, layer.d_inner, dtype=torch.float64)
    found = solve(layer.map(x), start, solver, time_dim=1, **options)
    expected = find_fixed_point(layer, x, solver=solver)
    assert torch.equal(found.value, expected.y)
    assert torch.equal(found.stats.num_steps, expected.stats.num_steps)
