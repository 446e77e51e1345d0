"""The experiments: every command is valid, those of earlier runs give their configurations; the
file of a set of runs keeps what is added, whoever writes at the same time."""

import errno
import json
import math
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import research.runs
from bedouin.baselines import Attention
from research import baselines, ensemble, experiment
from research.experiments.plan import Experiment, Run
from research.experiments.table import ALSO, RATES, TASKS, VARIANTS, chosen, settled, tables
from research.figures import figure_of_both, figure_of_lengths, write_figures
from research.models import MODELS
from research.runs import RUNS, add_runs, read_run, read_runs
from research.study import GRID, make_layers
from research.summary import CHESS, markdown, summarize

ALL = experiment.experiments()
SINCE = ("out", "overwrite", "device", "stacked", "eigenvalues", "atol")
"""Options whose default has changed since the earlier runs, without an effect on them."""
REPORTED = ("table", "table-languages")
TUNING = ("heads", "table-tuning")
NOT_PLANNED = {
    *("a5_cpu_seed1_again", "a5_cpu_buffers", "a5_cpu_joined", "a5_cpu_no_mixing_seed100"),
    *(f"copy_cpu_recall_seed{seed}" for seed in range(3)),
    *("bedouin-lr0.006-seed100", "bedouin-lr0.01-seed100"),
    *("lm_lstm-lr0.01-seed100", "lm_lstm-lr0.02-seed100", "make_lm-seed0"),
}
"""Runs that no experiment makes: of earlier versions, of tuning seeds, of `make lm`."""


@cache
def parsed(run: Run) -> Any:
    """The configuration of a run."""
    if run.script == "ensemble":
        return ensemble.parse(run.arguments)
    return baselines.parse(experiment.TRAINING[run.script], run.arguments)[0]


@pytest.mark.parametrize("found", ALL.values(), ids=lambda found: str(found.name))
def test_every_command_is_valid_and_has_the_seeds_of_its_purpose(found: Experiment) -> None:
    for run in found.runs:
        config = parsed(run)
        if run.script == "ensemble":
            with torch.device("meta"):
                make_layers(config, {name: getattr(config, name)[0] for name in GRID})
        if found.name in REPORTED:
            seeds = int(run.name[-1]) if "-seed" in run.name else 0, 1 if "-seed" in run.name else 3
            assert (config.first_seed, config.seeds) == seeds, run.name
        elif found.name == "table-seeds":
            assert (config.first_seed, config.seeds) == (5, 5), run.name
        elif found.name in TUNING or run.name.endswith("-tuning"):
            assert config.first_seed >= 100, run.name


@pytest.mark.parametrize("name", ["cpu", "heads"])
def test_commands_of_earlier_runs_give_their_configurations(name: str) -> None:
    found, names = ALL[name], set()
    contents = read_runs(experiment.RESULTS / name)
    for run in found.runs:
        if name == "heads" and run.name not in contents:
            continue  # not every run has been made
        names.add(run.name)
        if run.script == "train_lm":
            continue  # of version 0.2.0, whose layer had another size
        saved = contents[run.name]["config"]
        config = asdict(parsed(run))
        config["mixer_layer"] = config.get("layer", "bedouin")
        saved["d_model"] = contents[run.name].get("rows", [saved])[0]["d_model"]
        for option in saved.keys() & config.keys() - set(SINCE):
            assert _listed(config[option]) == _listed(saved[option]), (run.name, option)
    assert contents.keys() - names == (NOT_PLANNED if name == "cpu" else set())


def test_listed_commands_name_scripts_that_exist(tmp_path: Path) -> None:
    root = Path(experiment.__file__).parents[2]
    shown = experiment.listing(ALL, tmp_path)
    assert max(map(len, shown.splitlines())) <= experiment.WIDTH
    commands = re.sub(r" \\\n\s+", " ", shown)
    assert all(run.options in commands for part in ALL.values() for run in part.runs)
    scripts = set(re.findall(r" python (\S+\.py) ", shown))
    assert len(scripts) == len(experiment.SCRIPTS) + 1  # and that of the baselines
    assert all((root / script).is_file() for script in scripts)


def _listed(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, list | tuple) else value


def test_a_run_is_made_once_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = Experiment("tiny", "Does it run?", (Run("a", "--length 3 --eval-lengths 3"),))
    monkeypatch.setattr(experiment, "experiments", lambda: {"tiny": tiny})
    extra = "--steps 2 --log-every 1 --d-model 8 --seeds 1 --batch-size 4 --eval-rows 8"
    config = experiment.Config(("tiny",), extra=f"{extra} --device cpu", out=tmp_path / "results")
    assert "  a: not run" in experiment.listing({"tiny": tiny}, config.out)
    assert experiment.main(config) == 0
    assert "  a: cpu, " in experiment.listing({"tiny": tiny}, config.out)
    assert experiment.chosen({"tiny": tiny}, config) == []
    broken = Experiment("tiny", "Does it run?", (Run("b", "--group S3 --length 0"),))
    monkeypatch.setattr(experiment, "experiments", lambda: {"tiny": broken})
    assert experiment.main(config) == 1
    record = read_runs(config.out / "tiny")["b"]
    assert (
        "length must be at least 1" in record["error"]
        and record["options"] == "--group S3 --length 0"
    )
    assert "  b: failed" in experiment.listing({"tiny": broken}, config.out)
    assert len(experiment.chosen({"tiny": broken}, config)) == 1
    with pytest.raises(ValueError, match="an experiment must be among"):
        experiment.chosen({"tiny": tiny}, experiment.Config(("huge",)))
    with pytest.raises(ValueError, match="--only must be among .* or match one"):
        experiment.chosen({"tiny": tiny}, experiment.Config(("tiny",), only=("c",)))


def test_runs_side_by_side_have_processes_and_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tuple(Run(name, "--length 3") for name in ("a", "b", "c-0.002"))
    monkeypatch.setattr(experiment, "experiments", lambda: {"few": Experiment("few", "?", runs)})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    started: dict[str, tuple[list[str], str]] = {}
    both = threading.Barrier(2, timeout=60)

    def start(command: list[str], env: dict[str, str], **options: Any) -> Any:
        name = command[command.index("--only") + 1]
        if name != "c-0.002":
            both.wait()  # fails unless the first two run at the same time
        started[name] = command[2:], env["CUDA_VISIBLE_DEVICES"]
        return SimpleNamespace(returncode=int(name == "c-0.002"))

    monkeypatch.setattr("subprocess.run", start)
    config = experiment.Config(("few",), extra="--steps 2", devices=2, out=tmp_path)
    assert experiment.main(config) == 1
    assert {started["a"][1], started["b"][1]} == {"5", "7"}
    expected = experiment.Config(
        ("few",), only=("c-0.002",), again=True, extra="--steps 2", out=tmp_path
    )
    assert tyro.cli(experiment.Config, args=started["c-0.002"][0]) == expected
    log = Path("runs") / "experiments" / "few" / "c-0.002.log"
    assert (
        f"c-0.002 failed with exit status 1, see {log}" in capsys.readouterr().err and log.exists()
    )
    with pytest.raises(ValueError, match="--devices must be at most 2, the number of GPUs, got 3"):
        experiment.visible_devices(3)
    with pytest.raises(ValueError, match=r"--devices must be an int in \[1, inf\), got 0"):
        experiment.Config(devices=0)
    with pytest.raises(ValueError, match=r"--per-device must be an int in \[1, inf\), got 0"):
        experiment.Config(per_device=0)
    started.clear()
    two = experiment.Config(("few",), devices=1, per_device=2, only=("a", "b"), out=tmp_path)
    assert experiment.main(two) == 0 and {v[1] for v in started.values()} == {"5"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert experiment.visible_devices(2) == [None, None]


def test_the_summary_has_every_measure_of_all_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in experiment.RESULTS.glob(f"*/{RUNS}"):
        (tmp_path / file.parent.name).mkdir()
        (tmp_path / file.parent.name / RUNS).symlink_to(file)
    assert experiment.main(experiment.Config(summary=True, out=tmp_path)) == 0
    printed = capsys.readouterr().out
    assert all(markdown(experiment.RESULTS, tasks) in printed for tasks in (TASKS, CHESS))
    assert min((tmp_path / f"{name}.png").stat().st_size for name in ("both", "lengths")) > 5000
    report = json.loads((tmp_path / "summary.json").read_text())
    assert report.keys() - CHESS.keys() == TASKS.keys()
    kinds = {"characters": "token", "strings": "sequence", "accuracy": "token"}
    kinds |= {"squares": "token", "boards": "sequence"}
    folders = [read_runs(tmp_path / name) for name in ("table", "table-more", "chess")]
    for task, model in ((task, model) for task, models in report.items() for model in models):
        run = f"{CHESS.get(task, task)}-{model}"
        accuracies = [row["accuracy"] for of in folders if run in of for row in of[run]["rows"]]
        assert report[task][model].pop("tuning_runs") > 0
        for name, values in report[task][model].items():
            kind, _, length = name.replace("last_boards", "last").partition("_")
            assert values == [v for of in accuracies for v in of[length][kinds.get(kind, kind)]]
    with pytest.raises(ValueError, match="no model has runs of both"):
        figure_of_both({"a5": {}, "copy": {}}, tmp_path / "f.png")


def ydata(panel: Axes) -> list[list[float]]:
    return [torch.tensor(line.get_ydata()).tolist() for line in panel.get_lines()]


def test_the_figure_of_lengths_shows_the_seeds_of_each_model(
    tmp_path: Path, figures: list[Figure]
) -> None:
    summary: dict[str, Any] = {task: {} for task in TASKS}
    bound = {"token_16_32": [0.7], "token_16_128": [0.6], "token_24_128": [0.1]}
    summary["bound_s3"]["bedouin"] = bound | {"sequence_16_32": [0.0], "tuning_runs": 1}
    summary["a5"]["tracking"] = {"token_16": [1.0] * 3, "token_512": [0.2, 0.9, 0.3]}
    figure_of_lengths(summary, tmp_path / "f.png")
    shown = {panel.get_title(): panel for panel in figures[0].axes}
    medians, bands = ydata(shown["A5"]), shown["A5"].collections
    assert medians[0] == [1.0, 0.3]
    limits = bands[0].get_datalim(shown["A5"].transData)
    assert (limits.y0, limits.y1) == (0.2, 1.0)
    assert [0.7, 0.6] in ydata(shown["bound S3, 16 names"])


def test_further_figures_show_their_runs(tmp_path: Path, figures: list[Figure]) -> None:
    summary = summarize(experiment.RESULTS)
    write_figures(summary, tmp_path)
    assert len(figures) == 2  # the others have no runs
    rows = [
        {"point": {"states": kind}, "accuracy": {"512": {"token": seeds}}}
        for kind, seeds in ((None, [0.1, 0.3, 0.2]), ("noise", [0.9]))
    ]
    add_runs(tmp_path / "length", {"s5-lstm_l1": {"rows": rows}})
    for name, value in {"k0": 0.5, "k1": 0.6, "k2-beta2": 0.9, "k4-unfed": 0.7}.items():
        row = {"accuracy": dict.fromkeys(("16", "128", "512"), {"token": [value]})}
        add_runs(tmp_path / "bedouin", {f"a5-{name}": {"rows": [row]}})
    add_runs(tmp_path / "bedouin", {"training-paper": {"rows": [row]}})
    board = {"labels": [0] * 64, "found": [[0] * 62 + [1, 2]]}
    add_runs(tmp_path / "chess", {"chess-1m-bedouin": {"rows": [{"boards": {"200": board}}]}})
    write_figures(summary, tmp_path)
    starts, reflections, boards = (figure.axes for figure in figures[4:])
    assert ydata(starts[6]) == [[0.2], [0.9]] and ydata(starts[0]) == []
    assert ydata(reflections[1]) == [[0.5, 0.9], [0.5, 0.6], [], [0.7]]
    assert ydata(reflections[2]) == [[0.7]]
    assert boards[1].get_title() == "Bedouin: 2 squares wrong"
    assert [len(panel.patches) for panel in boards] == [0, 2, 0]
    add_runs(tmp_path / "chess", {"chess-1m-lstm_l1": {"rows": [{"boards": {"60": board}}]}})
    with pytest.raises(ValueError, match="runs of chess must show one game"):
        write_figures(summary, tmp_path)


def of_rates(found: dict[float, list[float]]) -> dict[str, Any]:
    """A run with the labels of the seeds at each rate."""
    rows = [
        {"accuracy": {"16": {"token": seeds}}, "point": {"lr": rate}}
        for rate, seeds in found.items()
    ]
    return {"rows": rows}


def test_tuning_chooses_form_and_rate(tmp_path: Path) -> None:
    runs = {
        "a5-rdn_l1": of_rates({1e-3: [0.5], 2e-3: [0.6], 4e-3: [math.nan]}),
        "a5-rdn_l1_slow": of_rates({1e-3: [0.5], 2e-3: [0.6], 4e-3: [0.7]}),
        "copy-tracking_no_read": of_rates({1e-3: [0.5], 2e-3: [0.4], 4e-3: [0.3]}),
    }
    add_runs(tmp_path / "table-tuning", runs)
    assert chosen(runs, "s5", "rdn_l1") == ("rdn_l1_slow", 4e-3)
    assert chosen(runs, "mqar", "tracking_no_read") is None  # it has tuning runs of its own
    assert chosen(runs, "a5", "tracking_no_read") is None
    assert chosen(runs, "copy", "rdn_l1") is None
    found = {e.name: {run.name: run.options for run in e.runs} for e in tables(tmp_path)}
    beyond = {n: options for n, options in found["table-tuning"].items() if "-0." in n}
    always = {f"{run}-{rate:g}" for run, rates in ALSO.items() for rate in rates}
    assert beyond.keys() == {"a5-rdn_l1_slow-0.008", "copy-tracking_no_read-0.0005", *always}
    assert beyond["a5-rdn_l1_slow-0.008"].endswith("--lr 0.008")
    # reported when the further rate has been tried, too
    assert found["table"] == {}
    add_runs(tmp_path / "table-tuning", {"a5-rdn_l1_slow-0.008": of_rates({8e-3: [0.8]})})
    again = {run.name: run.options for e in tables(tmp_path)[:2] for run in e.runs}
    assert again["a5-rdn_l1_slow-0.008"] == beyond["a5-rdn_l1_slow-0.008"]
    assert "--model rdn_l1_slow --compile --lr 0.008" in again["a5-rdn_l1"]


def test_the_gate_chooses_the_rate_whose_worst_seed_is_the_best() -> None:
    tuning = {
        "a5-tracking": of_rates({1e-3: [0.5], 2e-3: [0.8], 4e-3: [0.9]}),
        "a5-tracking-0.008": of_rates({8e-3: [0.4]}),
    }
    gate = {"a5-tracking": of_rates({4e-3: [0.99, 0.7]})}
    assert settled(tuning, gate, "a5", "tracking") == ("tracking", 4e-3)  # a single rate
    gate["a5-tracking-0.002"] = of_rates({2e-3: [0.9, 0.75]})
    assert settled(tuning, gate, "a5", "tracking") == ("tracking", 2e-3)
    # the seed of tuning is the worst
    tuning["a5-tracking"] = of_rates({1e-3: [0.5], 2e-3: [0.6], 4e-3: [0.9]})
    assert settled(tuning, gate, "a5", "tracking") == ("tracking", 4e-3)
    assert settled({}, gate, "a5", "tracking") is None


def test_runs_that_others_bring_about_are_made_in_the_order_of_their_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [Run("a-x", "")]
    monkeypatch.setattr(experiment, "experiments", lambda: {"e": Experiment("e", "?", (*known,))})
    queue = experiment.Queue(experiment.Config(("e",), only=("a-*", "*"), out=tmp_path))
    names: list[str] = []

    def take_all() -> None:
        while (pair := queue.take()) is not None:
            names.append(pair[1].name)
            queue.done()

    assert queue.take() is not None  # it runs until `done`
    other = threading.Thread(target=take_all)
    other.start()
    known.extend((Run("b", ""), Run("a-y", "")))
    queue.done()
    other.join(10)
    assert names == ["a-y", "b"]


def test_models_of_the_table_have_equal_parameters() -> None:
    in_table = {form for forms in VARIANTS.values() for form in forms}
    assert in_table == MODELS.keys()
    for d_model in (256, 512):
        with torch.device("meta"):
            sizes = {
                name: sum(p.numel() for layer in layers for p in layer(d_model).parameters())
                for name, layers in MODELS.items()
            }
        for name, size in sizes.items():
            # a head is 3 to 8 % of the layer; a wide model has one tracker of 64 channels, too
            few = 0.21 if name.startswith("tracking") else 0.11
            if d_model == 512 and name.startswith("bedouin"):
                few = 0.41  # its projections are within heads, of which there are twice as many
            assert -few < size / sizes["gated_deltanet_l1"] - 1 < 0.11, (d_model, name, size)


def test_forms_of_rivals_begin_as_their_names_say() -> None:
    (make,) = MODELS["lstm_l1_forget"]
    biases = [make(256).get_parameter(f"lstm.bias_{name}_l0").chunk(4) for name in ("ih", "hh")]
    (i, f, *others), (_, recurrent, *_) = biases
    assert torch.equal(f + recurrent, torch.ones_like(f))
    assert max(bias.abs().max() for bias in (i, *others)) <= len(f) ** -0.5
    pairs = {"gated_deltanet_l1_large": "gated_deltanet_l1_slow", "gdn2_l1": "gdn2_l1_slow"}
    for names in pairs.items():
        rates = []
        for (make,) in map(MODELS.__getitem__, names):
            torch.manual_seed(0)
            rates.append(make(256).get_parameter("A_log").exp())
        torch.testing.assert_close(rates[1], rates[0] / 100)
    for make in MODELS["attention_l2_nope"]:
        layer = make(256)
        assert isinstance(layer, Attention) and layer.rope_base is None


SHORT = (
    "--device cpu --steps 2 --log-every 1 --seeds 2 --batch-size 2 --eval-rows 2 --autocast no "
    "--eval-lengths"
)
SHORT_TASKS = {
    "a5": f"--length 3 {SHORT} 3 4",
    "copy": f"--min-string 2 --max-string 3 --context 12 {SHORT} 3 4",
    "mqar": f"--vocabulary 16 --length 8 --pairs 2 {SHORT} 8 16",
    "bound_s3": (
        f"--min-definitions 1 --max-definitions 2 --max-operations 5 {SHORT} 2 20 20 "
        "--eval-definitions 1 2 2"
    ),
}


@pytest.mark.parametrize(
    ("task", "model"),
    [("bound_s3", model) for model in VARIANTS]
    + [(task, "tracking") for task in SHORT_TASKS if task != "bound_s3"],
)
def test_a_short_run_of_the_table(
    task: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, rates = f"{task}-{model}", " ".join(map(str, RATES[:2]))
    extra = f"{SHORT_TASKS[task]} --curriculum-from 2 --no-compile --lr {rates}"
    config = experiment.Config(("table-tuning",), (name,), extra=extra, out=tmp_path)
    assert experiment.main(config) == 0
    rows = read_runs(tmp_path / "table-tuning")[name]["rows"]
    assert [row["point"]["lr"] for row in rows] == list(RATES[:2])
    for row in rows:
        assert list(row["failed"]) == [False, False] and row["state_size"] >= 0
        assert all(h["loss"][0] > 0 for h in row["history"])
        names = {"bound_s3": ["1_2", "2_20"]}.get(task, list(row["accuracy"]))
        assert list(row["accuracy"]) == names
        assert all(len(v) == 2 for found in row["accuracy"].values() for v in found.values())


def test_a_run_replaces_the_one_of_its_name_alone(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    assert read_runs(folder) == {}
    add_runs(folder, {"b": {"loss": 0.1}, "a": [1, "Δ"]})
    add_runs(folder, {"b": {"loss": math.inf}, "c": None})
    assert read_runs(folder) == {"a": [1, "Δ"], "b": {"loss": math.inf}, "c": None}
    text = (folder / RUNS).read_text(encoding="utf-8")
    assert text == '{\n"a":[1,"Δ"],\n"b":{"loss":Infinity},\n"c":null\n}\n'
    assert [path.name for path in folder.iterdir()] == [RUNS]
    (tmp_path / "new").touch()
    assert (folder / RUNS).stat().st_mode == (tmp_path / "new").stat().st_mode


ADDING = """
import sys
from pathlib import Path
from research.runs import add_runs
for i in range(10):
    add_runs(Path(sys.argv[1]), {f"{sys.argv[2]}-{i}": int(sys.argv[2])})
"""


def test_processes_side_by_side_lose_no_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ADDING, str(tmp_path)]
    examples = Path(research.runs.__file__).parents[1]
    started = [subprocess.Popen([*command, str(n)], cwd=examples) for n in range(4)]
    assert [process.wait(timeout=60) for process in started] == [0] * 4
    assert read_runs(tmp_path) == {f"{n}-{i}": n for n in range(4) for i in range(10)}


def test_the_file_that_the_next_process_writes_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def replace_before_the_next_process(unfinished: Path, path: Path) -> None:
        replace(unfinished, path)
        unfinished.touch()  # by the process that waited for the lock of the replaced file

    monkeypatch.setattr(os, "replace", replace_before_the_next_process)
    add_runs(tmp_path, {"a": 1})
    assert {path.name for path in tmp_path.iterdir()} == {RUNS, "runs.tmp"}


def test_an_error_of_the_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_a_part(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    add_runs(tmp_path, {"a": 1})
    monkeypatch.setattr(Path, "write_text", write_a_part)
    with pytest.raises(OSError, match="No space left"):
        add_runs(tmp_path, {"b": 2})
    assert read_runs(tmp_path) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == [RUNS]


def test_a_run_is_named_by_its_file_or_its_folder(tmp_path: Path) -> None:
    add_runs(tmp_path / "set", {"a": {"seed": 1}})
    (tmp_path / "one.json").write_text(json.dumps({"seed": 2}))
    assert read_run(tmp_path / "set" / "a") == {"seed": 1}
    assert read_run(tmp_path / "one.json") == {"seed": 2}
    with pytest.raises(ValueError, match=r"FOLDER/NAME with a name in FOLDER/runs.json, got .*/b"):
        read_run(tmp_path / "set" / "b")
