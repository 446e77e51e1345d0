"""The study script: results, skipped steps, tasks, curricula, and options that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.tasks import IGNORE, Group
from common.options import decay
from flags import UsageError
from research import ensemble, length, stack, study
from research.data import Data, eval_points, metrics

POINT: dict[str, Any] = {
    **{"input_scale": "bounded_delta", "d_state": 2, "num_householder": 1, "decay": "mamba"},
    **{"beta_max": 1.0, "feedback": "B+mixer", "feedback_init": 0.1},
    **{"rate_scale": 0.5, "delta_from_x_init": 0.0, "expand": 2},
    **{"num_heads": 2, "lr": 1e-2, "schedule": "cosine", "batch_size": 8, "steps": 4},
}
GRID = {name: (value,) for name, value in POINT.items()}
DEFAULTS = {name: getattr(study.PRESETS["small"], name)[0] for name in study.GRID}
CPU = torch.device("cpu")


def small(**changes: Any) -> study.Config:
    values: dict[str, Any] = {"eval_lengths": (4, 6), "d_model": 8, "seeds": 2}
    if changes.get("task") not in ("copy", "bound"):
        values["length"] = 4
    return study.Config(**{**values, "warmup": 1, "log_every": 2, "device": "cpu", **changes})


def make_data(**changes: Any) -> Data:
    config = small(**changes)
    return Data(config, study.model_seeds(config), CPU)


def test_points_of_the_grid_are_trained_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results are those of one point after the other, also with fewer steps for one."""
    grid = GRID | {"steps": (2, 4)}
    found = []
    for concurrent in (True, False):
        config = small(concurrent=concurrent, out=tmp_path, autocast="bf16", overwrite=True, **grid)
        ensemble.main(config)
        rows = json.loads((tmp_path / "results.json").read_text())["rows"]
        found.append([(row["accuracy"], row["history"]) for row in rows])
    assert found[0] == found[1]
    assert [[entry["step"] for entry in history] for _, history in found[0]] == [[2], [2, 4]]
    assert set(rows[0]["accuracy"]) == {"4", "6"} and len(rows[0]["accuracy"]["4"]["token"]) == 2
    assert rows[1]["ms_per_step"] == pytest.approx(1e3 * rows[1]["seconds"] / 4)
    assert "ms a step" in capsys.readouterr().out
    with pytest.raises(UsageError, match="got .*results.json: name another one, or .*--overwrite"):
        ensemble.main(small(out=tmp_path, **grid))


def fail_at(one: stack.Ensemble, number: int, model: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a gradient of a model be NaN in the step of this number."""
    gradients, steps = one._gradients, iter(range(100))

    def failing() -> tuple[stack.Params, Tensor, Tensor]:
        found = gradients()
        if next(steps) == number:
            found[0]["head.weight"][model, 0] = torch.nan
        return found

    monkeypatch.setattr(one, "_gradients", failing)


def state_of(one: stack.Ensemble, model: int) -> list[Tensor]:
    """Copies of parameters, moments and step counts of a model."""
    state = [v for values in one.optimizers[model].state.values() for v in values.values()]
    return [v.clone() for v in (*(p[model] for p in one.params.values()), *state)]


def test_a_model_whose_gradient_is_not_finite_skips_its_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters, moments, step counts and weight decay; the other model does not notice, and the
    failed one goes on as if it had not tried."""

    def start(**changes: Any) -> stack.Ensemble:
        changes = {"weight_decay": 0.5, **changes}
        return stack.Ensemble(small(**changes), POINT, make_data(**changes), CPU)

    both, alone, failed = start(), start(seeds=1), start(seeds=1, first_seed=1)
    fail_at(both, 1, 1, monkeypatch)
    for number in range(4):
        before = state_of(both, 1)
        for one in (both, alone, failed):
            one.refill()
            if (one, number) != (failed, 1):
                one.step()
            one.schedule.step()
        if number == 1:
            assert all(map(torch.equal, state_of(both, 1), before))
        assert all(map(torch.equal, state_of(both, 0), state_of(alone, 0)))
        assert all(map(torch.equal, state_of(both, 1), state_of(failed, 0)))
    assert both.skipped.tolist() == [0, 1]


@pytest.mark.gpu
def test_a_captured_step_skips_the_failed_model_alone() -> None:
    device = torch.device("cuda")
    config = small(device="cuda", weight_decay=0.5)
    data = Data(config, study.model_seeds(config), device)
    both = stack.Ensemble(config, POINT, data, device)
    step, weight = stack.stepper(both), both.params["head.weight"]
    right = weight[1, 0, 0].clone()
    weight[1, 0, 0] = torch.nan
    states = [state_of(both, model) for model in (0, 1)]
    step()
    assert not any(map(torch.equal, state_of(both, 0), states[0]))
    pairs = zip(state_of(both, 1), states[1], strict=True)
    assert all(torch.equal(new.nan_to_num(), old.nan_to_num()) for new, old in pairs)
    weight[1, 0, 0] = right
    step()
    assert both.skipped.tolist() == [0, 1]
    assert not torch.equal(state_of(both, 1)[-1], states[1][-1])


def test_a_run_with_too_many_skipped_steps_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(out=tmp_path, log_every=3, **GRID)
    start = stack.Ensemble.__init__

    def starting(one: stack.Ensemble, *args: Any) -> None:
        start(one, *args)
        fail_at(one, 3, 1, monkeypatch)  # after the last entry of the history

    monkeypatch.setattr(stack.Ensemble, "__init__", starting)
    ensemble.main(config)
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["skipped"] == [0, 1] and row["failed"] == [False, True]
    assert "FAILED: no update in 1 of model 1 of 4 steps" in capsys.readouterr().out
    assert not stack.has_failed(10, 1000) and stack.has_failed(11, 1000)


def test_the_learning_rate_of_a_captured_step_changes_in_place() -> None:
    one = stack.Ensemble(small(warmup=2), POINT, make_data(), CPU)
    rates = [group["lr"] for group in one.optimizers[1].param_groups]
    for step in range(4):
        assert [float(rate) for rate in rates] == pytest.approx(
            [1e-2 * decay("cosine", step, 2, 4)] * 2
        )
        one.step()
        one.schedule.step()


@pytest.mark.parametrize("name", ["tracking", "lstm_l1", "deltaproduct_l1"])
def test_a_layer_by_name_learns_and_goes_on_from_states_of_other_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels of further steps go on with the products of the rows whose last label was right."""
    monkeypatch.setattr(length, "STEPS", 5)
    monkeypatch.setattr(length, "RESTARTS", 0.0)
    seen: dict[str, list[list[Tensor]]] = {"zero": [], "carried": [], "noise": []}
    step = length.Continued.step

    def watched(one: length.Continued) -> None:
        step(one)
        one.goes_on[:, ::2] = one.kind != "zero"  # a model of so few steps is wrong
        seen[one.kind].append([v[0].clone() for v in (one.tokens, one.labels, one.goes_on)])

    monkeypatch.setattr(length.Continued, "step", watched)
    options: dict[str, Any] = {"steps": (30,), "batch_size": (16,), "lr": (3e-3,), "log_every": 5}
    options |= {"d_model": 256, "eval_rows": 4, "seeds": 1, "out": tmp_path}
    ensemble.main(small(model=name, states=tuple(seen), **options))
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["point"].get("states") for row in rows] == [None, *seen]
    assert [row["history"][-1]["step"] for row in rows] == [30, 5, 5, 5]
    first, *_, last = (entry["loss"][0] for entry in rows[0]["history"])
    assert last < first
    table = Group.from_name("A5").table
    for found in seen.values():
        product = torch.zeros(16, dtype=torch.int64)
        for tokens, labels, goes_on in found:
            for token, label in zip(tokens.unbind(1), labels.unbind(1), strict=True):
                product = table[product, token]
                assert torch.equal(label, product)
            product *= goes_on
    with pytest.raises(ValueError, match="--states must be empty for a task other than word"):
        length.Continued(stack.Ensemble(small(), POINT, make_data(task="parity"), CPU), "zero")


def test_lengths_of_a_curriculum_end_and_those_that_passed_are_known() -> None:
    changes = {"task": "bound", "curriculum": "double", "curriculum_from": 2, "seeds": 2}
    data = make_data(**changes, max_operations=16, curriculum_until=0.5)
    assert data.reached == [2, 2]
    for step in range(4):
        data.batch(1, step, 10)
        data.advance([0.9, 0.96])
    assert data.reached == [2, 16] and data.passed == [0, 16]
    data.batch(1, 4, 10)
    assert data.reached == [2, 16]
    data.batch(1, 5, 10)
    assert data.reached == [16, 16] and data.passed == [0, 16]
    with pytest.raises(ValueError, match="--curriculum must be none for --task mqar"):
        make_data(task="mqar", length=16, pairs=2, curriculum="double")
    with pytest.raises(ValueError, match="--eval-definitions must be one number or 3, as many as"):
        eval_points(small(task="bound", eval_definitions=(4, 8)), (2, 4, 8))


def test_a_model_by_name_takes_no_option_of_a_layer() -> None:
    config = small(model="hybrid_l2", d_model=256)
    assert [type(v).__name__ for v in study.make_model(config, DEFAULTS).mixers] == [
        "DeltaNet",
        "LSTM",
    ]
    with pytest.raises(ValueError, match="d_state must keep its default 16 for model 'hybrid_l2'"):
        study.make_model(config, {**DEFAULTS, "d_state": 2})
    with pytest.raises(ValueError, match="solver must keep its default for model 'hybrid_l2'"):
        study.make_model(small(model="hybrid_l2", d_model=256, solver="picard"), DEFAULTS)
    with pytest.raises(ValueError, match="--model must be among .*, got 'other'"):
        small(model="other")


VARIANTS: list[dict[str, Any]] = [
    {"group": "S5", "elements": "swaps", "include_identity": True},
    {"tokens_per_transition": 2, "label_at": "every"},
    {"generators": 12, "label_at": "last"},
    {"task": "parity", "length": 12, "eval_from": 8},
    {"task": "arithmetic", "length": 12},
    {"task": "brackets", "length": 12, "eval_from": 8},
    {"task": "copy", "curriculum": "double"},
    {"task": "mqar", "length": 16, "vocabulary": 20, "pairs": 2},
    {"task": "bound", "curriculum": "double", "max_operations": 8, "eval_lengths": (40,)},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_task_has_rows_and_accuracies(changes: dict[str, Any]) -> None:
    data = make_data(**changes)
    batches = data.batches(4, 10, 2)
    (tokens, labels), (later, _) = next(batches), next(batches)
    assert tokens.shape == labels.shape == (2, 4, data.width) and bool((labels != IGNORE).any())
    assert not torch.equal(tokens, later)
    tokens, labels = data.eval_batch(4, (16, 40) if changes.get("task") == "bound" else 16)
    right = torch.nn.functional.one_hot(labels.clamp(min=0), data.task.output_size).float()
    for name, metric in metrics(data.task).items():
        assert float(metric(right[0], labels[0], tokens[0])) == 1.0, name
    assert int(tokens.max()) < data.task.vocab_size


def test_the_length_doubles_for_each_seed_by_itself() -> None:
    data = make_data(curriculum="double", length=16)
    data.advance([0.99, 0.5])
    assert data.reached == [4, 2]
    tokens, labels = data.batch(8, 0, 10)
    assert (labels != IGNORE).sum(-1).tolist() == [[4] * 8, [2] * 8]
    for _ in range(5):
        data.advance([1.0, 0.0])
    assert data.reached == [16, 2]
    four_times = make_data(curriculum="quadruple", length=16)
    four_times.advance([0.95, 0.94])
    assert four_times.reached == [8, 2]
    four_times.advance([1.0, 1.0])
    assert four_times.reached == [16, 8]


def test_a_longer_length_begins_with_the_step_after_the_log_entry() -> None:
    changes: dict[str, Any] = {"curriculum": "double", "length": 16, "seeds": 1}
    data, config = make_data(**changes), small(**changes)
    trained = stack.Ensemble(config, POINT | {"steps": 100}, data, CPU)
    for longest in (2, 4, 8):
        for _ in range(config.log_every):
            trained.refill()
            assert int((trained.labels != IGNORE).sum(-1).max()) == longest
        data.advance([1.0])
