"""`Convolved`: its definition, and what it shares with the layer around which it is.

Chunks, steps, states, padding and documents are tested with those of the baselines
(tests/baselines), whole models in tests/test_generation.py.
Letters: b batch, t time, m d_model.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from bedouin import (
    Bedouin,
    Bidirectional,
    Convolved,
    ConvolvedState,
    Decoder,
    FixedPointRNN,
    SequenceModel,
    param_groups,
)
from bedouin.baselines import LSTM, Attention
from bedouin.decoding.parts import is_buffered
from bedouin.solvers import GammaCap, Picard
from bedouin.testing import assert_close

FLOAT64: dict[str, Any] = {"dtype": torch.float64}


def make(d_conv: int = 3, **options: Any) -> Convolved:
    return Convolved(Bedouin(4, d_state=2, **(FLOAT64 | options)), d_conv)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Plain(nn.Module):
    """A layer without states and masks."""

    d_model = 4

    def forward(self, x: Tensor) -> Tensor:  # (b, t, m) -> (b, t, m)
        return 2 * x


class Elsewhere(Plain):
    """A layer whose states are not ours."""

    def init_state(self, batch_size: int) -> tuple[Tensor, ...]:
        return (torch.zeros(batch_size, 4),)


@pytest.mark.parametrize("d_conv", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_layer_on_what_the_convolution_gives(d_conv: int, bias: bool) -> None:
    layer, x = Bedouin(4, **FLOAT64), draw(2, 6, 4)
    whole = Convolved(layer, d_conv, bias=bias)
    seen = F.pad(x, (0, 0, d_conv - 1, 0))
    weight = whole.conv.weight
    assert weight is not None and (whole.conv.bias is not None) == bias
    u = torch.stack([(seen[:, t : t + d_conv] * weight.T).sum(1) for t in range(6)], 1)
    u = u if whole.conv.bias is None else u + whole.conv.bias
    assert_close("output", whole(x), layer(F.silu(u)), 1e-12)
    assert whole.stats is layer.stats and layer.stats is not None


def test_it_is_made_like_its_layer() -> None:
    whole = Convolved(Bedouin(4, layer_idx=3, device="meta", dtype=torch.bfloat16))
    assert {(p.device.type, p.dtype) for p in whole.parameters()} == {("meta", torch.bfloat16)}
    assert (whole.d_model, whole.layer_idx, whole.stats) == (4, 3, None)
    assert "d_conv=4" in repr(whole)
    other = Convolved(LSTM(4), device="meta", dtype=torch.float64)
    assert other.conv.weight is not None and other.conv.weight.dtype == torch.float64
    assert other.conv.weight.is_meta and other.layer_idx is None


def test_states_join_and_separate() -> None:
    layer = make()
    state: Any = layer(draw(3, 5, 4), return_state=True)[1]
    assert [v.shape for v in state.tensors] == [(3, 2, 4), (3, 8, 2), (3, 8)]
    for joined in (
        ConvolvedState.stack([state[i] for i in range(3)]),
        ConvolvedState.cat([state[:1], state[[1, 2]]]),
        state.clone().cpu(),
    ):
        assert isinstance(joined, ConvolvedState)
        assert all(map(torch.equal, joined.tensors, state.tensors))
    copied = state.detach().clone()
    copied.conv.zero_()
    copied.inner.y.zero_()
    assert state.conv.any() and state.inner.y.any()
    with pytest.raises(TypeError, match="cat must get a list of BedouinState, got one of LSTMStat"):
        ConvolvedState.cat([state, Convolved(LSTM(4, **FLOAT64), 3).init_state(1)])


def test_a_returned_state_owns_its_memory() -> None:
    layer, x = make(), draw(2, 40, 4)
    _, state = layer(x, return_state=True)
    _, stepped = layer.step(x[:, 0], state)
    mask = torch.ones(2, 40, dtype=torch.bool)
    _, padded = layer(x, return_state=True, mask=mask)
    for tensor in (*state.tensors, *stepped.tensors, *padded.tensors):
        assert tensor.untyped_storage().nbytes() == 8 * tensor.numel()


@torch.no_grad()
@pytest.mark.parametrize("t", [0, 3])
def test_empty_documents_and_calls_without_tokens(t: int) -> None:
    """They return the state that came."""
    layer, x = make(), draw(1, t, 4)
    _, before = layer(draw(3, 2, 4), return_state=True)
    cu_seqlens = torch.tensor([0, 0, t, t])
    output, after = layer(x, before, return_state=True, cu_seqlens=cu_seqlens)
    assert output.shape == x.shape
    for i in (0, 2) if t else range(3):
        pair: list[Any] = [after[i], before[i]]
        assert all(map(torch.equal, pair[0].tensors, pair[1].tensors))
    _, after = layer(draw(3, t, 4), before, return_state=True, mask=torch.zeros(3, t).bool())
    assert all(map(torch.equal, after.tensors, before.tensors))
    none, first = layer(draw(0, t, 4), return_state=True)
    assert none.shape == (0, t, 4) and first.conv.shape == (0, 2, 4)


def test_statistics_have_an_entry_for_each_document() -> None:
    layer, x = make(), draw(2, 5, 4)
    layer(x, seq_idx=torch.tensor([[0, 0, 1, 1, 1], [7, 7, 7, 7, 7]]))
    assert layer.stats.converged.tolist() == [True] * 3
    layer(x[:1], cu_seqlens=torch.tensor([0, 2, 2, 5]))
    assert layer.stats.num_steps.tolist() == [1, 0, 1]


@torch.no_grad()
def test_a_decoder_continues_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps, and on buffers, which only Triton's interpreter and a GPU take by themselves."""
    layer, x = make(num_heads=2), draw(3, 7, 4)
    whole, end = layer(x, return_state=True)
    _, state = layer(x[:, :2], return_state=True)
    for buffered in (False, True):
        monkeypatch.setattr("bedouin.decoding.decoder.is_buffered", lambda *call, b=buffered: b)
        decoder: Any = Decoder(layer, 3, state=state)
        for t in range(2, 7):
            assert_close(f"token {t}", decoder(x[:, t]), whole[:, t], 1e-11)
        assert (decoder._captured is not None) == buffered
        found = decoder.state
        decoder(x[:, 0])
        for actual, expected in zip(found.tensors, end.tensors, strict=True):
            assert_close("state", actual, expected, 1e-11)
        decoder.reset()
        assert_close("anew", decoder(x[:, 0]), whole[:, 0], 1e-11)
    # a replaced convolution makes another graph, which continues from the same state
    captured = decoder._captured
    layer.conv.bias = nn.Parameter(draw(4))
    expected, _ = layer.step(x[:, 1], decoder.state)
    assert_close("replaced", decoder(x[:, 1]), expected, 1e-11)
    assert decoder._captured is not captured
    with pytest.raises(ValueError, match=r"state.conv must have shape \(2, 2, 4\)"):
        Decoder(layer, 2, state=state)
    with pytest.raises(ValueError, match=r"state.ssm must have shape \(3, 8, 2\)"):
        Decoder(layer, 3, state=state._replace(inner=state.inner[:2]))
    with pytest.raises(TypeError, match="FixedPointRNN or a SequenceModel, got LSTM"):
        Decoder(Convolved(LSTM(4)), 1)


@pytest.mark.interpreter
@torch.no_grad()
def test_a_decoder_on_the_kernels() -> None:
    layer = make(backend="triton")
    plain, x = copy.deepcopy(layer), draw(2, 3, 4)
    plain.layer.backend = "reference"
    assert is_buffered(layer, x[:, 0]) and not is_buffered(plain, x[:, 0])
    decoder, whole, state = Decoder(layer, 2), plain(x), layer.init_state(2)
    for t in range(3):
        assert_close(f"token {t}", decoder(x[:, t]), whole[:, t], 1e-10)
        y_t, state = layer.step(x[:, t], state)
        assert_close(f"step {t}", y_t, whole[:, t], 1e-10)
    # a hook does not run in a replay
    with layer.conv.register_forward_hook(lambda *call: None):
        assert not is_buffered(layer, x[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_decoder_on_a_gpu_is_one_graph(autocast: Any, no_synchronization: Any) -> None:
    layer = Convolved(Bedouin(64, num_heads=2, device="cuda"))
    x = torch.randn(3, 9, 64, device="cuda")
    rtol = 1e-4 if autocast is None else 0.05
    with torch.inference_mode(), torch.autocast("cuda", autocast, enabled=autocast is not None):
        whole, (_, state) = layer(x), layer(x[:, :4], return_state=True)
        decoder: Any = Decoder(layer, 3, state=state)
        first = decoder(x[:, 4])
        for t in range(5, 9):
            with no_synchronization():
                again = decoder(x[:, t])
            assert again is first
            assert_close(f"token {t}", again, whole[:, t], rtol)
    run = layer.graphed(x)
    assert_close("graphed", run(x), layer(x), 1e-5)


def test_a_capture_takes_convolution_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a call in place of a replay, as a machine without a GPU can."""
    with pytest.raises(ValueError, match=r"CUDA device, got cpu.*call the layer itself"):
        make().graphed(draw(1, 2, 4))
    monkeypatch.setattr("bedouin.graphed.is_cuda_device", lambda device: True)
    monkeypatch.setattr("bedouin.graphed.capture", lambda layer, *call: lambda x, *p: layer(x))
    layer, x = make(), draw(2, 3, 4)
    run = layer.graphed(x)
    assert_close("output", run(x), layer(x), 1e-12)
    layer.conv.weight = nn.Parameter(draw(4, 3))
    with pytest.raises(RuntimeError, match="capture layer.graphed"):
        run(x)
    with pytest.raises(ValueError, match="max_steps to an int"):
        make(solver=Picard(), max_steps=GammaCap(4.0, 1.0, 100)).graphed(x)
    with pytest.raises(TypeError, match=r"layer LSTM has no graphed\(\)"):
        Convolved(LSTM(4, **FLOAT64)).graphed(x)


def test_copies_under_vmap_and_double_backward() -> None:
    layers, x = [make() for _ in range(2)], draw(2, 4, 4)
    params, buffers = stack_module_state(layers)
    stacked = vmap(lambda p: functional_call(layers[0], (p, buffers), (x,)))(params)
    for found, layer in zip(stacked, layers, strict=True):
        assert_close("vmap", found, layer(x), 1e-11)
    x.requires_grad_()
    torch.autograd.gradgradcheck(Convolved(Plain(), 2, **FLOAT64), x[:1])
    (grad,) = torch.autograd.grad(layers[0](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="bedouin's fixed point is once differentiable"):
        grad.sum().backward()


# dynamo instantiates torch.autograd.Function when it traces a subclass
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_call_is_one_graph() -> None:
    """Also with a state; what a compiler makes of the layer is tested with the layer."""
    layer, x = make(), draw(2, 3, 4)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="eager")
    (output, state), expected = compiled(x, return_state=True), layer(x, return_state=True)
    assert_close("output", output, expected[0], 1e-12)
    for found, tensor in zip(state.tensors, expected[1].tensors, strict=True):
        assert_close("state", found, tensor, 1e-12)
    params = list(layer.parameters())
    grads = (torch.autograd.grad(y.square().sum(), params) for y in (output, expected[0]))
    for a, e in zip(*grads, strict=True):
        assert_close("gradient", a, e, 1e-10)


def test_the_filters_decay_and_the_bias_does_not() -> None:
    layer = make()
    decayed, exempt = (group["params"] for group in param_groups(layer, 0.1))
    assert any(p is layer.conv.weight for p in decayed)
    for kept in (layer.conv.bias, layer.layer.A_log, layer.layer.D):
        assert any(p is kept for p in exempt)


def test_a_wrapped_projection_inside() -> None:
    """An adapter's matrix is used, and a copy with merged weights gives the same."""
    layer, x = make(), draw(2, 4, 4)
    merged = copy.deepcopy(layer)
    nn.utils.parametrizations.weight_norm(layer.layer.y_proj)
    layer.layer.y_proj.parametrizations.weight.original0.data.mul_(2.0)
    merged.layer.y_proj.weight.data.mul_(2.0)
    assert_close("output", layer(x), merged(x), 1e-12)
    state = layer.init_state(2)
    assert_close("step", layer.step(x[:, 0], state)[0], merged(x)[:, 0], 1e-11)


def test_both_directions_and_layers_within_layers() -> None:
    x, mask = draw(2, 5, 4), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    both = Bidirectional(make(), make())
    alone = both(x[:1, 1:])
    assert_close("row", both(x, mask=mask)[:1, 1:], alone, 1e-11)
    twice = Convolved(make(2), 3)
    whole, state = twice(x), twice.init_state(2)
    decoder = Decoder(twice, 2)
    for t in range(5):
        y_t, state = twice.step(x[:, t], state)
        assert_close("step", y_t, whole[:, t], 1e-11)
        assert_close("decoder", decoder(x[:, t]), whole[:, t], 1e-11)


def test_what_a_layer_lacks_is_named() -> None:
    plain, x = Convolved(Plain(), 2, dtype=torch.float64), draw(1, 3, 4)
    assert plain(x).shape == x.shape and plain.stats is None
    with pytest.raises(TypeError, match=r"layer Plain has no init_state\(\), which this needs"):
        plain(x, return_state=True)
    with pytest.raises(TypeError, match=r"layer Plain has no init_state\(\)"):
        plain.init_state(1)
    with pytest.raises(TypeError, match=r"layer Plain has no step\(\)"):
        plain.step(x[:, 0], None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mixer Plain takes no mask"):
        plain(x, mask=torch.ones(1, 3).bool())
    with pytest.raises(TypeError, match=r"layer Plain has no reset_parameters\(\)"):
        plain.reset_parameters()
    with pytest.raises(
        TypeError, match="must have states that can be joined.*tuple from Elsewhere"
    ):
        Convolved(Elsewhere()).init_state(2)
    with pytest.raises(AttributeError, match="solve_options"):
        _ = plain.solve_options


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((4,), TypeError, "layer must be a module, got int"),
        ((nn.Linear(4, 4),), TypeError, "mixing layer with an int d_model.*got Linear"),
        ((Bidirectional(Bedouin(4), Bedouin(4)),), TypeError, "got Bidirectional: put Convolved"),
        ((Bedouin(4), 0), ValueError, "d_conv must be at least 1, got 0"),
        ((Bedouin(4), None), TypeError, "d_conv must be an int >= 1, got None"),
        ((Bedouin(4), 2.0), TypeError, "d_conv must be an int >= 1, got 2.0"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Convolved(*arguments)
    with pytest.raises(TypeError, match="bias must be True or False, got 1"):
        Convolved(Bedouin(4), bias=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype must be None or one of"):
        Convolved(Bedouin(4), dtype=torch.int64)


@torch.no_grad()
def test_generated_tokens_are_those_of_the_full_forward() -> None:
    mixers = [
        make(),
        Convolved(Attention(4, num_heads=1, **FLOAT64), 2),
        Convolved(FixedPointRNN(4, **FLOAT64)),
    ]
    model = SequenceModel(7, 4, mixers, **FLOAT64)
    prompt = expected = torch.randint(7, (2, 3))
    for _ in range(4):
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(prompt, 4), expected)
    left = F.pad(prompt, (2, 0))
    mask = F.pad(torch.ones_like(prompt), (2, 0)).bool()
    assert torch.equal(model.generate(left, 4, mask=mask)[:, 2:], expected)
