"""The table of parameters: its numbers are those of the layers and of the README."""

import pytest

import parameters
from bedouin import Bedouin


def test_numbers_are_those_of_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    config = parameters.Config(d_model=16, num_householder=2, num_heads=(1, 4))
    found = parameters.counts(config)
    for heads, title in ((1, "Bedouin, 1 head"), (4, "Bedouin, 4 heads")):
        layer = Bedouin(16, num_heads=heads, num_householder=2)
        assert found[title] == sum(p.numel() for p in layer.parameters())
    assert found["Bedouin, 4 heads"] < found["Bedouin, 1 head"]
    parameters.main(config)
    assert f"| Mamba | {found['Mamba']:,} | 1.0 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--num-heads must divide the 32 inner channels"):
        parameters.Config(d_model=16, num_heads=(3,))
