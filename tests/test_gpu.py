"""On a GPU: the numbers of the CPU, graph capture, and warnings without synchronization."""

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.layer_cases import assert_all_close, draw, fixed_points, make, results
from torch import Tensor

from bedouin import Bedouin
from bedouin.solvers import (
    ConvergenceError,
    ConvergenceWarning,
    Direct,
    FixedCap,
    ImplicitAdjoint,
    Jacobi,
    Picard,
    Solver,
)
from bedouin.testing import assert_close

pytestmark = pytest.mark.gpu


def _gradients(layer: torch.nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    y = layer(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    grads = torch.autograd.grad((y * weights).sum(), list(layer.parameters()))
    # detached: an autograd graph that stays alive would tie the next call to this call's stream
    return y.detach(), list(grads)


@fixed_points
@pytest.mark.parametrize("t", [1, 33])
def test_values_and_gradients_equal_those_of_the_cpu(name: str, t: int) -> None:
    """In float64, which kernels do not take."""
    layer, x = make(name), draw(3, t)
    found = results(copy.deepcopy(layer).cuda(), x.cuda())
    assert_all_close([v.cpu() for v in found], results(layer, x), 1e-8, 1e-10)


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("solver", [Direct(), Jacobi(), Picard()])
def test_forward_and_backward_can_be_captured(solver: Solver, num_heads: int) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_steps": FixedCap(24), "on_unconverged": "ignore"}
    layer = Bedouin(16, solver=solver, num_heads=num_heads, device="cuda", **options)
    x = torch.randn(4, 20, 16, device="cuda")
    expected, expected_grads = _gradients(layer, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _gradients(layer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grads = _gradients(layer, x)
    for tensor in [y, *grads]:
        tensor.zero_()
    graph.replay()
    found, known = [y, *grads], [expected, *expected_grads]
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-5)


# torch runs the graphed backward on another stream than the capture, and it warms up with
# uninitialized output gradients, which may contain NaN
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.filterwarnings("ignore:Bedouin, adjoint solve.*not finite:UserWarning")
def test_torch_can_graph_a_layer_whose_last_outcome_is_still_unread() -> None:
    torch.manual_seed(0)
    layer = Bedouin(16, device="cuda")
    x = torch.randn(4, 20, 16, device="cuda", requires_grad=True)
    expected, expected_grads = _gradients(layer, x)
    assert layer.deferred.is_pending("Bedouin")
    sample = (torch.randn_like(x, requires_grad=True),)
    assert torch.cuda.make_graphed_callables(layer, sample) is layer
    y, grads = _gradients(layer, x)
    assert torch.equal(y, expected) and layer.stats is not None
    assert bool(layer.stats.converged.all())
    assert all(map(torch.equal, grads, expected_grads))


def test_direct_never_waits_for_the_gpu_and_warns_one_call_late(no_synchronization: Any) -> None:
    layer = Bedouin(8, device="cuda", adjoint=ImplicitAdjoint())
    x = torch.randn(2, 5, 8, device="cuda")
    layer(x)
    torch.cuda.synchronize()
    bad = x.clone()
    bad[0, 2] = torch.nan
    with no_synchronization():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(bad)
    torch.cuda.synchronize()
    with pytest.warns(ConvergenceWarning, match="1 of 2 samples"):
        layer(x)


def test_the_exact_adjoint_never_waits_for_the_gpu_and_warns_one_call_late(
    no_synchronization: Any,
) -> None:
    layer, x = Bedouin(8, device="cuda"), torch.randn(2, 5, 8, device="cuda")
    bad = torch.ones_like(x)
    bad[0, 4] = torch.nan
    layer(x).backward(torch.ones_like(x))
    torch.cuda.synchronize()
    layer(x)
    torch.cuda.synchronize()
    y = layer(x)
    with no_synchronization(), warnings.catch_warnings():
        warnings.simplefilter("error")
        y.backward(bad)
    torch.cuda.synchronize()
    with pytest.warns(ConvergenceWarning, match=r"adjoint solve \(an earlier call\): 1 of 2"):
        layer(x)
    layer.on_unconverged = "raise"
    with pytest.raises(ConvergenceError, match="Bedouin, adjoint solve: 1 of 2 samples"):
        layer(x).backward(bad)


@pytest.mark.parametrize("bounds", [[0, 32, 64], [0, 5, 64]], ids=["one length", "two lengths"])
@pytest.mark.parametrize("num_heads", [1, 8])
def test_the_host_waits_for_documents_once(bounds: list[int], num_heads: int) -> None:
    layer = Bedouin(64, num_heads=num_heads, device="cuda")
    x, cu_seqlens = torch.randn(1, 64, 64, device="cuda"), torch.tensor(bounds, device="cuda")
    layer(x, cu_seqlens=cu_seqlens).sum().backward()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            output = layer(x, cu_seqlens=cu_seqlens)
            output.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in seen if "called a synchronizing" in str(w.message)]
    assert len(waits) == 1, waits
    alone = [layer(x[:, start:stop]) for start, stop in pairwise(bounds)]
    # float32, in other sums
    assert_close("output", output, torch.cat(alone, 1), 1e-3)
