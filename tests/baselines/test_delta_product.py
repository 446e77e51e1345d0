"""DeltaProduct and DeltaNet: the layer written out; n - 1 reflections compose any permutation."""

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from tests.baselines.kinds import assert_written_out
from torch import Tensor
from torch.nn import functional as F

from bedouin.baselines import DeltaNet, DeltaProduct, DeltaState
from bedouin.kernels.delta_rule import DeltaInputs, delta_rule_reference
from bedouin.kernels.scan import Eigenvalues

N = 5
PERMUTATIONS = list(permutations(range(N)))
START = len(PERMUTATIONS)
"""The token that writes the initial memory."""


def written_out(layer: DeltaProduct, x: Tensor, state: DeltaState) -> Tensor:
    """The outputs (b, t, m) of inputs (b, t, m), token by token and head by head."""
    k, h, p, v = layer.num_householder, layer.num_heads, layer.head_dim, layer.value_dim
    window, outputs = state.conv, []
    memories = list(state.memory.unbind(1))
    for x_t in x.unbind(1):
        raw = torch.cat([layer.q_proj(x_t), layer.k_proj(x_t), layer.v_proj(x_t)], -1)
        if layer.conv.weight is not None:
            window = torch.cat([window, raw.unsqueeze(1)], dim=1)
            raw, window = (window * layer.conv.weight.T).sum(1), window[:, 1:]
        q, key, value = F.silu(raw).split([h * p, k * h * p, k * h * v], -1)
        key, value = key.unflatten(-1, (k, h, p)), value.unflatten(-1, (k, h, v))
        beta = torch.sigmoid(layer.b_proj(x_t)).unflatten(-1, (k, h))
        beta = 2 * beta if layer.eigenvalues == "full" else beta
        heads = []
        for i in range(h):
            S = memories[i]
            if layer.a_proj is not None:
                dt = F.softplus(layer.a_proj(x_t)[:, i] + layer.dt_bias[i])
                S = S * torch.exp(-layer.A_log[i].exp() * dt)[:, None, None]
            for j in range(k):
                u = F.normalize(key[:, j, i], dim=-1).unsqueeze(-1)
                b = beta[:, j, i, None, None]
                S = S - b * u @ (u.mT @ S) + b * u @ value[:, j, i].unsqueeze(-2)
            memories[i] = S
            unit = F.normalize(q.unflatten(-1, (h, p))[:, i], dim=-1)
            o = (S.mT @ unit.unsqueeze(-1)).squeeze(-1) / p**0.5
            o = o / (o.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt()
            heads.append(o * layer.norm_weight)
        o = torch.cat(heads, -1)
        if layer.g_proj is not None:
            o = o * F.silu(layer.g_proj(x_t))
        outputs.append(layer.out_proj(o))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DeltaNet, {}),
        (DeltaNet, {"gated": True, "eigenvalues": "full"}),
        (DeltaProduct, {"d_conv": None, "eigenvalues": "positive"}),
        (DeltaProduct, {"gated": True, "num_householder": 3, "head_dim": 3, "expand_v": 1.5}),
    ],
)
def test_equals_the_layer_written_out(
    kind: Callable[..., DeltaProduct], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # F.normalize has no eps under the root
    monkeypatch.setattr("bedouin.layers.delta_net.FLA_UNIT_EPS", 1e-30)
    layer = kind(8, num_heads=2, dtype=torch.float64, **options)
    assert_written_out(layer, written_out, (2, 6, 8), 1e-8)


def test_defaults_are_the_authors() -> None:
    plain, gated, product = DeltaNet(16), DeltaNet(16, gated=True), DeltaProduct(16)
    assert (plain.num_householder, plain.head_dim, plain.value_dim, plain.g_proj) == (1, 4, 4, None)
    assert (gated.value_dim, gated.eigenvalues) == (8, "positive") and gated.g_proj is not None
    assert (product.num_householder, product.value_dim, product.eigenvalues) == (2, 8, "full")
    rate = gated.A_log.exp()
    assert (rate > 0).all() and (rate <= 16).all()


def test_fla_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedouin.kernels.delta_rule.fla.FLA_IS_INSTALLED", False)
    with pytest.raises(ValueError, match="backend='fla' needs the package flash-linear-attention"):
        DeltaNet(8, backend="fla")


# -- S5: n - 1 = 4 reflections compose any permutation of n = 5 elements


def swaps(permutation: tuple[int, ...]) -> list[tuple[int, int]]:
    """At most n - 1 transpositions whose successive application sorts 0 ... n - 1 to
    `permutation`."""
    order, found = list(range(N)), []
    for i, wanted in enumerate(permutation):
        j = order.index(wanted)
        if j != i:
            order[i], order[j] = order[j], order[i]
            found.append((i, j))
    return found


def matrix(permutation: tuple[int, ...]) -> Tensor:
    """(n, n): row i is the unit vector of permutation[i]."""
    return torch.eye(N, dtype=torch.float64)[list(permutation)]


def before_silu(value: float) -> float:
    """The x with SiLU(x) = `value`, for values above SiLU's minimum of -0.278 at -1.278."""
    low, high = (0.0, 2.0) if value >= 0 else (-1.278, 0.0)
    for _ in range(60):
        middle = (low + high) / 2
        below = middle / (1 + math.exp(-middle)) < value
        low, high = (middle, high) if below else (low, middle)
    return low


def tracking_layer(eigenvalues: Eigenvalues) -> DeltaProduct:
    """A layer of one-hot tokens (b, t, 121), the 120 permutations and `START`, that applies a
    token's permutation to the rows of its memory, and reads out a sum of distinctly weighted rows.

    A transposition of i and j is the reflection I - 2 u u^T, u = (e_i - e_j) / sqrt(2).
    """
    layer = DeltaProduct(
        START + 1,
        num_householder=N - 1,
        num_heads=1,
        head_dim=N,
        expand_v=1,
        eigenvalues=eigenvalues,
        output_gate=False,
        d_conv=None,
        dtype=torch.float64,
    )
    key = torch.zeros(START + 1, N - 1, N, dtype=torch.float64)
    value = torch.zeros_like(key)
    beta = torch.full((START + 1, N - 1), -40.0, dtype=torch.float64)
    for token, permutation in enumerate(PERMUTATIONS):
        for step, (i, j) in enumerate(swaps(permutation)):
            key[token, step, i], key[token, step, j] = before_silu(0.27), before_silu(-0.27)
            beta[token, step] = 40.0
    for i in range(N - 1):
        key[START, i, i], value[START, i, i], beta[START, i] = 40.0, before_silu(1.0), 0.0
    with torch.no_grad():
        layer.q_proj.weight.copy_(torch.arange(1.0, N + 1).unsqueeze(-1).expand(-1, START + 1))
        layer.k_proj.weight.copy_(key.flatten(1).T)
        layer.v_proj.weight.copy_(value.flatten(1).T)
        layer.b_proj.weight.copy_(beta.T)
        layer.out_proj.weight.copy_(torch.eye(START + 1, N))
    return layer


@torch.no_grad()
def share_recognized(layer: DeltaProduct, length: int) -> float:
    """The share of prefixes of random words whose product has the nearest read-out of all 120."""
    tokens = torch.randint(START, (8, length))
    words = torch.cat([torch.full((8, 1), START), tokens], dim=1)
    y = layer(F.one_hot(words, START + 1).double())[:, 1:, :N]
    rows = torch.eye(N, dtype=torch.float64)
    rows[N - 1, N - 1] = 0  # the memory that START writes
    matrices = torch.stack([matrix(g) for g in PERMUTATIONS])
    q = F.silu(layer.q_proj.weight[:, 0])
    read = (matrices @ rows).mT @ q
    read = F.rms_norm(read, (N,))
    product, correct = torch.eye(N, dtype=torch.float64).expand(8, N, N), 0
    for t in range(length):
        product = matrices[tokens[:, t]] @ product
        nearest = torch.cdist(y[:, t], read).argmin(-1)
        correct += int((matrices[nearest] == product).all(-1).all(-1).sum())
    return correct / (8 * length)


def test_four_reflections_track_s5() -> None:
    assert max(len(swaps(g)) for g in PERMUTATIONS) == N - 1
    assert share_recognized(tracking_layer("full"), 64) == 1.0
    # the same keys with beta at most 1 project instead of reflecting, and lose the word
    assert share_recognized(tracking_layer("positive"), 64) < 0.1


def test_three_reflections_do_not_make_a_five_cycle() -> None:
    # each step changes the transition by a matrix of rank 1, and I - (five-cycle) has rank 4
    eye = torch.eye(N, dtype=torch.float64)
    assert torch.linalg.matrix_rank(eye - matrix((1, 2, 3, 4, 0))) == 4
    key = F.normalize(torch.randn(50, 1, 3, 1, N, dtype=torch.float64), dim=-1)
    beta = torch.full((50, 1, 3, 1), 2.0, dtype=torch.float64)
    inputs = DeltaInputs(key[:, :, 0], key, torch.zeros_like(key), beta, None)
    _, transition = delta_rule_reference(inputs, eye.expand(50, 1, N, N))
    assert (torch.linalg.matrix_rank(eye - transition, rtol=1e-9) <= 3).all()
