"""Coefficients from raw values by their layout, against the layers."""

import pytest
import torch

from bedouin import Bedouin, FixedPointRNN
from bedouin.kernels.direct.layout import bind_by_layout, is_covered
from bedouin.kernels.operands import RawLayout
from bedouin.layers.fixed_point import FixedPointLayer

LAYERS: list[FixedPointLayer] = [
    Bedouin(3, d_state=2, num_householder=3, beta_max=2.0, dtype=torch.float64),
    Bedouin(3, d_state=2, decay="griffin", num_householder=1, dtype=torch.float64),
    FixedPointRNN(3, dtype=torch.float64),
    FixedPointRNN(3, decay="griffin", dtype=torch.float64),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda v: f"{type(v).__name__} {v.decay}")
def test_the_layout_is_what_the_layer_does(layer: FixedPointLayer) -> None:
    raw = torch.randn(2, 3, layer.raw_size, dtype=torch.float64)
    layout, A = layer.layout(), layer._A()
    assert layout is not None and is_covered(layout, raw, A, ())
    delta, B, C, mixer_raw = layer._split(raw)
    expected = (delta, B, C, *layer.mixer(mixer_raw), raw[..., :0])
    for ours, theirs in zip(bind_by_layout(layout, A)(raw), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_other_raw_values_are_not_covered() -> None:
    layout, A = RawLayout("sigmoid", True, 1, 1.0), torch.zeros(4, 2)
    raw = torch.zeros(1, layout.size(4, 2))
    assert is_covered(layout, raw, A, ())
    assert not is_covered(None, raw, A, ())
    assert not is_covered(layout, raw[:, 1:], A, ())
    assert not is_covered(layout, raw, A, (A,))
