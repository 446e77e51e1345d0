"""The pages of language, small layers, times, trials and history have the numbers of their runs."""

import json
import re
from statistics import fmean

import pytest
from tests.examples.result_pages import (
    RESULTS,
    TEXTS,
    device,
    joined,
    line,
    names_of,
    of_run,
    of_seeds,
    raw,
    runs_of,
    seconds,
)

from benchmarks import table
from research.experiments.language_model import SCORE, TUNING_SEED
from research.experiments.table import BEYOND, RATES

BITS = {
    **{"gated_deltanet": "Gated DeltaNet", "attention": "attention", "mamba": "Mamba"},
    **{"bedouin": "the default layer", "lstm": "LSTM"},
}
"""Names of the page of language."""


@pytest.mark.parametrize("name", [*BITS, "recall", "recall_n64", "tracking"])
def test_tuned_language_models_are_those_of_the_pages(name: str) -> None:
    found = runs_of("language-tuning")
    rates = (*RATES, BEYOND[RATES[-1]])
    tried = {rate: found[f"{name}-{rate:g}"] for rate in rates if f"{name}-{rate:g}" in found}
    assert {run["seed"] for run in tried.values()} == {TUNING_SEED}
    further = "H200" if name.startswith(("recall", "tracking")) else "H100"
    assert all(device(run) == ("H200" if rate in RATES else further) for rate, run in tried.items())
    bits = {rate: float(run["bits_per_byte"][SCORE]) for rate, run in tried.items()}
    best = min(bits, key=bits.__getitem__)
    cells = [f"{bits[rate]:.3f}" if rate in tried else "–" for rate in rates]
    cells[rates.index(best)] = f"**{cells[rates.index(best)]}**"
    assert line(TEXTS["language-tuning"], f"{name} |")[1:] == cells
    runs = [runs_of("language")[f"{name}-seed{seed}"] for seed in range(3)]
    assert {(device(run), run["config"]["lr"]) for run in runs} == {(further, best)}
    peaks = [run["peak_memory"] for run in runs if "peak_memory" in run]
    start = f"`{name}`" if name == "recall_n64" else f"{name},"
    page = TEXTS["language"].replace("| mamba |", "| mamba, |").replace("| lstm |", "| lstm, |")
    assert line(page, start)[1:] == [
        f"{runs[0]['parameters'] / 1e6:.2f} M",
        f"{best:g}",
        joined((run["bits_per_byte"][SCORE] for run in runs), 3),
        f"{fmean(run['bits_per_byte'][SCORE] for run in runs):.3f}",
        joined((run["bits_per_byte"]["8192"] for run in runs), 3),
        # scripts of later versions record no memory
        f"{max(peaks) / 2**30:.1f}" if peaks else "–",
    ]


def test_differences_of_language_models_are_those_of_the_page() -> None:
    found = runs_of("language")

    def mean(name: str) -> float:
        return fmean(found[f"{name}-seed{n}"]["bits_per_byte"][SCORE] for n in range(3))

    behind = [mean(name) - mean("recall") for name in BITS]
    form = "needs {:.3f} less than Gated DeltaNet, {:.3f} less than attention, {:.3f} less than "
    form += "Mamba and {:.3f} less than the default layer;"
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
    assert " of the second row is {:.3f}, that of the LSTM {:.3f};".format(*means) in page
    made = found["make_lm-seed0"]
    shown = [f"{made['parameters']:,}", f"{made['bits_per_byte']['128']:.3f} (seed 0)"]
    assert line(page, "`make lm`, d_model 64")[1:] == [*shown, f"{made['seconds']:.0f}"]


def test_a5_on_a_cpu_is_that_of_the_pages() -> None:
    def cells(name: str, *columns: tuple[str, str]) -> list[str]:
        shown = [of_seeds(name, measure, length, range(3)) for measure, length in columns]
        return [*shown, seconds(name, range(3))]

    of_rows = ("sequence_accuracy", "12"), ("sequence_accuracy", "24")
    rows = {
        "one head, rate": "a5_cpu_bounded_delta_seed{}",
        "the same with input": "a5_cpu_delta_seed{}",
        "one head, feedback of Δ, B, C": "a5_cpu_seed{}",
    }
    name = "a5-cpu/a5_cpu_heads_seed{}"
    made = [of_seeds(name, measure, length, range(2), 3) for measure, length in of_rows]
    assert line(TEXTS["a5-cpu"], "`make a5`: two heads")[1:] == [*made, seconds(name, range(2))]
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
    runs = {"`make copy`, 0": "heads_seed0"} | {
        f"`recall`, {seed}": f"recall_seed{seed}" for seed in range(3)
    }
    for start, run in runs.items():
        content = raw(f"copying-cpu/copy_cpu_{run}")
        shown = [f"{content['character_accuracy'][n]:.3f}" for n in ("8", "12", "16")]
        shown += [f"{content['string_accuracy']['16']:.3f}", f"{content['seconds']:.0f}"]
        assert line(TEXTS["copying-cpu"], f"{start} |")[1:] == shown
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
    peaks = [key for key in missed if key[0].endswith("GiB")]
    assert all(float(missed[key][2]) / float(missed[key][3]) < 1.055 for key in peaks)
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


def accuracies(name: str, length: str, metric: str = "token") -> list[float]:
    """The values of a trial of `TrackingDeltaNet`, of one seed or of several."""
    found = raw(f"tracking-trials/{name}")["accuracy"][length][metric]
    return found if isinstance(found, list) else [found]


def test_trials_of_tracking_are_those_of_the_page() -> None:
    page = TEXTS["tracking-trials"]
    reads = {
        "no tracker": (["memory"], None),
        "nothing": (["noread"], None),
        "norm(o), added": (["x1"], None),
        "Sᵀq, added to x after": (["rawp"], "rawp"),
        "**Sᵀq, added to x before": (["F4"], "F4"),
        "Sᵀq, added to all parts": (["F1"], "F1"),
        "Sᵀq as a part": (["F5"], "F5"),
    }
    for start, ((form,), bound) in reads.items():
        names = [n for n in runs_of("tracking-trials") if n.startswith(f"trials.mqar-{form}-0.002")]
        steps = [raw(f"tracking-trials/{name}")["step_at_099"] for name in names]
        shown = " ".join("never" if step is None else f"{step:,}" for step in steps)
        pairs = joined(value for name in names for value in accuracies(name, "512"))
        products = "–"
        if bound is not None:
            name = f"trials.bound_a5-{bound}-0.002-s100"
            of_both = (("16_32", "token"), ("16_128", "sequence"))
            products = "; ".join(f"{accuracies(name, *of)[0]:.2f}" for of in of_both)
        assert line(page, start)[1:] == [shown, pairs, products]

    def five(kind: str, task: str, rate: str, *of: str, digits: int = 2) -> str:
        names = [f"{kind}.{part} {task}-tracking {rate}" for part in ("table", "table-more")]
        return joined((v for name in names for v in accuracies(name, *of)), digits)

    for start, task, rates, of in (
        ("A5, labels", "a5", ("0.002", "0.002"), ("512",)),
        ("S5, labels", "s5", ("0.002", "0.002"), ("512",)),
        ("copying, characters", "copy", ("0.004", "0.008"), ("200",)),
        ("MQAR, 256", "mqar", ("0.001", "0.001"), ("256",)),
    ):
        kinds = zip(("table", "bounded"), rates, strict=True)
        both = [five(kind, task, rate, *of, digits=2 + (task == "a5")) for kind, rate in kinds]
        assert line(page, start)[1:] == both
    bounded = five("bounded", "bound_s3", "0.004", "16_128", "sequence")
    assert line(page, "bound S3, sequences")[2] == bounded
    assert line(page, "bound A5, products")[2] == five("bounded", "bound_a5", "0.004", "16_32")
    steps = [
        raw(f"tracking-trials/skip.mqar-skip-0.002-s{seed}")["step_at_0.99"][0]
        for seed in (100, 101)
    ]
    assert "after {:,} and {:,} steps (seeds 100, 101)".format(*steps) in page


def of_trials(trial: str, model: str, task: str) -> str:
    """The values at the longest length but 2,048 of the only run of a task that a script made."""
    rows = raw(f"history/{trial}")["rows"]
    (row,) = [row for row in rows if (row["model"], row["task"]) == (model, task)]
    *_, last = (length for length in row["accuracy"] if length != "2048")
    return joined(row["accuracy"][last]["token"])


def test_trials_of_the_history_are_those_of_its_page() -> None:
    page = TEXTS["history"]
    one = [of_trials("feedback-heads", "p1sa", task) for task in ("a5", "mqar")]
    assert "(A5 at 512 {}, 64 pairs {})".format(*one) in page
    assert f"A5 holds ({of_trials('initial-values', 'x2', 'a5')} at 512)" in page


@pytest.mark.parametrize(
    ("start", "run", "of"),
    [
        ("`without_noise`:", "feedback-heads.without_noise.table.a5-recall", ("512",)),
        ("(at 200:", "many-states.copy-7x64x128g2", ("200",)),
        ("against", "many-states.copy-9x64x64g1", ("200",)),
        ("copy further (", "many-states.copy-erase_fed", ("200",)),
        ("128 operations (", "many-states.bound_s3-erase_fed", ("16_128", "sequence")),
        ("products of `recall`", "table-controls.bound_z60-recall", ("16_32",)),
        ("of all heads", "table-controls.bound_z60-recall_layer", ("16_32",)),
        ("(at 512:", "table-seeds.trials.s5-recall_n64-0.002", ("512",)),
        ("its 2e-3 (A5 at 512", "table-seeds.trials.a5-lstm_l1_forget-0.002", ("512",)),
        ("sequences at 128", "a5-one-head.a5_five_seeds", ("128", "sequence")),
    ],
)
def test_runs_of_the_history_are_those_of_its_page(
    start: str, run: str, of: tuple[str, ...]
) -> None:
    length, metric = (*of, "token")[:2]
    shown = of_run(f"history/{run}", length, metric)
    assert f"{start} {shown}".replace("( ", "(") in TEXTS["history"]


def test_what_a_layer_had_learned_is_that_of_the_history() -> None:
    page, models = TEXTS["history"], raw("history/learned.a5-recall")["models"]
    late = joined(model["horizon"]["2048"] for model in models)
    assert f"from token 1,025 to 2,048 {late} of the labels" in page
    assert max(abs(v) for model in models for v in model["exponent"]) < 0.0024
    last = [model["steps"]["256"] for model in models]
    times = [v[f"{name}_ms"] / v["direct_ms"] for v in last for name in ("picard", "jacobi")]
    assert f"{min(times):.0f} to {max(times):.0f} times the time of the sweep" in page
    for model in models:  # one head tracks, and only it is needed
        first, *others = model["heads"]["without"]
        assert first < 0.025 and min(others) > 0.985
        assert all(model["steps"][t]["jacobi"] == int(t) + 1 for t in ("16", "64", "256"))
    for model in raw("history/learned.copy-recall")["models"]:  # the memories copy
        first, *others = (model["heads"]["all"] - v for v in model["heads"]["without"])
        assert abs(first) < 0.0055 and 0.045 < min(others) and max(others) < 0.225


def test_parameterizations_of_the_history_are_those_of_the_default() -> None:
    page, rows = TEXTS["history"], raw("history/a5-one-head.a5_parameterizations")["rows"]

    def of(scale: str, k: int, length: str) -> list[float]:
        (row,) = [
            row
            for row in rows
            if (row["point"]["input_scale"], row["point"]["num_householder"]) == (scale, k)
            if row["point"]["d_state"] == 16
        ]
        return sorted(row["accuracy"][length]["token"])

    scales = ("bounded_delta", "delta")
    worst = [of(scale, k, "16")[0] for scale in scales for k in (4, 2)]
    assert "({:.2f} and {:.2f} against {:.2f} and {:.2f} with `delta`)".format(*worst) in page
    medians = [of(scale, 4, "128")[2] for scale in reversed(scales)]
    assert "medians at 128 ({:.2f} against {:.2f})".format(*medians) in page
