"""The command line of the training scripts. And scripts to copy, as examples/README.md tells:
`train_a5.py` with what it needs; the short one, in a folder of its own, with another automaton.
"""

import dataclasses
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from tests.messages import of_kind, refused

import train_a5
import train_copy
import train_lm
from bedouin import Bedouin, TrackingDeltaNet
from bedouin.baselines import DeltaNet
from bedouin.solvers import FixedCap, GammaCap, ImplicitAdjoint, Jacobi
from common.options import (
    ADJOINTS,
    OF_BEDOUIN,
    RunConfig,
    TrainConfig,
    fixed_point_options,
    parse_config,
)
from research import baselines

SCRIPTS: list[Any] = [train_a5, train_copy, train_lm]


def parse_a5(*args: str) -> train_a5.WordProblemConfig:
    return parse_config(train_a5.PRESETS, args)


def message_of(
    capsys: pytest.CaptureFixture[str], script: Any, *flags: str, status: int = 2
) -> str:
    """What tyro says of flags that end the script, without its frame and its line breaks."""
    with pytest.raises(SystemExit) as stop:
        parse_config(script.PRESETS, flags)
    assert stop.value.code == status
    printed = capsys.readouterr()
    return " ".join((printed.err + printed.out).replace("│", " ").split())


def test_preset_gives_the_defaults_and_flags_override_them() -> None:
    config = parse_a5("--preset", "paper", "--d-model", "96", "--eval-lengths", "3", "5")
    assert config == dataclasses.replace(train_a5.PAPER, d_model=96, eval_lengths=(3, 5))
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


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", ["paper", "tracking", "lstm", "mamba", "deltaproduct"])
def test_another_layer_leaves_out_what_the_preset_gives_bedouin(name: str, script: Any) -> None:
    for preset in script.PRESETS.keys() - {"paper"}:
        for flag in ("--layer", "--mixer-layer"):
            config, _ = baselines.parse(script, ("--preset", preset, flag, name))
            assert config.layer == name and config.feedback == RunConfig.feedback
            assert config.steps == script.PRESETS[preset].steps


def test_a_baseline_takes_its_own_options() -> None:
    flags = ("--preset", "cpu", "--mixer-layer", "deltanet", "--num-heads", "2")
    config, make_layer = baselines.parse(train_a5, flags)
    (layer,) = train_a5.make_model(config, make_layer).mixers
    assert isinstance(layer, DeltaNet) and layer.num_heads == 2
    with pytest.raises(ValueError, match="--layer lstm takes no --d-state: leave it out"):
        baselines.parse(train_a5, ("--mixer-layer", "lstm", "--d-state", "8"))
    with pytest.raises(SystemExit, match="name a script of .* and --mixer-layer, one of"):
        baselines.main(["train_a5", "--mixer-layer", "bedouin"])


def test_unknown_flag_exits_and_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    message = message_of(capsys, train_a5, "--d-modle", "3")
    assert "--d-modle" in message and "--d-model" in message


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_help(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = message_of(capsys, script, "--help", status=0)
    entries = {entry.split()[0].rstrip(","): entry for entry in re.split(r" (?=--[a-z])", text)}
    for field in dataclasses.fields(script.CPU):
        entry = entries[f"--{field.name.replace('_', '-')}"]
        if entry.endswith(","):  # of a flag without a value the text follows its negation
            entry = entries[f"--no-{field.name.replace('_', '-')}"]
        assert re.search(r"[a-z]{2,} [a-z]{2,}", entry) or field.name == "layer", entry


BAD = of_kind(ValueError, [
    ({"layer": "paper", "solver": "direct"}, "--layer paper takes no --solver: leave"),
    ({"layer": "tracking", "d_state": 8}, "--layer tracking takes no --d-state: leave it"),
    ({"gamma_cap": (4.0, 0.0)}, "--gamma-cap must be a number in (0, 1e+06], got 0.0"),
    ({"steps": True}, "--steps must be an int in ..., got True"),
    ({"d_model": 8.0}, "--d-model must be an int in ..., got 8.0"),
])  # fmt: skip

test_bad_values_are_named = refused(BAD, TrainConfig)


OF_A5 = [
    *((f"{name} 0", "0") for name in ("--steps", "--batch-size", "--d-model", "--num-layers")),
    *((f"{name} -1", "-1") for name in ("--d-state", "--expand", "--num-householder")),
    *((f"{name} 0", "0") for name in ("--solver-steps", "--threads", "--log-every")),
    *((f"{name} 0", "0") for name in ("--eval-every", "--eval-rows", "--final-rows")),
    *((f"{name} 0", "0") for name in ("--eval-batch-size", "--checkpoint-every", "--length")),
    *((f"{name} 4 -4", "-4") for name in ("--eval-lengths", "--final-lengths")),
    *((f"{name} nan", "nan") for name in ("--lr", "--clip", "--beta-max", "--feedback-init")),
    *((f"{name} inf", "inf") for name in ("--lr", "--weight-decay", "--rtol", "--atol")),
    *((f"{name} -1", "-1.0") for name in ("--weight-decay", "--feedback-init", "--rtol")),
    *(("--warmup-steps -5", "-5"), ("--seed 524288", "524288"), ("--betas 0.9 1.0", "1.0")),
    *(("--beta-max 2.1", "2.1"), ("--beta-max 0", "0.0"), ("--num-heads 0", "0")),
    *(("--num-heads 3", "3"), ("--group Q8", "'Q8'"), ("--group Z1", "1")),
]
"""Flags, and what was got of the first of them."""
BAD_FLAGS: list[tuple[Any, str, str]] = [
    (train_copy, "--min-length 9", "--min-length must be at most --max-length, got"),
    (train_copy, "--min-length 0", "--min-length must be at least 1, got 0"),
    (train_copy, "--context-len 18", "--context-len must hold a whole sample"),
    (train_copy, "--num-letters 27", "--num-letters must be in [2, 26], got 27"),
    (train_lm, "--mlp-expand 0", "--mlp-expand must be a number in (0, inf), got 0.0"),
    (train_lm, "--accumulate 3", "--accumulate must divide --batch-size = 16, got 3"),
    (train_lm, "--eval-tokens 0", "--eval-tokens must be an int in [1, inf), got 0"),
    *((train_a5, flags, f"got {got}") for flags, got in OF_A5),
]


@pytest.mark.parametrize(("script", "flags", "message"), BAD_FLAGS, ids=str)
def test_bad_flags_exit_with_a_message_that_names_them(
    script: Any, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = message_of(capsys, script, "--preset", "cpu", *flags.split())
    assert message in found and flags.split()[0] in found


def test_solver_flags_build_the_solver_the_gradient_and_the_cap() -> None:
    base = TrainConfig(rtol=1e-3, atol=1e-7)

    def built(**changes: Any) -> Any:
        return fixed_point_options(dataclasses.replace(base, **changes)).values()

    assert tuple(built()) == ("auto", ImplicitAdjoint(), FixedCap(100))
    for name in ("picard", "jacobi", "anderson", "broyden", "direct"):
        solver, *_ = built(solver=name)
        assert type(solver).__name__.lower() == name
        assert getattr(solver, "rtol", 1e-3) == 1e-3 and getattr(solver, "atol", 1e-7) == 1e-7
    for name, adjoint in ADJOINTS.items():
        assert [*built(adjoint=name)][1] == adjoint
    *_, cap = built(gamma_cap=(4.0, 1.0), solver_steps=50)
    assert isinstance(cap, GammaCap) and (cap.shape, cap.scale, cap.limit) == (4.0, 1.0, 50)


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_make_the_layer(script: Any) -> None:
    flags = ("--preset", "cpu", "--d-conv", "3", "--num-heads", "2", "--solver", "jacobi")
    (layer, *_) = script.make_model(parse_config(script.PRESETS, flags)).mixers
    assert isinstance(layer, Bedouin) and layer.num_heads == 2 and layer.conv is not None
    assert layer.conv.width == 3 and layer.solver == Jacobi(rtol=1e-4, atol=1e-30)
    (layer, *_) = script.make_model(parse_config(script.PRESETS, ("--layer", "tracking"))).mixers
    assert isinstance(layer, TrackingDeltaNet)
    own = {name: getattr(RunConfig, name) for name in OF_BEDOUIN} | {"gamma_cap": (4.0, 1.0)}
    (layer, *_) = script.make_model(dataclasses.replace(script.CPU, **own, layer="paper")).mixers
    assert isinstance(layer, Bedouin) and layer.decay == "griffin"
    assert layer.cap == GammaCap(4.0, 1.0, 100)
    model = script.make_model(dataclasses.replace(script.CPU, seed=3))
    again, other = (script.make_model(dataclasses.replace(script.CPU, seed=s)) for s in (3, 4))
    pairs = [*zip(*(m.state_dict().values() for m in (model, again, other)), strict=True)]
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    assert not all(torch.equal(one, three) for one, _, three in pairs)


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


@pytest.mark.parametrize("script", SCRIPTS)
def test_layers_of_the_presets_are_none_that_the_library_warns_of(script: Any) -> None:
    for config in script.PRESETS.values():
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("error")
            script.make_model(config)


def test_no_example_silences_the_library() -> None:
    with pytest.warns(UserWarning, match="input_scale='delta' with HouseholderProduct"):
        train_a5.make_model(parse_a5("--preset", "cpu", "--input-scale", "delta"))
    for path in Path(train_a5.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"filterwarnings|simplefilter|catch_warnings", text), path


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


# -- the scripts to copy


def test_a_copy_needs_the_files_alone_that_the_page_names(tmp_path: Path) -> None:
    for name in ("train_a5.py", "flags.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    shutil.copytree(EXAMPLES / "common", tmp_path / "common")
    flags = ["--preset=cpu", "--threads=1", "--d-model=16", "--batch-size=8", "--steps=4"]
    flags += ["--warmup-steps=2", "--eval-every=4", "--eval-rows=16", "--final-rows=32"]
    command = [sys.executable, "train_a5.py", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "results in runs/a5-seed0" in done.stdout
    files = {"metrics.json", "accuracy.png", "model.safetensors", "checkpoint-4"}
    assert {path.name for path in (tmp_path / "runs" / "a5-seed0").iterdir()} == files


SCRIPT = EXAMPLES / "train_your_own.py"
SHORT = ["--d-model", "16", "--length", "6", "--batch", "4", "--steps", "3"]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The script in `folder`, with counting modulo 3, which a third letter resets."""
    text, found = SCRIPT.read_text(), "[[1, 2, 3, 4, 0], [1, 0, 2, 3, 4]]"
    assert found in text
    (folder / "mine.py").write_text(text.replace(found, "[[1, 2, 0], [2, 0, 1], [0, 0, 0]]"))
    command = [sys.executable, "-P", "mine.py", *SHORT, *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_script_is_short_and_needs_three_packages() -> None:
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) <= 120
    imported = {
        line.split()[1].split(".")[0] for line in lines if line.startswith(("import", "from"))
    }
    assert imported == {"argparse", "time", "torch", "bedouin", "matplotlib"}


@pytest.mark.parametrize(
    "flags", [(), ("--layer", "tracking"), ("--layer", "rnn", "--solver", "jacobi")]
)
def test_another_automaton(flags: tuple[str, ...], tmp_path: Path) -> None:
    done = run(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    assert "6 letters:" in done.stdout and "96 letters:" in done.stdout
    assert imread(tmp_path / "automaton.png").std() > 0
    saved = torch.load(tmp_path / "automaton.pt")
    assert saved["model"]["head.weight"].shape == (3, 16)


def test_a_solver_for_a_layer_without_one(tmp_path: Path) -> None:
    done = run(tmp_path, "--layer", "tracking", "--solver", "jacobi")
    assert done.returncode != 0 and "--solver needs a fixed-point layer" in done.stderr
