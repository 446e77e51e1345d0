"""A step in ONNX Runtime: the numbers of `step`. Letters: b batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bedouin import Bedouin, BedouinState, FixedPointRNN, LowRank

# onnxscript and its dependencies announce deprecations of their own
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LAYERS: dict[str, Any] = {
    "default": lambda: Bedouin(4),
    "heads": lambda: Bedouin(4, num_heads=2),
    "coupled": lambda: Bedouin(4, num_householder=4, input_scale="one_minus_decay"),
    "low rank": lambda: Bedouin(4, mixer=LowRank(2)),
    "FixedPointRNN": lambda: FixedPointRNN(4),
}


class Step(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_t: Tensor, ssm: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, state = self.layer.step(x_t, BedouinState(ssm, y))
        return output, state.ssm, state.y


@pytest.mark.parametrize("kind", LAYERS)
def test_a_step(kind: str) -> None:
    step = Step(LAYERS[kind]()).eval()
    _, state = step.layer(torch.randn(2, 3, 4), return_state=True)
    inputs = torch.randn(2, 4), state.ssm.detach(), state.y.detach()
    program = torch.onnx.export(step, inputs, dynamo=True, verbose=False)
    assert program is not None
    torch.testing.assert_close(tuple(program(*inputs)), step(*inputs), rtol=1e-4, atol=1e-5)
