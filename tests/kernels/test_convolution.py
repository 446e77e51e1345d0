"""The module of the short convolution, equal to the sum written out from any window, and with what
follows it: SiLU, something added and unit groups.

`test_operations.py` compares the operation with its definition.
"""

import pytest
import torch
from torch.nn import functional as F

from bedouin.kernels.convolution import Groups
from bedouin.layers.convolution import ShortConvolution


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("t", [1, 2, 7])
def test_equals_the_sum(width: int, t: int) -> None:
    conv = ShortConvolution(3, width, bias=True, dtype=torch.float64)
    assert conv.window_size == (width - 1, 3)
    x = torch.randn(2, t, 3, dtype=torch.float64)
    window = torch.randn(2, width - 1, 3, dtype=torch.float64)
    y, after = conv(x, window)
    assert conv.weight is not None and conv.bias is not None
    seen = torch.cat([window, x], dim=1)
    for s in range(t):
        expected = (seen[:, s : s + width] * conv.weight.T).sum(1) + conv.bias
        torch.testing.assert_close(y[:, s], expected)
    assert torch.equal(after, seen[:, t:])


def test_without_width_it_is_the_identity() -> None:
    conv = ShortConvolution(3, None, bias=True)
    x, window = torch.randn(2, 4, 3), torch.zeros(2, *conv.window_size)
    assert conv(x, window)[0] is x and not list(conv.parameters())


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
