"""Time, memory and share of the floor of the layer, its solvers, its parts and other layers.

    python examples/benchmarks/bench.py             # every row at its shapes, under 4 minutes
    python examples/benchmarks/bench.py --quick     # the exact sweep only, under a minute
    python examples/benchmarks/bench.py --rows direct lstm --shapes 64x256
    python examples/benchmarks/bench.py --report runs/bench/results.json    # an earlier result
    python examples/benchmarks/bench.py --speed examples/results/speed.json  # make bench
    python examples/benchmarks/bench.py --device cpu --tiny --precision float32 --repeats 1

Before a row is timed, its fast path is compared with the plain reference, in float32 and in the
precision of the run, and the row is run once. This compiles the kernels, which may take minutes
that do not count towards the limits of the measurement.

A time is the median of `--repeats` calls (plain torch: 3) after a warm-up, by CUDA events, on sets
of random inputs that alternate so that none is left in the L2 cache. Forward is without gradients;
forward + backward computes the gradients of the input and all parameters; "graph" is the replay of
a CUDA graph of the same call. Peak memory ("GiB") is torch.cuda.max_memory_allocated of one call,
including parameters, input and gradients; "kept GiB" is what a forward pass leaves allocated for
its backward pass, including its output. The floor is the larger of bytes / copy bandwidth and
flops / GEMM rate, both measured at the start (benchmarks/cost.py defines bytes and flops).

`--speed` writes a list with layer, shape, graph_ms and eager_ms (forward + backward), forward_ms
(captured where possible), peak_gib and first_call_s for each row of a layer in cases.SPEED, by
default of all of these. A row without a time has null there and the reason under "error".
first_call_s are the seconds of one forward + backward in a new process with an empty compiler's
cache, without imports, measured after all rows in `--processes` processes side by side. The file
examples/results/speed.json is only written by whole runs on a GPU.

A row that fails is reported with its message, and the other rows are still measured; the exit
status is then 1.
"""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from benchmarks import agreement, cases, speed, table
from benchmarks.measure import Context, Numbers, first_line
from benchmarks.setting import Precision, Setting, Shape
from benchmarks.timing import measure_machine, release_memory
from flags import Count, UsageError, check_types, choose_device
from research.runs import read_run

RECORDED = Path(__file__).resolve().parents[1] / "results" / "speed.json"
"""The times of the layers that are in the repository."""

ROW_SECONDS = 60
"""Seconds of measuring after which a row is aborted."""

Agreed = dict[tuple[cases.Agreement, Setting, Shape], str | None]
"""The results of the comparisons made so far: None, or the message of a difference."""


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    rows: tuple[str, ...] = ()  # Names of the rows to measure; none: all.
    shapes: tuple[str, ...] = ()  # Shapes BATCHxTIME; none: each row's own.
    quick: bool = False  # Only the exact sweep: with feedback, without it, and with heads.
    tiny: bool = False  # Toy sizes, to check that every row runs; the times are meaningless.
    device: Literal["cuda", "cpu"] = "cuda"
    """Where to measure; without a GPU rows of full size take minutes, and many fail: see --tiny."""
    precision: Precision = "bf16"
    """That of parameters and inputs."""
    repeats: Count = 20  # Timed calls of each kind.
    graph: bool = True  # Also time replays of captured calls.
    budget: float = 200.0  # Seconds of measuring after which no further row is started.
    prepare_limit: float = 240.0
    """Seconds after which a comparison of a row, or its first run, is aborted; both compile."""
    speed: Path | None = None
    """Also measure first calls, and write the times of the layers in cases.SPEED, see above."""
    processes: Count = 4  # New processes side by side for first calls.
    first_call: bool = False
    """Only print the seconds of the first call of a row of cases.SPEED, in this process."""
    out: Path = Path("runs/bench/results.json")  # The numbers of all rows.
    report: Path | None = None
    """Print this earlier result, and measure nothing; also FOLDER/NAME, the run NAME of
    FOLDER/runs.json."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.first_call and not set(self.rows) <= set(cases.SPEED):
            raise ValueError(f"first_call takes rows among {tuple(cases.SPEED)}, got {self.rows}")
        if self.quick and self.rows:
            raise ValueError("quick chooses the rows: give it or rows, not both")


def main(config: Config) -> int:
    """Measure all rows, print and write them; returns the exit status."""
    if config.report is not None:
        print(table.text(read_run(config.report)))
        return 0
    if config.first_call:
        return first_call(config)
    started = time.perf_counter()
    path = speed_path(config)
    context = make_context(config)
    left = config.budget
    rows: list[table.Row] = []
    report = {"machine": asdict(context.machine), "setting": describe(context), "rows": rows}
    print(table.describe_machine(report))
    print(table.text_header(), flush=True)
    agreed: Agreed = {}
    for case, shape in chosen(config):
        rows.append(run_row(context, case, shape, agreed, config.prepare_limit, left))
        left -= rows[-1].get("seconds", 0.0)
        print(table.text_line(rows[-1]), flush=True)
        write(config.out, report)
    print(table.text_targets(rows))
    if path is not None:
        write(path, speed.entries(rows))  # in case that first calls are cut off
        speed.add_first_calls(
            rows, first_call_command(config), config.processes, config.prepare_limit
        )
        write(config.out, report)
        write(path, speed.entries(rows))
        for row in rows:
            if reason := row["numbers"].get("first_call_failed"):
                print(f"{row['case']} {row['shape']}, first call: {reason}")
    print(f"{time.perf_counter() - started:.0f} s, numbers in {config.out}")
    failed = (row["status"] == "failed" or "first_call_failed" in row["numbers"] for row in rows)
    return int(any(failed))


def speed_path(config: Config) -> Path | None:
    """Where the times of the layers go; None, with a message, for the recorded file if they are not
    those of a whole run on a GPU."""
    whole = ("device", "precision", "tiny", "quick", "rows", "shapes", "graph")
    changed = [name for name in whole if getattr(config, name) != getattr(Config, name)]
    if config.speed is None or config.speed.resolve() != RECORDED or not changed:
        return config.speed
    given = ", ".join(f"--{name}" for name in changed)
    print(f"{config.speed} is not written, because of {given}: give another --speed")
    return None


def first_call_command(config: Config) -> list[str]:
    """The command that prints the seconds of a first call, without its row and shape."""
    options = ["--device", config.device, "--precision", config.precision]
    tiny = ["--tiny"] if config.tiny else []
    return [sys.executable, __file__, "--first-call", *options, *tiny]


def first_call(config: Config) -> int:
    """Print the seconds of the first call of every chosen row; returns the exit status."""
    context = replace(make_context(config), first_call=True)
    for case, shape in chosen(config):
        adapted = replace(context, setting=case.adapt(context.setting))
        print(case.measure(adapted, shape)["first_call_s"])
    return 0


def chosen(config: Config) -> list[tuple[cases.Case, Shape]]:
    """The cases to measure with their shapes, in order."""
    shapes = config.shapes or (cases.TINY if config.tiny else ())
    named = config.rows or (tuple(cases.SPEED) if config.speed or config.first_call else ())
    return cases.select(cases.QUICK if config.quick else named, shapes)


def make_context(config: Config) -> Context:
    """Device, sizes and speed of the machine."""
    small = "--tiny --precision float32 --repeats 1 to run every row at toy sizes"
    device = choose_device(config.device, f"--device cpu, with {small}")
    sizes = {"m": 8, "n": 2, "k": 2} if config.tiny else {}
    setting = Setting(device, config.precision, **sizes)
    # a small product suffices if the speed of the machine is not used
    size = 8192 if device.type == "cuda" and not config.first_call else 256
    machine = measure_machine(device, setting.dtype, size)
    return Context(setting, machine, config.repeats, config.graph)


def describe(context: Context) -> dict[str, Any]:
    """The setting as JSON."""
    device = str(context.setting.device)
    return asdict(context.setting) | {"device": device, "repeats": context.repeats}


def run_row(
    context: Context,
    case: cases.Case,
    shape: Shape,
    agreed: Agreed,
    prepare_limit: float,  # seconds
    left: float,  # seconds
) -> table.Row:
    """Measure one row; an error of the row is recorded and not raised."""
    context = replace(context, setting=case.adapt(context.setting))
    row: table.Row = {"case": case.name, "title": case.title, "shape": shape.label, "numbers": {}}
    reason = case.missing()
    if reason is None and left <= 0:
        reason = "the time budget is spent"
    if reason is not None:
        return row | {"status": "skipped", "reason": reason}
    started = time.perf_counter()
    prepared = None
    try:
        prepare(context, case, shape, agreed, prepare_limit)
        prepared = time.perf_counter()
        with time_limit(min(ROW_SECONDS, left)):
            numbers = measure(context, case, shape)
        row |= {"status": "measured", "numbers": numbers}
    except Exception as error:  # reported in the row, the table and the exit status
        row |= {"status": "failed", "reason": first_line(error)}
    release_memory()
    ended = time.perf_counter()
    prepared = ended if prepared is None else prepared
    return row | {"prepare_seconds": prepared - started, "seconds": ended - prepared}


def prepare(context: Context, case: cases.Case, shape: Shape, agreed: Agreed, limit: float) -> None:
    """Compare the row with its reference and run it once, each within `limit` seconds, so that all
    kernels are compiled. Raises TimeoutError after that, AssertionError for a difference."""
    with time_limit(limit):
        check_agreement(context.setting, case, shape, agreed)
    with time_limit(limit):
        case.measure(replace(context, repeats=0, graph=False), shape)
    release_memory()


def measure(context: Context, case: cases.Case, shape: Shape) -> Numbers:
    """The numbers of a row, including "repeats" if they are fewer than in the context."""
    if case.most_repeats is None or case.most_repeats >= context.repeats:
        return case.measure(context, shape)
    fewer = replace(context, repeats=case.most_repeats)
    return case.measure(fewer, shape) | {"repeats": fewer.repeats}


def check_agreement(setting: Setting, case: cases.Case, shape: Shape, agreed: Agreed) -> None:
    """Make the row's comparisons that are not in `agreed`. Raises AssertionError if one failed."""
    if case.agrees is None:
        return
    for check in agreement.checks(setting, shape):
        key = (case.agrees, *check)
        if key not in agreed:
            try:
                case.agrees(*check)
                agreed[key] = None
            except AssertionError as error:
                agreed[key] = first_line(error)
        message = agreed[key]
        if message is not None:
            raise AssertionError(f"not timed, it differs from the reference: {message}")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"gave up after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def write(path: Path, report: dict[str, Any] | list[Numbers]) -> None:
    """Write the report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Config, description=__doc__)))
    except UsageError as error:
        sys.exit(f"error: {error}")
