"""The training scripts: their results, and exact continuation of interrupted runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from tests.examples.training import SMALL, a5_config, interrupting, last, read_metrics

import train_a5
import train_copy
from bedouin import SequenceModel, baselines
from bedouin.solvers import ConvergenceWarning
from bedouin.tasks import stream
from common.checkpoint import MANIFEST, find_checkpoint
from common.options import MakeLayer, Schedule, decay, make_layer
from common.run import Run
from flags import UsageError
from research.baselines import make_baseline


def copy_config(out: Path, **changes: Any) -> train_copy.CopyingConfig:
    lengths = {"min_length": 2, "max_length": 3, "context_len": 16, "eval_lengths": (3, 6)}
    return train_copy.CopyingConfig(**{**SMALL, **lengths, "out": out, **changes})


def states(folder: Path) -> dict[str, Any]:
    """The parts of the last checkpoint of a run."""
    files = sorted(file for file in last(folder).iterdir() if file.name != MANIFEST)
    return {file.name: torch.load(file, weights_only=False) for file in files}


def assert_equal(one: Any, two: Any, name: str = "") -> None:
    """Equal tensors and numbers at any depth, but for the seconds."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one.keys() - {"seconds"}:
            assert_equal(one[key], two[key], f"{name} {key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two), name
    elif name.endswith("torch_manual_seed") or "random_states" not in name:
        assert str(one) == str(two), name


def assert_same_run(first: Path, second: Path) -> None:
    assert_equal(states(first), states(second))
    assert read_metrics(first)["accuracy"] == read_metrics(second)["accuracy"]


@pytest.mark.parametrize(
    ("script", "make_config", "said", "names"),
    [
        (
            train_a5,
            a5_config,
            {"name": "a5", "title": "Word problem of A5, trained at length 3", "chance": 1 / 60},
            ("accuracy", "sequence_accuracy"),
        ),
        (
            train_copy,
            copy_config,
            {"name": "copy", "title": "Copying, trained on 2 to 3 letters", "chance": 1 / 26},
            ("character_accuracy", "string_accuracy"),
        ),
    ],
    ids=["a5", "copy"],
)
def test_a_script_writes_metrics_figure_and_weights(
    script: Any,
    make_config: Any,
    said: dict[str, Any],
    names: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tmp_path, seed=3)
    found, metrics = script.main(config), read_metrics(tmp_path)
    lengths = [str(length) for length in sorted({3, *config.eval_lengths, *config.final_lengths})]
    assert metrics == json.loads(json.dumps(found)) and list(metrics["residual"]) == lengths
    assert (metrics[names[0]], metrics[names[1]]) == (
        metrics["accuracy"],
        metrics["sequence_accuracy"],
    )
    assert 0 <= metrics["accuracy"][lengths[-1]] < 0.5 and metrics["seconds"] > 0
    assert metrics["seed"] == 3 and metrics["config"]["d_model"] == 16
    assert metrics["task"] == {**said, "train_length": 3}
    assert [entry["step"] for entry in metrics["history"]] == [3, 6]
    assert metrics["history"][0]["loss"] == pytest.approx(math.log(1 / said["chance"]), abs=1.0)
    assert metrics["versions"]["torch"] == torch.__version__ and "cpu" in metrics["device"]
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["metrics.json"]
    assert_equal(load_file(tmp_path / "model.safetensors"), states(tmp_path)["pytorch_model.bin"])
    printed = capsys.readouterr().out
    assert "step 3  loss" in printed and names[1] in printed


def test_weights_in_one_buffer_and_tied_weights_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mixer = baselines.LSTM(4)
    model = SequenceModel(6, 4, [mixer], tie_embeddings=True)
    run = Run("tied", a5_config(tmp_path), model)
    flat = torch.cat([p.detach().flatten() for p in mixer.lstm.parameters()])
    parts = flat.split([p.numel() for p in mixer.lstm.parameters()])
    for parameter, part in zip(mixer.lstm.parameters(), parts, strict=True):
        parameter.data = part.view_as(parameter)  # as on a GPU
    run.finish({}, {})
    shared = {p.untyped_storage().data_ptr() for p in mixer.lstm.parameters()}
    assert len(shared) == 1  # saving left the buffer as it was
    loaded = SequenceModel(6, 4, [baselines.LSTM(4)], tie_embeddings=True)
    missing, unexpected = load_model(loaded, tmp_path / "model.safetensors")
    assert not missing and not unexpected
    assert_equal(dict(model.state_dict()), dict(loaded.state_dict()))


@pytest.mark.parametrize("options", [{}, {"curriculum": "uniform", "length": 5}], ids=str)
def test_interrupted_run_continues_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    train_a5.main(a5_config(tmp_path / "whole", **options))
    with interrupting(4), pytest.raises(KeyboardInterrupt):
        train_a5.main(a5_config(tmp_path / "cut", **options))
    assert find_checkpoint(tmp_path / "cut") == tmp_path / "cut" / "checkpoint-4"
    torch.manual_seed(99)
    train_a5.main(a5_config(tmp_path / "cut", resume=True, **options))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_an_earlier_run_is_not_replaced_silently(tmp_path: Path) -> None:
    train_a5.main(a5_config(tmp_path, steps=1))
    with pytest.raises(ValueError, match=r"written with --lr 0.001, got 0.1; .*--out"):
        train_a5.main(a5_config(tmp_path, steps=1, resume=True, lr=0.1))
    before = states(tmp_path)
    message = "without an earlier run, got .* another one, .*--resume, .*--overwrite"
    with pytest.raises(UsageError, match=message):
        train_a5.main(a5_config(tmp_path, steps=1, seed=1))
    assert_equal(before, states(tmp_path))
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


@pytest.mark.parametrize(("layer", "make"), [("lstm", make_baseline), ("tracking", make_layer)])
def test_another_layer_is_trained_without_statistics_of_a_solver(
    layer: Any, make: MakeLayer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"d_state": 16, "num_householder": 2, "layer": layer}
    metrics = train_a5.main(a5_config(tmp_path, **sizes), make)
    assert metrics["num_steps"] == {} and metrics["config"]["layer"] == layer
    assert f"{metrics['parameters']:,} parameters, 6 steps" in capsys.readouterr().out


def test_the_first_third_may_have_shorter_products(tmp_path: Path) -> None:
    config = a5_config(tmp_path, length=5, curriculum="uniform", steps=90)
    rows = stream("train", 0)
    lengths = [train_a5.draw_length(config, step, rows) for step in range(config.steps)]
    assert set(lengths[:30]) == {2, 3, 4, 5} and set(lengths[30:]) == {5}
    assert train_a5.draw_length(a5_config(tmp_path, length=5), 0, rows) == 5
    with pytest.raises(ValueError, match="--length must be at least 2 with --curriculum uniform"):
        a5_config(tmp_path, length=1, curriculum="uniform")


def test_most_gradients_that_are_not_finite_stop_with_a_message(tmp_path: Path) -> None:
    config = a5_config(tmp_path, lr=1e30, warmup_steps=0)
    message = "2 of the 3 steps before step 3 .* lower --lr"
    with pytest.warns(ConvergenceWarning, match="not finite"):
        with pytest.raises(FloatingPointError, match=message):
            train_a5.main(config)


def test_a_step_whose_gradient_is_not_finite_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters, moments and step counts, but not the learning rate; the run has failed, because
    it is one of six steps."""
    update, around = Run.update, []

    def failing(run: Run, loss: torch.Tensor, **shown: torch.Tensor) -> None:
        if run.step == 2:
            moments = [v for state in run.optimizer.state.values() for v in state.values()]
            values = [*run.model.state_dict().values(), *moments]
            around.append((values, [v.detach().clone() for v in values]))
            next(run.model.parameters()).grad[0].fill_(torch.nan)
            loss = loss * torch.nan
        rate = run.schedule.get_last_lr()
        update(run, loss, **shown)
        assert run.step != 6 or rate != run.schedule.get_last_lr()
        if run.step == 3:
            assert all(map(torch.equal, *around[0]))

    monkeypatch.setattr(Run, "update", failing)
    metrics = train_a5.main(a5_config(tmp_path))
    assert around and (metrics["skipped"], metrics["failed"]) == (1, True)
    assert [entry["skipped"] for entry in metrics["history"]] == [1, 0]
    assert all(math.isfinite(entry["loss"]) for entry in metrics["history"])
    assert "FAILED: 1 steps had gradients that were not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        *(("cosine", step, f) for step, f in ((0, 0.1), (9, 1), (10, 1), (60, 0.5), (110, 0))),
        *(("linear", step, f) for step, f in ((35, 0.75), (110, 0))),
        *(("hold", step, f) for step, f in ((70, 1), (90, 0.5), (110, 0))),
    ],
)
def test_learning_rate_warms_up_and_falls_to_zero(
    schedule: Schedule, step: int, factor: float
) -> None:
    assert decay(schedule, step, 10, 110) == pytest.approx(factor)
