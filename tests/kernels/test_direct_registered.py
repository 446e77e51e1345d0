"""The Triton sweep as registered operations: one graph under torch.compile, and opcheck passes.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.direct import direct_sweep
from bedouin.kernels.operands import Coefficients, Operands, Parameterization, RawLayout

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
feedbacks = pytest.mark.parametrize("feedback", [False, True])
kinds = pytest.mark.parametrize(
    ("known", "feedback"), [(False, True), (False, False), (True, True)]
)

LAYOUT = RawLayout("softplus", True, 1, 1.0)
FIELDS = ("softplus", True, 1, 1.0, 0.0, "bounded_delta", "positive", 1e-5, False, False, 2)
"""LAYOUT, input scale, eigenvalues, norm eps, feeds_x, plain, keep_every of an operation."""


def _bind(raw: Tensor) -> Coefficients:
    raise AssertionError("the Triton sweep reads raw values by their layout")


OPTIONS = Parameterization(LAYOUT, "bounded_delta", "positive", 1e-5)


def draw(device: str, *, t: int = 2, feedback: bool = True) -> list[Any]:
    """x, raw, W_y or None, A, h0 and y0, with gradients; b = d = n = 2."""
    r = LAYOUT.size(2, 2)
    shapes = [(2, t, 2), (2, t, r), (r, 2), (2, 2), (2, 2, 2), (2, 2)]
    values: list[Any] = [torch.randn(shape) for shape in shapes]
    values[2], values[3] = 0.1 * values[2], -values[3].exp()
    values = [v.to(device).requires_grad_() for v in values]
    return [*values[:2], values[2] if feedback else None, *values[3:]]


def run(operands: list[Any], y_star: Tensor | None = None) -> tuple[Tensor, ...]:
    reports: list[Tensor] = []  # which a graph leaves alone
    sweep = direct_sweep(
        Operands(*operands),
        OPTIONS,
        _bind,
        y_star=y_star,
        report=lambda *values: reports.extend(values),
        backend="triton",
    )
    present = [v for v in sweep if v is not None]
    return *present[:-1], present[-1] if y_star is None else present[-1] + 1


def present(operands: list[Any]) -> list[Tensor]:
    return [v for v in operands if v is not None]


@devices
@kinds
def test_a_compiled_function_is_one_graph_with_the_same_results(
    known: bool, feedback: bool, device: str
) -> None:
    operands = draw(device, feedback=feedback)
    y_star = run(operands)[0].detach() if known else None
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, run):
        y, h, *rest = function(operands, y_star)
        total = y.sum() + h.square().sum()
        grads = torch.autograd.grad(total, present(operands), materialize_grads=True)
        results.append([y, h, *rest, *grads])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad


@devices
def test_a_compiled_function_without_gradients(device: str) -> None:
    operands = draw(device)
    with torch.no_grad():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(operands)
        assert all(torch.equal(*pair) for pair in zip(compiled, run(operands), strict=True))


@devices
@kinds
def test_opcheck(known: bool, feedback: bool, device: str) -> None:
    operands = draw(device, feedback=feedback)
    given = [torch.randn_like(operands[0])] if known else []
    name = "direct_sweep_known" if known else "direct_sweep"
    operation = getattr(torch.ops.bedouin, name)
    # the slow one, tracing, once
    utils: tuple[str, ...] = ("test_schema", "test_faketensor", "test_autograd_registration")
    if feedback and not known:
        utils += ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(operation, (*given, *operands, *FIELDS), test_utils=utils)


@devices
@feedbacks
def test_opcheck_of_the_reverse_sweep(feedback: bool, device: str) -> None:
    drawn = draw(device, t=3, feedback=feedback)
    operands = [None if v is None else v.detach() for v in drawn]
    y, h, kept, *_ = torch.ops.bedouin.direct_sweep(*operands, *FIELDS)
    assert kept.shape == (2, 4)
    arguments = (y.clone(), h.clone(), y, kept, *operands, True, *FIELDS)
    # the slow one, tracing, once
    utils: tuple[str, ...] = ("test_schema", "test_faketensor", "test_autograd_registration")
    if feedback:
        utils += ("test_aot_dispatch_dynamic",)
    backward = torch.ops.bedouin.direct_sweep_backward
    torch.library.opcheck(backward, arguments, test_utils=utils)


@devices
@pytest.mark.parametrize(("t", "k", "heads"), [(0, 1, 1), (3, 1, 1), (3, 0, 1), (3, 0, 2)])
def test_fake_results_of_low_dtypes_have_the_real_strides(
    t: int, k: int, heads: int, device: str
) -> None:
    x, raw, W_y, A, h0, y0 = (v.detach() for v in draw(device, t=t))
    r, options = replace(LAYOUT, num_householder=k).size(2, 2), (*FIELDS[:2], k, *FIELDS[3:])
    raw, W_y = raw[..., :r], W_y[:r]
    if heads > 1:
        W_y, A = W_y.repeat(heads, 1, 1), A.repeat(heads, 1, 1)
    low = x.bfloat16(), raw.bfloat16(), W_y.bfloat16()
    rest = A.float(), h0.float(), y0.float()
    utils = ("test_schema", "test_faketensor")
    operands = (*low, *rest, *options)
    torch.library.opcheck(torch.ops.bedouin.direct_sweep, operands, test_utils=utils)
    y, h, kept, *_ = torch.ops.bedouin.direct_sweep(*operands)
    arguments = (y.clone(), h.clone(), y, kept, *low, *rest, False, *options)
    torch.library.opcheck(torch.ops.bedouin.direct_sweep_backward, arguments, test_utils=utils)


@devices
@feedbacks
def test_a_batch_of_cotangents(feedback: bool, device: str) -> None:
    operands = draw(device, feedback=feedback)
    y = run(operands)[0]
    weights = torch.randn(2, *y.shape, dtype=y.dtype, device=device)
    inputs = present(operands)
    batched = torch.autograd.grad(
        y, inputs, weights, is_grads_batched=True, retain_graph=True, materialize_grads=True
    )
    for i, weight in enumerate(weights):
        single = torch.autograd.grad(y, inputs, weight, retain_graph=True, materialize_grads=True)
        for ours, theirs in zip(batched, single, strict=True):
            torch.testing.assert_close(ours[i], theirs)


@devices
def test_a_second_derivative_is_refused(device: str) -> None:
    operands = draw(device)
    y = run(operands)[0]
    (grad,) = torch.autograd.grad(y.square().sum(), operands[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        torch.autograd.grad(grad.sum(), operands[1])
