"""The table of sizes: its numbers are those of the layers, of the README and of the raw file."""

import json
from pathlib import Path

import pytest

from bedouin import Bedouin
from research import parameters

RESULTS = Path(parameters.__file__).parents[1] / "results"


def test_numbers_are_those_of_the_layers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "sizes.json"
    config = parameters.Config((16,), num_householder=2, num_heads=(1, 4), length=6, out=out)
    parameters.main(config)
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    rows = [parameters.Sizes(**row) for row in report["layers"]]
    assert printed.splitlines() == parameters.table(rows) and report["config"]["length"] == 6
    found = {row.layer: row for row in rows}
    for heads, title in ((1, "Bedouin, 1 head"), (4, "Bedouin, 4 heads")):
        layer = Bedouin(16, num_heads=heads, num_householder=2)
        assert found[title].parameters == sum(p.numel() for p in layer.parameters())
        assert found[title].state_bytes == 4 * (32 * 16 + 32)
    assert f"| 16 | Mamba | {found['Mamba'].parameters:,} | 1.00 |" in printed
    # keys and values
    assert found["Attention"].state_bytes == 2 * 4 * 6 * 16
    with pytest.raises(ValueError, match="--num-heads must divide the 32 inner channels"):
        parameters.Config(d_model=(16,), num_heads=(3,))


def test_the_table_is_that_of_the_raw_file() -> None:
    report = json.loads((RESULTS / "parameters" / "parameters.json").read_text())
    # the page shows one width of three
    rows = [parameters.Sizes(**row) for row in report["layers"] if row["d_model"] == 512]
    assert "\n".join(parameters.table(rows)) in (RESULTS / "parameters" / "README.md").read_text()
