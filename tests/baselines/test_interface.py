"""What every baseline shares: chunks, steps, states, errors, precision, copies."""

import copy
import re
from typing import Any

import pytest
import torch
from tests.baselines.kinds import Kind, every_kind

from bedouin.baselines import LSTM, Attention, DeltaNet, DeltaProduct, Mamba


def close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_kind
def test_chunks_and_steps_give_what_one_call_gives(kind: Kind) -> None:
    layer = kind(8, dtype=torch.float64)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    whole, last = layer(x, return_state=True)
    close(layer(x), whole)
    state, outputs = None, []
    for chunk in x.split([1, 3, 5], dim=1):
        y, state = layer(chunk, state, return_state=True)
        outputs.append(y)
    close(torch.cat(outputs, dim=1), whole)
    assert state is not None
    close(state.tensors, last.tensors)
    state, outputs = layer.init_state(2), []
    for x_t in x.unbind(1):
        y, state = layer.step(x_t, state)
        outputs.append(y)
    close(torch.stack(outputs, dim=1), whole)
    close(state.tensors, last.tensors)


@every_kind
def test_gradients_cross_chunks(kind: Kind) -> None:
    layer = kind(8, dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    weight = torch.randn(2, 3, 8, dtype=torch.float64)
    expected = torch.autograd.grad((layer(x)[:, 3:] * weight).sum(), inputs)
    _, state = layer(x[:, :3], return_state=True)
    close(torch.autograd.grad((layer(x[:, 3:], state) * weight).sum(), inputs), expected)


@every_kind
def test_state_methods(kind: Kind) -> None:
    layer = kind(8)
    x = torch.randn(3, 4, 8)
    _, state = layer(x, return_state=True)
    assert any(v.requires_grad for v in state.tensors)
    assert not any(v.requires_grad for v in state.detach().tensors)
    assert all(v.dtype == torch.float64 for v in state.to(torch.float64).tensors)
    assert [v.dtype for v in state.tensors] == [v.dtype for v in layer.init_state(3).tensors]
    x_t = torch.randn(3, 8)
    whole = layer.step(x_t, state)[0]
    close(layer.step(x_t[1:], state[1:])[0], whole[1:], 1e-5)
    # a sample without batch axis is taken as a batch of one
    close(layer.step(x_t[1:2], state[1])[0], whole[1:2], 1e-5)


@every_kind
def test_writing_into_a_detached_state_changes_no_backward(kind: Kind) -> None:
    layer = kind(8, dtype=torch.float64)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    y, state = layer(x, return_state=True)
    for tensor in state.detach().tensors:
        tensor.zero_()
    close(torch.autograd.grad(y.sum(), list(layer.parameters())), expected)


@every_kind
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(kind: Kind, autocast: bool) -> None:
    layer = kind(8, dtype=torch.float64)
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if isinstance(layer, LSTM) and autocast and not has_bfloat16:
        pytest.skip("torch.nn.LSTM fails under autocast on a CPU without bfloat16 instructions")
    layer.to(torch.float32 if autocast else torch.bfloat16)
    exact = copy.deepcopy(layer).to(torch.float64)
    x = torch.randn(2, 6, 8).to(next(layer.parameters()).dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        first, state = layer(x[:, :3], return_state=True)
        y = torch.cat([first, layer(x[:, 3:], state)], dim=1)
    assert y.dtype == torch.bfloat16
    assert [v.dtype for v in state.tensors] == [v.dtype for v in layer.init_state(3).tensors]
    torch.testing.assert_close(y.double(), exact(x.double()), rtol=0.1, atol=0.03)
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


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
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_parameter_gets_a_gradient_from_nothing(
    kind: Kind, device: str, shape: tuple[int, int]
) -> None:
    """DDP waits for them on a rank without samples or tokens."""
    layer, x = kind(8, device=device), torch.randn(*shape, 8, device=device, requires_grad=True)
    before = layer.init_state(shape[0])
    output, state = layer(x, before, return_state=True)
    assert all(torch.equal(*pair) for pair in zip(before.tensors, state.tensors, strict=True))
    masked = layer(x, mask=torch.ones(shape, dtype=torch.bool, device=device))
    step, _ = layer.step(torch.randn(0, 8, device=device), layer.init_state(0))
    assert output.shape == masked.shape == x.shape and step.shape == (0, 8)
    for v in state.tensors:
        v.detach().fill_(1)  # the state that is returned is another one
    assert all(map(torch.equal, before.tensors, layer.init_state(shape[0]).tensors))
    for result in (output, masked, step):
        layer.zero_grad()
        result.sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None and not parameter.grad.any(), name
    assert x.grad is not None and x.grad.shape == x.shape


@every_kind
def test_reset_parameters_draws_all_anew(kind: Kind) -> None:
    torch.manual_seed(1)
    drawn = kind(8)
    emptied = kind(8, device="meta").to_empty(device="cpu")
    for parameter in emptied.parameters():
        parameter.data.fill_(float("nan"))
    emptied.reset_parameters()
    for (name, value), other in zip(drawn.named_parameters(), emptied.parameters(), strict=True):
        assert other.isfinite().all(), name
        spread = other.std(), value.std()
        if value.numel() > 30:
            torch.testing.assert_close(*spread, rtol=0.5, atol=0.02, msg=name)


INPUTS: list[tuple[Any, type[Exception], str]] = [
    ([1.0], TypeError, "x must be a tensor (b, t, m), got list"),
    (torch.randn(2, 8), ValueError, "x must have shape (b, t, m) with m = d_model = 8, got (2, 8)"),
    (torch.randn(2, 3, 7), ValueError, "with m = d_model = 8, got (2, 3, 7)"),
    (torch.ones(2, 3, 8, dtype=torch.int64), TypeError, "x must have a floating dtype, got"),
    (torch.randn(2, 3, 8, dtype=torch.float64), TypeError, "the layer's dtype torch.float32, got"),
    (torch.randn(2, 3, 8, device="meta"), ValueError, "x must be on the layer's device cpu"),
]


@every_kind
@pytest.mark.parametrize(("x", "error", "message"), INPUTS)
def test_wrong_inputs(kind: Kind, x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        kind(8)(x)


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
