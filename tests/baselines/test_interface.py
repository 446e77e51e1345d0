"""What every baseline shares beside the laws of every layer: a GPU and errors."""

import copy
import re
from typing import Any

import pytest
import torch
from tests.baselines.kinds import Kind, every_kind

from bedouin.baselines import LSTM, Attention, DeltaNet, DeltaProduct, Mamba


# torch warns that the backward of its attention kernel adds in an order that is not fixed
@pytest.mark.filterwarnings("ignore:.*ttention defaults to a non-deterministic:UserWarning")
@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("autocast", [False, True])
def test_gpu_gives_what_the_cpu_gives(kind: Kind, autocast: bool) -> None:
    layer = kind(64)
    on_gpu = copy.deepcopy(layer).to("cuda")
    x, results = torch.randn(3, 70, 64), []
    for one, u in ((layer, x), (on_gpu, x.cuda())):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            first, state = one(u[:, :40], return_state=True)
            y = torch.cat([first, one(u[:, 40:], state)], dim=1).float()
        y.square().sum().backward()
        results.append([y.cpu(), *(p.grad.cpu() for p in one.parameters() if p.grad is not None)])
    for on_cpu, value in zip(*results, strict=True):
        # cuDNN's LSTM multiplies in TensorFloat32
        assert (on_cpu - value).norm() < (0.05 if autocast else 5e-3) * on_cpu.norm()


@every_kind
def test_wrong_states(kind: Kind) -> None:
    layer = kind(8)
    x, state = torch.randn(2, 3, 8), layer.init_state(2)
    with pytest.raises(TypeError, match=r"state must be a \w+State or None, got tuple: make one"):
        layer(x, tuple(state))
    with pytest.raises(TypeError, match="state must not be None"):
        layer.step(x[:, 0], None)
    with pytest.raises(ValueError, match=r"state.conv must have shape \(2, .*got \(3, "):
        layer(x, layer.init_state(3))
    with pytest.raises(ValueError, match="must have dtype torch.float32, got torch.float64: use"):
        layer(x, state.to(torch.float64))
    with pytest.raises(ValueError, match=r"must be on cpu, got meta: use state.to\(device\)"):
        layer(x, state.to("meta"))
    with pytest.raises(TypeError, match=r"state.conv must be a tensor \(b, .*\), got NoneType"):
        layer(x, state._replace(conv=None))
    with pytest.raises(ValueError, match="batch_size must be an int >= 0, got -1"):
        layer.init_state(-1)


OPTIONS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (LSTM, {"d_model": 0}, ValueError, "d_model must be at least 1, got 0"),
    (LSTM, {"d_model": 8.0}, TypeError, "d_model must be an int >= 1, got 8.0"),
    (LSTM, {"expand": 0}, ValueError, "expand must be finite and > 0, got 0"),
    (LSTM, {"expand": "2"}, TypeError, "expand must be a number > 0, got '2'"),
    (LSTM, {"expand": 0.1}, ValueError, "expand * d_model must be at least 1, got 0.1 * 8"),
    (LSTM, {"d_conv": 0}, ValueError, "d_conv must be at least 1, got 0"),
    (LSTM, {"conv_bias": 1}, TypeError, "conv_bias must be True or False, got 1"),
    (LSTM, {"dtype": torch.int64}, TypeError, "dtype must be None or one of torch.float32"),
    (LSTM, {"num_layers": 2}, TypeError, "has no option 'num_layers'"),
    (Mamba, {"d_state": 0}, ValueError, "d_state must be at least 1, got 0"),
    (Mamba, {"dt_rank": 0}, ValueError, "dt_rank must be at least 1, got 0"),
    (Mamba, {"eigenvalues": "negative"}, ValueError, "eigenvalues must be one of ('positive', "),
    (Mamba, {"backend": "cuda"}, ValueError, "backend must be one of ('auto', 'triton', "),
    (Mamba, {"bias": None}, TypeError, "bias must be True or False, got None"),
    (DeltaNet, {"gated": 1}, TypeError, "gated must be True or False, got 1"),
    (DeltaNet, {"num_heads": 3}, ValueError, "num_heads must divide d_model = 8, got 3: choose"),
    (DeltaNet, {"expand_v": 0.1}, ValueError, "expand_v * head_dim must be at least 1, got 0.1"),
    (DeltaNet, {"output_gate": 0}, TypeError, "output_gate must be True or False, got 0"),
    (DeltaNet, {"backend": "cuda"}, ValueError, "backend must be one of ('auto', 'torch', 'triton"),
    (DeltaProduct, {"num_householder": 0}, ValueError, "num_householder must be at least 1, got 0"),
    (DeltaProduct, {"eigenvalues": "any"}, ValueError, "eigenvalues must be one of ('positive', "),
    (DeltaProduct, {"norm_eps": 0.0}, ValueError, "norm_eps must be finite and > 0, got 0.0"),
    (DeltaProduct, {"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
    (Attention, {"num_heads": 3}, ValueError, "num_heads must divide d_model = 8, got 3: choose"),
    (Attention, {"num_heads": 8}, ValueError, "channels a head, got 1: choose another num_heads"),
    (Attention, {"rope_base": -1.0}, ValueError, "rope_base must be finite and > 0, got -1.0"),
]


@pytest.mark.parametrize(("kind", "options", "error", "message"), OPTIONS)
def test_wrong_options(
    kind: Kind, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        kind(**{"d_model": 8, **options})
