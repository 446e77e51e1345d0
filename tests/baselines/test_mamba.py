"""Mamba: equal to the recurrence written out; what its eigenvalues can and cannot represent."""

import copy
import math
from typing import Any

import pytest
import torch
from tests.baselines.kinds import assert_written_out
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from bedouin.baselines import Mamba, MambaState
from bedouin.kernels.scan import Eigenvalues


def recurrence(layer: Mamba, u: Tensor, state: MambaState) -> Tensor:
    """The outputs (b, t, m) of inputs (b, t, m), token by token."""
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


@pytest.mark.parametrize("d_conv", [None, 4])
@pytest.mark.parametrize("eigenvalues", ["positive", "full"])
def test_equals_the_recurrence(d_conv: int | None, eigenvalues: Eigenvalues) -> None:
    layer = Mamba(4, d_state=3, d_conv=d_conv, eigenvalues=eigenvalues, dtype=torch.float64)
    assert_written_out(layer, recurrence, (2, 6, 4))


class Adapted(nn.Module):
    """base(x) + x A, as of an adapter that is not merged, with the base's weight as PEFT's have."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(base.in_features, base.out_features).to(base.weight))

    @property
    def weight(self) -> Any:
        return self.base.weight

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + x @ self.A


def test_adapters_of_every_projection_train_and_merge() -> None:
    layer = Mamba(4, dtype=torch.float64)
    u = torch.randn(2, 3, 4, dtype=torch.float64)
    names = "in_proj", "x_proj", "dt_proj", "out_proj"
    merged = copy.deepcopy(layer)
    for name in names:
        adapted = Adapted(getattr(layer, name))
        setattr(layer, name, adapted)
        with torch.no_grad():
            getattr(merged, name).weight.add_(adapted.A.T)
    y = layer(u)
    torch.testing.assert_close(y, merged(u))
    y.square().sum().backward()
    assert all(getattr(layer, name).A.grad.any() for name in names)


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


def test_initial_values_are_the_authors() -> None:
    layer = Mamba(64)
    assert layer.dt_rank == 4 and layer.d_inner == 128
    torch.testing.assert_close(layer.A_log.exp()[7], torch.arange(1.0, 17.0))
    dt = F.softplus(layer.dt_proj.bias)
    assert 9e-4 < dt.min() < 5e-3 and 0.03 < dt.max() < 0.11
    assert layer.A_log._no_weight_decay and layer.dt_proj.bias._no_reinit  # type: ignore[attr-defined]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.interpreter
def test_triton_scan_equals_the_reference(autocast: bool) -> None:
    layers = [Mamba(4, d_state=2, backend=backend) for backend in ("triton", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    u = torch.randn(2, 5, 4)
    results = []
    for layer in layers:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, state = layer(u, return_state=True)
        y.float().square().sum().backward()
        results.append((y, *state, *(p.grad for p in layer.parameters())))
    tolerance = 2e-2 if autocast else 1e-5
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def parity_layer(eigenvalues: Eigenvalues) -> Mamba:
    """A layer of one-hot bits (b, t, 2) whose "full" version has their parity in output channel 0.

    Channel 0 of x and Delta (about 40 or 0) are zero for the bit 0; channel 1 of x is constant and
    serves as the bias of B and C. With lambda = 2 exp(-Delta) - 1 and Delta x B = 1, a bit 1 does
    h <- 1 - h and a bit 0 leaves h as it is.
    """
    layer = Mamba(2, d_state=1, d_conv=None, expand=1, eigenvalues=eigenvalues, dtype=torch.float64)
    silu_one = 1 / (1 + math.exp(-1))
    values = {
        layer.in_proj.weight: [[0, 1], [1, 1], [1, 1], [1, 1]],  # x and z are 1 before SiLU
        layer.x_proj.weight: [[1 / silu_one, 0], [0, 1 / (40 * silu_one**2)], [0, 1 / silu_one]],
        layer.dt_proj.weight: [[80], [0]],
        layer.dt_proj.bias: [-40, -40],
        layer.A_log: [[0], [0]],
        layer.D: [0, 0],
        layer.out_proj.weight: [[1 / silu_one, 0], [0, 0]],
    }
    with torch.no_grad():
        for parameter, value in values.items():
            parameter.copy_(torch.tensor(value, dtype=torch.float64))
    return layer


def test_full_eigenvalues_represent_parity() -> None:
    bits = torch.randint(2, (4, 200))
    y = parity_layer("full")(F.one_hot(bits, 2).double())[..., 0]
    torch.testing.assert_close(y, bits.cumsum(1).remainder(2).double(), rtol=0, atol=1e-12)
    ones = F.one_hot(torch.ones(1, 9, dtype=torch.int64), 2).double()
    torch.testing.assert_close(parity_layer("positive")(ones)[0, :, 0], torch.ones(9).double())


def memory_after_each(layer: Mamba, u: Tensor) -> Tensor:
    """The scan's memory (t, b, d, n) after each token of u (b, t, m)."""
    state, memories = layer.init_state(u.shape[0]), []
    for u_t in u.unbind(1):
        _, state = layer.step(u_t, state)
        memories.append(state.ssm)
    return torch.stack(memories)


@torch.no_grad()
def test_positive_eigenvalues_cannot_represent_parity() -> None:
    # Grazzi et al. (arXiv 2411.12537), theorem 1: on a constant input each memory cell with a decay
    # in [0, 1] is monotone from the token on at which the convolution's window is full, whatever
    # the weights, so no read-out of it alternates. The parity of ones alternates for ever.
    for scale in (0.3, 1.0, 3.0):
        layer = Mamba(4, d_state=3, dtype=torch.float64)
        for parameter in layer.parameters():
            parameter.normal_(std=scale)
        u = torch.randn(8, 1, 4, dtype=torch.float64).expand(-1, 60, -1)
        change = memory_after_each(layer, u)[3:].diff(dim=0)
        size = memory_after_each(layer, u).abs().amax(0)
        assert not ((change > 1e-12 * size).any(0) & (change < -1e-12 * size).any(0)).any()
    ones = F.one_hot(torch.ones(1, 20, dtype=torch.int64), 2).double()
    change = memory_after_each(parity_layer("full"), ones)[:, 0, 0, 0].diff()
    torch.testing.assert_close(change, torch.tensor([-1.0, 1.0]).double().repeat(10)[:19])
