"""A step in ONNX Runtime: the numbers of `step`. Letters: b batch."""

from typing import Any

import pytest
import torch
from tests.layer_cases import make
from torch import Tensor, nn

from bedouin import BedouinState

# onnxscript and its dependencies announce deprecations of their own
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NAMES = "one head", "heads", "coupled", "full", "low rank", "vector"


class Step(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_t: Tensor, ssm: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, state = self.layer.step(x_t, BedouinState(ssm, y))
        return output, state.ssm, state.y


@pytest.mark.parametrize("name", NAMES)
def test_a_step(name: str) -> None:
    step = Step(make(name, dtype=torch.float32)).eval()
    _, state = step.layer(torch.randn(2, 3, 4), return_state=True)
    inputs = torch.randn(2, 4), state.ssm.detach(), state.y.detach()
    program: Any = torch.onnx.export(step, inputs, dynamo=True, verbose=False)
    torch.testing.assert_close(tuple(program(*inputs)), step(*inputs), rtol=1e-4, atol=1e-5)
