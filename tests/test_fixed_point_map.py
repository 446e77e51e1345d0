"""The layers against their equations, written out token by token with explicit matrices.

The oracle knows nothing of the local equation, WY forms or scans: Q_t is a product of d x d
matrices, and since F(y)_t is affine in y_t given the past, y_t is found from d + 1 evaluations of
the definition.
"""

import random
from dataclasses import dataclass

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.layer_cases import RNGS, drawn, random_layer, random_state
from torch import Tensor
from torch.nn.functional import silu, softplus

from bedouin import Bedouin, FixedPointRNN, HouseholderProduct, Kronecker, LowRank, Monarch
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import Direct, Picard
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

    def __init__(self, layer: FixedPointLayer) -> None:
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
            assert layer.y_proj is not None
            parts = (layer.y_proj.weight @ seen).split([sizes[name] for name in fed])
            raw |= {name: raw[name] + p for name, p in zip(fed, parts, strict=True)}
        return raw

    def token(self, x: Tensor, y_before: Tensor) -> tuple[Token, Tensor]:
        raw = self.raw(x, y_before)
        if isinstance(self.layer, Bedouin):
            return bedouin_token(self.layer, raw, x), raw["gate"]
        assert isinstance(self.layer, FixedPointRNN)
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

    def solve_token(self, token: Token, h: Tensor) -> Tensor:
        d = self.layer.d_inner
        basis = torch.eye(d, dtype=h.dtype)
        constant = token.next_memory(h, torch.zeros_like(basis[0])) @ token.C
        columns = [token.next_memory(h, e) @ token.C - constant for e in basis]
        y: Tensor = torch.linalg.solve(basis - torch.stack(columns, 1), constant)
        return y

    def output(self, x: Tensor, z: Tensor, gate: Tensor, y: Tensor) -> Tensor:
        layer = self.layer
        skipped = y + layer.D * x
        if layer.norm is None:
            return layer.out_proj.weight @ (gate * silu(skipped))
        eps = layer.norm.eps
        assert eps is not None
        normed = rms(skipped, eps) * layer.norm.weight
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
    # the equations are those of one head; test_layer_heads.py reduces several heads to one
    layer = spread(random_layer(rng, solver=Direct(), num_heads=1, d_conv=None))
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    assert_oracle(layer, b, t)


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2, 4])
def test_from_paper_is_the_papers_parameterization(k: int) -> None:
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


def test_from_paper_solves_as_the_paper_does() -> None:
    layer = Bedouin.from_paper(4)
    assert layer.solver == Picard(rtol=0.1, stop_rule="paper")
    assert type(layer.adjoint).__name__ == "OneStepAdjoint"
    assert layer.cap.limit == 100
