"""Tools that hook every module of a model to list it, to count its operations, or for gradients of
samples: they run, and leave the numbers as they are.

Letters: b batch, t time, m d_model.
"""

import copy
from collections.abc import Callable
from typing import Any

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


def make(kind: str) -> tuple[nn.Module, str, Tensor]:
    """A model, the name of its input, and an input."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    if isinstance(model, SequenceModel):
        return model, "tokens", torch.randint(10, (2, 5))
    return model, "x", torch.randn(2, 5, 16)


def torchinfo(model: nn.Module, name: str, x: Tensor) -> int:
    tool = pytest.importorskip("torchinfo")
    return int(tool.summary(model, input_data=x, depth=9, verbose=0).total_mult_adds)


def lightning(model: nn.Module, name: str, x: Tensor) -> int:
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.utilities.model_summary import ModelSummary

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.example_input_array = model, x

        def forward(self, x: Tensor) -> Any:
            return self.model(x)

    return len(str(ModelSummary(Module(), max_depth=-1)).splitlines())


@models
@pytest.mark.parametrize("tool", [torchinfo, lightning])
def test_tools_that_count_and_list(tool: Callable[..., int], kind: str) -> None:
    model, name, x = make(kind)
    expected = model(x)
    assert tool(model, name, x) > 0
    torch.testing.assert_close(model(x), expected)
    layers = [layer for layer in model.modules() if isinstance(layer, FixedPointLayer)]
    assert layers and all(layer.layout() is not None for layer in layers)


@models
def test_gradients_of_samples_by_opacus(kind: str) -> None:
    opacus = pytest.importorskip("opacus")
    model, _, x = make(kind)
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    wrapped(x).square().sum().backward()
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        for ours, theirs in zip(model.parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(theirs.grad_sample[i], ours.grad, rtol=1e-3, atol=1e-4)
