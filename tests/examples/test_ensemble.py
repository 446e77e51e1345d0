"""The study script: stacked and sequential models agree; presets and results."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ensemble
from bedouin.testing import assert_close
from common import study

POINT = {
    **{"input_scale": "bounded_delta", "d_state": 2, "num_householder": 1, "decay": "mamba"},
    **{"beta_max": 1.0, "feedback": "B+mixer", "feedback_init": 0.1, "rate_scale": 0.5},
    **{"num_heads": 2, "lr": 1e-2, "schedule": "cosine", "batch_size": 8, "steps": 4},
}
CPU = torch.device("cpu")


def small(**changes: Any) -> study.Config:
    values: dict[str, Any] = {"length": 4, "eval_lengths": (4, 6), "d_model": 8, "seeds": 2}
    return study.Config(**{**values, "warmup": 1, "log_every": 2, "device": "cpu", **changes})


def test_models_that_take_turns_are_those_of_the_stack() -> None:
    """One step from the same rows."""
    data = {stacked: ensemble.Data(small(), CPU) for stacked in (True, False)}
    pair = [
        ensemble.Ensemble(small(stacked=stacked), POINT, data[stacked], CPU)
        for stacked in (True, False)
    ]
    pair[1].tokens.copy_(pair[0].tokens)
    pair[1].labels.copy_(pair[0].labels)
    for one in pair:
        one.set_lr(0)
        one.step()
    for name, value in pair[0].params.items():
        assert_close(name, pair[1].params[name], value, 1e-4)
    assert_close("loss", pair[1].loss_sum, pair[0].loss_sum, 1e-5)


def test_results_hold_accuracy_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {name: (value,) for name, value in POINT.items()}
    ensemble.main(small(stacked=False, autocast="bf16", out=tmp_path, **grid))
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert set(row["accuracy"]) == {"4", "6"} and len(row["accuracy"]["4"]["token"]) == 2
    assert row["ms_per_step"] == pytest.approx(1e3 * row["seconds"] / 4)
    assert [entry["step"] for entry in row["history"]] == [2, 4]
    assert "ms a step" in capsys.readouterr().out


def test_preset_of_the_papers_size_is_overridden_by_flags() -> None:
    config = ensemble.parse(["--preset", "paper", "--lr", "0.001", "--steps", "10"])
    changed = dataclasses.replace(study.PAPER, lr=(1e-3,), steps=(10,))
    assert config == changed
    assert (config.d_model, config.num_householder, config.batch_size) == (512, (4,), (128,))
    assert config.length == 16 and not config.stacked and config.autocast == "bf16"
    assert ensemble.parse([]) == study.Config()


def test_batches_drawn_ahead_are_of_their_split() -> None:
    data = ensemble.Data(small(), CPU)
    batches = data.batches(8, 3)
    first, second = next(batches), next(batches)
    assert first[0].shape == second[1].shape == (2, 8, 4)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(data.word.group.prefix_products(second[0][0]), second[1][0])


@pytest.mark.parametrize("name", ["lstm", "mamba", "deltanet", "deltaproduct", "attention"])
def test_a_baseline_learns_something(tmp_path: Path, name: Any) -> None:
    options = {"steps": (30,), "batch_size": (16,), "lr": (3e-2,), "log_every": 10, "eval_rows": 8}
    config = small(mixer_layer=name, num_layers=2, stacked=False, seeds=1, out=tmp_path, **options)
    ensemble.main(config)
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    first, *_, last = (entry["loss"][0] for entry in row["history"])
    assert last < first and row["parameters"] > 0 and row["smallest_conditioning"] == [None]


def test_options_that_a_baseline_does_not_take_are_refused() -> None:
    point = {name: getattr(study.PRESETS["small"], name)[0] for name in study.GRID}
    lstm = small(mixer_layer="lstm", stacked=False)
    with pytest.raises(ValueError, match="decay must keep its default 'mamba' for mixer_layer"):
        study.make_layer(lstm, {**point, "decay": "griffin"})
    with pytest.raises(ValueError, match="num_heads must keep its default None for mixer_layer"):
        study.make_layer(lstm, {**point, "num_heads": 2})
    attention = study.make_layer(
        dataclasses.replace(lstm, mixer_layer="attention"), {**point, "num_heads": 2}
    )
    assert attention.num_heads == 2
    with pytest.raises(ValueError, match="eigenvalues must be None for mixer_layer 'lstm'"):
        study.make_layer(dataclasses.replace(lstm, eigenvalues="full"), point)
    with pytest.raises(ValueError, match="eigenvalues must be None for mixer_layer 'bedouin'"):
        study.make_layer(small(eigenvalues="full"), point)
    with pytest.raises(ValueError, match="stacked must be False for mixer_layer 'lstm'"):
        study.make_layer(dataclasses.replace(lstm, stacked=True), point)
