"""The benchmarks of layers and of whole models: every row runs at toy sizes, a failing one is
reported, numbers become tables and the recorded files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.messages import of, of_kind, refused

from bedouin import Bedouin
from benchmarks import bench, cases, cpu, figure, generation, special, speed, table, whole_models
from benchmarks.generation import Config, measure_apart, measure_here, ratios
from benchmarks.whole_models import MIXERS, TASKS, Sizes
from flags import UsageError
from research.baselines import count

PACKED = tuple(case.name for case in (cases.PACKED[0], cases.PACKED[-1]))
INTERPRETED = tuple(
    case.name
    for case in cases.CASES
    if not case.name.startswith("compiled") and (case not in cases.PACKED or case.name in PACKED)
)
"""Rows that need no C++ compiler, of those that one function makes two."""


def toy(out: Path, **changes: Any) -> bench.Config:
    values = {"device": "cpu", "tiny": True, "precision": "float32", "repeats": 1}
    return bench.Config(**{**values, "shapes": ("2x4",), "out": out / "r.json", **changes})


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a few tokens shows that its rows run."""
    monkeypatch.setattr(special, "TOKENS", 4)
    # what other tests have left takes longer to search than the rows take
    monkeypatch.setattr("gc.collect", lambda: 0)


def test_every_row_is_measured_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(toy(tmp_path, rows=INTERPRETED)) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    status = {row["case"]: row["status"] for row in report["rows"]}
    assert tuple(status) == INTERPRETED
    assert {name for name, value in status.items() if value != "measured"} <= {
        "mamba-scan",
        "kimi-fla",
    }
    numbers = {row["case"]: row["numbers"] for row in report["rows"]}
    assert numbers["direct"]["both_ms"] > 0 and numbers["direct"]["sequential_steps"] == 4
    assert numbers["direct"]["converged"] and numbers["jacobi"]["num_steps"] <= 16
    assert numbers["decode"]["us_a_layer"] > 0
    for name in PACKED:
        packed = numbers[name]
        assert packed["over_padded"] == packed["both_ms"] / packed["padded_both_ms"]
        assert packed["tokens"] <= packed["padded_tokens"] <= 8
    assert numbers["direct-heads8"]["converged"] and numbers["decode-heads16"]["decoder_us"] > 0
    text = capsys.readouterr().out
    assert "copy moves" in text and torch.__version__ in text and "direct-no-feedback" in text
    assert bench.main(bench.Config(report=tmp_path / "r.json")) == 0
    assert capsys.readouterr().out.strip() in text


def test_a_failing_row_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(toy(tmp_path, rows=("direct", "lstm"), prepare_limit=1e-5)) == 1
    found = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["status"] for row in found] == ["failed", "failed"]
    assert capsys.readouterr().out.count("TimeoutError: gave up after 0 s") == 2


def test_a_row_that_differs_from_the_reference_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = Bedouin.forward

    def wrong(layer: Bedouin, *args: Any, **options: Any) -> Any:
        factor = 1.0 if layer.backend == "reference" else 1.001
        return forward(layer, *args, **options) * factor

    monkeypatch.setattr(Bedouin, "forward", wrong)
    assert bench.main(toy(tmp_path, rows=("direct",))) == 1
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["status"] == "failed" and not row["numbers"]
    printed = capsys.readouterr().out
    for part in ("not timed, it differs from the reference", "output: relative error"):
        assert part in row["reason"] and part in printed


KEYS = ("layer", "shape", "graph_ms", "eager_ms", "forward_ms", "peak_gib", "first_call_s")


def test_speed_lists_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_first_call", lambda command, limit: {"first_call_s": 1.5})
    path = tmp_path / "speed.json"
    assert bench.main(toy(tmp_path, speed=path)) == 0
    found = json.loads(path.read_text())
    assert all(tuple(entry) == KEYS and entry["first_call_s"] == 1.5 for entry in found)
    assert all(entry["eager_ms"] > 0 and entry["forward_ms"] > 0 for entry in found)
    assert {(entry["shape"], entry["graph_ms"], entry["peak_gib"]) for entry in found} == {
        ("2x4", None, None)
    }
    assert [entry["layer"] for entry in found] == [*cases.SPEED.values()]


def test_a_first_call_is_that_of_a_new_process(tmp_path: Path) -> None:
    command = bench.first_call_command(toy(tmp_path))
    row: table.Row = {"case": "lstm", "shape": "2x4", "status": "measured", "numbers": {}}
    wrong: table.Row = {**row, "shape": "2", "numbers": {}}
    speed.add_first_calls([row, wrong], command, 2, 120)
    assert 0 < row["numbers"]["first_call_s"] < 60
    assert "BATCHxTIME" in wrong["numbers"]["first_call_failed"]
    speed.add_first_calls([wrong], command, 1, 0.01)
    assert wrong["numbers"]["first_call_failed"] == "gave up after 0 s"


def test_only_a_whole_run_on_a_gpu_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = bench.RECORDED
    assert bench.speed_path(bench.Config(speed=recorded)) == recorded
    assert bench.speed_path(toy(tmp_path, speed=recorded)) is None
    assert "because of --device, --precision, --tiny, --shapes" in capsys.readouterr().out
    assert bench.speed_path(bench.Config(speed=recorded, rows=("lstm",))) is None
    assert bench.speed_path(toy(tmp_path, speed=tmp_path)) == tmp_path


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["direct", "direct-no-feedback", "scan", "jacobi"])
def test_forward_and_backward_are_captured(name: str, tmp_path: Path) -> None:
    config = toy(tmp_path, rows=(name,), device="cuda", precision="bf16")
    assert bench.main(config) == 0
    numbers = json.loads((tmp_path / "r.json").read_text())["rows"][0]["numbers"]
    assert numbers["graph_forward_ms"] > 0 and numbers["graph_both_ms"] > 0


NOWHERE = Path("nowhere")
WRONG = of_kind(ValueError, [
    (lambda: bench.main(toy(NOWHERE, rows=("direkt",))), "rows must be among"),
    (lambda: bench.main(toy(NOWHERE, shapes=("64,256",))), "BATCHxTIME"),
    (of(toy, NOWHERE, repeats=0), "--repeats must be an int in [1, inf), got 0"),
    (of(toy, NOWHERE, first_call=True, rows=("scan",)), "first_call takes rows among"),
    (of(toy, NOWHERE, quick=True, rows=("direct",)), "quick chooses the rows"),
    (lambda: toy_models(models=("gru",)), "models must be among ... got 'gru'"),
    (lambda: toy_models(tasks=("trian",)), "tasks must be among ... got 'trian'"),
    *((of(figure.draw, NOWHERE, [{"layer": layer, "shape": "64x256", "graph_ms": ms}]),
       "entries must have times of a layer among")
      for layer, ms in (("unknown", 1.0), ("lstm", None))),
])  # fmt: skip

test_wrong_arguments_are_named = refused(WRONG)


def test_recorded_times_become_a_figure(tmp_path: Path) -> None:
    figure.main(figure.Config(out=tmp_path / "f.png"))
    assert (tmp_path / "f.png").stat().st_size > 5000


def test_every_layer_has_a_time_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


pytestmark = pytest.mark.filterwarnings("ignore:.*may become singular:UserWarning")


def toy_models(**changes: Any) -> Config:
    return Config(**{"device": "cpu", "tiny": True, "models": ("lstm",), **changes})


def test_models_of_this_repository_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = ("train", "decode-1", "vocabulary-torch", "captured")
    measure_here(toy_models(models=tuple(MIXERS), tasks=tasks))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
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
    config = toy_models(tasks=("train", "decode-1"))
    for limit, reason in ((0.05, "the process was ended after 0 s"), (-1, "budget is spent")):
        rows = measure_apart(config, "lstm", limit)
        assert [row["task"] for row in rows] == ["train", "decode-1"]
        assert all(reason in row["error"] for row in rows)


def test_the_file_has_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    generation.main(toy_models(tasks=("decode-64",), out=path))
    report = json.loads(path.read_text())
    [row] = report["rows"]
    assert row["task"] == "decode-64" and row["tokens_per_second"] > 0, row
    assert report["device"].startswith("cpu") and report["sizes"]["depth"] == 2
    assert "| lstm | decode-64 | 0." in capsys.readouterr().out


def test_only_whole_runs_on_a_gpu_are_recorded(tmp_path: Path) -> None:
    for changes in ({}, {"tiny": False}, {"device": "cuda", "tiny": False}):
        with pytest.raises(UsageError, match="is for whole runs on a GPU"):
            generation.main(toy_models(out=generation.RECORDED, **changes))


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
