"""Training and decoding speed of whole language models of about 130 million parameters.

    python examples/benchmarks/generation.py                        # on a GPU, under 8 minutes
    python examples/benchmarks/generation.py --models tracking lstm --out runs/two.json
    python examples/benchmarks/generation.py --device cpu --tiny --models tracking --tasks train
    python examples/benchmarks/generation.py --out examples/results/models.json

`TrackingDeltaNet`, this repository's Mamba and LSTM, an attention model of transformers (Llama) and
mamba-ssm's Mamba, in bfloat16. Training: 8 rows of 2,048 tokens, eager, as a CUDA graph and with
compiled blocks, and at a vocabulary of 131,072 with a fused loss; tokens a second and peak memory.
Decoding: tokens a second at batch 1 and 64, of attention after 16 tokens. Every model has a process
of its own, one after the other, with a time limit. What cannot be measured is a row with its
reason.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from benchmarks.bench import time_limit, write
from benchmarks.measure import Numbers, first_line
from benchmarks.timing import release_memory
from benchmarks.whole_models import TASKS, Sizes, measure
from common.run import device_name, versions
from flags import Range, UsageError, check_types, choose_device

RECORDED = Path(__file__).resolve().parents[1] / "results" / "models.json"
"""The numbers that are published; only whole runs on a GPU write them."""

Seconds = Annotated[float, Range(0, brackets="(]")]


@dataclass(frozen=True)
class Config:
    """What to measure."""

    models: tuple[str, ...] = ()  # Among tracking, mamba, lstm, attention, mamba-ssm; none: all.
    tasks: tuple[str, ...] = ()  # Such as train or decode-1; none: all of each model.
    device: Literal["cuda", "cpu"] = "cuda"  # Where to measure; on a CPU with --tiny.
    tiny: bool = False  # Toy sizes, to check that every row runs; the times are meaningless.
    task_limit: Seconds = 90  # Seconds after which a row is given up.
    model_limit: Seconds = 150  # Seconds after which the process of a model is ended.
    budget: Seconds = 450  # Seconds for all processes together.
    out: Path = Path("runs/generation.json")  # The numbers of all rows.
    in_process: bool = False
    """Measure here, and print a row a line; the script starts itself with this option."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in self.models:
            if name not in TASKS:
                raise ValueError(f"models must be among {tuple(TASKS)}, got {name!r}")
        known = dict.fromkeys(task for tasks in TASKS.values() for task in tasks)
        for task in self.tasks:
            if task not in known:
                raise ValueError(f"tasks must be among {tuple(known)}, got {task!r}")


def main(config: Config) -> None:
    """Measure, print and write all rows."""
    if config.in_process:
        return measure_here(config)
    whole = not (config.models or config.tasks or config.tiny or config.device == "cpu")
    if config.out.resolve() == RECORDED and not whole:
        raise UsageError(f"--out {config.out} is for whole runs on a GPU: give another file")
    device, started = choose_device(config.device, "--device cpu --tiny"), time.perf_counter()
    rows: list[Numbers] = []
    sizes = asdict(_sizes(config)) | {"device": config.device}
    report: Numbers = {"device": device_name(device), "versions": versions(), "sizes": sizes}
    for name in config.models or TASKS:
        left = config.budget - (time.perf_counter() - started)
        rows += measure_apart(config, name, min(config.model_limit, left))
        write(config.out, report | {"rows": rows, "ratios": ratios(rows)})
    print("\n".join(lines(rows)))
    for title, value in ratios(rows).items():
        print(f"{title}: {value:.2f}")
    print(f"{time.perf_counter() - started:.0f} s, numbers in {config.out}")
    return None


def measure_here(config: Config) -> None:
    """Print the rows of the models, each as soon as it is measured."""
    sizes = _sizes(config)
    for name in config.models or TASKS:
        for task in tasks_of(config, name):
            row: Numbers = {"model": name, "task": task}
            try:
                with time_limit(config.task_limit):
                    row |= measure(name, task, sizes)
            except Exception as error:  # reported in the row
                row["error"] = first_line(error)
            release_memory()
            print(json.dumps(row), flush=True)


def measure_apart(config: Config, name: str, limit: float) -> list[Numbers]:
    """The rows of a model, from a new process that is ended after `limit` seconds."""
    options = ["--device", config.device, "--task-limit", str(config.task_limit)]
    options += ["--tiny"] if config.tiny else []
    options += ["--tasks", *config.tasks] if config.tasks else []
    command = [sys.executable, __file__, "--in-process", "--models", name, *options]
    reason = "the time budget is spent"
    # files, because what a process has started may hold its pipes open after its end
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        if limit > 0:
            try:
                done = subprocess.run(command, stdout=output, stderr=errors, timeout=limit)
                errors.seek(0)
                messages = errors.read().strip().splitlines() or ["no message"]
                reason = f"exit status {done.returncode}: {messages[-1][:200]}"
            except subprocess.TimeoutExpired:
                reason = f"the process was ended after {limit:.0f} s"
        output.seek(0)
        found = [json.loads(line) for line in output if line.startswith('{"model"')]
    done_tasks = {row["task"] for row in found}
    rest = [task for task in tasks_of(config, name) if task not in done_tasks]
    return [*found, *({"model": name, "task": task, "error": reason} for task in rest)]


def tasks_of(config: Config, name: str) -> Sequence[str]:
    """The tasks that are measured of a model."""
    return [task for task in TASKS[name] if not config.tasks or task in config.tasks]


def ratios(rows: Sequence[Numbers]) -> dict[str, float]:
    """What is aimed at, of the rows that were measured."""
    measured = {(row["model"], row["task"]): row for row in rows if "error" not in row}

    def best(number: str, models: Sequence[str], tasks: Sequence[str]) -> float | None:
        keys = [(model, task) for model in models for task in tasks]
        found = [measured[key][number] for key in keys if key in measured]
        return max((value for value in found if value is not None), default=None)

    speed, memory = "tokens_per_second", "peak_gib"
    # of version 0.2.0 the second name
    ours, mambas = ("tracking", "bedouin"), ("mamba", "mamba-ssm")
    training, large = ("train", "captured", "compiled"), ("vocabulary-fla",)
    liger, chunked = ("vocabulary-liger",), ("vocabulary-torch",)
    one, many = ("decode-1",), ("decode-64",)
    pairs: list[tuple[str, str, Sequence[str], Sequence[str], Sequence[str]]] = [
        ("training, of the fastest Mamba (at least 0.4)", speed, mambas, training, training),
        ("training, of the captured LSTM (at least 2)", speed, ("lstm",), ("captured",), training),
        ("decoding at batch 1, of the fastest Mamba", speed, mambas, one, one),
        ("decoding at batch 64, of the fastest Mamba", speed, mambas, many, many),
        ("memory with Liger's loss, of Mamba with FLA's (at most 1)", memory, mambas, large, liger),
        ("memory with plain torch's loss, of Mamba with FLA's", memory, mambas, large, chunked),
    ]
    found = {}
    for title, number, models, theirs, tasks in pairs:
        other, own = best(number, models, theirs), best(number, ours, tasks)
        if other is not None and own is not None:
            found[title] = own / other
    return found


def lines(rows: Sequence[Numbers]) -> list[str]:
    """The rows as a Markdown table."""
    found = [
        "| model | task | parameters | tokens/s | ms | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            cells = [row["error"], "", "", ""]
        else:
            peak = row.get("peak_gib")
            cells = [f"{row['parameters'] / 1e6:.1f} M", f"{row['tokens_per_second']:,.0f}"]
            cells += [f"{row['ms']:.3g}", "" if peak is None else f"{peak:.1f}"]
        found.append("| " + " | ".join([row["model"], row["task"], *cells]) + " |")
    return found


def _sizes(config: Config) -> Sizes:
    device = torch.device(config.device)
    return Sizes.tiny(device) if config.tiny else Sizes(device)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except UsageError as error:
        sys.exit(f"error: {error}")
