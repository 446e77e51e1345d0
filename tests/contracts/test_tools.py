"""Tools that hook every module of a model to count its operations, or for gradients of samples:
they run, and leave the numbers as they are.

Letters: b batch, t time, m d_model.
"""

import copy

import pytest
import torch
from tests.layer_cases import CPU, draw, make
from torch import Tensor, nn

from bedouin.layers.fixed_point import FixedPointLayer

NAMES = "one head", "convolution", "no mixing", "vector, heads", "model"
models = pytest.mark.parametrize("kind", NAMES)
# the tools warn of what they do themselves, and the library of mixers with hooks
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def prepared(kind: str) -> tuple[nn.Module, Tensor]:
    """A model in training mode and an input."""
    place = CPU._replace(m=16, dtype=torch.float32)
    model = make(kind, place).train()
    return model, torch.randint(5, (2, 5)) if kind == "model" else draw(2, 5, place)


@models
def test_torchinfo_counts_operations(kind: str) -> None:
    """test_wrapped.py has hooks as those of any tool that lists or counts."""
    model, x = prepared(kind)
    expected, torchinfo = model(x), pytest.importorskip("torchinfo")
    assert torchinfo.summary(model, input_data=x, depth=9, verbose=0).total_mult_adds > 0
    torch.testing.assert_close(model(x), expected)
    layers = [layer for layer in model.modules() if isinstance(layer, FixedPointLayer)]
    assert layers and all(layer.layout() is not None for layer in layers)


@models
def test_gradients_of_samples_by_opacus(kind: str) -> None:
    opacus = pytest.importorskip("opacus")
    model, x = prepared(kind)
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    wrapped(x).square().sum().backward()
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        for ours, theirs in zip(model.parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(theirs.grad_sample[i], ours.grad, rtol=1e-3, atol=1e-4)
