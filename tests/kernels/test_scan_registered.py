"""The Triton scan as registered operations: one graph under torch.compile, and opcheck passes.

Letters: b batch, t time, d channels, n state per channel.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.scan import selective_scan
from bedouin.kernels.scan.types import SCAN_CHUNK

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])


def draw(device: str, *, t: int = 3, skip: bool = True) -> list[Tensor]:
    """x, delta, A, B, C, h0 and, with `skip`, D, all with gradients; b = d = n = 2."""
    shapes = [(2, t, 2), (2, t, 2), (2, 2), (2, t, 2), (2, t, 2), (2, 2, 2), (2,)]
    values = [torch.randn(shape) for shape in shapes]
    values[1], values[2] = values[1].exp(), -values[2].exp()
    return [v.to(device).requires_grad_() for v in (values if skip else values[:-1])]


def run(*operands: Tensor) -> tuple[Tensor, Tensor]:
    y, h = selective_scan(*operands, backend="triton", eigenvalues="full")
    return 2 * y, h


@devices
@pytest.mark.parametrize("skip", [False, True])
def test_a_compiled_function_is_one_graph_with_the_same_results(skip: bool, device: str) -> None:
    operands = draw(device, skip=skip)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, run):
        y, h = function(*operands)
        results.append([y, h, *torch.autograd.grad(y.sum() + h.square().sum(), operands)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@devices
def test_a_compiled_function_without_gradients(device: str) -> None:
    operands = draw(device)
    with torch.no_grad():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*operands)
        assert all(torch.equal(*pair) for pair in zip(compiled, run(*operands), strict=True))


@devices
@pytest.mark.parametrize("skip", [False, True])
def test_opcheck(skip: bool, device: str) -> None:
    # two chunks, or a part of one
    operands: list[Any] = draw(device, t=SCAN_CHUNK + 1 if skip else 3, skip=skip)
    if not skip:
        operands.append(None)
    options = ("delta", "positive", False)
    scan, backward = torch.ops.bedouin.selective_scan, torch.ops.bedouin.selective_scan_backward
    utils: tuple[str, ...] = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(scan, (*operands, *options, True), test_utils=utils)
    if skip:  # tracing is slow: once, and of both operations, since the gradients are traced, too
        few = (*draw(device), *options, True)
        torch.library.opcheck(scan, few, test_utils="test_aot_dispatch_dynamic")
    values = [None if v is None else v.detach() for v in operands]
    y, h, kept = scan(*values, *options, True)
    assert kept.shape == (2, 2 if skip else 1, 2, 2)
    arguments = (y, h.clone(), kept, *values, *options)
    torch.library.opcheck(backward, arguments, test_utils=utils)


@devices
def test_recording_gradients_without_kept_memory_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="keep must be True where gradients are recorded"):
        torch.ops.bedouin.selective_scan(*draw(device), "delta", "positive", False, False)


@devices
def test_a_batch_of_cotangents(device: str) -> None:
    operands = draw(device)
    y, _ = run(*operands)
    weights = torch.randn(2, *y.shape, dtype=y.dtype, device=device)
    batched = torch.autograd.grad(
        y, operands, weights, is_grads_batched=True, retain_graph=True, materialize_grads=True
    )
    for i, weight in enumerate(weights):
        single = torch.autograd.grad(y, operands, weight, retain_graph=True)
        for ours, theirs in zip(batched, single, strict=True):
            torch.testing.assert_close(ours[i], theirs)
