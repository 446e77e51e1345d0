"""Time, memory and share of the floor of the layer, its solvers, its parts and its peers.

    python examples/bench.py                            # all rows at all shapes, under 4 minutes
    python examples/bench.py --quick                    # the exact sweep only, under a minute
    python examples/bench.py --rows direct lstm --shapes 64x256
    python examples/bench.py --readme runs/bench/results.json     # an earlier run as Markdown
    python examples/bench.py --device cpu --tiny        # every row at toy sizes, no GPU

Before a row is timed, its fast path is compared with the plain reference, in float32 and in the
precision of the run. A time is the median of `--repeats` calls after a warm-up, by CUDA events, on
random inputs that rotate so that none is left in the L2 cache; forward is without gradients,
forward + backward with those of the input and of all parameters; "graph" is the replay of a CUDA
graph of the same call. Peak memory is torch.cuda.max_memory_allocated of one call, parameters,
input and gradients included. The floor is the larger of bytes / copy bandwidth and flops / GEMM
rate, both measured at the start (benchmarks/cost.py says what counts).

A row that fails is reported with its message, and the others go on; the exit status is then 1.
"""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks import cases, table
from benchmarks.measure import Context, first_line
from benchmarks.setting import Precision, Setting, Shape
from benchmarks.timing import measure_machine, release_memory


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    rows: tuple[str, ...] = ()
    """Names of the rows to measure; none: all."""
    shapes: tuple[str, ...] = ()
    """Shapes BATCHxTIME; none: each row's own."""
    quick: bool = False
    """Only the exact sweep, with and without feedback."""
    tiny: bool = False
    """Toy sizes: shows that every row runs, the times mean nothing."""
    device: str = "auto"
    """cuda, cpu, or auto: the GPU if there is one."""
    precision: Precision = "bf16"
    """bf16: parameters and inputs; autocast: float32 parameters; float32."""
    repeats: int = 20
    """Timed calls of each kind."""
    graph: bool = True
    """Also time replays of captured calls."""
    budget: float = 230.0
    """Seconds after which no further row is started."""
    row_limit: float = 60.0
    """Seconds after which a row is given up."""
    out: Path = Path("runs/bench/results.json")
    """The numbers of all rows."""
    readme: Path | None = None
    """Print this earlier result as Markdown, and measure nothing."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if self.quick and self.rows:
            raise ValueError("quick chooses the rows: give it or rows, not both")


def main(config: Config) -> int:
    """Measure, print, write; the exit status."""
    if config.readme is not None:
        print(table.markdown(json.loads(config.readme.read_text())))
        return 0
    started = time.perf_counter()
    context = make_context(config)
    rows: list[table.Row] = []
    report = {"machine": context.machine.facts, "setting": describe(context), "rows": rows}
    print(table.describe_machine(report))
    print(table.text_header(), flush=True)
    agreed: dict[Any, str | None] = {}
    for case, shape in chosen(config):
        left = config.budget - (time.perf_counter() - started)
        rows.append(run_row(context, case, shape, agreed, min(left, config.row_limit)))
        print(table.text_line(rows[-1]), flush=True)
        write(config.out, report)
    print(table.text_targets(rows))
    print(f"{time.perf_counter() - started:.0f} s, numbers in {config.out}")
    return int(any(row["status"] == "failed" for row in rows))


def chosen(config: Config) -> list[tuple[cases.Case, Shape]]:
    """What to measure, in order."""
    shapes = config.shapes or (cases.TINY if config.tiny else ())
    return cases.select(cases.QUICK if config.quick else config.rows, shapes)


def make_context(config: Config) -> Context:
    """Device, sizes and speed of the machine."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    sizes = {"m": 8, "n": 2, "k": 2} if config.tiny else {}
    setting = Setting(device, config.precision, **sizes)
    size = 8192 if device.type == "cuda" else 256
    machine = measure_machine(device, setting.gemm_dtype, size)
    return Context(setting, machine, config.repeats, config.graph)


def describe(context: Context) -> dict[str, Any]:
    """The setting as JSON."""
    setting = context.setting
    dtype = str(setting.gemm_dtype).removeprefix("torch.")
    return asdict(setting) | {
        "device": str(setting.device),
        "gemm_dtype": dtype,
        "repeats": context.repeats,
    }


def run_row(
    context: Context,
    case: cases.Case,
    shape: Shape,
    agreed: dict[Any, str | None],
    limit: float,
) -> table.Row:
    """Measure one row; never raises for what the row does."""
    row: table.Row = {"case": case.name, "title": case.title, "shape": shape.label, "numbers": {}}
    reason = case.missing()
    if reason is None and limit <= 0:
        reason = "the time budget is spent"
    if reason is not None:
        return row | {"status": "skipped", "reason": reason}
    started = time.perf_counter()
    try:
        with time_limit(limit):
            check_agreement(context.setting, case, agreed)
            numbers = case.measure(context, shape)
        row |= {"status": "measured", "numbers": numbers}
    except Exception as error:  # reported in the row, the table and the exit status
        row |= {"status": "failed", "reason": first_line(error)}
    release_memory()
    return row | {"seconds": time.perf_counter() - started}


def check_agreement(setting: Setting, case: cases.Case, agreed: dict[Any, str | None]) -> None:
    """Run the row's comparison with the reference once; AssertionError if it failed, then too."""
    if case.agrees is None:
        return
    if case.agrees not in agreed:
        try:
            case.agrees(setting)
            agreed[case.agrees] = None
        except Exception as error:
            agreed[case.agrees] = first_line(error)
    message = agreed[case.agrees]
    if message is not None:
        raise AssertionError(f"not timed, it differs from the reference: {message}")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError after so many seconds; without effect outside the main thread."""
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


def write(path: Path, report: dict[str, Any]) -> None:
    """The report as JSON, after every row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
