"""The pages of examples/results are short, and their numbers are those of the raw runs."""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks import table
from common.runs import RUNS, read_runs
from research import experiment
from research.experiments.language_model import SCORE, TUNING_SEED
from research.experiments.table import BEYOND, LANGUAGES, RATES
from research.summary import markdown, summarize, tuning_markdown

RESULTS = experiment.RESULTS
PAGES = {path.parent.name: path for path in sorted(RESULTS.glob("*/README.md"))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
INDEX = (RESULTS / "README.md").read_text(encoding="utf-8")
ROOT = RESULTS.parents[1]


@cache
def runs_of(folder: str) -> dict[str, Any]:
    """All runs of an experiment by name."""
    return read_runs(RESULTS / folder)


def raw(name: str) -> Any:
    """The content of the run EXPERIMENT/NAME."""
    folder, run = name.split("/")
    return runs_of(folder)[run]


def names_of(*folders: str) -> list[str]:
    """The runs of experiments as EXPERIMENT/NAME."""
    return [f"{folder}/{run}" for folder in folders for run in runs_of(folder)]


def line(page: str, start: str) -> list[str]:
    """The cells of the one table line that begins with `start`."""
    (found,) = [row for row in page.splitlines() if row.startswith(f"| {start}")]
    return [cell.strip() for cell in found.strip("|").split(" | ")]


def joined(values: Iterable[float], digits: int = 2) -> str:
    """The values of seeds, as pages show them."""
    return " ".join(f"{value:.{digits}f}" for value in values)


def of_run(name: str, length: str, metric: str = "token", digits: int = 2) -> str:
    """The values of every seed of a run with one row."""
    (row,) = raw(name)["rows"]
    return joined(row["accuracy"][length][metric], digits)


def of_seeds(name: str, measure: str, length: str, seeds: Iterable[int], digits: int = 2) -> str:
    """The values of runs of one seed each, whose name has {} in its place."""
    return joined((raw(name.format(seed))[measure][length] for seed in seeds), digits)


def seconds(name: str, seeds: Iterable[int]) -> str:
    return joined((raw(name.format(seed))["seconds"] for seed in seeds), 0)


@cache
def summary() -> dict[str, Any]:
    return summarize(RESULTS)


def summed(task: str, model: str, measure: str) -> str:
    """The values of every seed of the table."""
    return joined(summary()[task][model][measure])


def device(content: Any) -> str:
    """CPU, H100 or H200, as a raw file names it."""
    name = content["device"] if "device" in content else content["machine"]["device"]
    return "CPU" if name.startswith("cpu") else re.findall(r"H\d00", name)[0]


def test_the_pages_are_short_and_the_files_few() -> None:
    pages = [path.read_text(encoding="utf-8") for path in RESULTS.rglob("*.md")]
    for text in ("\n".join(pages), "\n".join(pages).replace("|", " ")):
        assert len(text.split()) <= 9000
    assert len(list(RESULTS.rglob("*.json"))) <= 25


def test_every_figure_is_shown() -> None:
    pages = [*RESULTS.rglob("*.md"), ROOT / "README.md"]
    shown = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert {path.resolve() for path in RESULTS.rglob("*.png")} <= shown


def test_runs_with_too_many_skipped_steps_are_marked_as_failed() -> None:
    """In their files, also in those that were written before `ensemble.py` did so."""
    folders = [path.parent.name for path in RESULTS.glob(f"*/{RUNS}")]
    for name in names_of(*(folder for folder in folders if folder != "history")):
        content = raw(name)
        for row in content.get("rows", ()) if isinstance(content, dict) else ():
            skipped = [entry["skipped"] for entry in row.get("history", ()) if "skipped" in entry]
            share = [sum(of) / row["point"]["steps"] for of in zip(*skipped, strict=True)]
            if share:
                marked = row.get("failed", [False] * len(share))
                assert marked == [value > 0.01 for value in share], name


def test_the_index_has_the_numbers_of_the_runs() -> None:
    def check(start: str, form: str, *values: str) -> None:
        assert line(INDEX, start)[1] == form.format(*values)

    def of_make(length: str) -> str:
        return of_seeds("a5-cpu/a5_cpu_bounded_delta_seed{}", "sequence_accuracy", length, range(3))

    check(
        "`TrackingDeltaNet` recalls",
        "64 pairs: {}; S3, sequences at 128 operations: {}; characters at 200: {}",
        summed("mqar", "tracking", "accuracy_512"),
        summed("bound_s3", "tracking", "sequence_16_128"),
        summed("copy", "tracking", "characters_200"),
    )
    held = [summed("a5", model, "token_512") for model in ("recall", "lstm_l1")]
    check("`recall` and the LSTM hold", "{}; {}", *held)
    further = [of_run(f"table-seeds/a5-{model}", "512") for model in ("recall", "lstm_l1")]
    check("With five more seeds", "{}; {}", *further)
    copied = [summed("copy", m, "characters_200") for m in ("gated_deltanet_l1", "recall")]
    check("Gated DeltaNet, attention", "characters at 200: {}; 1.00; `recall` {}", *copied)
    assert min(summary()["copy"]["attention_l2"]["characters_200"]) > 0.995
    assert max(summary()["a5"]["attention_l2"]["token_512"]) < 0.03
    assert max(summary()["a5"]["gated_deltanet_l1"]["token_512"]) < 0.03
    assert max(summary()["a5"]["recall_no_feedback"]["token_512"]) < 0.025
    assert min(summary()["mqar"]["recall_no_feedback"]["accuracy_512"]) > 0.995
    for group in ("bound_s3", "bound_a5"):
        assert min(summary()[group]["hybrid_l2"]["token_16_32"]) > 0.995
    assert max(summary()["mqar"]["hybrid_l2"]["accuracy_512"]) < 0.005
    wide = [of_run("table-wide/a5-recall", "512"), of_run("table-wide/copy-recall", "200")]
    check("At d_model 512", "A5 at 512: {}; characters at 200: {}", *wide)
    most = max(
        max(raw(name)["rows"][0]["accuracy"]["256"]["token"])
        for name in names_of("table-languages")
        if "/brackets" in name
    )
    check("Parity and arithmetic", "`recall`: 1.00; 1.00; at most {}", f"{most:.2f}")
    for task in ("parity", "arithmetic"):
        assert set(of_run(f"table-languages/{task}-recall", "256").split()) == {"1.00"}
    check("`make a5`", "sequences at 12: {}; at 24: {}", of_make("12"), of_make("24"))
    fed = of_seeds("controls-cpu/no_feedback-seed{}", "accuracy", "6", range(3))
    check("Feedback of one part", "labels at 6 without: {}", fed)
    letters = of_seeds("copying-cpu/copy_cpu_recall_seed{}", "character_accuracy", "16", range(3))
    check("`make copy`", "characters: {}", letters)
    heads = [of_run(f"heads/a5-heads{n}", "128", "sequence") for n in (1, 8)]
    check("Heads cost", "A5, sequences at 128: one {}, eight {}", *heads)
    models = ("recall", "gated_deltanet")
    named = [f"language/{model}-seed{{}}" for model in models]
    bits = [of_seeds(name, "bits_per_byte", SCORE, range(3), 3) for name in named]
    check("`recall` needs the fewest bits", "{}; Gated DeltaNet {}", *bits)
    named = [f"language-model-cpu/{model}-seed{{}}" for model in ("bedouin", "lstm")]
    bits = [of_seeds(name, "bits_per_byte", "128", range(3)) for name in named]
    check("`make lm`", "{}; {}", *bits)


def test_the_page_of_the_examples_has_the_numbers_of_the_runs() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    found = [raw(f"a5-cpu/a5_cpu_bounded_delta_seed{seed}") for seed in range(3)]
    worst = min(run["sequence_accuracy"]["12"] for run in found)
    assert f"trained at length 6; {worst:.2f} of the sequences right at 12" in page
    copies = [raw(f"copying-cpu/copy_cpu_recall_seed{seed}") for seed in range(3)]
    mean = fmean(run["character_accuracy"]["16"] for run in copies)
    assert f"{mean:.2f} of the characters right at 16" in page


def test_the_table_is_that_of_the_summary() -> None:
    shown = TEXTS["table"].split("<!-- summary -->")[1].split("<!-- /summary -->")[0]
    assert shown.strip() == markdown(RESULTS).strip()
    recorded = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))
    assert recorded == summary()


def test_claims_of_the_table_hold() -> None:
    def worst(task: str, measure: str, *models: str) -> float:
        return min(min(summary()[task][model][measure]) for model in models)

    def best(task: str, measure: str, *models: str) -> float:
        return max(max(summary()[task][model][measure]) for model in models)

    def span(task: str, measure: str, model: str) -> str:
        values = summary()[task][model][measure]
        return f"{min(values):.2f} to {max(values):.2f}"

    page = TEXTS["table"]
    assert worst("a5", "token_512", "recall", "lstm_l1") > 0.99
    of_2048 = [span("a5", "token_2048", model) for model in ("lstm_l1", "recall")]
    assert "At 2,048 the LSTM has {}, `recall` {}.".format(*of_2048) in page
    copies = [span("copy", "characters_200", m) for m in ("gated_deltanet_l1", "tracking")]
    assert "Gated DeltaNet {} of the characters, `tracking` {}".format(*copies) in page
    assert f"`recall` {span('copy', 'characters_200', 'recall')}." in page
    four = ("attention_l2", "gated_deltanet_l1", "tracking", "recall")
    assert worst("mqar", "accuracy_512", *four) > 0.99
    learned = {
        model for model, of in summary()["bound_s3"].items() if min(of["token_16_32"]) > 0.99
    }
    of_recall = ("recall", "recall_no_x", "recall_k2", "recall_layer", "recall_by_head")
    assert learned == {"tracking", "hybrid_l2", *of_recall}
    far = ("tracking", "recall_no_x", "recall_layer", "hybrid_l2")
    assert worst("bound_s3", "sequence_16_128", *far) > 0.98
    of_a5 = {model for model, of in summary()["bound_a5"].items() if min(of["token_16_32"]) > 0.99}
    assert of_a5 >= {"hybrid_l2", "deltaproduct_l2", "recall_layer"}
    for task, measure in (("bound_s3", "recall_16_32"), ("bound_a5", "recall_16_32")):
        others = [model for model in summary()[task] if model != "lstm_l1"]
        assert worst(task, measure, *others) > 0.91 > worst(task, measure, "lstm_l1")
    assert best("a5", "token_512", "recall_no_feedback") < 0.025
    assert "(A5 0.02 at 512, S3 0.25 to 0.28)" in page
    assert span("bound_s3", "token_16_32", "recall_no_feedback") == "0.25 to 0.28"
    assert f"({span('a5', 'token_512', 'recall_no_x')} at 512)" in page
    assert f"({span('copy', 'characters_200', 'recall_no_erase')})" in page
    assert 0.98 < worst("copy", "characters_100", "recall")
    assert 0.0005 < 0.99 - worst("s5", "token_128", "recall") < 0.0015
    assert sum(v < 0.95 for v in summary()["bound_s3"]["recall"]["sequence_16_128"]) == 2
    assert f"({span('bound_a5', 'token_16_32', 'recall')})" in page


def test_seeds_of_the_gate_are_those_of_the_page() -> None:
    rows = {
        "MQAR, 64 pairs": ("mqar", "512", "token", "accuracy_512"),
        "copying, characters at 100": ("copy", "100", "token", "characters_100"),
        "copying, characters at 200": ("copy", "200", "token", "characters_200"),
        "bound S3, products": ("bound_s3", "16_32", "token", "token_16_32"),
        "bound S3, sequences": ("bound_s3", "16_128", "sequence", "sequence_16_128"),
    }
    for start, (task, length, metric, measure) in rows.items():
        found = of_run(f"table-gate/{task}-tracking", length, metric, 3)
        worst = min(summary()[task]["recall"][measure])
        assert line(TEXTS["table-gate"], start)[1:] == [found, f"{worst:.3f}"]


COLUMNS = {
    "a5": (("512", "token"), ("2048", "token")),
    "copy": (("100", "token"), ("200", "token")),
    "bound_a5": (("16_32", "token"), ("16_128", "token")),
}


@pytest.mark.parametrize("name", names_of("table-wide"))
def test_runs_at_d_model_512_are_those_of_the_page(name: str) -> None:
    run, config = name.split("/")[1], raw(name)["config"]
    assert (config["first_seed"], config["seeds"], config["d_model"]) == (0, 3, 512)
    shown = [of_run(name, *column) for column in COLUMNS[run.split("-")[0]]]
    assert line(TEXTS["table-wide"], f"{run} |")[1:] == shown


def test_parity_and_arithmetic_are_those_of_the_page() -> None:
    page, models = TEXTS["table-languages"], set()
    for name in runs_of("table-languages"):
        task, model = name.split("-")
        models.add(model)
        shown = of_run(f"table-languages/{name}", "256")
        assert line(page, f"{model} |")[1 + list(LANGUAGES).index(task)] == shown
    assert len(models) == len(re.findall(r"^\| \w+ \| \d", page, re.MULTILINE))
    assert sorted(of_run("table-languages/brackets-lstm_l1", "40").split())[::2] == ["0.91", "0.94"]


def test_more_seeds_are_those_of_the_page() -> None:
    page, names = TEXTS["table-seeds"], {"lstm_l1": "LSTM"}
    for name, run in runs_of("table-seeds").items():
        assert (run["config"]["first_seed"], run["config"]["seeds"]) == (5, 5)
        task, model = name.split("-")
        columns = ("128", "sequence"), ("512", "token"), ("2048", "token")
        shown = [of_run(f"table-seeds/{name}", *column) for column in columns]
        assert line(page, f"{task.upper()} | {names.get(model, f'`{model}`')} |")[2:] == shown

    def mean(task: str, model: str) -> str:
        more = raw(f"table-seeds/{task}-{model}")["rows"][0]["accuracy"]["512"]["token"]
        return f"{fmean([*summary()[task][model]['token_512'], *more]):.2f}"

    means = [mean(task, model) for task in ("a5", "s5") for model in ("recall", "lstm_l1")]
    form = "`recall` has {} of the labels of A5 at 512 in the mean, the LSTM {}; of S5 {} and {}."
    assert form.format(*means) in page


def test_every_tuning_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(experiment.Config(tuning=True)) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == tuning_markdown(RESULTS).strip()
    rows = [row for run in runs_of("table-tuning").values() for row in run.get("rows", ())]
    assert shown.count("\n|") - 2 * shown.count("|form|") == len(rows)
    page = TEXTS["table-tuning"]
    counts = {
        model: {of[model]["tuning_runs"] for of in summary().values() if model in of}
        for model in {model for of in summary().values() for model in of}
    }
    rivals = [n for m, of in counts.items() if not m.startswith(("recall", "tracking")) for n in of]
    assert f"Rivals have {min(rivals)} to {max(rivals)} runs a task" in page
    assert counts["tracking"] == {3, 4} and "`tracking` 3 or 4" in page


BITS = {
    **{"gated_deltanet": "Gated DeltaNet", "attention": "attention", "mamba": "Mamba"},
    **{"bedouin": "the default layer", "lstm": "LSTM"},
}
"""Names of the page of language."""


@pytest.mark.parametrize("name", [*BITS, "recall", "recall_n64"])
def test_tuned_language_models_are_those_of_the_pages(name: str) -> None:
    found = runs_of("language-tuning")
    rates = (*RATES, BEYOND[RATES[-1]])
    tried = {rate: found[f"{name}-{rate:g}"] for rate in rates if f"{name}-{rate:g}" in found}
    assert {run["seed"] for run in tried.values()} == {TUNING_SEED}
    further = "H200" if name.startswith("recall") else "H100"
    assert all(device(run) == ("H200" if rate in RATES else further) for rate, run in tried.items())
    bits = {rate: float(run["bits_per_byte"][SCORE]) for rate, run in tried.items()}
    best = min(bits, key=bits.__getitem__)
    cells = [f"{bits[rate]:.3f}" if rate in tried else "–" for rate in rates]
    cells[rates.index(best)] = f"**{cells[rates.index(best)]}**"
    assert line(TEXTS["language-tuning"], f"{name} |")[1:] == cells
    runs = [runs_of("language")[f"{name}-seed{seed}"] for seed in range(3)]
    assert {(device(run), run["config"]["lr"]) for run in runs} == {(further, best)}
    start = f"`{name}`" if name == "recall_n64" else f"{name},"
    page = TEXTS["language"].replace("| mamba |", "| mamba, |").replace("| lstm |", "| lstm, |")
    assert line(page, start)[1:] == [
        f"{runs[0]['parameters'] / 1e6:.2f} M",
        f"{best:g}",
        joined((run["bits_per_byte"][SCORE] for run in runs), 3),
        f"{fmean(run['bits_per_byte'][SCORE] for run in runs):.3f}",
        joined((run["bits_per_byte"]["8192"] for run in runs), 3),
        f"{max(run['peak_memory'] for run in runs) / 2**30:.1f}",
    ]


def test_differences_of_language_models_are_those_of_the_page() -> None:
    found = runs_of("language")

    def mean(name: str) -> float:
        return fmean(found[f"{name}-seed{n}"]["bits_per_byte"][SCORE] for n in range(3))

    behind = [mean(name) - mean("recall") for name in BITS]
    form = "needs {:.3f} less than Gated DeltaNet, {:.3f} less than attention, {:.3f} less than "
    form += "Mamba and {:.3f} less than the default layer."
    assert form.format(*behind) in TEXTS["language"] and min(behind) > 0
    one, two = (found[f"scaling-{name}"]["tokens_per_second"] for name in ("one", "two"))
    shown = f"{two / one:.2f} times as fast as one: {two:,.0f} and {one:,.0f} tokens"
    assert shown in TEXTS["language"]


def test_the_model_of_make_lm_needs_fewer_bits_than_an_lstm_of_its_size() -> None:
    found, page, means = runs_of("language-model-cpu"), TEXTS["language-model-cpu"], []
    for name in ("bedouin", "lstm"):
        runs = [found[f"{name}-seed{seed}"] for seed in range(3)]
        assert {device(run) for run in runs} == {"CPU"}
        assert all(run["seconds"] < 600 and run["steps"] == 1200 for run in runs)
        bits = [run["bits_per_byte"]["128"] for run in runs]
        took = seconds(f"language-model-cpu/{name}-seed{{}}", range(3))
        shown = [f"{runs[0]['parameters']:,}", joined(bits, 3), took]
        assert line(page, f"{name}, ")[1:] == shown
        means.append(fmean(bits))
    assert means[0] < means[1]
    assert " of the layer is {:.3f}, that of the LSTM {:.3f};".format(*means) in page


def test_a5_on_a_cpu_is_that_of_the_pages() -> None:
    def cells(name: str, *columns: tuple[str, str]) -> list[str]:
        shown = [of_seeds(name, measure, length, range(3)) for measure, length in columns]
        return [*shown, seconds(name, range(3))]

    of_rows = ("sequence_accuracy", "12"), ("sequence_accuracy", "24")
    rows = {
        "`make a5`: feedback": "a5_cpu_bounded_delta_seed{}",
        "the same with input": "a5_cpu_delta_seed{}",
        "feedback of Δ, B, C": "a5_cpu_seed{}",
    }
    for start, name in rows.items():
        assert line(TEXTS["a5-cpu"], start)[1:] == cells(f"a5-cpu/{name}", *of_rows)
    again = raw("a5-cpu/a5_cpu_seed1_again")
    shown = [joined(run["sequence_accuracy"][n] for run in again) for n in ("12", "24")]
    shown += [joined((run["seconds"] for run in again), 0)]
    assert line(TEXTS["a5-cpu"], "the same at length 6")[1:] == shown
    assert f"({joined(run['accuracy']['12'] for run in again)})" in TEXTS["a5-cpu"]
    parts = {part: f"controls-cpu/{part}-seed{{}}" for part in ("no_mixing", "no_feedback")}
    parts |= {part: f"controls-cpu/{part}-seed{{}}" for part in ("mixer_feedback", "lstm")}
    parts["`make a5`, `delta`"] = "a5-cpu/a5_cpu_delta_seed{}"
    for start, name in parts.items():
        shown = cells(name, ("accuracy", "6"), *of_rows)
        assert line(TEXTS["controls-cpu"], f"{start} |")[1:] == shown


def test_copying_on_a_cpu_and_the_presets_are_those_of_the_pages() -> None:
    for seed in range(3):
        content = raw(f"copying-cpu/copy_cpu_recall_seed{seed}")
        shown = [f"{content['character_accuracy'][n]:.3f}" for n in ("8", "12", "16")]
        shown += [f"{content['string_accuracy']['16']:.3f}", f"{content['seconds']:.0f}"]
        assert line(TEXTS["copying-cpu"], f"{seed} |")[1:] == shown
    of_a5 = ("accuracy", "128"), ("accuracy", "512"), ("sequence_accuracy", "512")
    of_copying = ("character_accuracy", "100"), ("character_accuracy", "200")
    for start, name, seeds, columns in (
        ("A5, 4e-3", "a5_gpu_seed{}", range(3, 6), of_a5),
        ("A5, 8e-3", "a5_gpu_0.008_seed{}", range(3), of_a5),
        ("copying", "copy_gpu_seed{}", range(3), (*of_copying, ("sequence_accuracy", "100"))),
    ):
        run = f"gpu-presets/{name}"
        shown = [of_seeds(run, measure, length, seeds, 3) for measure, length in columns]
        assert line(TEXTS["gpu-presets"], start)[1:] == [*shown, seconds(run, seeds)]


def test_heads_are_those_of_the_page() -> None:
    page = TEXTS["heads"]
    of_a5, of_copying = (part for part in page.split("| copying: heads"))
    for name, run in runs_of("heads").items():
        task, heads, *equal = name.split("-")
        part, columns = of_a5, (("128", "sequence"), ("512", "token"))
        if task == "copy":
            part, columns = of_copying, (("100", "token"), ("200", "token"))
        start = f"{'= ' if equal else ''}{heads.removeprefix('heads')} of "
        best = max(run["rows"], key=lambda row: fmean(row["accuracy"][columns[1][0]]["token"]))
        shown = [joined(best["accuracy"][length][metric]) for length, metric in columns]
        assert line(part, start)[1:] == [f"{best['parameters'] / 1e6:.2f} M", *shown], name


@pytest.mark.parametrize("name", names_of("benchmark"))
def test_the_page_lists_every_run_of_the_benchmark_with_its_device(name: str) -> None:
    cells = line(TEXTS["benchmark"], f"{name.split('/')[1]} |")
    assert cells[2] == device(raw(name))


def test_whole_models_are_those_of_the_page() -> None:
    report = json.loads((RESULTS / "models.json").read_text(encoding="utf-8"))
    rows = {(row["model"], row["task"]): row for row in report["rows"]}
    names = {
        "bedouin": "`recall_by_head`, 15",
        "mamba": "Mamba of this library, 24",
        "lstm": "LSTM (cuDNN)",
        "attention": "attention, 13",
    }
    for model, start in names.items():
        speeds = [
            f"{rows[model, task]['tokens_per_second']:,.0f}"
            for task in ("train", "captured", "compiled", "decode-1", "decode-64")
        ]
        train = rows[model, "train"]
        size, peak = f"{train['parameters'] / 1e6:.1f} M", f"{train['peak_gib']:.1f}"
        shown = [size, *speeds[:3], peak, *speeds[3:]]
        assert line(TEXTS["benchmark"], start)[1:] == shown
    mamba, lstm, one, many, liger, plain = report["ratios"].values()
    page = TEXTS["benchmark"]
    assert f"({mamba:.2f}, met" in page and f"({lstm:.2f}, missed" in page
    assert f"({one:.2f} and {many:.2f}, met)" in page
    assert f"with Liger's ({liger:.3f}) and missed with plain torch's ({plain:.3f})" in page


def test_targets_and_parts_of_the_benchmark_are_those_of_the_page() -> None:
    page, verdict = TEXTS["benchmark"], table.TARGET_TITLES.index("verdict")
    found = {
        (row[0], row[1]): row for row in table.target_rows(raw("benchmark/h100_layers")["rows"])
    }
    missed = {key: row for key, row in found.items() if row[verdict].startswith("missed")}
    times = {key: row for key, row in missed.items() if key[0].endswith("fwd + bwd, ms")}
    assert [key for key in times if key[0].startswith("feedback")] == [
        ("feedback, fwd + bwd, ms", "64x256")
    ]
    assert "(12.9 of 12 ms)" in page and times["feedback, fwd + bwd, ms", "64x256"][2] == "12.9"
    over = [
        float(re.findall(r"[\d.]+", row[verdict])[0])
        for key, row in times.items()
        if "heads" in key[0]
    ]
    assert len(over) == 8 and f"by {min(over):.1f} to {max(over):.1f} times" in page
    parts = {
        (row["case"], row["shape"]): row["numbers"]
        for row in raw("benchmark/h100_benchmark")["rows"]
    }
    scans = [
        "{:.3g}".format(n["graph_both_ms"]) for (case, _), n in parts.items() if case == "scan"
    ]
    assert "the scan alone takes {}, {}, {} and {} ms".format(*scans) in page
    floors = [parts[f"{kind}-iteration", "64x256"]["times_floor"] for kind in ("picard", "jacobi")]
    assert "takes {:.2f} (Picard) and {:.2f} (Jacobi) times its byte floor".format(*floors) in page
    packed = [row["numbers"]["over_padded"] for row in raw("benchmark/h100_packed")["rows"]]
    assert f"take {min(packed):.2f} to {max(packed):.2f} times as long as padded rows" in page


def test_hazards_of_the_sanitizer_are_those_of_cublas() -> None:
    checks, page = raw("benchmark/h200_checks"), TEXTS["benchmark"]
    entries = {row["entry"] for row in checks["rows"]}
    assert f"no error in {len(entries)} entries" in page
    assert len(checks["rows"]) == 2 * len(entries)
    found = [row for row in checks["rows"] if row["errors"]]
    assert len(found) == 6 and all(row["tool"] == "racecheck" for row in found)
    assert all(name.startswith("nvjet_sm90_") for row in found for name in row["kernels"])
    counts = sorted(row["replays"] for row in checks["replays"])
    assert f"{counts[0]:,} to {counts[-1]:,} replays" in page
    assert not any(row["differing"] for row in checks["replays"])
