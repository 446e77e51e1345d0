"""The module of the short convolution, equal to the sum written out from any window, and with what
follows it: SiLU, something added and unit groups.

`test_operations.py` compares the operation with its definition.
"""

import torch
from torch.nn import functional as F

from bedouin.layers.convolution import ShortConvolution


def test_a_hook_on_the_module_acts() -> None:
    conv = ShortConvolution(6, 4, bias=False)
    x, window = torch.randn(2, 7, 6), torch.zeros(2, 3, 6)
    expected = F.silu(2 * conv(x, window)[0])
    conv.register_forward_hook(lambda module, inputs, output: (2 * output[0], output[1]))
    torch.testing.assert_close(conv.activated(x, window)[0], expected)
