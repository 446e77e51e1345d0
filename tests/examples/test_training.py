"""The training scripts: their results, and exact continuation of interrupted runs."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model

import train_a5
import train_copy
from bedouin import SequenceModel, baselines
from bedouin.solvers import ConvergenceWarning
from bedouin.tasks import Batch, Stream, stream
from common import training
from common.checkpoint import plain_config
from common.errors import UsageError
from common.folder import save_weights
from common.job import Place, Problem, Run
from common.options import TrainConfig, build_model, parse_config
from common.schedule import Schedule, decay
from common.trackers import tracked_config

SMALL: dict[str, Any] = {
    **{"device": "cpu", "d_model": 16, "d_state": 2, "num_householder": 1, "batch_size": 8},
    **{"steps": 6, "warmup_steps": 2, "log_every": 2, "eval_every": 3, "checkpoint_every": 2},
    **{"eval_rows": 16, "final_rows": 32, "eval_batch_size": 16, "final_lengths": (2,)},
}


def a5_config(out: Path, **changes: Any) -> train_a5.WordProblemConfig:
    values = {**SMALL, "length": 3, "eval_lengths": (3, 5), "out": out, **changes}
    return train_a5.WordProblemConfig(**values)


def copy_config(out: Path, **changes: Any) -> train_copy.CopyingConfig:
    lengths = {"min_length": 2, "max_length": 3, "context_len": 16, "eval_lengths": (3, 6)}
    return train_copy.CopyingConfig(**{**SMALL, **lengths, "out": out, **changes})


def read_metrics(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return content


def checkpoint(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return content


def assert_same_run(first: Path, second: Path) -> None:
    one, two = checkpoint(first), checkpoint(second)
    assert one["step"] == two["step"] and one["history"] == two["history"]
    for name in one["model"]:
        assert torch.equal(one["model"][name], two["model"][name]), name
    for index, state in one["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, two["optimizer"]["state"][index][name])
    assert torch.equal(one["random"][0]["data"], two["random"][0]["data"])
    assert read_metrics(first)["accuracy"] == read_metrics(second)["accuracy"]


def interrupted_at(step: int, config: train_a5.WordProblemConfig) -> Problem:
    """The word problem with a Ctrl-C in the middle of a step, while its batch is drawn."""
    problem = train_a5.word_problem(config)

    def train_batch(rows: Stream, now: int, longest: int) -> Batch:
        if now == step:
            raise KeyboardInterrupt
        return problem.train_batch(rows, now, longest)

    return dataclasses.replace(problem, train_batch=train_batch)


def test_a5_writes_metrics_figure_and_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_a5.main(a5_config(tmp_path, seed=3))
    metrics = read_metrics(tmp_path)
    for name in ("accuracy", "sequence_accuracy", "num_steps", "residual"):
        assert list(metrics[name]) == ["2", "3", "5"]
    assert 0 <= metrics["accuracy"]["5"] < 0.5 and metrics["seconds"] > 0
    assert metrics["seed"] == 3 and metrics["config"]["d_model"] == 16
    assert [entry["step"] for entry in metrics["history"]] == [3, 6]
    assert metrics["history"][0]["loss"] == pytest.approx(4.1, abs=1.0)
    assert metrics["versions"]["torch"] == torch.__version__ and "cpu" in metrics["device"]
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["metrics.json"]
    weights, saved = load_file(tmp_path / "model.safetensors"), checkpoint(tmp_path)["model"]
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    printed = capsys.readouterr().out
    assert "step 3  loss" in printed and "sequence_accuracy" in printed


def test_weights_in_one_buffer_and_tied_weights_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mixer = baselines.LSTM(4)
    model = SequenceModel(6, 4, [mixer], tie_embeddings=True)
    flat = torch.cat([p.detach().flatten() for p in mixer.lstm.parameters()])
    parts = flat.split([p.numel() for p in mixer.lstm.parameters()])
    for parameter, part in zip(mixer.lstm.parameters(), parts, strict=True):
        parameter.data = part.view_as(parameter)  # as on a GPU
    save_weights(model, tmp_path / "weights")
    shared = {p.untyped_storage().data_ptr() for p in mixer.lstm.parameters()}
    assert len(shared) == 1  # saving left the buffer as it was
    loaded = SequenceModel(6, 4, [baselines.LSTM(4)], tie_embeddings=True)
    missing, unexpected = load_model(loaded, tmp_path / "weights")
    assert not missing and not unexpected
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_copy_writes_its_accuracies_under_both_names(tmp_path: Path) -> None:
    train_copy.main(copy_config(tmp_path))
    metrics = read_metrics(tmp_path)
    assert list(metrics["character_accuracy"]) == ["2", "3", "6"]
    assert metrics["character_accuracy"] == metrics["accuracy"]
    assert metrics["string_accuracy"] == metrics["sequence_accuracy"]


@pytest.mark.parametrize(
    ("script", "make_config", "task"),
    [
        (train_a5, a5_config, ("a5", "Word problem of A5, trained at length 3", 1 / 60)),
        (train_copy, copy_config, ("copy", "Copying, trained on 2 to 3 letters", 1 / 26)),
    ],
)
def test_files_and_figure_say_what_the_problem_says(
    script: Any,
    make_config: Any,
    task: tuple[str, str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(training, "save_figure", lambda *args, **options: shown.append(options))
    script.main(make_config(tmp_path, steps=1))
    said = dict(zip(("name", "title", "chance"), task, strict=True))
    assert read_metrics(tmp_path)["task"] == {**said, "train_length": 3}
    assert shown == [{"title": task[1], "train_length": 3, "chance": task[2]}]


def test_an_error_of_the_figure_costs_neither_weights_nor_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise KeyError("num_letters")

    with monkeypatch.context() as patch:
        patch.setattr(training, "save_figure", fail)
        with pytest.raises(KeyError, match="num_letters"):
            train_a5.main(a5_config(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    numbers = read_metrics(tmp_path)["accuracy"]
    train_a5.main(a5_config(tmp_path, resume=True))
    assert (tmp_path / "accuracy.png").exists() and read_metrics(tmp_path)["accuracy"] == numbers
    again = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_interrupted_run_continues_bit_for_bit(tmp_path: Path) -> None:
    train_a5.main(a5_config(tmp_path / "whole"))
    config = a5_config(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        training.train(interrupted_at(5, config), config)
    assert checkpoint(tmp_path / "cut")["step"] == 4
    torch.manual_seed(99)
    train_a5.main(a5_config(tmp_path / "cut", resume=True))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_killed_process_continues_bit_for_bit(tmp_path: Path) -> None:
    shape = ["--preset=cpu", "--d-model=16", "--d-state=2", "--batch-size=8", "--threads=1"]
    shape += ["--steps=60", "--eval-every=30", "--checkpoint-every=10", "--final-rows=64"]

    def flags(out: str, *extra: str) -> list[str]:
        return [*shape, f"--out={tmp_path / out}", *extra]

    command = [sys.executable, train_a5.__file__, *flags("cut")]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "cut" / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert checkpoint(tmp_path / "cut")["step"] < 60
    for again in (flags("cut", "--resume"), flags("whole")):
        train_a5.main(parse_config(train_a5.PRESETS, again))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_resume_with_other_options_names_the_option(tmp_path: Path) -> None:
    train_a5.main(a5_config(tmp_path))
    with pytest.raises(ValueError, match=r"written with --lr 0.001, got 0.1; .*--out"):
        train_a5.main(a5_config(tmp_path, resume=True, lr=0.1))


def test_an_earlier_run_is_not_replaced_silently(tmp_path: Path) -> None:
    train_a5.main(a5_config(tmp_path, steps=1))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    message = "without an earlier run, got .*checkpoint.pt.* another one, .*--resume, .*--overwrite"
    with pytest.raises(UsageError, match=message):
        train_a5.main(a5_config(tmp_path, steps=1, seed=1))
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    train_a5.main(a5_config(tmp_path, steps=1, seed=1, overwrite=True))
    assert read_metrics(tmp_path)["seed"] == 1
    with pytest.raises(ValueError, match="--overwrite replaces it: give one"):
        a5_config(tmp_path, resume=True, overwrite=True)


def test_one_process_instead_of_several_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is that of `accelerate launch --cpu --num_processes 2`."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match="as --num_processes says, got 1, .*torchrun"):
        train_a5.main(a5_config(tmp_path))


def test_a_baseline_is_trained_without_statistics_of_a_solver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"d_state": TrainConfig.d_state, "num_householder": TrainConfig.num_householder}
    train_a5.main(a5_config(tmp_path, mixer_layer="lstm", **sizes))
    metrics = read_metrics(tmp_path)
    assert metrics["num_steps"] == {} and metrics["parameters"] > 0
    assert f"{metrics['parameters']:,} parameters, 6 steps" in capsys.readouterr().out


def test_the_first_third_may_have_shorter_products(tmp_path: Path) -> None:
    config = a5_config(tmp_path, length=5, curriculum="uniform", steps=90)
    problem = train_a5.word_problem(config)
    rows = stream("train", 0)
    lengths = [problem.train_batch(rows, n, 5).tokens.shape[1] for n in range(config.steps)]
    assert set(lengths[:30]) == {2, 3, 4, 5} and set(lengths[30:]) == {5}
    without = train_a5.word_problem(dataclasses.replace(config, curriculum="none"))
    assert without.train_batch(rows, 0, 5).tokens.shape[1] == 5
    with pytest.raises(ValueError, match="--curriculum-from must be at most the training length 5"):
        dataclasses.replace(config, curriculum_from=6)


def test_the_length_doubles_and_is_resumed(tmp_path: Path) -> None:
    options = {"curriculum": "double", "curriculum_every": 2, "curriculum_threshold": 0.0}
    config = a5_config(tmp_path, length=8, **options)
    with pytest.raises(KeyboardInterrupt):
        training.train(interrupted_at(5, config), config)
    assert checkpoint(tmp_path)["step"] == 4 and checkpoint(tmp_path)["length"] == 8
    train_a5.main(dataclasses.replace(config, resume=True))
    train_a5.main(a5_config(tmp_path / "whole", length=8, **options))
    assert_same_run(tmp_path, tmp_path / "whole")
    assert checkpoint(tmp_path)["schedule"] == checkpoint(tmp_path / "whole")["schedule"]


def test_numbers_go_to_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    config = a5_config(tmp_path)
    job = training.start_job(train_a5.word_problem(config), config)
    monkeypatch.setattr(job.accelerator, "log", lambda values, step: seen.append((step, values)))
    run = training.start_run(job)
    run.step, run.loss_count = 7, 1
    training.record(job, run, {"accuracy": {"3": 0.5}, "num_steps": {}, "conditioning": {}})
    assert seen == [(7, {"loss": 0.0, "skipped": 0, "accuracy/3": 0.5})]
    numbers = tracked_config(plain_config(config))
    assert numbers["lr"] == config.lr and numbers["eval_lengths"] == "[3, 5]"


def test_early_stop_is_off_by_default_and_ends_the_run_when_reached(tmp_path: Path) -> None:
    train_a5.main(a5_config(tmp_path, stop_at_accuracy=0.0))
    metrics = read_metrics(tmp_path)
    assert metrics["steps"] == 3 and checkpoint(tmp_path)["stopped"] is True
    assert TrainConfig().stop_at_accuracy is None


def test_nonfinite_loss_stops_with_a_message(tmp_path: Path) -> None:
    config = a5_config(tmp_path, lr=1e30, warmup_steps=0)
    with (
        pytest.warns(ConvergenceWarning, match="not finite"),
        pytest.raises(FloatingPointError, match="2 of the 3 steps before step 3 .* lower --lr"),
    ):
        train_a5.main(config)


def fail_at(step: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Let a gradient be NaN in one step; returns copies of the run's state around its update."""
    update, around = training.update, []

    def state(run: Run) -> dict[str, torch.Tensor]:
        moments = enumerate(run.optimizer.state.values())
        named = {f"{name}{i}": v for i, values in moments for name, v in values.items()}
        return {n: v.detach().clone() for n, v in {**run.model.state_dict(), **named}.items()}

    def failing(job: Place, run: Run, loss: torch.Tensor) -> None:
        if run.step != step:
            return update(job, run, loss)
        around.append(state(run))
        next(run.model.parameters()).grad[0].fill_(torch.nan)  # type: ignore[index]
        update(job, run, loss * torch.nan)
        around.append(state(run))

    monkeypatch.setattr(training, "update", failing)
    return around


def test_a_step_whose_gradient_is_not_finite_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters, moments and step counts, but not the learning rate; the run has failed, because
    it is one of six steps."""
    around = fail_at(2, monkeypatch)
    train_a5.main(a5_config(tmp_path, weight_decay=0.5))
    before, after = around
    assert len(after) > 20 and all(torch.equal(after[name], before[name]) for name in after)
    metrics = read_metrics(tmp_path)
    assert (metrics["skipped"], metrics["failed"]) == (1, True)
    assert [entry["skipped"] for entry in metrics["history"]] == [1, 0]
    assert all(math.isfinite(entry["loss"]) for entry in metrics["history"])
    assert "FAILED: 1 steps had gradients that were not finite" in capsys.readouterr().out


def test_default_folder_is_named_after_task_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(a5_config(tmp_path, steps=1, seed=2, group="Z5"), out=None)
    train_a5.main(config)
    assert (tmp_path / "runs" / "z5-seed2" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        ("cosine", 0, 0.1),
        ("cosine", 9, 1.0),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.5),
        ("cosine", 110, 0.0),
        ("linear", 35, 0.75),
        ("linear", 110, 0.0),
        ("hold", 70, 1.0),
        ("hold", 90, 0.5),
        ("hold", 110, 0.0),
    ],
)
def test_learning_rate_warms_up_and_falls_to_zero(
    schedule: Schedule, step: int, factor: float
) -> None:
    assert decay(schedule, step, 10, 110) == pytest.approx(factor)


def test_marked_parameters_are_not_decayed(tmp_path: Path) -> None:
    model = build_model(a5_config(tmp_path), 60, 60)
    groups = training.build_optimizer(model, a5_config(tmp_path, weight_decay=0.5)).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spared = [names[id(p)].split(".")[-1] for p in groups[1]["params"]]
    assert "A_log" in spared and groups[1]["weight_decay"] == 0.0
    assert groups[0]["weight_decay"] == 0.5
    assert sum(len(group["params"]) for group in groups) == len(names)


@pytest.mark.parametrize("mixer", ["bedouin", "lstm"])
def test_the_width_follows_from_a_number_of_parameters(tmp_path: Path, mixer: Any) -> None:
    changes = {"d_state": 16, "num_householder": 2} if mixer == "lstm" else {}
    config = a5_config(tmp_path, mixer_layer=mixer, match_parameters=40_000, steps=1, **changes)
    metrics = training.train(train_a5.word_problem(config), config)
    assert metrics["config"]["d_model"] in (32, 64) and 25_000 < metrics["parameters"] < 60_000
    small = dataclasses.replace(config, match_parameters=10)
    with pytest.raises(ValueError, match="--match-parameters must be at least"):
        training.train(train_a5.word_problem(small), small)
