"""The short convolution with SiLU, something added and unit groups: plain torch and Triton.

Letters: b batch, t time, c channels, w width, a channels to which something is added.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.convolution import Groups, short_convolution
from bedouin.layers.convolution import ShortConvolution

# b, t, c, w, a, groups
CASES: list[tuple[int, int, int, int, int, Groups | None]] = [
    (2, 9, 24, 4, 8, None),
    (1, 1, 8, 4, 0, Groups(1, 8, 1e-6)),
    (2, 70, 40, 4, 0, Groups(3, 8, 1e-6)),
    (3, 2, 20, 4, 20, Groups(2, 10, 1e-6)),
    (2, 130, 36, 3, 0, Groups(2, 16, 1e-6)),
    (1, 5, 100, 1, 3, None),
]
cases = pytest.mark.parametrize("case", range(len(CASES)))


def operands(case: int, device: str, dtype: torch.dtype) -> tuple[list[Any], Groups | None]:
    """x, weight, window and `added`, and the groups."""
    b, t, c, w, a, groups = CASES[case]
    drawn = [torch.randn(*shape) for shape in ((b, t, c), (c, w), (b, w - 1, c), (b, t, a))]
    x, weight, window, added = (v.to(device) for v in drawn)
    window = window.to(torch.promote_types(dtype, torch.float32))
    return [x.to(dtype), weight, window, added.to(dtype) if a else None], groups


def by_hand(
    x: Tensor, weight: Tensor, window: Tensor, added: Any, groups: Any
) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in float64, and the window after the last token."""
    x, weight, window = x.double(), weight.double(), window.double()
    rows, w = torch.cat([window, x], 1), weight.shape[1]
    outputs = []
    for token in range(x.shape[1]):
        v = torch.einsum("bwc,cw->bc", rows[:, token : token + w], weight)
        more = []
        if added is not None:
            more = [F.silu(v[:, : added.shape[-1]] + added[:, token].double())]
        v = v * torch.sigmoid(v)
        parts = []
        for i in range(0 if groups is None else groups.number):
            part = v[:, i * groups.size : (i + 1) * groups.size]
            parts.append(part / torch.sqrt((part * part).sum(-1, keepdim=True) + groups.eps))
        done = sum(part.shape[1] for part in parts)
        outputs.append(torch.cat([*parts, v[:, done:], *more], 1))
    return torch.stack(outputs, 1), rows[:, x.shape[1] :]


def results(function: Any, given: list[Any], groups: Any, grad: Tensor, **options: Any) -> Any:
    """The result and the gradients of all operands."""
    leaves = [None if v is None else v.detach().clone().requires_grad_() for v in given]
    y, after = function(*leaves, groups, **options)
    present = [v for v in leaves if v is not None]
    weighed = (grad.to(y.dtype) * y).double().sum() + grad.double().mean() * after.double().sum()
    return [y, after, *torch.autograd.grad(weighed, present, materialize_grads=True)]


def assert_agrees(case: int, device: str, backend: str, dtype: torch.dtype, rtol: float) -> None:
    given, groups = operands(case, device, dtype)
    b, t, c, _, a, _ = CASES[case]
    grad = torch.randn(b, t, c + a, device=device)
    actual = results(short_convolution, given, groups, grad, backend=backend)
    expected = results(by_hand, given, groups, grad.to(dtype))
    for ours, theirs in zip(actual, expected, strict=True):
        scale = theirs.detach().double().abs().max().item() if theirs.numel() else 1.0
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=rtol * scale)


@cases
def test_plain_torch_is_the_definition(case: int) -> None:
    assert_agrees(case, "cpu", "reference", torch.float64, 1e-12)
    assert_agrees(case, "cpu", "reference", torch.float32, 1e-5)


@cases
@pytest.mark.interpreter
def test_the_kernels_are_the_definition(case: int) -> None:
    assert_agrees(case, "cpu", "triton", torch.float32, 1e-5)


@cases
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernels_are_the_definition(case: int, dtype: torch.dtype) -> None:
    # the cotangent of the convolution's result is stored in the dtype of x
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    assert_agrees(case, "cuda", "triton", dtype, rtol)


@pytest.mark.interpreter
def test_rows_may_be_spaced_and_sums_are_equal_in_every_run() -> None:
    given, groups = operands(2, "cpu", torch.float32)
    wide = torch.randn(*given[0].shape[:2], 2 * given[0].shape[2])
    grad = torch.randn(given[0].shape)
    apart = [wide[..., : given[0].shape[2]], *given[1:]]
    together = [apart[0].contiguous(), *given[1:]]
    found = [
        results(short_convolution, each, groups, grad, backend="triton")
        for each in (apart, together, together)
    ]
    for ours, theirs, again in zip(*found, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(theirs, again)


def test_bad_operands_are_named() -> None:
    (x, weight, window, added), _ = operands(0, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"window must have shape \(b, w - 1, c\)"):
        short_convolution(x, weight, window[:, 1:])
    with pytest.raises(ValueError, match=r"added must have shape \(b, t, a\)"):
        short_convolution(x, weight, window, added[:, 1:])
    with pytest.raises(ValueError, match="groups and added must have at most the 24 channels of x"):
        short_convolution(x, weight, window, None, Groups(4, 8, 0.0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [None, 1, 4])
def test_the_module_gives_the_result_and_its_window(width: int | None, bias: bool) -> None:
    conv = ShortConvolution(6, width, bias=bias, dtype=torch.float64)
    x, window = torch.randn(2, 7, 6).double(), torch.randn(2, conv.window_size[0], 6).double()
    added, groups = torch.randn(2, 7, 2).double(), Groups(1, 3, 1e-6)
    y, after = conv.activated(x, window, None, added, groups)
    expected, expected_after = conv(x, window)
    v, more = F.silu(expected), F.silu(expected[..., :2] + added)
    unit = v[..., :3] * torch.rsqrt(v[..., :3].square().sum(-1, keepdim=True) + groups.eps)
    torch.testing.assert_close(y, torch.cat([unit, v[..., 3:], more], -1))
    torch.testing.assert_close(after, expected_after, rtol=0, atol=0)
    first, between = conv.activated(x[:, :2], window, None, added[:, :2], groups)
    last, end = conv.activated(x[:, 2:], between, None, added[:, 2:], groups)
    torch.testing.assert_close(torch.cat([first, last], 1), y)
    torch.testing.assert_close(end, after, rtol=0, atol=0)


def test_a_hook_on_the_module_acts() -> None:
    conv = ShortConvolution(6, 4, bias=False)
    x, window = torch.randn(2, 7, 6), torch.zeros(2, 3, 6)
    expected = F.silu(2 * conv(x, window)[0])
    conv.register_forward_hook(lambda module, inputs, output: (2 * output[0], output[1]))
    torch.testing.assert_close(conv.activated(x, window)[0], expected)
