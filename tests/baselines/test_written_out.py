"""Each baseline against its definition written out, its kernels, errors, and what is its own."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.equations import delta_rule
from tests.layer_cases import BASELINES
from tests.messages import Row, of, refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from bedouin.baselines import (
    LSTM,
    Attention,
    AttentionState,
    DeltaNet,
    DeltaProduct,
    LSTMState,
    Mamba,
    MambaState,
    PaddedAttentionState,
)
from bedouin.testing import assert_close

Kind = Callable[..., Any]


def assert_written_out(
    layer: Any, expected: Callable[..., Tensor], shape: tuple[int, ...], tolerance: float = 1e-9
) -> None:
    """The layer's outputs and gradients in float64 are those of expected(layer, x, state)."""
    x, state = torch.randn(shape, dtype=torch.float64, requires_grad=True), None
    if not isinstance(layer, Attention):  # whose state holds tokens
        empty = layer.init_state(shape[0])
        state = empty._make(torch.randn_like(v) for v in empty.tensors)
    outputs = layer(x, state), expected(layer, x, state)
    inputs = [x, *layer.parameters()]
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in outputs]
    for pair in (outputs, *zip(*grads, strict=True)):
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)


def lstm(layer: LSTM, x: Tensor, state: LSTMState) -> Tensor:
    """The outputs (b, t, m) of inputs (b, t, m), token by token; so are the other functions."""
    W, U, b, b_U = layer.lstm.parameters()
    x = x if layer.conv.width is None else F.silu(layer.conv(x, state.conv)[0])
    h, c = state.h, state.c
    outputs = []
    for x_t in x.unbind(1):
        i, f, g, o = (x_t @ W.T + b + h @ U.T + b_U).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h @ layer.out_proj.weight.T)
    return torch.stack(outputs, dim=1)


def turned(x: Tensor, position: int, base: float | None) -> Tensor:
    """The rotary position applied to x (b, h, p) as complex numbers."""
    if base is None:
        return x
    first, second = x.chunk(2, -1)
    i = torch.arange(first.shape[-1], dtype=x.dtype)
    angle = position * base ** (-i / first.shape[-1])
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def attention(layer: Attention, x: Tensor, state: None) -> Tensor:
    h, p = layer.num_heads, layer.head_dim
    window = layer.init_state(x.shape[0]).conv
    q, k, v = layer.conv(layer.in_proj(x), window)[0].unflatten(-1, (3, h, p)).unbind(2)
    keys = [turned(k[:, s], s, layer.rope_base) for s in range(x.shape[1])]
    outputs = []
    for t in range(x.shape[1]):
        query = turned(q[:, t], t, layer.rope_base)
        scores = torch.stack([(query * key).sum(-1) for key in keys[: t + 1]], -1) / math.sqrt(p)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        o = torch.einsum("bhs,bshp->bhp", weights, v[:, : t + 1])
        outputs.append(layer.out_proj(o.flatten(1)))
    return torch.stack(outputs, dim=1)


def mamba(layer: Mamba, u: Tensor, state: MambaState) -> Tensor:
    window, h, outputs = state.conv, state.ssm, []
    r, n = layer.dt_rank, layer.d_state
    weight, bias = layer.conv.weight, layer.conv.bias
    for u_t in u.unbind(1):
        x, z = layer.in_proj(u_t).chunk(2, -1)
        if weight is not None and bias is not None:
            window = torch.cat([window, x.unsqueeze(1)], dim=1)
            x = (window * weight.T).sum(1) + bias
            window = window[:, 1:]
        x = F.silu(x)
        dt, B, C = layer.x_proj(x).split([r, n, n], -1)
        delta = F.softplus(layer.dt_proj(dt)).unsqueeze(-1)
        decay = torch.exp(-torch.exp(layer.A_log) * delta)
        decay = 2 * decay - 1 if layer.eigenvalues == "full" else decay
        h = decay * h + delta * x.unsqueeze(-1) * B.unsqueeze(1)
        y = (h * C.unsqueeze(1)).sum(-1) + layer.D * x
        outputs.append(layer.out_proj(y * F.silu(z)))
    return torch.stack(outputs, dim=1)


DEFINITIONS: dict[Any, Callable[..., Tensor]] = {
    LSTM: lstm,
    Attention: attention,
    Mamba: mamba,
    DeltaNet: lambda *given: delta_rule(*given)[1],
    DeltaProduct: lambda *given: delta_rule(*given)[1],
}
MORE: dict[str, Kind] = {
    "full": partial(DeltaNet, num_heads=2, gated=True, eigenvalues="full"),
    "positive": partial(DeltaProduct, num_heads=2, d_conv=None, eigenvalues="positive"),
}


@pytest.mark.parametrize("make", (BASELINES | MORE).values(), ids=BASELINES | MORE)
def test_equals_the_definition(make: Kind) -> None:
    layer = make(8, dtype=torch.float64)
    tolerance = 1e-8 if isinstance(layer, DeltaProduct) else 1e-9
    assert_written_out(layer, DEFINITIONS[type(layer)], (2, 6, 8), tolerance)


def test_defaults_and_initial_values_are_the_authors() -> None:
    plain, gated, product = DeltaNet(16), DeltaNet(16, gated=True), DeltaProduct(16)
    assert (plain.num_householder, plain.head_dim, plain.value_dim, plain.g_proj) == (1, 4, 4, None)
    assert DeltaNet(8, num_heads=1, head_dim=100, expand_v=0.57).value_dim == 57
    assert (gated.value_dim, gated.eigenvalues) == (8, "positive") and gated.g_proj is not None
    assert (product.num_householder, product.value_dim, product.eigenvalues) == (2, 8, "full")
    rate = gated.A_log.exp()
    assert (rate > 0).all() and (rate <= 16).all()
    layer = Mamba(64)
    assert layer.dt_rank == 4 and layer.d_inner == 128
    torch.testing.assert_close(layer.A_log.exp()[7], torch.arange(1.0, 17.0))
    dt = F.softplus(layer.dt_proj.bias)
    assert 9e-4 < dt.min() < 5e-3 and 0.03 < dt.max() < 0.11
    assert layer.A_log._no_weight_decay and layer.dt_proj.bias._no_reinit  # type: ignore[attr-defined]


def test_fla_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedouin.kernels.delta_rule.fla.FLA_IS_INSTALLED", False)
    with pytest.raises(ValueError, match="backend='fla' needs the package flash-linear-attention"):
        DeltaNet(8, backend="fla")


def test_a_call_does_not_move_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP puts gathered weights in the place of others, and gathers into the same memory again."""
    moved: list[torch.nn.LSTM] = []
    monkeypatch.setattr(torch.nn.LSTM, "flatten_parameters", lambda self: moved.append(self))
    layer, x = LSTM(4), torch.randn(2, 3, 4)
    other, moves = LSTM(4), len(moved)
    assert moves
    layer.lstm.weight_hh_l0 = other.lstm.weight_hh_l0
    y = layer(x)
    torch.func.functional_call(layer, dict(other.named_parameters()), x)
    assert len(moved) == moves
    torch.testing.assert_close(y, lstm(layer, x, layer.init_state(2)))
    layer.double()
    assert len(moved) > moves


def test_states_of_different_lengths_join() -> None:
    layer = Attention(8, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    states = [layer(x[i : i + 1, : 2 + i], return_state=True)[1] for i in range(2)]
    joined = AttentionState.cat(states)
    assert isinstance(joined, PaddedAttentionState) and joined.lengths.tolist() == [2, 3]
    x_t = torch.randn(2, 8, dtype=torch.float64)
    steps = [layer.step(x_t[i : i + 1], state)[0] for i, state in enumerate(states)]
    assert_close("step", layer.step(x_t, joined)[0], torch.cat(steps), 1e-12)
    singles = PaddedAttentionState.stack([joined[1], joined[0]])
    assert_close("stack", layer.step(x_t, singles[[1, 0]])[0], torch.cat(steps), 1e-12)
    half = joined.to(torch.float16)
    assert half.keys.dtype == torch.float16 and half.lengths.dtype == torch.int64
    with pytest.raises(ValueError, match=r"state.lengths must be int64 of shape \(2,\), got "):
        layer.step(x_t, joined._replace(lengths=joined.lengths[:1]))


@pytest.mark.parametrize("change", ["parametrization", "hook", "forward"])
def test_a_changed_projection_to_delta_is_called(change: str) -> None:
    """And adds its bias itself, in its own dtype; otherwise the bias is added in float32."""
    layer = Mamba(64, dtype=torch.bfloat16)
    proj: Any = layer.dt_proj
    dt = torch.randn(2, 5, layer.dt_rank, dtype=torch.bfloat16)
    seen: list[Tensor] = []
    raw, bias = layer._project_dt(dt)
    assert bias is proj.bias and torch.equal(raw, F.linear(dt, proj.weight))
    if change == "hook":
        proj.register_forward_hook(lambda module, args, output: seen.append(output))
    elif change == "forward":
        plain = proj.forward

        def forward(v: Tensor) -> Any:
            seen.append(plain(v))
            return seen[-1]

        proj.forward = forward
    else:
        parametrize.register_parametrization(proj, "weight", nn.Identity())
    raw, bias = layer._project_dt(dt)
    assert bias is None and torch.equal(raw, F.linear(dt, proj.weight, proj.bias))
    assert len(seen) == (change != "parametrization")


# torch warns that the backward of its attention kernel adds in an order that is not fixed
@pytest.mark.filterwarnings("ignore:.*ttention defaults to a non-deterministic:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("kind", BASELINES.values(), ids=BASELINES)
@pytest.mark.parametrize("autocast", [False, True])
def test_gpu_gives_what_the_cpu_gives(kind: Kind, autocast: bool) -> None:
    layer = kind(64)
    x, results = torch.randn(3, 70, 64), []
    for device, rounded in (("cpu", False), ("cpu", autocast), ("cuda", autocast)):
        one, u = copy.deepcopy(layer).to(device), x.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=rounded):
            first, state = one(u[:, :40], return_state=True)
            y = torch.cat([first, one(u[:, 40:], state)], dim=1).float()
        y.square().sum().backward()
        results.append([y.cpu(), *(p.grad.cpu() for p in one.parameters() if p.grad is not None)])
    for exact, on_cpu, value in zip(*results, strict=True):
        # cuDNN's LSTM multiplies in TensorFloat32
        assert (value - exact).norm() <= 3 * (on_cpu - exact).norm() + 5e-3 * exact.norm()


UNEQUAL = AttentionState(torch.zeros(2, 0, 24), torch.zeros(2, 3, 4, 2), torch.zeros(2, 2, 4, 2))
OPTIONS: list[Row] = [
    (of(LSTM, 8, expand=0), ValueError, "expand must be finite and > 0, got 0"),
    (of(LSTM, 8, expand="2"), TypeError, "expand must be a number > 0, got '2'"),
    (of(LSTM, 8, expand=0.1), ValueError, "expand * d_model must be at least 1, got 0.1 * 8"),
    (of(Mamba, 8, conv_bias=1), TypeError, "conv_bias must be True or False, got 1"),
    (of(Mamba, 8, d_state=0), ValueError, "d_state must be at least 1, got 0"),
    (of(Mamba, 8, dt_rank=0), ValueError, "dt_rank must be at least 1, got 0"),
    (of(Mamba, 8, bias=None), TypeError, "bias must be True or False, got None"),
    (of(DeltaNet, 8, gated=1), TypeError, "gated must be True or False, got 1"),
    (of(DeltaNet, 8, num_heads=3), ValueError, "num_heads must divide d_model = 8, got 3: choose"),
    (of(DeltaNet, 8, num_householder=1), TypeError, "num_householder, which is 1: use Delta"),
    (of(DeltaNet, 8, expand_v=0.1), ValueError, "expand_v * head_dim must be at least 1, got 0.1"),
    (of(DeltaNet, 8, output_gate=0), TypeError, "output_gate must be True or False, got 0"),
    (of(DeltaNet, 8, backend="cuda"), ValueError,
     "backend must be one of ('auto', 'torch', 'reference', 'triton"),
    (of(DeltaProduct, 8, num_householder=0), ValueError,
     "num_householder must be at least 1, got 0"),
    (of(DeltaProduct, 8, norm_eps=0.0), ValueError, "norm_eps must be finite and > 0, got 0.0"),
    (of(DeltaProduct, 8, head_dim=0), ValueError, "head_dim must be at least 1, got 0"),
    (of(Attention, 8, num_heads=3), ValueError, "num_heads must divide d_model = 8, got 3: choose"),
    (of(Attention, 8, num_heads=8), ValueError, "channels a head, got 1: choose another num_heads"),
    (of(Attention, 8, rope_base=-1.0), ValueError, "rope_base must be finite and > 0, got -1.0"),
    (of(Attention(8), torch.randn(2, 3, 8), UNEQUAL), ValueError,
     "state.keys and state.values must have one shape, got"),
]  # fmt: skip

test_wrong_options = refused(OPTIONS)
