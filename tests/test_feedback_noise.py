"""The noise of `feedback_noise` in training mode."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bedouin import Decoder, SequenceModel
from bedouin.layers.tracking import Tracker, TrackingDeltaNet

SIZES: dict[str, Any] = {"tracker_dim": 8, "tracker_state": 4, "dtype": torch.float64}


def make(noise: float = 0.3) -> Tracker:
    torch.manual_seed(0)
    return Tracker(8, num_trackers=2, feedback_noise=noise, **SIZES)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_evaluation_has_none() -> None:
    layer, plain, u = make(), make(noise=0.0), draw(2, 7)
    assert not torch.equal(layer(u), plain(u))
    torch.testing.assert_close(layer.eval()(u), plain.eval()(u), rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_has_the_same_noise(use_reentrant: bool) -> None:
    found = []
    for checkpointed in (False, True):
        layer, u = make(), draw(2, 9).requires_grad_()
        y = checkpoint(layer, u, use_reentrant=use_reentrant) if checkpointed else layer(u)
        y.square().sum().backward()
        found.append([y, u.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_padding_stays_without_influence() -> None:
    """The memory passes through tokens of padding, whatever noise they get."""
    mask = torch.tensor([[True] * 4 + [False] * 5, [True] * 9])
    found = []
    for padding in (0.0, 3.0):
        layer, u = make(), draw(2, 9)
        u[~mask] = padding
        y, after = layer(u, mask=mask, return_state=True)
        found.append([y[mask], *after.tensors])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def noisy_layers() -> list[Any]:
    return [make(), TrackingDeltaNet(8, feedback_noise=0.3, **SIZES)]


@pytest.mark.parametrize("index", [0, 1])
def test_single_tokens_have_none_in_training_mode(index: int) -> None:
    layer, u = noisy_layers()[index], draw(2)
    state = layer.init_state(2)
    stepped, decoded = layer.step(u, state)[0], Decoder(layer, 2)(u)
    expected, _ = layer.eval().step(u, state)
    torch.testing.assert_close(stepped, expected, rtol=0, atol=0)
    torch.testing.assert_close(decoded, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("index", [0, 1])
def test_generation_has_none_its_prompt_included(index: int) -> None:
    model = SequenceModel(12, 8, [noisy_layers()[index]], dtype=torch.float64)
    prompt = torch.randint(12, (3, 6))
    generated = model.generate(prompt, 20)
    assert torch.equal(generated, model.eval().generate(prompt, 20))


def test_a_compiled_step_has_none() -> None:
    layer, u = make(), draw(2)
    state = layer.init_state(2)
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(u, state)[0], step(u, state)[0])
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert not torch.equal(call(draw(2, 3)), call(draw(2, 3)))
