"""The times on a CPU: every layer has a row, with the LSTM's time as the unit."""

import json
from pathlib import Path

import pytest

from benchmarks import cpu


def test_every_layer_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(cpu.LAYERS, "Bedouin, compiled")  # which compiles for a minute
    out = tmp_path / "cpu.json"
    cpu.main(cpu.Config(widths=(16,), batch=2, tokens=3, rounds=3, out=out))
    content = json.loads(out.read_text())
    assert content["config"]["widths"] == [16] and content["device"] == "cpu"
    rows = {row["layer"]: row for row in content["rows"]}
    assert set(rows) == {cpu.LSTM, *cpu.LAYERS}
    assert rows[cpu.LSTM]["of_lstm"] == 1 and rows[cpu.LSTM]["state_size"] == 64
    assert rows["Bedouin"]["steps"] == 1 and rows["GatedDeltaNet"]["steps"] is None
    assert all(row["ms"] > 0 and row["parameters"] > 0 for row in rows.values())


def test_a_count_below_one_names_the_flag() -> None:
    with pytest.raises(ValueError, match="--rounds must be an int"):
        cpu.main(cpu.Config(rounds=0))
