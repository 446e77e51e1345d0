"""The numbers of all experiments in one table, and the figure of tracking against copying."""

from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend must be chosen first)

from common.runs import read_runs  # noqa: E402

Models = dict[str, dict[str, Any]]
"""By model: lists over the seeds by metric, and its number of parameters; where a seed failed, also
which ones ("failed")."""

METRICS = {
    "a5": ("words", {"sequence_128": ("128", "sequence"), "token_512": ("512", "token")}),
    "s5": ("words", {"token_128": ("128", "token"), "token_512": ("512", "token")}),
    "copy": (
        "copying",
        {
            "characters_100": ("100", "token"),
            "strings_100": ("100", "sequence"),
            "characters_200": ("200", "token"),
        },
    ),
}
"""The experiment of each task, and the length and accuracy of each number."""


def read_task(results: Path, task: str) -> Models:
    """The models of a task that have been run, by the names of their runs."""
    folder, wanted = METRICS[task]
    found = {}
    for run, content in read_runs(results / folder).items():
        if not run.startswith(f"{task}-"):
            continue
        (row,) = content["rows"]
        numbers = {key: row["accuracy"][n][name] for key, (n, name) in wanted.items()}
        numbers["parameters"] = row["parameters"]
        if any(row.get("failed", ())):
            numbers["failed"] = row["failed"]
        found[run.removeprefix(f"{task}-")] = numbers
    return found


def with_better_forms(models: Models, key: str) -> Models:
    """The models, and for every baseline under its name without the number of layers the form with
    the higher mean of `key`."""
    found = dict(models)
    for name, numbers in models.items():
        family, _, layers = name.rpartition("_l")
        if family and layers.isdigit():
            better = found.get(family)
            if better is None or mean(numbers[key]) > mean(better[key]):
                found[family] = {**numbers, "layers": int(layers)}
    return found


def read_both(a5: Models, copying: Models) -> Models:
    """The models that were trained on A5 and on copying without a failed seed, with one number from
    each."""
    found = {}
    for name in sorted(a5.keys() & copying.keys()):
        if "failed" in a5[name] or "failed" in copying[name]:
            continue
        found[name] = {
            "a5_sequence_128": a5[name]["sequence_128"],
            "copy_characters_100": copying[name]["characters_100"],
            "parameters": a5[name]["parameters"],
        }
        sums = zip(found[name]["a5_sequence_128"], found[name]["copy_characters_100"], strict=True)
        found[name]["sum"] = [first + second for first, second in sums]
    return found


def summarize(results: Path) -> dict[str, Models]:
    """The content of summary.json: the tasks, and both A5 and copying."""
    tasks = {task: read_task(results, task) for task in METRICS}
    both = with_better_forms(read_both(tasks["a5"], tasks["copy"]), "sum")
    for numbers in both.values():
        del numbers["sum"]
    first = {task: next(iter(wanted)) for task, (_, wanted) in METRICS.items()}
    named = {task: with_better_forms(models, first[task]) for task, models in tasks.items()}
    return {**named, "both": both}


def figure_of_both(both: Models, path: Path) -> None:
    """Plot copying against A5: one point for each model at the mean of its seeds, with lines over
    their range; of a baseline its better form. Raises ValueError if there is no model."""
    families = [name for name, numbers in both.items() if "layers" in numbers]
    shown = {name: both[name] for name in both if name.startswith("bedouin") or name in families}
    if not shown:
        raise ValueError("no model has runs of both A5 and copying: run the experiments first")
    figure, axes = plt.subplots(figsize=(5.4, 4.4), layout="constrained")
    for name, numbers in shown.items():
        x, y = numbers["a5_sequence_128"], numbers["copy_characters_100"]
        layers = numbers.get("layers", 1)
        label = f"{name}, {layers} layer{'s' if layers > 1 else ''}"
        ranges = [[[mean(v) - min(v)], [max(v) - mean(v)]] for v in (x, y)]
        axes.errorbar(mean(x), mean(y), xerr=ranges[0], yerr=ranges[1], marker="o", label=label)
    axes.set(
        xlabel="A5: sequences of length 128 without an error (trained at 16)",
        ylabel="copying: characters at 100 letters (trained to 50)",
        xlim=(-0.03, 1.03),
        ylim=(-0.03, 1.03),
    )
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
