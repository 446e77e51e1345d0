"""The README's Python code runs, and its numbers are those of the raw results."""

import json
import re
from statistics import fmean
from typing import Any

import pytest
from tests.examples.test_results import RESULTS, ROOT, cells_of, runs_of, summary, tuning_runs

import bedouin
from benchmarks.cases import SPEED
from benchmarks.targets import PAPER_16, PAPER_100
from research.experiments.language_model import SCORE
from research.experiments.table import RATES, VARIANTS

PAGES = {
    "README": ROOT / "README.md",
    "examples": ROOT / "examples" / "README.md",
    "integrations": ROOT / "examples" / "integrations" / "README.md",
    "index": RESULTS / "README.md",
    **{path.parent.name: path for path in sorted(RESULTS.glob("*/README.md"))},
}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
README = TEXTS["README"]
TEXT = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
"""The README without code."""
PROSE = " ".join(line for line in TEXT.splitlines() if not line.startswith("|"))
"""And without tables."""
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(block: str) -> dict[str, Any]:
    """Execute a block by itself, with 3 steps of training in place of 400; returns its names."""
    names: dict[str, Any] = {}
    exec(block.replace("range(400)", "range(3)"), names)
    return names


TRAINING = next(block for block in BLOCKS if "optimizer" in block)


def test_every_block_runs_by_itself_and_gives_what_they_promise() -> None:
    first, training, parts, decoding, mixer = map(run, BLOCKS)
    assert first["y"].shape == (8, 100, 64) and first["y_t"].shape == (8, 64)
    assert bool(first["layer"].stats.converged.all())
    assert bool(first["iterated"].stats.converged.all())
    assert not training["model"].training and training["tokens"].shape == (64, 512)
    assert parts["solution"].result.message == "every sample converged"
    assert decoding["x_t"].shape == (1, 64) and decoding["state"].y.shape == (1, 128)
    assert bool(mixer["layer"].stats.converged.all())


def test_the_training_loop_is_short_and_has_the_recipe() -> None:
    assert "range(400)" in TRAINING
    assert len(TRAINING.split("\n\n", 1)[1].strip().splitlines()) <= 15
    for part in ("param_groups", "warmup", "clip_grad_norm_", "model.eval()"):
        assert part in TRAINING
    rates = ", ".join(f"{rate:.0e}".replace("e-0", "e-") for rate in RATES[:-1])
    assert f"try the rates {rates} and {RATES[-1]:.0e}".replace("e-0", "e-") in PROSE


def test_the_long_description_is_taken_from_the_readme() -> None:
    text = (ROOT / ".ci" / "pypi.md").read_text(encoding="utf-8")
    paragraphs = [part for part in text.split("\n\n") if "the README of the repository" not in part]
    assert len(paragraphs) > 5 and all(part.rstrip() in README for part in paragraphs)


def test_the_page_of_the_examples_is_short_and_names_every_folder() -> None:
    assert len(TEXTS["examples"].split()) <= 200
    folders = [path.parent for path in (ROOT / "examples").glob("*/*.py")]
    assert all(path.name in TEXTS["examples"] for path in folders)
    for name in ("train_a5", "train_copy", "train_lm"):
        script = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert len(script.splitlines()) <= 160 and "cross_entropy" in script, name
    shared = (path.read_text().splitlines() for path in (ROOT / "examples" / "common").glob("*.py"))
    assert sum(map(len, shared)) <= 800


def test_the_readme_and_the_index_are_short_and_lead_to_every_experiment() -> None:
    assert len(PROSE.split()) <= 1100
    assert len(TEXTS["index"].split()) <= 1500
    folders = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert folders == PAGES.keys() - {"README", "examples", "integrations", "index"}
    assert all(f"({folder}/README.md)" in TEXTS["index"] for folder in folders)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_no_row_says_skipped(page: str) -> None:
    assert "skipped" not in TEXTS[page]
    targets = re.findall(r"\]\(([^)#]+)", TEXTS[page])
    local = [target for target in targets if not target.startswith("https://")]
    assert all((PAGES[page].parent / target).is_file() for target in local)


def speeds() -> list[dict[str, Any]]:
    """The rows of speed.json."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / "speed.json").read_text(encoding="utf-8"))
    return rows


def test_speed_is_that_of_the_benchmark() -> None:
    rows = runs_of("benchmark")["h200_layers"]["rows"]
    layers = {(row["case"], row["shape"]): row["numbers"] for row in rows}
    page = TEXTS["benchmark"].split("## Times of the layers")[1].split("\n## ")[0]
    lines = [row for row in page.splitlines() if row.startswith("| ")][1:]
    shapes = "128x16", "64x256", "16x1024", "8x4096"
    starts = {
        "tracking": "`TrackingDeltaNet`",
        "memory": "its memory alone",
        "tracker": "its tracker alone",
        "direct-heads16": "`Bedouin`, 16 heads of 64",
        "direct-heads8": "8 heads of 128",
        "direct": "one head of 1,024",
        "direct-no-feedback": "the same without feedback",
        "rnn": "`FixedPointRNN`",
        "picard": "one head, 16 Picard steps, one-step gradient",
        "picard-exact": "the same, exact gradient",
        "mamba": "Mamba of this library",
        "lstm": "cuDNN LSTM, 512 → 1,024",
    }
    assert set(starts) == set(SPEED)
    graph = {case: [layers[case, shape]["graph_both_ms"] for shape in shapes] for case in starts}
    for row, (case, start) in zip(lines, starts.items(), strict=True):
        times = [layers[case, shape] for shape in shapes]
        shown = [f"{n['graph_both_ms']:.3g} / {n['both_ms']:.3g}" for n in times]
        peaks = ", ".join(f"{n['peak_gib']:.3g}" for n in times)
        assert row == f"| {' | '.join([start, *shown, peaks])} |"
    for shape in shapes:
        columns = "tracking", "direct-heads16", "direct-heads8", "lstm", "mamba"
        times = [layers[case, shape] for case in columns]
        shown = [f"{n['graph_both_ms']:.3g}/{n['both_ms']:.3g}" for n in times]
        assert cells_of(README, f"{shape.replace('x', '×')} ")[1:6] == shown

    def faster(case: str) -> list[bool]:
        return [a < b for a, b in zip(graph[case], graph["lstm"], strict=True)]

    assert "`TrackingDeltaNet` is faster than the LSTM from 64×256 on, `Bedouin` from 16×" in PROSE
    assert faster("tracking") == [False, True, True, True]
    for case in ("direct-heads16", "direct-heads8"):
        assert faster(case) == [False, False, True, True]
    assert [case for case in SPEED if faster(case)[0]] == ["memory", "tracker"]
    ratio = graph["direct"][2] / graph["direct-heads8"][2]
    assert f"of 1,024 takes {ratio:.1f} times as long on a GPU as eight of 128" in PROSE
    first: dict[str, list[float]] = {}
    for entry in speeds():
        first.setdefault(entry["layer"], []).append(entry["first_call_s"])
    every = [s for name, found in first.items() if name not in ("lstm", "mamba") for s in found]
    assert f"First calls compile for {min(every):.0f}–{max(every):.0f} s" in README
    heads = [s for name, found in first.items() if "head" in name for s in found]
    tracking, mamba = first["tracking"], first["mamba"]
    assert f"of `Bedouin` take {min(heads):.0f} to {max(heads):.0f} s, of `Tracking" in page
    assert f"DeltaNet` {min(tracking):.0f} to {max(tracking):.0f} s, of Mamba" in page
    assert f"of Mamba {min(mamba):.0f} to {max(mamba):.0f} s." in page
    assert [entry["graph_ms"] for entry in speeds()] == [ms for case in SPEED for ms in graph[case]]


def test_times_of_the_papers_code_are_those_of_the_benchmark() -> None:
    for shape, few in PAPER_16.items():
        assert cells_of(README, f"{shape.replace('x', '×')} ")[6] == f"{few:g}/{PAPER_100[shape]:g}"


RIVALS = [model for model in VARIANTS if not model.startswith(("bedouin", "tracking"))]
NAMES = {
    "attention_l2": "attention",
    "gated_deltanet_l1": "Gated DeltaNet",
    "hybrid_l2": "hybrid",
    "lstm_l1": "LSTM",
}
"""Rivals as the README calls them."""
TABLE = {
    "A5:": ("a5", "token_512"),
    "S5:": ("s5", "token_512"),
    "copying:": ("copy", "characters_200"),
    "MQAR:": ("mqar", "accuracy_512"),
    "bound S3:": ("bound_s3", "token_16_32"),
    "bound A5:": ("bound_a5", "token_16_32"),
}
"""The measure of each row of the README's table of results."""
LANGUAGE_MODELS = {
    "recall": "recall",
    "bedouin": "bedouin",
    "gated_deltanet": "Gated DeltaNet",
    "attention": "attention",
    "mamba": "Mamba",
    "lstm": "LSTM",
}
"""The language models, and rivals as the README calls them."""


def spread(values: list[float]) -> str:
    """Mean and range."""
    return f"{fmean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def all_seeds(task: str, model: str, measure: str) -> list[float]:
    """The reported seeds, and those of table-seeds of a layer of the README."""
    values = list(summary()[task][model][measure])
    further = runs_of("table-seeds").get(f"{task}-{model}")
    if further is not None:
        values += further["rows"][0]["accuracy"][measure.split("_")[1]]["token"]
    return values


@pytest.mark.parametrize("start", TABLE)
def test_the_table_of_results_is_that_of_the_raw_results(start: str) -> None:
    task, measure = TABLE[start]
    models = summary()[task]
    _, tracking, rivals, _ = cells_of(README, start)
    assert tracking == spread(all_seeds(task, "tracking", measure))
    found = {m: all_seeds(task, m, measure) for m in models if m in RIVALS}
    best = max(found, key=lambda model: fmean(found[model]))
    assert rivals.startswith(f"{NAMES[best]} ")
    shown = [f"{NAMES[model]} {spread(found[model])}" for model in NAMES]
    assert set(rivals.split(", ")) <= set(shown)


def test_the_row_of_chess_is_that_of_the_raw_results() -> None:
    boards = {model: of["boards_120"] for model, of in summary()["chess"].items()}
    _, tracking, others, words = cells_of(README, "chess")
    own, lstm = spread(boards["bedouin"]), spread(boards["lstm_l1"])
    assert tracking == spread(boards["tracking"])
    assert others == f"**`Bedouin` {own}**, LSTM {lstm}"
    means = [f"{fmean(boards[rival]):.2f}" for rival in ("gated_deltanet_l1", "attention_l2")]
    assert "Gated DeltaNet has {}, attention {}.".format(*means) in words
    assert min(boards.pop("bedouin")) > max(v for values in boards.values() for v in values)


def bits_of(name: str, number: int = 3, page: str = "language", score: str = SCORE) -> list[float]:
    """Bits per byte of the first seeds of a language model."""
    runs = [runs_of(page)[f"{name}-seed{seed}"] for seed in range(number)]
    return [run["bits_per_byte"][score] for run in runs]


def test_the_words_on_results_are_those_of_the_raw_results() -> None:
    tasks = summary()
    found = "`TrackingDeltaNet` were chosen in {tracking} tuning runs, those of a rival in {rival}."
    assert found.format(**tuning_runs()) in PROSE
    new = "gated_deltanet_l1", "kda_l1", "mamba3_l1"
    flat = [value for model in new for value in tasks["a5"][model]["token_512"]]
    assert f"have {min(flat):.2f} to {max(flat):.2f}." in cells_of(README, "A5:")[3]
    for start in ("copying:", "MQAR:"):
        task, measure = TABLE[start]
        own = spread(tasks[task]["kda_l1"][measure])
        assert f"Kimi Delta Attention {own}." in cells_of(README, start)[3]
    assert min(tasks["copy"]["attention_l2"]["characters_200"]) > 0.995
    assert max(tasks["mqar"]["lstm_l1"]["accuracy_512"]) < 0.005
    bound, copied = tasks["bound_s3"], tasks["copy"]
    one = [max(bound[m]["token_16_32"]) for m in RIVALS if m in bound and m.endswith("_l1")]
    assert f"at most {max(one):.2f}." in cells_of(README, "bound S3:")[3]
    recurrent = [m for m in RIVALS if m in copied and m != "attention_l2"]
    assert max(recurrent, key=lambda m: fmean(copied[m]["characters_200"])) == "gated_deltanet_l1"
    of_lstm = all_seeds("a5", "lstm_l1", "token_512")  # "most seeds track as far"
    assert sum(value > 0.99 for value in of_lstm) > 5
    models = {name: bits_of(name) for name in LANGUAGE_MODELS}
    cells = cells_of(README, "Python source")
    assert cells[1] == spread(bits_of("tracking"))
    earlier = fmean(all_seeds("s5", "recall", "token_512")), fmean(models.pop("recall"))
    assert "better on S5 ({:.2f}) and Python source ({:.2f} bits), ".format(*earlier) in PROSE
    own, lstm = spread(models.pop("bedouin")), spread(models["lstm"])
    best = min(models, key=lambda name: fmean(models[name]))
    assert cells[2] == f"{LANGUAGE_MODELS[best]} {spread(models[best])}"
    assert f"as a language model it needs {own} bits per byte, an LSTM {lstm}." in PROSE
    large = [bits_of(name, 2, "language-large", "2048") for name in ("tracking", "gated_deltanet")]
    shown = [spread(large[0]), f"Gated DeltaNet {spread(large[1])}"]
    assert cells_of(README, "source of packages")[1:3] == shown


def test_the_words_on_heads_are_those_of_the_raw_results() -> None:
    one, eight, equal = (
        runs_of("heads")[f"a5-{name}"]["rows"][0] for name in ("heads1", "heads8", "heads1-equal")
    )
    labels = {id(row): row["accuracy"]["512"]["token"] for row in (one, eight, equal)}
    runs = [runs_of("length")[f"{task}-bedouin"]["rows"][0] for task in ("a5", "s5")]
    shown = [spread(row["accuracy"]["512"]["token"]) for row in runs]
    assert "has {} of the labels of A5 at 512 and {} of S5;".format(*shown) in PROSE
    assert fmean(labels[id(one)]) > fmean(labels[id(eight)])
    sizes = one["parameters"] / 1e6, eight["parameters"] / 1e6
    assert "and has {:.1f} M parameters instead of {:.1f} M.".format(*sizes) in PROSE
    assert abs(fmean(labels[id(equal)]) - fmean(labels[id(eight)])) < 0.05


def test_the_table_of_layers_is_that_of_the_raw_results() -> None:
    rows = json.loads((RESULTS / "cpu.json").read_text(encoding="utf-8"))["rows"]
    of = {(row["layer"], row["d_model"]): row for row in rows}
    ms = {(row["layer"], row["shape"]): row["graph_ms"] for row in speeds()}
    shapes = "64x256", "16x1024"

    def shown_ratio(value: float) -> str:
        return f"{value:.1f}" if value < 10 else f"{value:.0f}"

    timed = "8 heads", "picard, one step", "FixedPointRNN", "tracking"
    of_lstm = [[ms[layer, shape] / ms["lstm", shape] for shape in shapes] for layer in timed]
    on_gpu = ["; ".join(map(shown_ratio, pair)) for pair in of_lstm]
    layers = [name.strip("`").removesuffix("(d_model)") for name in cells_of(README, "| `")[1:]]
    assert layers == ["Bedouin", "Bedouin.from_paper", "FixedPointRNN", "TrackingDeltaNet"]
    sizes = [f"{of[layer, 256]['state_size']:,}" for layer in layers]
    assert cells_of(README, "state |")[1:] == sizes
    on_cpu = [[shown_ratio(of[layer, m]["of_lstm"]) for m in (64, 256)] for layer in layers]
    assert cells_of(README, "time on a CPU")[1:] == ["; ".join(pair) for pair in on_cpu]
    assert cells_of(README, "time on a GPU")[1:] == on_gpu
    for layer in layers:
        made = bedouin.Bedouin.from_paper if "." in layer else getattr(bedouin, layer)
        assert of[layer, 256]["parameters"] == sum(p.numel() for p in made(256).parameters())
    assert f"where an LSTM has {of['LSTM', 256]['state_size']:,}." in PROSE
    compiled = [of["Bedouin, compiled", m]["ms"] / of["Bedouin", m]["ms"] for m in (64, 256)]
    assert "takes {:.1f} (d_model 64) and {:.1f} times (256) as long.".format(*compiled) in PROSE
