"""Run experiments, list their commands, or write summary.json and the figures from their runs.

    python examples/research/experiment.py                  # list every run (make experiments)
    python examples/research/experiment.py heads table      # make the runs that are not there yet
    python examples/research/experiment.py table --only a5-tracking "*-lstm_l1"
    python examples/research/experiment.py table --extra="--steps 20 --device cpu" --out runs/trial
    python examples/research/experiment.py language --devices 2   # two at a time, a GPU each
    python examples/research/experiment.py table --per-device 6         # six at a time on one GPU
    python examples/research/experiment.py --summary
    python examples/research/experiment.py --tuning         # print every run of "table-tuning"

The experiments are defined in examples/research/experiments/, one short file each. What is left to
run is looked up whenever a run has ended, because runs of "table-tuning" decide what those of
"table" are: named together, both are made. Each run adds its numbers to OUT/EXPERIMENT/runs.json,
in place of those of an earlier run of its name (`research/runs.py`), or its error, after which it
is made again. The list has, for every run, its command and, once it has been made, its device, its
seconds and its seeds, with the number of those that failed. `--summary` writes OUT/summary.json,
OUT/both.png and OUT/lengths.png from the runs of "table" and "table-more", the figures of further
experiments whose runs have been made (`figures.py`), and prints the tables of "table" and "chess".
"""

import json
import os
import shlex
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from threading import Condition
from types import ModuleType
from typing import Any

import torch
import tyro
from accelerate.state import AcceleratorState

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

import train_a5
import train_copy
import train_lm
from flags import Count, UsageError, check_types
from research import baselines, ensemble
from research.experiments.further import further
from research.experiments.heads import heads
from research.experiments.language_model import language
from research.experiments.plan import Experiment, Run, Script
from research.experiments.presets import CPU, GPU_PRESETS
from research.experiments.table import tables
from research.figures import write_figures
from research.runs import add_runs, read_run, read_runs
from research.summary import CHESS, markdown, summarize, tuning_markdown

RESULTS = Path(__file__).resolve().parents[1] / "results"
WIDTH = 100
"""Characters of a line of the list."""


@dataclass(frozen=True)
class Config:
    """What to run."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()  # Experiments to run; none: list all.
    only: tuple[str, ...] = ()
    """Run only the runs of these names, which may be patterns as "*-lstm_l1", in their order."""
    again: bool = False  # Also make runs that have been made.
    extra: str = ""  # Flags appended to every command, for trials; written --extra="--flag value".
    out: Path = RESULTS  # Folder with a folder for each experiment.
    devices: Count = 1
    """Runs made at the same time. With more than one each has a process and a GPU of its own, if
    there are GPUs, and what it prints is in runs/experiments/EXPERIMENT/RUN.log."""
    per_device: Count = 1
    """Runs made at the same time on each GPU, also in processes of their own; small layers leave
    much of a GPU idle, which NVIDIA's MPS lets processes share."""
    summary: bool = False
    """Write summary.json and the figures, and run nothing."""
    tuning: bool = False
    """Print every tuning run of the table, and run nothing."""

    def __post_init__(self) -> None:
        check_types(self)


def experiments() -> dict[str, Experiment]:
    """Every experiment by name."""
    found = (
        *(CPU, GPU_PRESETS, heads(), *language(RESULTS)),
        *(*tables(RESULTS), *further(RESULTS)),
    )
    return {experiment.name: experiment for experiment in found}


def _ensemble(arguments: Sequence[str]) -> None:
    ensemble.main(ensemble.parse(arguments))


def _train(script: ModuleType, arguments: Sequence[str]) -> None:
    script.main(*baselines.parse(script, arguments))


TRAINING: dict[Script, ModuleType] = {
    "train_a5": train_a5,
    "train_copy": train_copy,
    "train_lm": train_lm,
}
SCRIPTS: dict[Script, tuple[Callable[[Sequence[str]], None], str]] = {
    "ensemble": (_ensemble, "results.json"),
    **{name: (partial(_train, script), "metrics.json") for name, script in TRAINING.items()},
}
"""How a script is called, and the file with its numbers."""


def run_folder(experiment: Experiment, run: Run) -> Path:
    """The folder of all that a run writes."""
    return Path("runs") / "experiments" / experiment.name / run.name


def make(experiment: Experiment, run: Run, config: Config) -> None:
    """Make one run and keep its numbers; all that it wrote stays in runs/experiments."""
    script, file = SCRIPTS[run.script]
    folder = run_folder(experiment, run)
    print(f"== {experiment.name} {run.name}", flush=True)
    AcceleratorState._reset_state()  # it keeps the precision of the last run
    extra = shlex.split(config.extra)
    # what an earlier try has left is replaced, unless it is to be continued
    replacing = () if "--resume" in extra else ("--overwrite",)
    script([*run.arguments, *extra, *replacing, "--out", str(folder)])
    add_runs(config.out / experiment.name, {run.name: read_run(folder / file)})


class Queue:
    """The chosen runs that have not been started, also by several threads."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._started: set[tuple[str, str]] = set()
        self._running = 0
        self._ended = Condition()

    def take(self) -> tuple[Experiment, Run] | None:
        """The next run; waits for one while others are running. None: there will be none."""
        with self._ended:
            while True:
                for experiment, run in chosen(experiments(), self.config):
                    if (experiment.name, run.name) not in self._started:
                        self._started.add((experiment.name, run.name))
                        self._running += 1
                        return experiment, run
                if self._running == 0:
                    return None
                self._ended.wait()

    def done(self) -> None:
        """A run that was taken has ended."""
        with self._ended:
            self._running -= 1
            self._ended.notify_all()


def make_all(queue: Queue, config: Config) -> int:
    """Make runs one after the other; returns the number of those that failed."""
    failed = 0
    while (pair := queue.take()) is not None:
        experiment, run = pair
        try:
            make(experiment, run, config)
        except Exception as error:  # reported; a long list of runs goes on
            message = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            print(f"{run.name} failed: {message}", file=sys.stderr)
            record = {"error": message, "options": run.options}
            add_runs(config.out / experiment.name, {run.name: record})
            failed += 1
        queue.done()
    return failed


def make_side_by_side(queue: Queue, config: Config) -> int:
    """Make `config.per_device` runs at a time on each device; returns the number of those that
    failed."""

    def work(device: str | None) -> int:
        failed = 0
        while (pair := queue.take()) is not None:
            try:
                failed += make_in_process(*pair, config, device)
            finally:
                queue.done()
        return failed

    devices = visible_devices(config.devices) * config.per_device
    with ThreadPoolExecutor(len(devices)) as pool:
        return sum(pool.map(work, devices))


def visible_devices(number: int) -> list[str | None]:
    """Values of CUDA_VISIBLE_DEVICES for so many processes; None without a GPU.

    Raises ValueError if there are GPUs, but fewer.
    """
    count = torch.cuda.device_count()
    if count == 0:
        return [None] * number
    if count < number:
        raise ValueError(f"--devices must be at most {count}, the number of GPUs, got {number}")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if named is None else named.split(",")
    return list(names[:number])


def make_in_process(experiment: Experiment, run: Run, config: Config, device: str | None) -> int:
    """Make one run in a process of its own; returns whether it failed, and prints so."""
    folder = run_folder(experiment, run)
    log = folder.with_name(f"{folder.name}.log")  # a name may have a point in a learning rate
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, experiment.name, "--only", run.name, "--again"]
    command += [f"--extra={config.extra}", "--out", str(config.out)]
    changes = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    place = "" if device is None else f" on GPU {device}"
    print(f"== {experiment.name} {run.name}{place}, see {log}", flush=True)
    with log.open("w") as output:
        status = subprocess.run(
            command, env=os.environ | changes, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    if status:
        print(f"{run.name} failed with exit status {status}, see {log}", file=sys.stderr)
    return int(status != 0)


def seconds_and_seeds(content: dict[str, Any]) -> tuple[float, str]:
    """Of what a run has written, in either of the formats; the seeds with the number of those that
    failed."""
    if "rows" not in content:
        seed = str(content["seed"])
        return content["seconds"], f"{seed} (failed)" if content.get("failed") else seed
    first, number = content["config"].get("first_seed", 0), content["config"]["seeds"]
    seeds = " ".join(str(seed) for seed in range(first, first + number))
    if failed := sum(sum(row.get("failed", ())) for row in content["rows"]):
        seeds += f" ({failed} failed)"
    seconds = [row["seconds"] for row in content["rows"]]
    # points that were trained at the same time have the seconds of all
    together = content["config"].get("concurrent", False)
    return max(seconds) if together else sum(seconds), seeds


def listing(found: dict[str, Experiment], out: Path) -> str:
    """Every run with device, seconds and seeds where it has been made, and its command."""
    lines = []
    for experiment in found.values():
        contents = read_runs(out / experiment.name)
        lines += [*fill(f"{experiment.name}: {experiment.question}", ""), ""]
        for run in experiment.runs:
            made, content = "not run", contents.get(run.name, {})
            if "error" in content:
                made = "failed"
            elif content:
                seconds, seeds = seconds_and_seeds(content)
                made = f"{content['device']}, {seconds:.0f} s, seeds {seeds}"
            lines += fill(f"{run.name}: {made}", "  ")
            command = fill(f"python {script_of(run)} {run.options}", "      ")
            lines += [f"{line} \\" for line in command[:-1]] + command[-1:]
        lines.append("")
    return "\n".join(lines)


def script_of(run: Run) -> str:
    """The script of a command."""
    if run.script == "ensemble":
        return "examples/research/ensemble.py"
    if baselines.baseline_of(run.arguments)[0] is not None:
        return f"examples/research/baselines.py {run.script}"
    return f"examples/{run.script}.py"


def fill(text: str, indent: str) -> list[str]:
    """The lines of a text, as wide as a terminal, with space for a backslash at their ends."""
    return textwrap.wrap(
        text,
        WIDTH - 2,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def chosen(found: dict[str, Experiment], config: Config) -> list[tuple[Experiment, Run]]:
    """The runs to make, in their order. Raises ValueError for a name that does not exist."""
    for name in config.names:
        if name not in found:
            raise UsageError(f"an experiment must be among {tuple(found)}, got {name!r}")
    named = [(found[name], run) for name in config.names for run in found[name].runs]
    made = {name: read_runs(config.out / name) for name in config.names}
    wanted = []
    for pattern in config.only or ("*",):
        matching = [pair for pair in named if fnmatchcase(pair[1].name, pattern)]
        if config.only and not matching:
            names = [run.name for _, run in named]
            raise UsageError(f"--only must be among {names} or match one, got {pattern!r}")
        wanted += matching
    return [
        (experiment, run)
        for experiment, run in dict.fromkeys(wanted)
        if config.again or "error" in made[experiment.name].get(run.name, {"error": "not run"})
    ]


def main(config: Config) -> int:
    """Returns the exit status: 1 if a run failed; the others are made all the same."""
    if config.summary:
        report = summarize(config.out)
        (config.out / "summary.json").write_text(json.dumps(report, indent=1) + "\n")
        write_figures(report, config.out)
        print(markdown(config.out))
        print(markdown(config.out, CHESS))
        return 0
    if config.tuning:
        print(tuning_markdown(config.out))
        return 0
    found = experiments()
    if not config.names:
        print(listing(found, config.out))
        return 0
    if not chosen(found, config):
        print("all of these runs are made: --out FOLDER makes them elsewhere, --again in place")
        return 0
    one = config.devices * config.per_device == 1
    failed = (make_all if one else make_side_by_side)(Queue(config), config)
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Config, description=__doc__)))
    except UsageError as error:
        sys.exit(f"error: {error}")
