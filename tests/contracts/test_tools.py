"""Tools that hook every module of a model to count its operations, or for gradients of samples:
they run, and leave the numbers as they are.

Letters: b batch, t time, m d_model.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bedouin import Bedouin, FixedPointRNN, SequenceModel
from bedouin.layers.fixed_point import FixedPointLayer

MODELS: dict[str, Callable[[], nn.Module]] = {
    "one head": lambda: Bedouin(16),
    "heads": lambda: Bedouin(16, num_heads=2, d_conv=3),
    "no mixing": lambda: Bedouin(16, num_householder=0),
    "FixedPointRNN": lambda: FixedPointRNN(16, num_heads=2),
    "model": lambda: SequenceModel(10, 16, [Bedouin(16), FixedPointRNN(16)]),
}
models = pytest.mark.parametrize("kind", MODELS)
# the tools warn of what they do themselves, and the library of mixers with hooks
pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def make(kind: str) -> tuple[nn.Module, Tensor]:
    """A model and an input."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    is_model = isinstance(model, SequenceModel)
    return model, torch.randint(10, (2, 5)) if is_model else torch.randn(2, 5, 16)


@models
def test_torchinfo_counts_operations(kind: str) -> None:
    """test_wrapped.py has hooks as those of any tool that lists or counts."""
    model, x = make(kind)
    expected, torchinfo = model(x), pytest.importorskip("torchinfo")
    assert torchinfo.summary(model, input_data=x, depth=9, verbose=0).total_mult_adds > 0
    torch.testing.assert_close(model(x), expected)
    layers = [layer for layer in model.modules() if isinstance(layer, FixedPointLayer)]
    assert layers and all(layer.layout() is not None for layer in layers)


@models
def test_gradients_of_samples_by_opacus(kind: str) -> None:
    opacus = pytest.importorskip("opacus")
    model, x = make(kind)
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    wrapped(x).square().sum().backward()
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        for ours, theirs in zip(model.parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(theirs.grad_sample[i], ours.grad, rtol=1e-3, atol=1e-4)
