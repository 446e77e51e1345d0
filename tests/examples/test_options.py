"""The command line of the training scripts."""

import dataclasses
import math
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import train_a5
import train_copy
import train_lm
from bedouin import TrackingDeltaNet
from bedouin.baselines import DeltaNet
from bedouin.solvers import (
    Anderson,
    Broyden,
    Direct,
    Jacobi,
    PhantomAdjoint,
    Picard,
)
from bedouin.tasks import Group, WordProblem, generating_set
from common.checks import Count, Share, check_types
from common.layers import build_adjoint, build_solver
from common.options import TrainConfig, build_model, parse_config


def parse_a5(*args: str) -> train_a5.WordProblemConfig:
    return parse_config(train_a5.PRESETS, args)


def test_preset_gives_the_defaults_and_flags_override_them() -> None:
    config = parse_a5("--preset", "paper", "--d-model", "96", "--eval-lengths", "3", "5")
    expected = dataclasses.replace(train_a5.PAPER, d_model=96, eval_lengths=(3, 5))
    assert config == expected
    assert parse_a5("--preset=gpu") == train_a5.GPU


def test_a_script_may_have_one_preset(capsys: pytest.CaptureFixture[str]) -> None:
    presets = {"paper": train_a5.PAPER}
    for flags in ((), ("--preset", "auto"), ("--preset", "paper")):
        assert parse_config(presets, flags) == train_a5.PAPER
    for name in ("cpu", "gpu"):
        with pytest.raises(SystemExit, match="2"):
            parse_config(presets, ("--preset", name))
        expected = f"--preset must be one of auto, paper, got {name}"
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("presets", [train_a5.PRESETS, train_copy.PRESETS, train_lm.PRESETS])
@pytest.mark.parametrize("name", ["paper", "lstm", "mamba", "deltaproduct"])
def test_another_layer_leaves_out_what_the_preset_gives_bedouin(name: str, presets: Any) -> None:
    for preset in set(presets) - {"paper"}:
        config = parse_config(presets, ("--preset", preset, "--mixer-layer", name))
        assert config.mixer_layer == name and config.feedback == TrainConfig.feedback
        assert config.steps == presets[preset].steps


def test_variants_of_word_problems_reach_the_task() -> None:
    flags = {
        **{"elements": "3-permutations", "tokens_per_transition": 4},
        **{"include_identity": True, "label_at": "every"},
    }
    config = train_a5.WordProblemConfig(group="S5", **flags)  # type: ignore[arg-type]
    assert config.task() == WordProblem(Group.from_name("S5"), 6, **flags)  # type: ignore[arg-type]
    config = parse_a5("--generators", "12", "--generator-seed", "1", "--label-at", "last")
    assert config.task().alphabet == generating_set(config.task().group, 12, 1)
    assert config.task().label_at == "last"


@pytest.mark.parametrize(
    ("flag", "suggestion"),
    [("--lrr", "--lr"), ("--d-modle", "--d-model"), ("--num-housholder", "--num-house")],
)
def test_unknown_flag_exits_and_suggests(
    flag: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_a5(flag, "3")
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert flag in message and suggestion in message


def test_every_flag_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_a5("--help")
    text = capsys.readouterr().out
    for field in dataclasses.fields(train_a5.WordProblemConfig):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "Optimizer steps" in text and "(default:" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, r"--steps must be an int in \[1, inf\), got 0"),
        ({"seed": -1}, r"--seed must be an int in \[0, 524288\), got -1"),
        ({"eval_lengths": (4, 0)}, r"--eval-lengths must be an int in \[1, inf\), got 0"),
        (
            {"mixer_layer": "paper", "solver": "direct"},
            "--mixer-layer paper takes no --solver: leave",
        ),
        ({"mixer_layer": "lstm", "d_state": 8}, "--mixer-layer lstm takes no --d-state: leave it"),
        (
            {"train_solver_steps": 200},
            "--train-solver-steps must be at most --solver-steps = 100, got 200",
        ),
        (
            {"train_solver_steps": 2, "gamma_cap": (4.0, 1.0)},
            "--gamma-cap draws the steps in training",
        ),
        ({"gamma_cap": (4.0, 0.0)}, r"--gamma-cap must be a number in \(0, 1e\+06\], got 0.0"),
        ({"clip": math.nan}, r"--clip must be a number in \(0, inf\], got nan"),
        ({"steps": True}, "--steps must be an int in .*, got True"),
        ({"d_model": 8.0}, r"--d-model must be an int in .*, got 8\.0"),
    ],
)
def test_bad_values_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TrainConfig(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "got"),
    [
        *(((name, "0"), "0") for name in ("--steps", "--batch-size", "--d-model", "--num-layers")),
        *(((name, "-1"), "-1") for name in ("--d-state", "--expand", "--num-householder")),
        *(((name, "0"), "0") for name in ("--solver-steps", "--threads", "--log-every")),
        *(((name, "0"), "0") for name in ("--eval-every", "--eval-rows", "--final-rows")),
        *(((name, "0"), "0") for name in ("--eval-batch-size", "--checkpoint-every")),
        *(((name, "4", "-4"), "-4") for name in ("--eval-lengths", "--final-lengths")),
        *(((name, "nan"), "nan") for name in ("--lr", "--clip", "--beta-max", "--feedback-init")),
        *(((name, "inf"), "inf") for name in ("--lr", "--weight-decay", "--rtol", "--atol")),
        (("--weight-decay", "-1"), "-1.0"),
        (("--warmup-steps", "-5"), "-5"),
        (("--seed", "524288"), "524288"),
        (("--betas", "0.9", "1.0"), "1.0"),
        (("--betas", "-0.1", "0.9"), "-0.1"),
        (("--mlp-expand", "0"), "0.0"),
        (("--beta-max", "2.1"), "2.1"),
        (("--beta-max", "0"), "0.0"),
        (("--feedback-init", "-1"), "-1.0"),
        (("--rtol", "-1e-3"), "-0.001"),
        (("--atol", "-1e-3"), "-0.001"),
        (("--stop-at-accuracy", "1.5"), "1.5"),
        (("--length", "0"), "0"),
        (("--curriculum-from", "7"), "7"),
        (("--trackers", "paper"), "'paper'"),
        (("--num-heads", "0"), "0"),
        (("--num-heads", "3"), "3"),
        (("--group", "Q8"), "'Q8'"),
        (("--group", "Z1"), "'Z1'"),
        (("--generators", "61"), "61"),
        (("--elements", "swaps", "--generators", "3"), "'swaps'"),
        (("--label-at", "last", "--protocol", "official"), "'last'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_bad_flags_exit_with_a_message_that_names_them(
    flags: tuple[str, ...], got: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_a5("--preset", "cpu", *flags)
    assert stop.value.code == 2
    message = unboxed(capsys.readouterr().err)
    assert flags[0] in message and f"got {got}" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--min-length", "9"), "--min-length must be at most --max-length, got"),
        (("--min-length", "0"), "--min-length must be at least 1, got 0"),
        (("--context-len", "18"), "--context-len must hold a whole sample"),
        (("--num-letters", "27"), "--num-letters must be in [2, 26], got 27"),
    ],
)
def test_bad_flags_of_copying(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_config(train_copy.PRESETS, ("--preset", "cpu", *flags))
    assert message in unboxed(capsys.readouterr().err)


def unboxed(message: str) -> str:
    """tyro's message without its frame and its line breaks."""
    return " ".join(message.replace("│", " ").split())


def test_solver_flags_build_the_solver_with_its_tolerances() -> None:
    base = TrainConfig(rtol=1e-3, atol=1e-7)
    assert build_solver(base) == "auto"
    assert build_solver(dataclasses.replace(base, solver="direct")) == Direct()
    for name, solver in (("picard", Picard), ("jacobi", Jacobi)):
        config = dataclasses.replace(base, solver=name)  # type: ignore[arg-type]
        assert build_solver(config) == solver(rtol=1e-3, atol=1e-7)
    anderson = build_solver(dataclasses.replace(base, solver="anderson"))
    broyden = build_solver(dataclasses.replace(base, solver="broyden"))
    assert isinstance(anderson, Anderson) and anderson.rtol == 1e-3
    assert isinstance(broyden, Broyden) and broyden.atol == 1e-7
    assert isinstance(build_adjoint(dataclasses.replace(base, adjoint="phantom")), PhantomAdjoint)


def test_a_baseline_replaces_the_layer_and_the_presets_options_of_bedouin() -> None:
    config = parse_a5("--preset", "cpu", "--mixer-layer", "deltanet", "--num-heads", "2")
    assert config.feedback == TrainConfig.feedback != train_a5.CPU.feedback
    model = build_model(config, 7, 5)
    assert isinstance(model.mixers[0], DeltaNet) and model.mixers[0].num_heads == 2


def test_the_layer_that_tracks_and_recalls_takes_no_option_of_bedouin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (layer,) = build_model(parse_config(train_copy.PRESETS, ("--preset", "cpu")), 7, 5).mixers
    assert isinstance(layer, TrackingDeltaNet)
    for name, value in (("--d-state", "3"), ("--solver", "picard")):
        with pytest.raises(SystemExit):
            parse_config(train_copy.PRESETS, ("--preset", "cpu", name, value))
        message = unboxed(capsys.readouterr().err)
        assert f"--mixer-layer tracking takes no {name}: leave it out or use" in message


def test_a_convolution_is_that_of_the_layer() -> None:
    layer: Any = build_model(parse_a5("--d-conv", "3"), 7, 5).mixers[0]
    assert layer.conv.width == 3 and layer.d_conv == 3
    layer = build_model(parse_a5(), 7, 5).mixers[0]
    assert layer.conv is None


@dataclasses.dataclass(frozen=True)
class Ranged:
    plain: int = -1
    share: Share = 0.5
    counts: tuple[Count, ...] = ()
    either: Count | None = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 1.5}, r"--share must be a number in \[0, 1\], got 1.5"),
        ({"share": None}, r"--share must be a number in \[0, 1\], got None"),
        ({"counts": (3, 0)}, r"--counts must be an int in \[1, inf\), got 0"),
        ({"either": 0}, r"--either must be an int in \[1, inf\), got 0"),
    ],
)
def test_ranges_are_those_of_the_types(change: dict[str, Any], message: str) -> None:
    check_types(Ranged())
    check_types(Ranged(counts=(1, 2), either=3))
    with pytest.raises(ValueError, match=message):
        check_types(Ranged(**change))


def test_model_is_a_function_of_the_seed() -> None:
    def weights(seed: int) -> list[float]:
        model = build_model(TrainConfig(seed=seed, d_model=8, d_state=2), 7, 5)
        return [float(parameter.detach().sum()) for parameter in model.parameters()]

    assert weights(3) == weights(3)
    assert weights(3) != weights(4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its name is valid")
@pytest.mark.parametrize("name", ["benchmarks/bench", "research/ensemble", "generate"])
def test_a_device_that_does_not_exist_is_an_error_of_the_flag(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(Path(train_a5.__file__).parent / f"{name}.py")
    for device, message in (("gpu", "invalid choice 'gpu'"), ("cuda", "--device cuda needs a GPU")):
        monkeypatch.setattr(sys, "argv", [script, "--device", device])
        if name == "generate":
            sys.argv += ["--run", "none"]
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(script, run_name="__main__")
        text = str(stop.value.code) + capsys.readouterr().err
        assert message in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("module", [train_a5, train_copy, train_lm])
def test_layers_of_the_presets_are_none_that_the_library_warns_of(module: Any) -> None:
    for config in module.PRESETS.values():
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("error")
            build_model(config, 7, 7)


def test_no_example_silences_the_library() -> None:
    with pytest.warns(UserWarning, match="input_scale='delta' with HouseholderProduct"):
        build_model(parse_a5("--preset", "cpu", "--input-scale", "delta"), 7, 7)
    for path in Path(train_a5.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"filterwarnings|simplefilter|catch_warnings", text), path
