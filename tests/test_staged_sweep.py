"""The sweep in two stages against that of all heads at once, which takes the same W^y."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin
from bedouin.fixed_point_map import StructuredMap
from bedouin.kernels.heads import fold
from bedouin.solvers.reporting import Measured
from bedouin.testing import assert_close, layer_gradients

B, T, M, H = 3, 5, 8, 4


def pair(layer: Bedouin, x: Tensor, lengths: Tensor | None) -> tuple[StructuredMap, StructuredMap]:
    """The map of a call with a state before the first token, and one that is swept at once."""
    operands = layer.map(x).operands
    assert operands.A.shape[0] == H
    torch.manual_seed(1)
    start = torch.randn(B * H, M * 2 // H, layer.d_state), torch.randn(B * H, M * 2 // H)
    h0, y0 = (0.3 * v.double() for v in start)
    staged = layer.map(x)
    assert isinstance(staged, StructuredMap)
    staged.operands = operands._replace(h0=h0.requires_grad_(), y0=y0.requires_grad_())
    staged.lengths = None if lengths is None else lengths.repeat(H)
    whole = copy.copy(staged)
    whole.operands, whole.fed_heads = staged.whole, None
    return staged, whole


def make(**options: Any) -> tuple[Bedouin, Tensor]:
    torch.manual_seed(0)
    layer = Bedouin(M, num_heads=H, d_state=3, feedback_init=1.0, dtype=torch.float64, **options)
    assert layer.y_proj is not None
    with torch.no_grad():
        layer.y_proj.weight.uniform_(-1, 1)
    return layer, torch.randn(B, T, M, dtype=torch.float64)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scope", ["head", "layer"])
@pytest.mark.parametrize(
    "options",
    [
        {"feedback_heads": 1},
        {"feedback_heads": 3, "feedback": ("delta", "x"), "erase": 1.0},
        {"feedback_heads": 2, "feedback": ("B", "x"), "feedback_norm": False},
        {"feedback_heads": 2, "feedback": ("delta", "x"), "erase": 1.0, "bounded_x": True},
    ],
    ids=str,
)
def test_two_stages_are_one_sweep(
    options: dict[str, Any], scope: str, padded: bool, unroll: bool
) -> None:
    layer, x = make(feedback_scope=scope, **options)
    lengths = torch.tensor([T, 2, 0]) if padded else None
    found: list[dict[str, Tensor]] = []
    for f in pair(layer, x, lengths):
        seen: list[Any] = []
        swept = f.sweep(unroll, lambda *norms, seen=seen: seen.append(norms))
        values = {name: v for name, v in swept._asdict().items() if v is not None}
        starts = {"h0": f.operands.h0, "y0": f.operands.y0}
        inputs = dict(layer.named_parameters()) | {k: v for k, v in starts.items() if v is not None}
        loss = swept.y.square().sum() + swept.h.sin().sum()
        grads = torch.autograd.grad(
            loss, list(inputs.values()), retain_graph=True, allow_unused=True
        )
        values |= {n: g for n, g in zip(inputs, grads, strict=True) if g is not None}
        if not unroll:
            backward = Measured(seen[-1][0], seen[-1][1], backward=True).statistics()
            assert bool(backward.converged.all())
            values["backward"] = backward.residual
        found.append(values)
    staged, whole = found
    assert staged.keys() == whole.keys()
    for name, value in whole.items():
        atol = 1e-13 if name in ("defect", "residual", "backward") else 1e-12
        assert_close(name, staged[name], value, 1e-9, atol=atol)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("number", [2, None])
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_a_single_token_is_the_first_of_many(scope: str, number: int | None, bounded: bool) -> None:
    """Its feedback is added before the sweep."""
    options: dict[str, Any] = {"feedback": ("delta", "erase", "x"), "bounded_x": bounded}
    layer, x = make(feedback_scope=scope, feedback_heads=number, erase=1.0, **options)
    found: list[dict[str, Tensor]] = []
    for tokens in (x, x[:, :1]):
        f, _ = pair(layer, tokens, None)
        first = f.sweep(False).y[:, :1]
        assert f.operands.h0 is not None and f.operands.y0 is not None
        inputs = dict(layer.named_parameters()) | {"h0": f.operands.h0, "y0": f.operands.y0}
        given = torch.autograd.grad(first.sin().sum(), list(inputs.values()), allow_unused=True)
        grads = {n: g for n, g in zip(inputs, given, strict=True) if g is not None}
        found.append({"y": first} | grads)
    many, one = found
    assert "y0" in one and "y_proj.weight" in one
    for name, value in one.items():
        assert_close(name, value, many[name], 1e-9, atol=1e-12)


@pytest.mark.interpreter
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_kernels_sweep_the_stages(scope: str) -> None:
    """With W^y in bfloat16, whose products are added to the input in float32."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"feedback_scope": scope, "feedback_heads": 1, "d_state": 16}
    options |= {"bounded_x": scope == "layer", "feedback_noise": 0.0}
    layer, x = Bedouin.recall(32, num_heads=2, **options), torch.randn(1, 4, 32)
    found: list[dict[str, Tensor]] = []
    for backend in ("reference", "triton"):
        layer.backend = backend
        with torch.autocast("cpu", torch.bfloat16):
            found.append(layer_gradients(layer, x))
    expected, ours = found
    for name, grad in ours.items():
        # a tenth of the largest value, because roundings to bfloat16 differ
        assert_close(name, grad, expected[name], 0.1, atol=0.1 * expected[name].abs().max().item())


def test_a_stage_that_no_gradient_reaches_has_no_defects() -> None:
    layer, x = make(feedback_heads=1)
    staged, _ = pair(layer, x, None)
    seen: list[Any] = []
    swept = staged.sweep(False, lambda *norms: seen.append(norms))
    swept.y[B:].sum().backward()
    stats = Measured(seen[-1][0], seen[-1][1], backward=True).statistics()
    assert stats.residual.shape == (B,)
    assert bool(stats.converged.all()) and not stats.residual.any()


@pytest.mark.parametrize("feedback_heads", [1, H])
def test_the_outputs_of_heads_are_those_of_the_sweep_without_a_copy(feedback_heads: int) -> None:
    layer, x = make(feedback_scope="layer", feedback_heads=feedback_heads)
    found = layer.map(x)
    assert isinstance(found, StructuredMap)
    y = found.sweep(False).y
    of_heads = found.folded(y)
    assert of_heads.data_ptr() == found.folded(y).data_ptr() != y.data_ptr()
    assert torch.equal(of_heads, fold(y, H))
    assert torch.equal(found.folded(2 * y), 2 * of_heads)
