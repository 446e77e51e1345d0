"""The benchmark of whole models: rows at toy sizes, rows that fail, limits, the recorded file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import generation, whole_models
from benchmarks.generation import Config, measure_apart, measure_here, ratios
from benchmarks.whole_models import MIXERS, TASKS, Sizes
from flags import UsageError
from research.baselines import count

pytestmark = pytest.mark.filterwarnings("ignore:.*may become singular:UserWarning")


def toy(**changes: Any) -> Config:
    return Config(**{"device": "cpu", "tiny": True, "models": ("lstm",), **changes})


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_models_of_this_repository_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = ("train", "decode-1", "vocabulary-torch", "captured")
    measure_here(toy(models=tuple(MIXERS), tasks=tasks))
    rows = rows_of(capsys.readouterr().out)
    assert [(row["model"], row["task"]) for row in rows] == [
        (model, task) for model in MIXERS for task in tasks if task in TASKS[model]
    ]
    for row in rows:
        if row["task"] == "captured":
            assert row["error"] == "ValueError: a CUDA graph needs a GPU"
        else:
            assert row["tokens_per_second"] > 0 and row["parameters"] > 1000, row


@pytest.mark.parametrize("name", MIXERS)
def test_models_are_of_one_size(name: str) -> None:
    sizes = Sizes(torch.device("meta"))
    assert 125e6 < count(whole_models._build(name, sizes, sizes.v)) < 135e6


def test_a_process_that_takes_too_long_gives_rows() -> None:
    config = toy(tasks=("train", "decode-1"))
    for limit, reason in ((0.05, "the process was ended after 0 s"), (-1, "budget is spent")):
        rows = measure_apart(config, "lstm", limit)
        assert [row["task"] for row in rows] == ["train", "decode-1"]
        assert all(reason in row["error"] for row in rows)


def test_the_file_has_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    generation.main(toy(tasks=("decode-64",), out=path))
    report = json.loads(path.read_text())
    [row] = report["rows"]
    assert row["task"] == "decode-64" and row["tokens_per_second"] > 0, row
    assert report["device"].startswith("cpu") and report["sizes"]["depth"] == 2
    assert "| lstm | decode-64 | 0." in capsys.readouterr().out


def test_only_whole_runs_on_a_gpu_are_recorded(tmp_path: Path) -> None:
    for changes in ({}, {"tiny": False}, {"device": "cuda", "tiny": False}):
        with pytest.raises(UsageError, match="is for whole runs on a GPU"):
            generation.main(toy(out=generation.RECORDED, **changes))
    with pytest.raises(ValueError, match="models must be among .* got 'gru'"):
        toy(models=("gru",))
    with pytest.raises(ValueError, match="tasks must be among .* got 'trian'"):
        toy(tasks=("trian",))


def test_ratios_are_those_of_the_best_rows() -> None:
    def row(model: str, task: str, speed: float = 1.0, **others: Any) -> dict[str, Any]:
        return {"model": model, "task": task, "tokens_per_second": speed, **others}

    rows = [row("tracking", "train", 40.0), row("tracking", "compiled", 60.0)]
    rows += [row("mamba", "train", 100.0), row("mamba-ssm", "captured", 120.0)]
    rows += [row("lstm", "captured", 20.0), row("lstm", "train", 10.0)]
    rows += [row("tracking", "decode-1", 9.0), row("tracking", "captured", 999.0, error="failed")]
    rows.append(row("tracking", "vocabulary-torch", peak_gib=3.0))
    rows.append(row("mamba", "vocabulary-fla", peak_gib=4.0))
    assert list(ratios(rows).values()) == [0.5, 3.0, 0.75]
    found = ratios([*rows, row("tracking", "vocabulary-liger", peak_gib=2.0)])
    shown = {"Liger's loss" in title: v for title, v in found.items() if title.startswith("memory")}
    assert shown == {True: 0.5, False: 0.75}
    assert ratios([*rows, row("tracking", "vocabulary-liger", error="failed")]) == ratios(rows)


def test_recorded_ratios_are_those_of_the_recorded_rows() -> None:
    report = json.loads(generation.RECORDED.read_text(encoding="utf-8"))
    assert report["ratios"] == ratios(report["rows"])
