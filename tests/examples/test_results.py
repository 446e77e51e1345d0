"""The pages of examples/results are short, and those of the table have the numbers of its runs."""

import json
import re
from statistics import fmean

import pytest
from tests.examples.result_pages import (
    INDEX,
    RESULTS,
    ROOT,
    TEXTS,
    line,
    names_of,
    of_run,
    of_seeds,
    raw,
    runs_of,
    summary,
    summed,
)

from research import experiment
from research.experiments.language_model import SCORE
from research.experiments.table import LANGUAGES
from research.runs import RUNS
from research.summary import markdown, tuning_markdown


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
    tracked = [
        of_seeds("a5-cpu/a5_cpu_heads_seed{}", "sequence_accuracy", length, range(2), 3)
        for length in ("12", "24")
    ]
    check("`make a5`", "sequences at 12: {}; at 24: {}", *tracked)
    fed = of_seeds("controls-cpu/no_feedback-seed{}", "accuracy", "6", range(3))
    check("Feedback of one part", "labels at 6 without: {}", fed)
    letters = of_seeds("copying-cpu/copy_cpu_recall_seed{}", "character_accuracy", "16", range(3))
    copied = raw("copying-cpu/copy_cpu_heads_seed0")["character_accuracy"]
    numbers = [f"{copied[length]:.2f}" for length in ("12", "16")]
    check("`make copy`", "characters at 12: {}; at 16: {}; `recall` {}", *numbers, letters)
    heads = [of_run(f"heads/a5-heads{n}", "128", "sequence") for n in (1, 8)]
    check("Heads cost", "A5, sequences at 128: one {}, eight {}", *heads)
    models = ("recall", "gated_deltanet", "tracking")
    named = [f"language/{model}-seed{{}}" for model in models]
    bits = [of_seeds(name, "bits_per_byte", SCORE, range(3), 3) for name in named]
    form = "{}; Gated DeltaNet {}, `TrackingDeltaNet` {}"
    check("`recall` needs the fewest bits", form, *bits)
    named = [f"language-model-cpu/{model}-seed{{}}" for model in ("bedouin", "lstm")]
    bits = [of_seeds(name, "bits_per_byte", "128", range(3)) for name in named]
    check("The model of `make lm`", "{}; {}", *bits)


def test_the_page_of_the_examples_has_the_numbers_of_the_runs() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    found = [raw(f"a5-cpu/a5_cpu_heads_seed{seed}") for seed in range(2)]
    worst = min(run["sequence_accuracy"]["24"] for run in found)
    assert f"trained at length 6; {worst:.2f} of the sequences right at 24" in page
    copied = raw("copying-cpu/copy_cpu_heads_seed0")["character_accuracy"]["12"]
    assert f"{copied:.2f} of the characters right at 12" in page


def test_the_table_is_that_of_the_summary() -> None:
    shown = TEXTS["table"].split("<!-- summary -->")[1].split("<!-- /summary -->")[0]
    assert shown.strip() == markdown(RESULTS).strip()
    recorded = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))
    assert recorded == summary()


def test_claims_of_the_table_hold() -> None:
    def worst(task: str, measure: str, *models: str) -> float:
        return min(float(v) for model in models for v in summary()[task][model][measure])

    def best(task: str, measure: str, *models: str) -> float:
        return max(float(v) for model in models for v in summary()[task][model][measure])

    def span(task: str, measure: str, model: str) -> str:
        values = summary()[task][model][measure]
        return f"{min(values):.2f} to {max(values):.2f}"

    page = TEXTS["table"]
    assert worst("a5", "token_512", "recall", "lstm_l1") > 0.99
    of_2048 = [span("a5", "token_2048", model) for model in ("lstm_l1", "recall", "tracking")]
    assert "At 2,048 the LSTM has {}, `recall` {}, `tracking` {}.".format(*of_2048) in page
    s5 = sorted(summary()["s5"]["tracking"]["token_512"])
    assert s5[0] < 0.05
    assert f"({s5[1]:.2f} to {s5[-1]:.2f} of the labels at 512)" in page
    products = sorted(summary()["bound_a5"]["tracking"]["token_16_32"])
    assert products[0] < 0.2
    assert products[1] > 0.99
    kept = sorted(summary()["bound_a5"]["tracking"]["sequence_16_128"])[1:]
    assert f"keep {kept[0]:.2f} to {kept[-1]:.2f} of the sequences" in page
    copies = [span("copy", "characters_200", m) for m in ("gated_deltanet_l1", "tracking")]
    assert f"Gated DeltaNet {copies[0]} of the characters" in page
    assert f"`tracking` {copies[1]}, " in page
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
        "bound A5, products": ("bound_a5", "16_32", "token", "token_16_32"),
        "A5, labels at 512, 4e-3": ("a5", "512", "token", "token_512"),
        "A5, labels at 512, 2e-3": ("a5", "512", "token", "token_512"),
        "S5, labels at 512": ("s5", "512", "token", "token_512"),
    }
    for start, (task, length, metric, measure) in rows.items():
        rate = "-0.002" if "2e-3" in start else ""
        found = of_run(f"table-gate/{task}-tracking{rate}", length, metric, 3)
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
    assert counts["tracking"] == {3, 4, 5} and "`tracking` 3 to 5" in page
