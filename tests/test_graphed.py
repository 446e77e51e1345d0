"""A captured layer: the numbers of the layer, and an error wherever a replay would differ.

Letters: b batch, t time, m d_model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin, TrackingDeltaNet
from bedouin.graphed import Graphed
from bedouin.solvers import GammaCap, Picard


def make(**options: Any) -> Bedouin:
    return Bedouin(4, d_state=2, **options)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures that run the layer instead, as a machine without a GPU can."""

    def rerun(layer: Any, sample: Tensor, parameters: Any) -> Callable[..., Tensor]:
        return lambda x, *unused: layer(x)

    monkeypatch.setattr("bedouin.graphed.capture", rerun)
    monkeypatch.setattr("bedouin.graphed.is_cuda_device", lambda device: True)


def test_a_cpu_gets_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"CUDA device, got cpu.*call the layer itself"):
        make().graphed(torch.randn(1, 2, 4))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["", "in_proj"])
def test_hooks_are_refused_before_and_after_the_capture(name: str) -> None:
    layer, x = make(), torch.randn(1, 2, 4)
    call = layer.graphed(x)
    layer.get_submodule(name).register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="a hook registered, after the capture"):
        call(x)
    with pytest.raises(ValueError, match=f"without hooks.*got some on {name or 'the layer'}: "):
        layer.graphed(x)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({}, (2, 4), "x must"),
        ({}, (0, 2, 4), "must not be empty"),
        ({"solver": Picard(), "max_steps": GammaCap(4.0)}, (1, 2, 4), "max_steps to an int"),
    ],
)
def test_what_cannot_be_captured(options: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options).graphed(torch.randn(shape))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(1, 3, 4), r"shape \(1, 2, 4\), got \(1, 3, 4\)"),
        (torch.randn(1, 2, 4).double(), "dtype"),
        (torch.randn(1, 2, 4, device="meta"), "device"),
        (torch.randn(1, 2, 4, requires_grad=True), "requires a gradient"),
    ],
)
def test_another_input(x: Tensor, message: str) -> None:
    run = make().graphed(torch.randn(1, 2, 4))
    with pytest.raises(ValueError, match=message):
        run(x)


@pytest.mark.usefixtures("on_cpu")
def test_another_mode() -> None:
    layer, x = make(), torch.randn(1, 2, 4)
    run = layer.graphed(x)
    with torch.no_grad():
        frozen = layer.graphed(x)
        run(x)
    with pytest.raises(RuntimeError, match="outside torch.no_grad"):
        frozen(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        run(x)
    layer.eval()
    with pytest.raises(RuntimeError, match="training=False"):
        run(x)
    layer.train()
    layer.D = torch.nn.Parameter(torch.ones_like(layer.D))
    with pytest.raises(RuntimeError, match="replaced"):
        run(x)
    with pytest.raises(TypeError, match="tensor"):
        run(None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_cpu")
def test_a_late_or_a_second_backward_pass_is_refused() -> None:
    run, x = make().graphed(torch.randn(1, 2, 4)), torch.randn(1, 2, 4)
    first, second = run(x), run(x)
    with pytest.raises(RuntimeError, match="before its next call"):
        first.sum().backward()
    total = second.sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once for each call"):
        total.backward()


def passes(call: Callable[[Tensor], Tensor], layer: Bedouin, x: Tensor) -> list[Tensor]:
    """The output, the gradient of x and those of the parameters."""
    out = call(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.usefixtures("on_cpu")
def test_layers_without_a_solver() -> None:
    layer = TrackingDeltaNet(4, tracker_dim=2, tracker_state=3).eval()
    x = torch.randn(1, 2, 4)
    call = layer.graphed(x)
    assert torch.equal(call(x), layer(x))
    with pytest.raises(ValueError, match="x must have the sample's shape"):
        call(x[:, :1])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"num_heads": 2}, {"feedback": ()}, None])
@pytest.mark.parametrize("cast", [False, True])
def test_the_numbers_of_the_layer(options: dict[str, Any] | None, cast: bool) -> None:
    layer: Any
    if options is None:
        layer = TrackingDeltaNet(32, feedback_noise=0.0, device="cuda")
    else:
        layer = Bedouin(32, device="cuda", **options)
    sample = torch.randn(2, 5, 32, device="cuda", requires_grad=True)
    casts = partial(torch.autocast, "cuda", torch.bfloat16, enabled=cast)
    with casts():
        run = layer.graphed(sample)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kept: list[Tensor] = []
    for _ in range(3):
        # a new context, as in training: one keeps its casts of the weights
        with casts():
            x = torch.randn_like(sample).requires_grad_()
            ours = passes(run, layer, x)
            theirs = passes(layer, layer, x)
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one, other)
            # what earlier calls returned is left alone
            assert all(map(torch.equal, kept[: len(kept) // 2], kept[len(kept) // 2 :]))
            kept = [*ours, *(v.clone() for v in ours)]
            # in place, as the graph needs
            run(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.gpu
def test_gradients_accumulate() -> None:
    layer = Bedouin(32, device="cuda")
    x = torch.randn(2, 5, 32, device="cuda")
    run = layer.graphed(x)
    run(x).sum().backward()
    once = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    run(x).sum().backward()
    for p, one in zip(layer.parameters(), once, strict=True):
        assert p.grad is not None and torch.equal(p.grad, 2 * one)


@pytest.mark.gpu
def test_a_capture_leaves_the_layer_as_it_was() -> None:
    layer = Bedouin(32, device="cuda")
    x = torch.randn(2, 5, 32, device="cuda")
    with patch.object(Graphed, "__call__", side_effect=AssertionError):
        layer.graphed(x)
        assert layer(x[:1]).shape == (1, 5, 32)
    assert all(p.grad is None for p in layer.parameters())
