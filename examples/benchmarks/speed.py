"""The times of the layers: one entry for each layer and shape, with the seconds of a first call."""

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

from benchmarks.cases import SPEED
from benchmarks.measure import Numbers
from benchmarks.table import Row

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""The variables that name the folders of compiled kernels."""


def entries(rows: Sequence[Row]) -> list[Numbers]:
    """The entries of the rows in SPEED. A missing number is None, and "error" says why; it does not
    for graph_ms without captures (CPU, --no-graph) and peak_gib on a CPU."""
    return [_entry(row) for row in rows if row["case"] in SPEED]


def _entry(row: Row) -> Numbers:
    numbers: Numbers = row["numbers"]
    forward_ms = numbers.get("graph_forward_ms", numbers.get("forward_ms"))
    entry = {
        "layer": SPEED[row["case"]],
        "shape": row["shape"],
        "graph_ms": numbers.get("graph_both_ms"),
        "eager_ms": numbers.get("both_ms"),
        "forward_ms": forward_ms,
        "peak_gib": numbers.get("peak_gib"),
        "first_call_s": numbers.get("first_call_s"),
    }
    reasons = {"reason": row.get("reason")} | {
        key: text for key, text in numbers.items() if key.endswith("_failed")
    }
    told = [f"{key}: {text}" for key, text in reasons.items() if text is not None]
    return entry | ({"error": "; ".join(told)} if told else {})


def add_first_calls(rows: Sequence[Row], command: list[str], processes: int, limit: float) -> None:
    """Add "first_call_s" to the numbers of the measured rows in SPEED, or "first_call_failed", the
    reason; `limit` is in seconds for each."""
    timed = [row for row in rows if row["case"] in SPEED and row["status"] == "measured"]

    def measure(row: Row) -> Numbers:
        return _first_call([*command, "--rows", row["case"], "--shapes", row["shape"]], limit)

    with ThreadPoolExecutor(processes) as pool:
        for row, found in zip(timed, pool.map(measure, timed), strict=True):
            row["numbers"] |= found


def _first_call(command: list[str], limit: float) -> Numbers:
    """What the command prints, in a new process with an empty cache."""
    with TemporaryDirectory() as empty:
        env = os.environ | dict.fromkeys(CACHES, empty)
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"first_call_failed": f"gave up after {limit:.0f} s"}
    if done.returncode == 0:
        return {"first_call_s": float(done.stdout)}
    said = done.stderr.strip().splitlines()
    return {"first_call_failed": said[-1][:200] if said else f"exit status {done.returncode}"}
