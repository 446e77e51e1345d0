"""The README's Python code runs, and its numbers are those of the raw results."""

import json
import re
import sys
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
from common.runs import read_runs  # noqa: E402
from research.experiments.language_model import SCORE  # noqa: E402
from research.experiments.table import VARIANTS  # noqa: E402
from research.summary import summarize  # noqa: E402

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
    script = (ROOT / "examples" / "train_a5.py").read_text(encoding="utf-8")
    assert len(script.splitlines()) <= 150  # the page tells to copy it


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
    assert {row["layer"] for row in recorded} >= set(SPEED.values())


def test_times_of_the_papers_code_are_those_of_the_benchmark() -> None:
    source = (ROOT / "examples" / "benchmarks" / "targets.py").read_text()
    few, many = (
        dict(re.findall(r'"(\w+)": ([\d.]+)', re.search(rf"^{name} = .*$", source, re.M)[0]))  # type: ignore[index]
        for name in ("PAPER_16", "PAPER_100")
    )
    for shape in few:
        shown = f"{float(few[shape]):g}/{float(many[shape]):g}"
        assert line(README, f"{shape} ")[7] == shown


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

    assert "Only recall, with or without reflections, reaches 0.99 on both A5 at 512 and" in text
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
    assert f"without erase it copies better ({unerased}) and tracks less;" in text
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
    tuned = f"recall {min(ours)}–{max(ours)}, rivals {min(rivals)}–{max(rivals)}."
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


def test_bits_of_the_readme_are_those_of_the_runs() -> None:
    of_readme = {"gated_deltanet": "Gated DeltaNet ", "attention": "attention ", "recall": "("}
    for name, start in of_readme.items():
        runs = [runs_of("language")[f"{name}-seed{n}"] for n in range(3)]
        shown = " ".join(f"{run['bits_per_byte'][SCORE]:.2f}" for run in runs)
        assert f"{start}{shown}" in README.replace("\n", " ")
