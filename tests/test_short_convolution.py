"""The short convolution: equal to the sum written out, from any window."""

import pytest
import torch

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
