"""TrackingDeltaNet, Tracker and GatedDeltaNet on a GPU: the kernels give what float64 gives.

Letters: b batch, t time, m d_model.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import GatedDeltaNet, Tracker, TrackingDeltaNet

pytestmark = pytest.mark.gpu

LAYERS: dict[str, Any] = {
    "small": lambda: TrackingDeltaNet(64),
    "as in the table": lambda: TrackingDeltaNet(256),
    "two trackers": lambda: TrackingDeltaNet(96, num_trackers=2, tracker_state=64),
    "memory of 64 channels": lambda: GatedDeltaNet(128),
    "memory of odd sizes": lambda: GatedDeltaNet(64, num_heads=3, head_dim=40, expand_v=1.5),
    "wide memory": lambda: GatedDeltaNet(128, num_heads=1, head_dim=128, expand_v=2),
    "tracker": lambda: Tracker(64),
}
layers = pytest.mark.parametrize("name", LAYERS)


def make(name: str) -> Any:
    torch.manual_seed(0)
    layer = LAYERS[name]().cuda().eval()
    for parameter_name, parameter in layer.named_parameters():
        if "read_proj" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    return layer


def results(layer: Any, x: Tensor, state: Any) -> list[Tensor]:
    """The output, the last state, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    y, after = layer(x, state, return_state=True)
    along = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).view(y.shape)
    loss = (y.double() * along).sum()
    return [y, *after.tensors, *torch.autograd.grad(loss, [x, *layer.parameters()])]


@layers
@pytest.mark.parametrize("t", [1, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("cast", [False, True])
def test_kernels_are_near_float64(name: str, t: int, cast: bool) -> None:
    layer = make(name)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(3, t, layer.d_model, device="cuda", dtype=torch.float64)
    _, state = exact(torch.randn_like(x), return_state=True)
    expected = results(exact, x, state.detach())
    with torch.autocast("cuda", torch.bfloat16, enabled=cast):
        given = x.float(), state.detach().to(torch.float32)
        actual, again = results(layer, *given), results(layer, *given)
    assert all(map(torch.equal, actual, again))
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        # gradients of the memory's rates are sums in which terms of both signs cancel
        error = (ours.double() - theirs).norm() / theirs.norm().clamp(min=0.1 if cast else 1e-3)
        # bfloat16 has 8 bits, and feedback amplifies roundings
        assert error < (0.1 if cast else 1e-3), (i, float(error))


@layers
def test_one_graph_of_the_compiler(name: str) -> None:
    layer = make(name)
    x = torch.randn(2, 40, layer.d_model, device="cuda")
    torch.compiler.reset()
    call: Any = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 30):
        torch.testing.assert_close(call(x[:, :length]), layer(x[:, :length]), rtol=1e-3, atol=1e-3)
