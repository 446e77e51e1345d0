"""The pages of examples/results are short, and their numbers are those of the raw runs."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import pytest

from bedouin import TrackingDeltaNet
from benchmarks import table
from benchmarks.whole_models import DEPTHS, MIXERS
from research import experiment
from research.experiments.table import EARLIER, TASKS
from research.runs import read_runs
from research.summary import CHESS, markdown, summarize, tuning_markdown

RESULTS = experiment.RESULTS
ROOT = RESULTS.parents[1]
TEXTS = {p.parent.name: p.read_text(encoding="utf-8") for p in sorted(RESULTS.rglob("*.md"))}
"""The pages by folder; that of `results` is the index."""
Of = TypeVar("Of")
Seeds = list[float]
Raw = dict[str, tuple[list[Seeds], list[float]]]
"""By what is common to the names of runs of several seeds: values of all seeds, and numbers."""
SEVERAL = re.compile(r"(?<![\d.,×])\d+\.\d+(?: \d+\.\d+)+(?![\d×])")
"""The values of several seeds."""
ONE = re.compile(r"\**([\d,]+(?:\.\d+)?)\**( M)?$")
NOT_RAW = {"0.91 0.97 0.84", "0.711 0.908 0.919", "0.744 0.745 0.950"}
"""Of runs of several scripts, and means over test lengths."""


@cache
def runs_of(folder: str) -> dict[str, Any]:
    """All runs of an experiment by name."""
    return read_runs(RESULTS / folder)


@cache
def summary() -> dict[str, Any]:
    return summarize(RESULTS)


@cache
def tuning_runs() -> dict[str, str]:
    """How many tuning runs the tasks have of each layer, and of a rival of ours."""
    counts = defaultdict(list)
    for task in TASKS:
        for model, of in summary()[task].items():
            name = model if model.startswith(("bedouin", "recall", "tracking")) else "rival"
            counts[name].append(of["tuning_runs"])
    return {name: f"{min(found)} to {max(found)}" for name, found in counts.items()}


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, dict):
        for key, of in value.items():
            if key != "history":
                yield from numbers(of, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def seeds(value: Any) -> Iterator[Seeds]:
    """The lists of numbers in what a run has written, and of the same number of all its dicts."""
    if isinstance(value, dict):
        for key, of in value.items():
            if key not in ("history", "config"):
                yield from seeds(of)
    elif isinstance(value, list) and value:
        if all(isinstance(v, int | float | None) for v in value):
            yield [float("nan" if v is None else v) for v in value]
        found = defaultdict(list)
        for v in value:
            yield from seeds(v)
            for path, number in numbers(v) if isinstance(v, dict) else ():
                found[path].append(number)
        yield from found.values()


@cache
def raw(folder: str) -> Raw:
    """The numbers of the runs of a page; runs of one seed each count as one, in their order."""

    def order(name: str) -> tuple[bool, int]:
        found = re.search(r"seed(\d+)|-s(\d+)$", name)
        return "more" in name, int(found[1] or found[2]) if found else 0

    if folder == "results":
        return {f"{of} {name}": v for of in TEXTS.keys() - {folder} for name, v in raw(of).items()}
    named = defaultdict(list)
    for name in sorted(runs_of(folder), key=order):
        named[re.sub(r"seed\d+|-s\d+$|-more", "", name)].append(runs_of(folder)[name])
    found: Raw = {}
    for name, runs in named.items():
        lists = [list(seeds(run)) for run in runs]
        joined = [[v for part in parts for v in part] for parts in zip(*lists, strict=False)]
        found[name] = [*seeds(runs), *joined], [v for run in runs for _, v in numbers(run)]
    return found


def cells_of(page: str, start: str) -> list[str]:
    """The cells of the one table line that begins with `start`."""
    (found,) = [row for row in page.splitlines() if row.startswith(f"| {start}")]
    return [cell.strip() for cell in found.strip("|").split(" | ")]


def of_label(runs: dict[str, Of], label: str) -> dict[str, Of]:
    """Those whose names have the first cell of a row as a part; all without a row or a name."""
    word = label.strip("`").split(",")[0].lower()
    if not word:
        return runs
    exact = {n: v for n, v in runs.items() if word in re.split("[-/ .]", n.lower())}
    return exact or {n: v for n, v in runs.items() if word in n.lower()} or runs


@cache
def shown(page: str, digits: int) -> dict[str, str]:
    """The values of seeds of each run as pages show them; of the page "summary" by model."""
    if page == "summary":
        found = {
            f"{task}-{model}": [v for v in of.values() if isinstance(v, list)]
            for task, models in summary().items()
            for model, of in models.items()
        }
    else:
        found = {name: lists for name, (lists, _) in raw(page).items()}
    return {
        name: "".join(f" {' '.join(f'{v:.{digits}f}' for v in of)} |" for of in lists)
        for name, lists in found.items()
    }


def test_values_of_seeds_are_those_of_the_runs_of_the_row() -> None:
    number = 0
    for page, text in TEXTS.items():
        pages = page, "summary"
        for line in text.splitlines():
            label = line.split("|")[1].strip() if line.startswith("| ") else ""
            for seeds in {found[0] for found in SEVERAL.finditer(line)} - NOT_RAW:
                digits = len(seeds.split()[0].partition(".")[2])
                known = [of_label(shown(of, digits), label) for of in pages]
                assert any(f" {seeds} " in text for of in known for text in of.values()), (
                    page,
                    seeds,
                    line,
                )
                number += 1
    assert number > 350


@pytest.mark.parametrize("page", sorted(TEXTS.keys() - {"table", "benchmark"}))
def test_cells_with_one_number_are_those_of_the_runs_of_the_row(page: str) -> None:
    """Seconds, sizes, rates, single seeds and means; the other pages have tests of their own."""
    own = raw(page)
    for line in TEXTS[page].splitlines() if own else ():
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        runs = of_label(own, label)
        for found in filter(None, map(ONE.match, cells)) if line.startswith("| ") else ():
            digits, sizes = len(found[1].partition(".")[2]), (1e6,) if found[2] else (1, 2**30)
            known = {
                f"{value / size:,.{digits}f}".replace(",", "")
                for lists, values in runs.values()
                for value in (*values, *map(fmean, lists), *(v for of in lists for v in of))
                for size in sizes
            }
            assert found[1].replace(",", "") in known | {"8192"}, (page, found[0], line)


def test_the_pages_are_short_and_the_files_few() -> None:
    for text in ("\n".join(TEXTS.values()), "\n".join(TEXTS.values()).replace("|", " ")):
        assert len(text.split()) <= 9000
    assert len(list(RESULTS.rglob("*.json"))) <= 25


def test_every_figure_is_shown() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in (*RESULTS.rglob("*.md"), ROOT / "README.md")
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert {path.resolve() for path in RESULTS.rglob("*.png")} <= shown


def test_the_page_of_the_examples_has_the_numbers_of_the_runs() -> None:
    page = Path(ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    found = [runs_of("cpu")[f"a5_cpu_heads_seed{seed}"] for seed in range(2)]
    worst = min(run["sequence_accuracy"]["24"] for run in found)
    assert f"trained at length 6; {worst:.2f} of the sequences right at 24" in page
    copied = runs_of("cpu")["copy_cpu_heads_seed0"]["character_accuracy"]["12"]
    assert f"{copied:.2f} of the characters right at 12" in page


# -- the table


def test_the_table_is_that_of_the_summary() -> None:
    for page, tasks in (("table", TASKS), ("chess", CHESS)):
        shown = TEXTS.get(page, "<!-- summary -->").split("<!-- summary -->")[1]
        assert shown.split("<!-- /summary -->")[0].strip() == markdown(RESULTS, tasks).strip()
    assert json.loads((RESULTS / "summary.json").read_text(encoding="utf-8")) == summary()


def test_claims_of_the_table_and_the_index_hold() -> None:
    def worst(task: str, measure: str, *models: str) -> float:
        return min(float(v) for model in models for v in summary()[task][model][measure])

    def span(task: str, measure: str, model: str) -> str:
        values = summary()[task][model][measure]
        return f"{min(values):.2f} to {max(values):.2f}"

    of_2048 = [span("a5", "token_2048", model) for model in ("lstm_l1", "tracking")]
    of_s5 = [span("s5", "token_512", model) for model in ("tracking", "lstm_l1")]
    near = [worst("s5", "token_128", m) for m in ("tracking", "lstm_l1")]
    sequences = sorted(summary()["bound_a5"]["tracking"]["sequence_16_128"])
    for claim in (
        "At 2,048 the LSTM has {}, `tracking` {}.".format(*of_2048),
        f"({min(near):.2f} or more of the labels of 128, `tracking` {near[0]:.2f})",
        "at 512 `tracking` has {}, the LSTM {}.".format(*of_s5),
        f"keeps {sequences[1]:.2f} to {sequences[-1]:.2f} of the sequences in these four",
        f"keep {worst('bound_s3', 'sequence_16_128', 'tracking_blocks'):.2f} of the sequences",
        f"Gated DeltaNet {span('copy', 'characters_200', 'gated_deltanet_l1')} of the characters",
        f"`tracking` {span('copy', 'characters_200', 'tracking')}. Kimi Delta Attention has "
        f"{span('copy', 'characters_200', 'kda_l1')}. Of 64 pairs the first three recall 0.98 or "
        f"more, the last {span('mqar', 'accuracy_512', 'kda_l1')}. Gated DeltaNet-2 copies as far "
        f"({span('copy', 'characters_200', 'gdn2_l1')}), Mamba-3",
    ):
        assert claim in TEXTS["table"], claim
    assert worst("a5", "token_512", "tracking", "lstm_l1") > 0.99
    assert sum(v < 0.03 for v in summary()["a5"]["tracking_blocks"]["token_512"]) == 3
    assert worst("mqar", "accuracy_512", "attention_l2", "gated_deltanet_l1", "tracking") > 0.98
    learned = {m for m in summary()["bound_s3"] if worst("bound_s3", "token_16_32", m) > 0.99}
    assert learned - set(EARLIER) == {"tracking", "hybrid_l2"}
    assert worst("bound_s3", "sequence_16_128", "tracking", "hybrid_l2") > 0.98
    assert worst("bound_a5", "token_16_32", "hybrid_l2", "deltaproduct_l2") > 0.99
    assert sum(v > 0.99 for v in summary()["bound_a5"]["tracking"]["token_16_32"]) == 4


def test_every_tuning_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiment.main(experiment.Config(tuning=True)) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == tuning_markdown(RESULTS).strip()
    rows = [row for run in runs_of("table-tuning").values() for row in run.get("rows", ())]
    assert shown.count("\n|") - 2 * shown.count("|form|") == len(rows) > shown.count("|chosen|") > 0
    page = TEXTS["table-tuning"]
    assert "Rivals have {rival} runs a task".format(**tuning_runs()) in page
    assert "`tracking` {tracking} with its trials".format(**tuning_runs()) in page


# -- language, history, times


def test_whole_models_are_those_of_the_page() -> None:
    report = json.loads((RESULTS / "models.json").read_text(encoding="utf-8"))
    rows = {(row["model"], row["task"]): row for row in report["rows"]}
    names = {"tracking": "`TrackingDeltaNet`", "mamba": "Mamba of this library"}
    names |= {"lstm": "LSTM (cuDNN)", "attention": "attention"}
    assert MIXERS["tracking"] is TrackingDeltaNet
    for model, name in names.items():
        tasks = ("train", "captured", "compiled", "decode-1", "decode-64")
        speeds = [f"{rows[model, task]['tokens_per_second']:,.0f}" for task in tasks]
        train = rows[model, "train"]
        size, peak = f"{train['parameters'] / 1e6:.1f} M", f"{train['peak_gib']:.1f}"
        cells = cells_of(TEXTS["benchmark"], f"{name}, {DEPTHS[model]} layers")
        assert cells[1:] == [size, *speeds[:3], peak, *speeds[3:]]
    mamba, lstm, one, many = report["ratios"].values()
    peaks = [rows[model, "vocabulary-torch"]["peak_gib"] for model in ("tracking", "mamba")]
    for claim in (
        *(f"({mamba:.2f}, met", f"({lstm:.2f}, missed", f"({one:.2f}, met) and 64 ({many:.2f},"),
        f"131,072 the peak is {peaks[0] / peaks[1]:.2f} of Mamba's",
    ):
        assert claim in TEXTS["benchmark"]


def test_targets_of_the_benchmark_are_those_of_the_page() -> None:
    page, runs = TEXTS["benchmark"], runs_of("benchmark")
    for name, run in runs.items():
        where = run["device"] if "device" in run else run["machine"]["device"]
        assert cells_of(page, f"{name} |")[2] in where
    verdict = table.TARGET_TITLES.index("verdict")
    found = {(row[0], row[1]): row for row in table.target_rows(runs["h200_layers"]["rows"])}
    missed = {key: row for key, row in found.items() if row[verdict].startswith("missed")}
    times = {key: row for key, row in missed.items() if key[0].endswith("fwd + bwd, ms")}
    over = [float(row[verdict][8:-2]) for key, row in times.items() if "heads" in key[0]]
    assert len(over) == 8 and f"by {min(over):.1f} to {max(over):.1f} times" in page
    peaks = [row for key, row in missed.items() if "heads" in key[0] and "GiB" in key[0]]
    over = [float(row[2]) / float(row[3]) for row in peaks]
    assert len(over) == 8 and f"those of memory by {min(over):.1f} to {max(over):.1f}" in page
