"""Launches are on the device of their tensors, which need not be the current one."""

import inspect
from typing import Any

import pytest
import torch

from bedouin import Bedouin, FixedPointRNN
from bedouin.kernels.backend import Backend
from bedouin.solvers import Direct, Jacobi, Picard

M = 16

LAYERS: list[tuple[type[Bedouin] | type[FixedPointRNN], dict[str, Any]]] = [
    (Bedouin, {"num_heads": 1}),
    (Bedouin, {"num_heads": 2}),
    (Bedouin, {"num_heads": 1, "feedback": ()}),
    (FixedPointRNN, {"num_householder": 1}),
    (Bedouin, {"solver": Jacobi()}),
    (Bedouin, {"solver": Picard(), "feedback": ()}),
]


def make(kind: Any, backend: Backend, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(M, backend=backend, **options)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind, options", LAYERS)
def test_every_launch_is_on_the_device_of_its_tensors(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor

    launch: Any = GridExecutor.__call__
    launched: list[str] = []
    inside = [0]
    enter: Any = torch.cuda.device_of.__enter__
    leave: Any = torch.cuda.device_of.__exit__

    def entered(self: Any) -> None:
        inside[0] += 1
        assert self.idx == -1  # that of the CPU
        enter(self)

    def left(self: Any, *raised: Any) -> None:
        inside[0] -= 1
        leave(self, *raised)

    def checked(self: Any, *args: Any, **given: Any) -> None:
        # an operation enters the device of its first tensor if that is on a GPU
        names = [frame.frame.f_globals["__name__"] for frame in inspect.stack(0)]
        assert inside[0] or "bedouin.kernels.operation" in names, self.fn.__name__
        launched.append(self.fn.__name__)
        launch(self, *args, **given)

    monkeypatch.setattr(torch.cuda.device_of, "__enter__", entered)
    monkeypatch.setattr(torch.cuda.device_of, "__exit__", left)
    monkeypatch.setattr(GridExecutor, "__call__", checked)
    layer = make(kind, "triton", max_steps=2, on_unconverged="ignore", **options)
    x = torch.randn(2, 2, M)
    with torch.no_grad():
        layer(x)
        layer.step(x[:, 0], layer.init_state(2))
    layer(x).sum().backward()
    assert len(set(launched)) > 4 and not inside[0]


@pytest.mark.gpu
@pytest.mark.parametrize("solver", [Direct(), Jacobi()])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_layer_on_a_gpu_that_is_not_the_current_one(solver: Any, num_heads: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    options = {"num_heads": num_heads, "on_unconverged": "ignore"}
    layer = make(Bedouin, "auto", solver=solver, **options).cuda(0)
    x = torch.randn(2, 5, M, device="cuda:0")
    expected = layer(x)
    expected.sum().backward()
    grads = [v.grad.cpu() for v in layer.parameters()]
    layer.zero_grad()
    layer, x = layer.to("cuda:1"), x.to("cuda:1")
    with torch.cuda.device(0):
        found = layer(x)
        found.sum().backward()
        with torch.no_grad():
            token, _ = layer.step(x[:, 0], layer.init_state(2))
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(token.cpu(), expected[:, 0].cpu(), rtol=1e-3, atol=1e-4)
    for v, grad in zip(layer.parameters(), grads, strict=True):
        torch.testing.assert_close(v.grad.cpu(), grad, rtol=1e-3, atol=1e-4)
