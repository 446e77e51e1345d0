"""Whole layers under torch.compile: one graph, the numbers of eager mode, no recompilation.

Letters: b batch, t time, m d_model.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import Direct

# dynamo instantiates torch.autograd.Function when it traces a subclass
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])

KINDS: list[tuple[type[FixedPointLayer], dict[str, Any]]] = [
    (Bedouin, {}),
    (Bedouin, {"decay": "griffin", "feedback": (), "input_scale": "delta"}),
    (FixedPointRNN, {}),
    (Bedouin, {"num_heads": 2, "d_state": 2}),
]
kinds = pytest.mark.parametrize(("kind", "options"), KINDS)


def make(kind: type[Any], device: str, **options: Any) -> Any:
    settings = {"device": device, "num_householder": 1} | options
    return kind(3, backend="triton", solver=Direct(), **settings)


def draw(device: str, t: int = 2) -> Tensor:
    return torch.randn(2, t, 3, device=device, requires_grad=True)


def compiled_once(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def results(layer: Any, call: Any, x: Tensor) -> list[Tensor]:
    """Output, then the gradients of x and the parameters."""
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


def assert_close_in_bfloat16(actual: list[Tensor], expected: list[Tensor]) -> None:
    """In fused code bfloat16 is rounded at other places."""
    for ours, theirs in zip(actual, expected, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * scale)


@devices
@kinds
def test_a_layer_is_one_graph_with_the_same_numbers(
    kind: type[FixedPointLayer], options: dict[str, Any], device: str
) -> None:
    layer, x = make(kind, device, **options), draw(device)
    expected = results(layer, layer, x)
    eager = layer.stats
    call = compiled_once(layer)
    for ours, theirs in zip(results(layer, call, x), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert layer.stats is not eager and layer.stats.backward is None
    for name in ("num_steps", "residual", "converged", "conditioning"):
        assert torch.equal(getattr(layer.stats, name), getattr(eager, name)), name
    layer(x)  # counts a training call and, on a GPU, leaves a pending outcome
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(call(x), expected[0])


@devices
def test_one_graph_for_every_length(device: str) -> None:
    layer = make(Bedouin, device)
    call = compiled_once(layer)
    for t in (2, 3):
        call(draw(device, t))
    with torch.compiler.set_stance("fail_on_recompile"):
        x = draw(device, 4)
        pairs = zip(results(layer, call, x), results(layer, layer, x), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.gpu
@kinds
def test_the_default_compiler_gives_the_same_numbers(
    kind: type[FixedPointLayer], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    layer = make(kind, "cuda", **options)
    x = torch.randn(2, 20, 3, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        expected = results(layer, layer, x)
        actual = results(layer, torch.compile(layer, fullgraph=True), x)
    assert_close_in_bfloat16(actual, expected)


# code that it does not fuse or capture is not an error
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_the_compiler_may_replay_cuda_graphs() -> None:
    torch.manual_seed(0)
    layer = make(Bedouin, "cuda")
    call = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):  # the first two calls warm up and record
        x = torch.randn(2, 20, 3, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            torch.compiler.cudagraph_mark_step_begin()
            actual = [v.clone() for v in results(layer, call, x)]
            expected = results(layer, layer, x)
    assert_close_in_bfloat16(actual, expected)
