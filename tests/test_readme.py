"""The README's Python code runs, and its numbers are those of the raw results."""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "examples" / "results"
sys.path.insert(0, str(ROOT / "examples"))

# as the scripts of that folder import them
from benchmarks.cases import SPEED  # noqa: E402
from research.experiments.language_model import SCORE, TUNING_SEED  # noqa: E402
from research.experiments.table import BEYOND, LANGUAGES, RATES, VARIANTS, rows_of  # noqa: E402
from research.runs import RUNS, read_runs  # noqa: E402
from research.summary import markdown, summarize  # noqa: E402

PAGES = {
    "README": ROOT / "README.md",
    "examples": ROOT / "examples" / "README.md",
    "index": RESULTS / "README.md",
    **{path.parent.name: path for path in sorted(RESULTS.glob("*/README.md"))},
}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
README = TEXTS["README"]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(block: str) -> dict[str, Any]:
    """Execute a block by itself; returns its names."""
    names: dict[str, Any] = {}
    exec(block, names)
    return names


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


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: str(BLOCKS.index(block)))
def test_every_block_runs_by_itself(block: str) -> None:
    run(block)


def test_blocks_give_what_they_promise() -> None:
    first, parts, decoding, mixer = map(run, BLOCKS)
    assert first["y"].shape == (8, 100, 64) and first["y_t"].shape == (8, 64)
    assert bool(first["layer"].stats.converged.all())
    assert parts["solution"].result.message == "every sample converged"
    assert parts["layer"](torch.randn(2, 5, 64)).shape == (2, 5, 64)
    assert decoding["x_t"].shape == (1, 64) and decoding["state"].y.shape == (1, 128)
    assert bool(mixer["layer"].stats.converged.all())


def test_the_script_of_iterations_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", TEXTS["iterations"], re.DOTALL)
    assert "STEPS = 1000\n" in block
    run(block.replace("STEPS = 1000", "STEPS = 0"))
    assert capsys.readouterr().out.startswith("Jacobi 32 ")


def test_the_long_description_is_taken_from_the_readme() -> None:
    text = (ROOT / ".ci" / "pypi.md").read_text(encoding="utf-8")
    paragraphs = [part for part in text.split("\n\n") if "the README of the repository" not in part]
    assert len(paragraphs) > 5 and all(part.rstrip() in README for part in paragraphs)


def test_the_readme_is_short() -> None:
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert len(text.split()) <= 1500


def test_the_page_of_the_examples_is_short_and_names_every_folder() -> None:
    assert len(TEXTS["examples"].split()) <= 200
    folders = [path.parent for path in (ROOT / "examples").glob("*/*.py")]
    assert all(path.name in TEXTS["examples"] for path in folders)
    for name in ("train_a5", "train_copy", "train_lm"):
        script = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert len(script.splitlines()) <= 160 and "cross_entropy" in script, name
    shared = (path.read_text().splitlines() for path in (ROOT / "examples" / "common").glob("*.py"))
    assert sum(map(len, shared)) <= 800


def test_the_index_is_short_and_leads_to_every_experiment() -> None:
    assert len(TEXTS["index"].split()) <= 1500
    folders = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert folders == PAGES.keys() - {"README", "examples", "index"}
    assert all(f"({folder}/README.md)" in TEXTS["index"] for folder in folders)


@pytest.mark.parametrize("page", PAGES)
def test_no_row_says_skipped(page: str) -> None:
    assert "skipped" not in TEXTS[page]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", TEXTS[page])
    local = [target for target in targets if not target.startswith("https://")]
    assert all((PAGES[page].parent / target).is_file() for target in local)


def numbers(name: str) -> dict[tuple[str, str], dict[str, float]]:
    """The numbers of a benchmark by row and shape."""
    return {(row["case"], row["shape"]): row["numbers"] for row in raw(name)["rows"]}


def test_speed_is_that_of_the_benchmark() -> None:
    shared = numbers("benchmark/h200_shared_keys")
    earlier = numbers("benchmark/h100_recall")
    layers = {("recall-n64", shape): earlier["recall-chosen", shape] for _, shape in earlier}
    layers |= {key: n for key, n in shared.items() if key[0] == "recall-chosen"}
    layers |= numbers("benchmark/h100_layers")
    starts = {
        "direct": "d_model 512, 1 head",
        "direct-heads8": "8 heads of 128",
        "direct-heads16": "16 heads of 64",
        "recall": "recall with n 64",
        "recall-wide": "the same, feedback of all heads",
        "recall-by-head": "recall_by_head",
        "recall-chosen": "`Bedouin.recall`, 14 heads",
        "recall-n64": "the same with 64 states",
        "direct-no-feedback": "1 head, no feedback",
        "lstm": "cuDNN LSTM",
    }
    shapes = "128x16", "64x256", "16x1024", "8x4096"
    page = TEXTS["benchmark"].split("## Times of the layers")[1].split("\n## ")[0]
    for case, start in starts.items():
        times = [layers[case, shape] for shape in shapes]
        shown = [f"{n['graph_both_ms']:.3g} / {n['both_ms']:.3g}" for n in times]
        peaks = ", ".join(f"{n['peak_gib']:.3g}" for n in times)
        assert line(page, start)[1:] == [*shown, peaks]
    heads = "direct-heads16", "direct-heads8", "direct"
    for shape in shapes:
        times = [layers[c, shape] for c in ("recall-chosen", "recall-by-head", *heads, "lstm")]
        shown = [f"{n['graph_both_ms']:.3g}/{n['both_ms']:.3g}" for n in times]
        assert line(README, f"{shape} ")[1:7] == shown
    there = (
        ", ".join(f"{shared[case, shape]['graph_both_ms']:.3g}" for shape in shapes)
        for case in ("lstm", "recall-n64")
    )
    assert "H200 (LSTM there {}; 64 states {})".format(*there) in README.replace("\n", " ")
    recorded = json.loads((RESULTS / "speed.json").read_text(encoding="utf-8"))
    assert [row["graph_ms"] for row in recorded] == [
        layers[case, shape]["graph_both_ms"] for case in starts for shape in shapes
    ]
    assert [row["layer"] for row in recorded[::4]] == list(SPEED.values())


def test_times_of_the_page_are_those_of_the_benchmark() -> None:
    table = TEXTS["benchmark"].split("## Times of earlier kernels")[1].split("\n## ")[0]
    starts = {
        ("benchmark/h100_sweep", "direct"): "d_model 512, 1 head",
        ("benchmark/h100_sweep", "direct-heads8"): "8 heads of 128",
        ("benchmark/h100_sweep", "direct-heads16"): "16 heads of 64 |",
        ("benchmark/h100_delta", "direct-delta-heads16-n64"): "16 heads of 64, n 64",
        ("benchmark/h100_no_feedback", "direct-no-feedback"): "1 head, no feedback",
        ("benchmark/h100_sweep", "direct-256-n32"): "d_model 256, 1 head, k 2, n 32",
        ("benchmark/h100_many_states", "direct-256-n64"): "d_model 256, 1 head, k 2, n 64",
        ("benchmark/h100_many_states", "lstm"): "cuDNN LSTM",
        ("benchmark/h100_autocast", "direct"): "1 head, autocast",
    }
    for (name, case), start in starts.items():
        rows, expected, peaks = numbers(name), [], []
        for shape in ("128x16", "64x256", "16x1024", "8x4096"):
            n = rows.get((case, shape))
            expected.append(f"{n['graph_both_ms']:.3g} / {n['both_ms']:.3g}" if n else "–")
            peaks += [f"{n['peak_gib']:.3g}"] if n else []
        assert line(table, start)[1:] == [*expected, ", ".join(peaks)]
    for row in raw("benchmark/h100_packed")["rows"]:
        n = row["numbers"]
        shown = [row["shape"], f"{n['both_ms']:.3g}", f"{n['over_padded']:.2f}"]
        assert line(table, row["title"] + " |")[1:] == shown


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
    for model, start in (("bedouin", "`recall_by_head` |"), ("mamba", "Mamba of this library |")):
        of = [rows.get((model, f"vocabulary-{loss}"), {}) for loss in ("liger", "torch", "fla")]
        shown = [f"{row['peak_gib']:.2f}" if "peak_gib" in row else "not measured" for row in of]
        assert line(TEXTS["benchmark"], start)[1:] == shown


def test_ratios_of_whole_models_are_those_of_the_page() -> None:
    report = json.loads((RESULTS / "models.json").read_text(encoding="utf-8"))
    mamba, lstm, one, many, liger, plain = report["ratios"].values()
    page = TEXTS["benchmark"]
    assert f"({mamba:.2f}, met" in page and f"({lstm:.2f}, missed" in page
    assert f"({one:.2f} and {many:.2f}, met)" in page
    assert f"with Liger's ({liger:.3f}) and missed with plain torch's ({plain:.3f})" in page


def test_times_of_the_papers_code_are_those_of_the_benchmark() -> None:
    source = (ROOT / "examples" / "benchmarks" / "targets.py").read_text()
    few, many = (
        dict(re.findall(r'"(\w+)": ([\d.]+)', re.search(rf"^{name} = .*$", source, re.M)[0]))  # type: ignore[index]
        for name in ("PAPER_16", "PAPER_100")
    )
    for shape in few:
        shown = f"{float(few[shape]):g}/{float(many[shape]):g}"
        assert line(README, f"{shape} ")[7] == shown


def of_seeds(name: str, metric: str) -> Iterator[str]:
    """ "length: value value …" for each length, the seeds of the only row side by side."""
    (row,) = raw(name)["rows"]
    for length, accuracy in row["accuracy"].items():
        yield f"{length}: " + " ".join(f"{value:.2f}" for value in accuracy[metric])


def device(content: Any) -> str:
    """CPU, H100 or H200, as a raw file names it."""
    first = content[0] if isinstance(content, list) else content
    name = first["device"] if "device" in first else first["machine"]["device"]
    return "CPU" if name.startswith("cpu") else re.findall(r"H\d00", name)[0]


@pytest.mark.parametrize("name", names_of("a5-cpu", "a5-one-head", "copying-one-head", "benchmark"))
def test_the_page_lists_every_run_with_its_device(name: str) -> None:
    folder, run = name.split("/")
    cells = line(TEXTS[folder].split("\n| run | command |")[1], f"{run} ")
    content = raw(name)
    assert cells[2] == device(content)
    if isinstance(content, dict) and "seconds" in content:
        assert cells[3] == f"{content['seconds']:.0f}"
    if isinstance(content, dict) and "config" in content and "rows" in content:
        assert cells[3] == f"{sum(row['seconds'] for row in content['rows']):.0f}"


RIVALS = [model for model in VARIANTS if not model.startswith(("recall", "tracking"))]


def of_run(name: str, length: str, metric: str = "token", digits: int = 2) -> str:
    """The values of every seed of a run, as pages show them."""
    (row,) = raw(name)["rows"]
    return " ".join(f"{value:.{digits}f}" for value in row["accuracy"][length][metric])


def test_the_first_table_is_that_of_the_summary() -> None:
    summary = summarize(RESULTS)
    rows = {
        "A5, labels at 512": ("a5", "token_512"),
        "S5, labels at 512": ("s5", "token_512"),
        "copying, characters at 200": ("copy", "characters_200"),
        "MQAR, 512 tokens, 64 pairs": ("mqar", "accuracy_512"),
        "bound S3, products": ("bound_s3", "token_16_32"),
    }
    shown_models = ("recall", "recall_n64", "lstm_l1", "gated_deltanet_l1", "hybrid_l2")
    for start, (task, measure) in rows.items():
        models = [summary[task][model][measure] for model in shown_models]
        shown = [" ".join(f"{value:.2f}" for value in values) for values in models]
        assert line(README, start)[1:] == shown
    text = README.replace("\n", " ")

    def seeds(task: str, model: str, measure: str) -> str:
        return " ".join(f"{value:.2f}" for value in summary[task][model][measure])

    assert "Only `recall`, with or without reflections, reaches 0.99 on both A5 at 512 and" in text
    for model, of_a5 in summary["a5"].items():
        worst = min(*of_a5["token_512"], *summary["mqar"][model]["accuracy_512"])
        assert (worst >= 0.99) == (model in ("recall", "recall_k2"))
    further = {
        name: [min(values), max(values)]
        for name in ("a5-recall", "a5-lstm_l1", "s5-recall")
        for values in [raw(f"table-seeds/{name}")["rows"][0]["accuracy"]["512"]["token"]]
    }
    spans = ["{:.2f} to {:.2f}".format(*span) for span in further.values()]
    assert "it has {} of A5, LSTM {}; of S5 {}.".format(*spans) in text
    wide = [
        of_run(f"table-wide/{task}-{model}", length)
        for task, length, rival in (("a5", "512", "lstm_l1"), ("copy", "200", "gated_deltanet_l1"))
        for model in ("recall", rival)
    ]
    found = "At d_model 512, rates untuned: A5 {} (LSTM {}), copying {} (Gated DeltaNet {})."
    assert found.format(*wide) in text
    assert "Without feedback it recalls as well and tracks nothing;" in text
    assert min(summary["mqar"]["recall_no_feedback"]["accuracy_512"]) > 0.995
    assert max(summary["a5"]["recall_no_feedback"]["token_512"]) < 0.03
    assert "with that of Δ alone A5 is lost, bound S3 is not;" in text
    assert max(summary["a5"]["recall_no_x"]["sequence_128"]) < 0.5
    assert min(summary["bound_s3"]["recall_no_x"]["sequence_16_128"]) > 0.99
    copying = summary["copy"]
    copied = copying["recall"]["characters_200"]
    unerased = seeds("copy", "recall_no_erase", "characters_200")
    assert f"with `erase=0` it copies better ({unerased}) and tracks less;" in text
    assert "two reflections cost copying." in text
    assert min(copying["recall_no_erase"]["characters_200"]) > max(copied)
    for task, measure in (("a5", "token_512"), ("s5", "token_128")):
        of = {
            model: fmean(summary[task][model][measure]) for model in ("recall", "recall_no_erase")
        }
        assert of["recall_no_erase"] < of["recall"] - 0.09
    assert max(copying["recall_k2"]["characters_200"]) < min(copied)
    counts = {model: [of[model]["tuning_runs"] for of in summary.values()] for model in RIVALS}
    ours = [of["recall"]["tuning_runs"] for of in summary.values()]
    rivals = [count for found in counts.values() for count in found]
    tuned = f"`recall` {min(ours)}–{max(ours)}, rivals {min(rivals)}–{max(rivals)}."
    assert f"Tuning runs a task: {tuned}" in text
    bound = seeds("bound_a5", "recall_layer", "token_16_32")
    found = f"by the hybrid (1.00) and where all heads have feedback and read all ({bound})"
    assert found in text
    for group in ("s3", "a5"):
        assert min(summary[f"bound_{group}"]["hybrid_l2"]["token_16_32"]) > 0.995
    better = ("attention_l2", "gated_deltanet_l1")
    far = ("rdn_l1",)
    less = ("deltaproduct_l1", "m2rnn_l1")
    for task, measure in (("copy", "characters_200"), ("mqar", "accuracy_512")):
        for model in better:
            assert task == "mqar" or min(summary[task][model][measure]) > max(copied)
        assert min(summary[task]["attention_l2"][measure]) > 0.995
    states = [
        raw(f"table/copy-{m}")["rows"][0]["state_size"] for m in ("gated_deltanet_l1", "recall")
    ]
    assert f"{states[0] / states[1]:.1f} times the state" in text
    cited = "DeltaProduct and [M²RNN](https://arxiv.org/abs/2603.14360)"
    assert f"copies nearly as far, {cited} less." in text
    for names in (far, less):
        copies = [value for m in names for value in copying[m]["characters_200"]]
        assert (fmean(copied) > fmean(copies) + 0.1) == (names is less)
    for model in (*better, *far, *less):
        for group in ("s3", "a5"):
            assert max(summary[f"bound_{group}"][model]["token_16_32"]) < 0.5
    for model in (*better, *far):
        assert set(summary["a5"][model]["sequence_128"]) == {0.0}


def test_the_index_has_the_numbers_of_the_summary() -> None:
    summary = summarize(RESULTS)

    def seeds(task: str, model: str, measure: str) -> str:
        return " ".join(f"{value:.2f}" for value in summary[task][model][measure])

    def cell(start: str) -> str:
        return line(TEXTS["index"], start)[1]

    words = cell("Every seed tracks A5 to 512")
    for task, measure in (("a5", "sequence_128"), ("a5", "token_512"), ("s5", "token_512")):
        ours, smaller, lstm = (
            seeds(task, model, measure) for model in ("recall", "recall_n64", "lstm_l1")
        )
        of_smaller = f" 64 states {smaller};" if measure == "token_512" else ""
        assert f"{ours};{of_smaller} LSTM {lstm}" in words
    assert min(summary["a5"]["recall"]["token_512"]) > 0.99
    assert sum(value > 0.99 for value in summary["a5"]["recall_n64"]["token_512"]) == 3
    copying = cell("Copying holds at twice")
    assert f"at 200: {seeds('copy', 'recall', 'characters_200')};" in copying
    assert f"Gated DeltaNet {seeds('copy', 'gated_deltanet_l1', 'characters_200')};" in copying
    assert min(summary["copy"]["attention_l2"]["characters_200"]) > 0.995
    assert max(summary["copy"]["lstm_l1"]["characters_100"]) < 0.155
    pairs = cell("MQAR with 8,192 tokens")
    assert min(summary["mqar"]["recall"]["accuracy_256"]) > 0.995
    assert min(summary["mqar"]["rdn_l1"]["accuracy_256"]) > 0.985
    of_64 = [
        seeds("mqar", model, "accuracy_512") for model in ("recall", "rdn_l1", "gated_deltanet_l1")
    ]
    assert "64 pairs: {}; RDN {}; Gated DeltaNet {};".format(*of_64) in pairs
    assert min(summary["mqar"]["attention_l2"]["accuracy_512"]) > 0.995
    by_head = cell("With feedback by head (`recall_by_head`)")
    measures = ("a5", "token_512"), ("copy", "characters_200"), ("mqar", "accuracy_512")
    values_of = (seeds(task, "recall_by_head", measure) for task, measure in measures)
    assert "labels at 512: {}; at 200: {}; 64 pairs: {};".format(*values_of) in by_head
    bound = cell("Every seed solves bound S3, with 64 states four of five")
    assert sorted(summary["bound_s3"]["recall_n64"]["sequence_16_32"])[1:] == [1.0] * 4
    assert min(summary["bound_s3"]["recall"]["sequence_16_32"]) > 0.9995
    products = [seeds(f"bound_{group}", "recall", "token_16_32") for group in ("s3", "a5")]
    assert "products: {}; {};".format(*products) in bound
    others = [model for model in RIVALS if model not in ("deltaproduct_l2", "hybrid_l2")]
    most = [
        max(max(summary[f"bound_{group}"][model]["token_16_32"]) for model in others)
        for group in ("s3", "a5")
    ]
    assert "the others at most {:.2f} and {:.2f}".format(*most) in bound
    two = cell("Two layers (hybrid) solve both")
    for model, name in ("hybrid_l2", "A5, sequences:"), ("deltaproduct_l2", "DeltaProduct"):
        assert f"{name} {seeds('a5', model, 'sequence_128')}" in two
        assert min(summary["bound_a5"][model]["token_16_32"]) > 0.995
    assert min(summary["bound_s3"]["hybrid_l2"]["token_16_32"]) > 0.995
    assert f"at 200: {seeds('copy', 'hybrid_l2', 'characters_200')};" in two

    models = "recall_no_feedback", "recall_no_x"
    copies = "; ".join(seeds("copy", model, "characters_200") for model in models)
    assert min(min(summary["mqar"][model]["accuracy_512"]) for model in models) > 0.995
    of_delta = seeds("a5", "recall_no_x", "sequence_128")
    expected = f"copying at 200: {copies}; 64 pairs: 1.00; 1.00; A5, sequences: 0.00; {of_delta}"
    bound = seeds("bound_s3", "recall_no_x", "sequence_16_128")
    expected += f"; bound S3 at 128 operations: 0.00; {bound}"
    assert cell("Without feedback it recalls and tracks nothing") == expected
    assert max(summary["bound_s3"]["recall_no_feedback"]["sequence_16_128"]) == 0
    assert seeds("a5", "recall_no_feedback", "sequence_128") == "0.00 0.00 0.00"
    of_parts = [("copy", "characters_200"), ("a5", "token_512"), ("s5", "token_128")]
    of_parts.append(("bound_s3", "sequence_16_128"))
    shown = [seeds(task, "recall_no_erase", measure) for task, measure in of_parts]
    expected = "at 200: {}; A5, labels at 512: {}; S5 at 128: {}; bound S3 at 128 operations: {}"
    assert cell("Without erase copying is as by Gated") == expected.format(*shown)
    of_parts = [("a5", "token_512"), ("s5", "token_512"), ("copy", "characters_200")]
    shown = [seeds(task, "recall_k2", measure) for task, measure in of_parts]
    expected = "A5, labels at 512: {}; S5: {}; at 200: {}".format(*shown)
    assert cell("Two reflections track as far") == expected
    wide = cell("At d_model 512")
    longer = [
        of_run(f"table-wide/bound_a5-{model}", "16_128") for model in ("recall_layer", "hybrid_l2")
    ]
    of_both = ("recall", "recall_n64")
    copied = [of_run(f"table-wide/copy-{m}", "200") for m in (*of_both, "gated_deltanet_l1")]
    tracked = [of_run(f"table-wide/a5-{m}", "512") for m in (*of_both, "lstm_l1", "hybrid_l2")]
    expected = (
        "at 200: {}, 64 states {}, Gated DeltaNet {}; A5, labels at 512: {}, 64 states {}, "
        "LSTM {}, hybrid {}; products at 128 operations: {}, hybrid {}, `recall` 0.03"
    )
    assert wide == expected.format(*copied, *tracked, *longer)
    assert set(of_run("table-wide/bound_a5-recall", "16_128").split()) == {"0.03"}
    models = ("recall", "recall_layer")
    shown = [of_run(f"table-controls/bound_z60-{model}", "16_32") for model in models]
    names = [f"table-controls/bound_a5_one_name-{model}" for model in (*models, "hybrid_l2")]
    shown += [of_run(name, "1_32") for name in names]
    scope = '`feedback_scope="layer"`'
    expected = f"Z60: {{}}, {scope} {{}}; one name: {{}}, {scope} {{}}, hybrid {{}}"
    assert line(TEXTS["index"], "Bound elements of Z60")[1:] == [expected.format(*shown)]


def test_arithmetic_of_the_index_is_that_of_the_runs() -> None:
    def at_length(task: str, model: str) -> list[float]:
        """Of rows of 40 to 256 tokens, by seed."""
        (row,) = raw(f"table-languages/{task}-{model}")["rows"]
        return list(row["accuracy"]["256"]["token"])

    def shown(model: str) -> str:
        return of_run(f"table-languages/arithmetic-{model}", "256")

    recall, of_64, lstm, hybrid = map(shown, ("recall", "recall_n64", "lstm_l1", "hybrid_l2"))
    assert {hybrid, shown("recall_layer")} == {"1.00 1.00 1.00"}
    assert min(at_length("parity", "recall") + at_length("parity", "recall_n64")) == 1
    runs = runs_of("table-languages")
    brackets = [max(at_length(*name.split("-"))) for name in runs if name.startswith("brackets")]
    same = '`feedback_scope="layer"`, hybrid'
    expected = (
        f"1.00; {recall}, 64 states {of_64}; {same} 1.00, LSTM {lstm}; at most {max(brackets):.2f}"
    )
    assert line(TEXTS["index"], "Parity holds from 40 to 256")[1:] == [expected]


OPERATIONS = [("16_32", "token"), ("16_32", "sequence"), ("16_32", "recall")]
OPERATIONS += [("16_128", "token"), ("16_128", "sequence")]


@pytest.mark.parametrize("name", names_of("table-wide", "table-controls", "table-languages"))
def test_further_runs_of_the_table_are_those_of_the_pages(name: str) -> None:
    folder, run = name.split("/")
    content = raw(name)
    (row,) = content["rows"]
    config, task = content["config"], run.split("-")[0]
    assert (config["first_seed"], config["seeds"]) == (0, 3)
    assert config["d_model"] == (512 if folder == "table-wide" else 256)
    shown = {
        "a5": [("128", "sequence"), ("512", "token"), ("2048", "token")],
        "copy": [("100", "token"), ("200", "token")],
        "bound_a5": OPERATIONS,
        "bound_z60": OPERATIONS,
        "bound_a5_one_name": [(length.replace("16_", "1_"), of) for length, of in OPERATIONS],
        **dict.fromkeys(LANGUAGES, [("40", "token"), ("256", "token")]),
    }[task]
    accuracy = row["accuracy"]
    values = [" ".join(f"{v:.2f}" for v in accuracy[length][metric]) for length, metric in shown]
    sizes = [str(row["parameters"]), str(row["state_size"]), f"{row['point']['lr']:g}"]
    assert line(TEXTS[folder], f"{run} |")[1:] == [device(content), *sizes, *values]


def test_rates_at_d_model_512_are_those_of_the_page() -> None:
    path, page = RESULTS / "table-wide" / "trials.json", TEXTS["table-wide"].replace("*", "")
    found: dict[str, dict[float, str]] = {}
    for name, run in json.loads(path.read_text(encoding="utf-8")).items():
        config = run["config"]
        assert (config["first_seed"], config["seeds"], config["d_model"]) == (100, 1, 512)
        task, model, rate = name.split("-", 2)
        length, start = {
            "copy": ("200", "characters at 200"),
            "a5": ("512", "labels at 512"),
        }[task]
        (value,) = run["rows"][0]["accuracy"][length]["token"]
        found.setdefault(f"{start} | {model} |", {})[float(rate)] = f"{value:.2f}"
    for start, of in found.items():
        rates = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
        assert line(page, start)[2:] == [of.get(rate, "–") for rate in rates]


def test_the_table_of_rivals_is_that_of_the_summary() -> None:
    shown = TEXTS["table"].split("<!-- summary -->")[1].split("<!-- /summary -->")[0]
    assert shown.strip() == markdown(RESULTS).strip()
    recorded = json.loads((RESULTS / "summary.json").read_text(encoding="utf-8"))
    assert recorded == summarize(RESULTS)


def of_heads(models: list[dict[str, Any]], digits_of_decay: int) -> dict[str, list[str]]:
    """The cells of the lines with a value for each head, by how the lines begin."""
    found = {
        "the same without each of the heads": [(m["heads"]["without"], 2) for m in models],
        "median decay": [
            ([q[1] for q in m["heads"]["decay_quantiles"]], digits_of_decay) for m in models
        ],
        "mean β of the erase": [(m["keys"]["beta"], 2) for m in models],
        "effective dimension of the keys": [(m["keys"]["dimension"], 1) for m in models],
        "largest modulus": [([v[0] for v in m["transition"]["moduli"]], 3) for m in models],
        "effective rank": [(m["transition"]["rank"], 1) for m in models],
    }
    return {
        start: [" ".join(f"{v:.{digits}f}" for v in values) for values, digits in of_models]
        for start, of_models in found.items()
    }


def test_what_a_layer_has_learned_is_that_of_the_page() -> None:
    models, page = raw("learned/a5-recall")["models"], TEXTS["learned"].split("## Copying")[0]

    def check(start: str, *values: str) -> None:
        assert line(page, f"{start} |")[1:] == list(values)

    ends = list(models[0]["horizon"])
    for end in ("128", "256", "512", "1024", "2048", "100000"):
        first = int(ends[ends.index(end) - 1]) + 1
        start = f"labels of tokens {first:,} to {int(end):,}"
        check(start, *(f"{m['horizon'][end]:.2f}" for m in models))
    without = "labels of tokens 257 to 512 of other rows, without noise"
    for size in ("0.0", "0.01", "0.03", "0.1", "0.3", "1.0"):
        start = f"the same, noise of {size} in the memory after token 256"
        start = start if float(size) else without
        check(start, *(f"{m['recovery'][size]:.2f}" for m in models))
    start = "largest Lyapunov exponent a token, mean of 8 rows"
    check(start, *(f"{fmean(m['exponent']):.4f}" for m in models))
    assert max(abs(v) for m in models for v in m["exponent"]) < 0.0024
    steps = "1000", "2000", "4000", "8000"
    start = "the same after 1,000, 2,000, 4,000 and 8,000 steps of training"
    check(start, *(" ".join(f"{m['exponents'][step]:.4f}" for step in steps) for m in models))
    assert max(m["exponents"][step] for m in models for step in steps) < 0
    assert min(m["exponents"][step] for m in models for step in steps[1:]) > -0.0017
    for t in ("16", "64", "256"):
        start = f"evaluations of Picard and of Jacobi, {t} tokens"
        check(start, *(f"{m['steps'][t]['picard']} {m['steps'][t]['jacobi']}" for m in models))
        assert all(m["steps"][t]["jacobi"] == int(t) + 1 for m in models)
    last = [m["steps"]["256"] for m in models]
    times = [v[f"{name}_ms"] / v["direct_ms"] for v in last for name in ("picard", "jacobi")]
    assert f"at 256 tokens {min(times):.0f} to {max(times):.0f} times as long" in page
    check("labels of tokens 1 to 256", *(f"{m['heads']['all']:.2f}" for m in models))
    for start, values in of_heads(models, 2).items():
        assert line(page, start)[1:] == values
    for m in models:  # "One head tracks, and only it is needed."
        first, *others = m["heads"]["without"]
        assert first < 0.025 and min(others) > 0.985
        assert m["keys"]["beta"][0] > 0.995 and m["keys"]["dimension"][0] < 1.05
        assert max(m["transition"]["rank"][1:]) == 0


def test_what_a_layer_has_learned_of_copying_is_that_of_the_page() -> None:
    models, page = raw("learned/copy-recall")["models"], TEXTS["learned"].split("## Copying")[1]
    steps = [m["steps"]["403"] for m in models]
    shown = {
        "characters of strings of 200": [f"{m['heads']['all']:.2f}" for m in models],
        "largest Lyapunov exponent a token": [f"{fmean(m['exponent']):.4f}" for m in models],
        "evaluations of Picard and of Jacobi": [f"{v['picard']} {v['jacobi']}" for v in steps],
    }
    for start, values in (shown | of_heads(models, 4)).items():
        assert line(page, start)[1:] == values
    times = [v[f"{name}_ms"] / v["direct_ms"] for v in steps for name in ("picard", "jacobi")]
    assert f"{min(times):.0f} to {max(times):.0f} times" in page
    for m in models:  # "The memories copy, all of them, and the head that tracks is not needed."
        first, *others = (m["heads"]["all"] - v for v in m["heads"]["without"])
        assert abs(first) < 0.0055 and 0.045 < min(others) and max(others) < 0.225
        assert max(m["keys"]["beta"]) < 0.15
        assert all(9 < size < 68 for size in m["keys"]["dimension"][1:4])
        assert all(69.5 < size < 78.5 for size in m["keys"]["dimension"][4:])


TUNED_RUNS = runs_of("table-tuning")


@pytest.mark.parametrize("form", [form for forms in VARIANTS.values() for form in forms])
@pytest.mark.parametrize("task", ["a5", "s5", "copy", "bound_s3", "bound_a5", "mqar"])
def test_tuning_of_the_table_is_that_of_the_page(task: str, form: str) -> None:
    rows = rows_of(TUNED_RUNS, f"{task}-{form}")
    points = {row["point"]["lr"]: row["accuracy"] for row in rows}
    if not rows:
        return
    bound = [("16_32", "token"), ("16_128", "sequence"), ("24_128", "sequence")]
    start, wanted = {
        "a5": ("| A5", [("128", "sequence"), ("512", "token"), ("2048", "token")]),
        "s5": ("| S5", [("128", "token"), ("512", "token")]),
        "copy": ("| copying", [("100", "token"), ("200", "token")]),
        "bound_s3": ("| bound S3", bound),
        "bound_a5": ("| bound A5", bound),
        "mqar": ("| MQAR", [("256", "token"), ("512", "token")]),
    }[task]
    shown = TEXTS["table-tuning"].replace("*", "")
    block = shown[shown.index(start) :].split(f"| {form} |")
    assert len(block) > 1, f"the page has no runs of {form}"
    for length, metric in wanted:
        rates = (0.0005, 0.001, 0.002, 0.004, 0.008)
        values = [f"{points[lr][length][metric][0]:.2f}" if lr in points else "–" for lr in rates]
        assert f"| {' | '.join(values)} |" in block[1]


def test_runs_with_too_many_skipped_steps_are_marked_as_failed() -> None:
    """In their files, also in those that were written before `ensemble.py` did so."""
    for name in names_of(*(path.parent.name for path in RESULTS.glob(f"*/{RUNS}"))):
        content = raw(name)
        for row in content.get("rows", ()) if isinstance(content, dict) else ():
            skipped = [entry["skipped"] for entry in row.get("history", ()) if "skipped" in entry]
            share = [sum(of) / row["point"]["steps"] for of in zip(*skipped, strict=True)]
            if share:
                marked = row.get("failed", [False] * len(share))
                assert marked == [value > 0.01 for value in share], name


def bits(runs: list[Any], length: str) -> str:
    return " ".join(f"{run['bits_per_byte'][length]:.3f}" for run in runs)


LANGUAGE_MODELS = {
    **{"gated_deltanet": "Gated DeltaNet", "attention": "attention", "mamba": "Mamba"},
    **{"recall": "bits, pieces of 1,024:", "bedouin": "default", "lstm": "LSTM"},
}
"""Names of the index."""


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, "recall_n64"])
def test_tuned_language_models_are_those_of_the_pages(name: str) -> None:
    found = runs_of("language-tuning")
    rates = (*RATES, BEYOND[RATES[-1]])
    tried = {rate: found[f"{name}-{rate:g}"] for rate in rates if f"{name}-{rate:g}" in found}
    assert {run["seed"] for run in tried.values()} == {TUNING_SEED}
    further = "H200" if name.startswith("recall") else "H100"
    assert all(device(run) == ("H200" if rate in RATES else further) for rate, run in tried.items())
    best = min(tried, key=lambda rate: float(tried[rate]["bits_per_byte"][SCORE]))
    cells = [bits([tried[rate]], SCORE) if rate in tried else "–" for rate in rates]
    cells[rates.index(best)] = f"**{cells[rates.index(best)]}**"
    assert line(TEXTS["language-tuning"], f"{name} |")[1:] == cells
    runs = [runs_of("language")[f"{name}-seed{seed}"] for seed in range(3)]
    assert {(device(run), run["config"]["lr"]) for run in runs} == {(further, best)}
    values = bits(runs, SCORE)
    row = line(TEXTS["language"], name if name in LANGUAGE_MODELS else f"`{name}`")
    assert row[1:] == [
        f"{runs[0]['parameters'] / 1e6:.2f} M",
        f"{best:g}",
        values,
        f"{fmean(run['bits_per_byte'][SCORE] for run in runs):.3f}",
        bits(runs, "8192"),
        f"{max(run['peak_memory'] for run in runs) / 2**30:.1f}",
    ]
    if name not in LANGUAGE_MODELS:
        return
    index = line(TEXTS["index"], "`Bedouin.recall` needs the fewest bits")
    assert f"{LANGUAGE_MODELS[name]} {values}" in index[1]


def test_differences_of_tuned_language_models_are_those_of_the_page() -> None:
    means = {
        name: fmean(
            runs_of("language")[f"{name}-seed{n}"]["bits_per_byte"][SCORE] for n in range(3)
        )
        for name in LANGUAGE_MODELS
    }
    behind = [means[name] - means["recall"] for name in ("gated_deltanet", "attention", "mamba")]
    page = TEXTS["language"]
    form = "{:.3f} less than Gated DeltaNet, {:.3f} less than attention, {:.3f} less than Mamba"
    assert form.format(*behind) in page
    assert f"{means['bedouin'] - means['recall']:.3f} less than the default layer" in page
    assert min(behind) > 0
    of_readme = {"gated_deltanet": "Gated DeltaNet ", "attention": "attention ", "recall": "("}
    for name, start in of_readme.items():
        runs = [runs_of("language")[f"{name}-seed{n}"] for n in range(3)]
        shown = " ".join(f"{run['bits_per_byte'][SCORE]:.2f}" for run in runs)
        assert f"{start}{shown}" in README.replace("\n", " ")


def test_the_model_of_make_lm_needs_fewer_bits_than_an_lstm_of_its_size() -> None:
    found, means = runs_of("language-model-cpu"), []
    for name in ("bedouin", "lstm"):
        runs = [found[f"{name}-seed{seed}"] for seed in range(3)]
        assert {device(run) for run in runs} == {"CPU"}
        assert all(run["seconds"] < 600 and run["steps"] == 1200 for run in runs)
        bits = [run["bits_per_byte"]["128"] for run in runs]
        assert line(TEXTS["language-model-cpu"], f"{name}, ")[1:] == [
            f"{runs[0]['parameters']:,}",
            " ".join(f"{value:.3f}" for value in bits),
            " ".join(f"{run['seconds']:.0f}" for run in runs),
        ]
        assert " ".join(f"{value:.2f}" for value in bits) in TEXTS["index"]
        means.append(sum(bits) / 3)
    assert means[0] < means[1]
    own = found["make_lm-seed0"]
    cells = [f"{own['parameters']:,}", f"{own['bits_per_byte']['128']:.3f} (seed 0)"]
    page = TEXTS["language-model-cpu"]
    assert line(page, "`make lm`, ")[1:] == [*cells, f"{own['seconds']:.0f}"]
    shown = " of the layer is {:.3f}, that of the LSTM {:.3f};".format(*means)
    assert shown in TEXTS["language-model-cpu"]


def test_controls_on_a_cpu_are_those_of_the_page() -> None:
    parts = ("no_mixing", "no_feedback", "mixer_feedback", "lstm")
    paths = {part: f"controls-cpu/{part}-seed{{}}" for part in parts}
    for name, path in ({"a5_cpu_delta": "a5-cpu/a5_cpu_delta_seed{}"} | paths).items():
        runs = [raw(path.format(seed)) for seed in range(3)]
        assert [(run["seed"], device(run)) for run in runs] == [(s, "CPU") for s in range(3)]
        shown = []
        for n in ("6", "12", "24"):
            kinds = [
                [f"{run[key][n]:.2f}" for run in runs] for key in ("accuracy", "sequence_accuracy")
            ]
            shown.append(" / ".join(" ".join(values) for values in kinds))
        seconds = " ".join(f"{run['seconds']:.0f}" for run in runs)
        assert line(TEXTS["controls-cpu"], f"{name} | ")[1:] == [*shown, seconds]


def test_table_of_parameterizations_is_that_of_the_raw_results() -> None:
    for row in raw("a5-one-head/a5_parameterizations")["rows"]:
        point = row["point"]
        start = f"{point['input_scale']}, n {point['d_state']}, k {point['num_householder']} |"
        accuracy = [" ".join(f"{v:.2f}" for v in a["token"]) for a in row["accuracy"].values()]
        assert line(TEXTS["a5-one-head"], start)[1:4] == accuracy


def test_tables_of_a5_and_copying_are_those_of_the_raw_results() -> None:
    again = raw("a5-cpu/a5_cpu_seed1_again")
    names = ["seed 0", "seed 1", "seed 2"]
    runs = [raw(f"a5-cpu/a5_cpu_seed{seed}") for seed in range(3)] + again
    names += [f"seed 1, length 6 throughout, {x['note']}" for x in again[:2]] + ["seed 1, the same"]
    buffers = raw("a5-cpu/a5_cpu_buffers")
    names += [f"seed {x['seed']}, {x['note']}" for x in buffers]
    fed = [(scale, seed) for scale in ("delta", "bounded_delta") for seed in (0, 1, 2, 100)]
    names += [f"feedback of Δ alone, {scale}, seed {seed}" for scale, seed in fed]
    only = [raw(f"a5-cpu/a5_cpu_{scale}_seed{seed}") for scale, seed in fed]
    for name, content in zip(names, runs + buffers + only, strict=True):
        token, sequence = content["accuracy"], content["sequence_accuracy"]
        shown = [f"{token[n]:.3f} / {sequence[n]:.3f}" for n in ("6", "12", "24")]
        end = " with 5,500 steps |" if name.endswith("same") else " |"
        assert line(TEXTS["a5-cpu"], name + end)[1:] == [*shown, f"{content['seconds']:.0f}"]
    of_make = [raw(f"a5-cpu/a5_cpu_heads_seed{n}") for n in range(2)]
    for seed, content in enumerate(of_make):
        token, sequence = content["accuracy"], content["sequence_accuracy"]
        shown = [f"{token[n]:.3f} / {sequence[n]:.3f}" for n in ("6", "12", "24")]
        start = f"two heads, feedback of Δ alone, bounded_delta (`make a5`), seed {seed} |"
        assert line(TEXTS["a5-cpu"], start)[1:] == [*shown, f"{content['seconds']:.0f}"]
    right = [[content["sequence_accuracy"][n] for content in of_make] for n in ("12", "24")]
    shown = [" ".join(f"{value:.3f}" for value in values) for values in right]
    expected = "sequences at 12: {}; at 24: {}".format(*shown)
    assert line(TEXTS["index"], "`make a5` tracks")[1] == expected
    worst = f"{min(right[1]):.2f}"
    assert f"trained at length 6; {worst} of the sequences right at 24" in TEXTS["examples"]
    (row,) = raw("a5-one-head/a5_five_seeds")["rows"]
    accuracies = row["accuracy"].values()
    for seed in range(5):
        shown = [f"{a['token'][seed]:.3f} / {a['sequence'][seed]:.3f}" for a in accuracies]
        assert line(TEXTS["a5-one-head"], f"{seed} | 1.000 / 1.000")[1:] == shown
    copies = [raw(f"copying-cpu/copy_cpu_recall_seed{seed}") for seed in range(3)]
    for seed, content in enumerate(copies):
        token, string = content["character_accuracy"], content["string_accuracy"]
        shown = [f"{token[n]:.3f} / {string[n]:.3f}" for n in ("4", "8", "12", "16")]
        seconds = f"{content['seconds']:.0f}"
        assert line(TEXTS["copying-cpu"], f"{seed} |")[1:] == [*shown, seconds]
    values = [content["character_accuracy"]["16"] for content in copies]
    shown = ["characters: " + " ".join(f"{value:.2f}" for value in values)]
    assert line(TEXTS["index"], "Copying with `recall`")[1:2] == shown
    token, string = (
        raw("copying-cpu/copy_cpu_heads_seed0")[f"{kind}_accuracy"]
        for kind in ("character", "string")
    )
    shown = [f"{token[n]:.3f} / {string[n]:.3f}" for n in ("4", "8", "12", "16")]
    assert line(TEXTS["copying-cpu"], "`make copy`, 0 |")[1:5] == shown
    expected = f"characters at 12: {token['12']:.2f}; at 16: {token['16']:.2f} (seed 0)"
    assert line(TEXTS["index"], "`make copy`: ")[1] == expected
    assert f"letters; {token['12']:.2f} of the characters right at 12" in TEXTS["examples"]
    for row in raw("copying-one-head/copy_parameterizations")["rows"]:
        accuracy, point = row["accuracy"], row["point"]
        shown = [" ".join(f"{v:.3f}" for v in accuracy[n]["token"]) for n in ("8", "16")]
        start = f"{point['input_scale']}, k {point['num_householder']} |"
        assert line(TEXTS["copying-one-head"], start)[1:3] == shown


def test_the_page_of_the_presets_has_the_numbers_of_the_raw_results() -> None:
    page = TEXTS["gpu-presets"]
    words = "", ("16", "128", "256", "512"), ("128", "512")
    letters = "character_", ("50", "100", "200"), ("50", "100")
    for start, name, (unit, of_units, of_rows) in (
        *((f"4e-3 (the preset), {i} |", f"a5_gpu_seed{i}", words) for i in range(3, 6)),
        *((f"8e-3, {i} |", f"a5_gpu_0.008_seed{i}", words) for i in range(3)),
        *((f"2, 8, 16, {i} |", f"a5_gpu_n64_seed{i}", words) for i in range(3)),
        ("2, 4, 8, 16, 0 |", "a5_gpu_n64_from_2_seed0", words),
        *((f"{i} |", f"copy_gpu_seed{i}", letters) for i in range(3)),
        *((f"64 states, {i} |", f"copy_gpu_n64_seed{i}", letters) for i in range(3)),
    ):
        found = raw(f"gpu-presets/{name}")
        units, rows = found[f"{unit}accuracy"], found["sequence_accuracy"]
        shown = [*(units[n] for n in of_units), *(rows[n] for n in of_rows)]
        cells = [*(f"{value:.3f}" for value in shown), f"{found['seconds']:.0f}"]
        assert line(page, start)[1:] == cells
    for start, name in (
        ("A5 | `recall_n64` | from 8 |", "a5-recall_n64_from_8"),
        ("A5 | `recall_n64` | doubled from 2 |", "a5-recall_n64_doubled"),
        ("A5 | LSTM (`lstm_l1_forget`) | from 8 |", "a5-lstm_l1_forget_from_8"),
        ("A5 | LSTM (`lstm_l1_forget`) | doubled from 2 |", "a5-lstm_l1_forget_doubled"),
        ("A5 | `recall_n64` | 2, 8, 16 |", "a5-recall_n64_quadrupled"),
        ("A5 | LSTM (`lstm_l1_forget`) | 2, 8, 16 |", "a5-lstm_l1_forget_quadrupled"),
        ("S5 | `recall_n64` | 2, 8, 16 |", "s5-recall_n64_quadrupled"),
        ("S5 | `recall_n64` | from 8 |", "s5-recall_n64_from_8"),
    ):
        (row,) = raw(f"gpu-presets/{name}")["rows"]
        shown = [row["accuracy"][n]["token"] for n in ("128", "512")]
        assert line(page, start)[-2:] == [" ".join(f"{v:.2f}" for v in seeds) for seeds in shown]


def test_the_page_of_more_seeds_has_the_numbers_of_the_raw_results() -> None:
    def cells(accuracy: dict[str, Any], *columns: tuple[str, str]) -> list[str]:
        return [" ".join(f"{v:.2f}" for v in accuracy[n][metric]) for n, metric in columns]

    page, names = TEXTS["table-seeds"], {"lstm_l1": "LSTM"}
    for name, run in runs_of("table-seeds").items():
        assert (run["config"]["first_seed"], run["config"]["seeds"]) == (5, 5)
        (row,) = run["rows"]
        task, model = name.split("-")
        columns = ("128", "sequence"), ("512", "token"), ("2048", "token")
        shown = cells(row["accuracy"], *columns)
        start = f"{task.upper()} | {names.get(model, f'`{model}`')} |"
        assert line(page, start)[-3:] == shown
    path = RESULTS / "table-seeds" / "trials.json"
    for name, run in json.loads(path.read_text(encoding="utf-8")).items():
        (row,) = run["rows"]
        task, model, rate = name.split("-")
        layer = {"lstm_l1_forget": "LSTM (`lstm_l1_forget`)"}.get(model, f"`{model}`")
        steps = [
            next(entry["step"] for entry in row["history"] if entry["length"][i] == 16)
            for i in range(3)
        ]
        shown = cells(row["accuracy"], *((n, "token") for n in ("128", "512", "2048")))
        start = f"{task.upper()}, {rate} | {layer} |"
        assert line(page, start)[2:] == [" ".join(map(str, steps)), *shown]


def test_the_page_of_many_states_has_the_numbers_of_the_raw_results() -> None:
    page = TEXTS["many-states"]

    def shown(name: str, length: str, measure: str = "token", digits: int = 2) -> str:
        return of_run(f"many-states/{name}", length, measure, digits)

    for form in ("9x64x64g1", "7x64x128g2", "8x64x128g1"):
        copies = [shown(f"copy-{form}", length) for length in ("100", "200")]
        pairs = [shown(f"mqar-{form}", "256"), shown(f"mqar-{form}", "512", digits=3)]
        assert line(page, f"{form} |")[-4:] == [*copies, *pairs]
    for task in ("a5", "s5"):
        cells = [shown(f"{task}-9x64x64g1", length) for length in ("16", "128", "512")]
        assert line(page, f"{task.upper()}, labels")[1:] == cells
    lengths = ("16_32", "16_128", "24_128")
    cells = [shown("bound_s3-9x64x64g1", length, "sequence") for length in lengths]
    assert line(page, "bound S3, sequences")[1:] == cells
    for form in ("fed", "m6", "half", "half_m6"):
        parts = ("copy", "100"), ("copy", "200"), ("a5", "128"), ("a5", "512")
        cells = [shown(f"{task}-erase_{form}", length) for task, length in parts]
        cells += [shown(f"s5-erase_{form}", length) for length in ("128", "512")]
        of_bound = ("bound_s3-erase_" + form, "16_128", "sequence")
        assert line(page, f"`erase_{form}` |")[1:] == [*cells, shown(*of_bound)]
    copied = {
        form: [shown(f"copy-erase_{form}-0.001", length) for length in ("100", "200")]
        for form in ("half", "m6")
    }
    assert line(page, "`erase_half`, copying 1e-3")[1:3] == copied["half"]
    tracked = [shown("a5-erase_m6-0.004", length) for length in ("128", "512")]
    assert line(page, "`erase_m6`, copying 1e-3")[1:5] == [*copied["m6"], *tracked]
    of_heads = "that with feedback", "it and the first group", "it and the second group", "all"
    for start, form in zip(of_heads, ("fed", "first_group", "second_group", "all"), strict=True):
        copies = [shown(f"d64-erase_{form}", length) for length in ("40", "80")]
        assert line(page, start)[1:3] == copies
    for start, form in (of_heads[1], "first_group"), (of_heads[3], "all"):
        tracked = [shown(f"d64-s3-erase_{form}", length) for length in ("128", "512")]
        assert line(page, start)[3:5] == tracked
    for start, form in (of_heads[0], "fed"), (of_heads[1], "first_group"):
        name = f"d64-bound_s3-erase_{form}"
        assert line(page, start)[5:7] == [shown(name, "6_16"), shown(name, "6_64", "recall")]
    for form in ("7x16x16", "7x16x32g2", "8x16x32g1", "6x16x64g1"):
        copies = [shown(f"d64-{form}", length) for length in ("40", "80")]
        (found,) = re.findall(
            rf"^\| {form} \| [\d,]+ \| ([\d. ]+) \| ([\d. ]+) \|", page, re.MULTILINE
        )
        assert list(found) == copies


def test_hazards_of_the_sanitizer_are_those_of_cublas() -> None:
    path = RESULTS / "benchmark" / "h200_checks.json"
    checks = json.loads(path.read_text(encoding="utf-8"))
    page = TEXTS["benchmark"].split("## Checks on a GPU")[1]
    entries = {row["entry"] for row in checks["rows"]}
    assert f"in {len(entries)} entries: no error" in page
    assert len(checks["rows"]) == 2 * len(entries)
    found = [row for row in checks["rows"] if row["errors"]]
    assert len(found) == 6 and all(row["tool"] == "racecheck" for row in found)
    assert all(name.startswith("nvjet_sm90_") for row in found for name in row["kernels"])
    for row in checks["replays"]:
        assert not row["differing"] and f"{row['replays']:,} " in page
        assert f"`{row['layer']}`" in page


def test_table_of_schedules_is_that_of_the_raw_results() -> None:
    rows = {
        (row["point"]["lr"], row["point"]["schedule"]): row["accuracy"]["12"]["token"]
        for row in raw("a5-one-head/a5_schedules")["rows"]
    }
    for lr in (0.001, 0.0015, 0.002):
        shown = [" ".join(f"{v:.3f}" for v in rows[lr, name]) for name in ("hold", "cosine")]
        assert line(TEXTS["a5-one-head"], f"{lr} |")[1:] == shown
