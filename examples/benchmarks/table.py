"""The report of a run as text."""

from collections.abc import Sequence
from typing import Any

from benchmarks.measure import Numbers
from benchmarks.targets import LSTM, PAPER_16, PAPER_100, TARGETS

Row = dict[str, Any]
"""One case at one shape: case, title, shape, status (measured, failed, skipped), numbers, …"""

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("fwd ms", "forward_ms", ".3f"),
    ("fwd graph", "graph_forward_ms", ".3f"),
    ("fwd+bwd ms", "both_ms", ".3f"),
    ("f+b graph", "graph_both_ms", ".3f"),
    ("GiB", "peak_gib", ".2f"),
    ("kept GiB", "kept_gib", ".2f"),
    ("GB/s", "both_gb_per_s", ".0f"),
    ("TFLOP/s", "both_tflop_per_s", ".1f"),
    ("of floor", "both_floor_share", ".1%"),
    ("us/token", "both_us_a_token", ".2f"),
)
"""Title, key in the numbers, format. Rates are of the faster of eager and captured."""

FORWARD_ONLY = {"both_gb_per_s": "forward_gb_per_s", "both_floor_share": "forward_floor_share"}
EXTRA = (
    *("us_a_layer", "decoder_us"),
    *("over_padded", "over_unmasked", "padded_both_ms", "unmasked_both_ms", "padded_tokens"),
    *("times_floor", "forward_eager_ms", "repeats", "graph_breaks", "residual", "num_steps"),
    *("graph_forward_ms_failed", "graph_both_ms_failed"),
    *("first_call_s", "first_call_failed"),
)


def cells(row: Row) -> list[str]:
    """The columns of a row, empty where nothing was measured."""
    return [_cell(row["numbers"], key, spec) for _, key, spec in COLUMNS]


def _cell(numbers: Numbers, key: str, spec: str) -> str:
    value = numbers.get(key)
    if value is None and "both_ms" not in numbers:
        value = numbers.get(FORWARD_ONLY.get(key, key))
    return "" if value is None else format(value, spec)


def note(row: Row) -> str:
    """The text after the columns: further numbers, or why the row was not measured."""
    if row["status"] != "measured":
        return f"{row['status']}: {row['reason']}"
    numbers = row["numbers"]
    found = [f"{key} {_short(numbers[key])}" for key in EXTRA if key in numbers]
    if row.get("prepare_seconds", 0) >= 1:
        found.append(f"prepared in {row['prepare_seconds']:.0f} s")
    return ", ".join(found)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def text_header() -> str:
    titles = "".join(f"{title:>11}" for title, _, _ in COLUMNS)
    return f"{'shape':8}{'row':34}{titles}"


def text_line(row: Row) -> str:
    """One row for the terminal."""
    values = "".join(f"{cell:>11}" for cell in cells(row))
    start = f"{row['shape']:8}{row['case']:34}"
    remark = note(row)
    if row["status"] != "measured":
        return f"{start}  {remark}"
    return f"{start}{values}" + (f"  {remark}" if remark else "")


def target_rows(rows: Sequence[Row]) -> list[list[str]]:
    """One row of cells for each target that was measured, in the order of `TARGET_TITLES`."""
    by_key = {(row["case"], row["shape"]): row["numbers"] for row in rows}
    found = []
    for target in TARGETS:
        numbers = by_key.get((target.case, target.shape))
        if numbers is None:
            continue
        value = target.reached(numbers)
        timed = target.case.startswith("direct") and target.key == "both"
        peers = (PAPER_16, PAPER_100, LSTM) if timed else ({}, {}, {})
        found.append(
            [
                target.text,
                target.shape,
                "" if value is None else f"{value:.3g}",
                f"{target.at_most:.3g}",
                "" if target.aim is None else f"{target.aim:.3g}",
                *(f"{peer[target.shape]:g}" if target.shape in peer else "" for peer in peers),
                target.verdict(numbers),
            ]
        )
    return found


TARGET_TITLES = (
    *("target", "shape", "measured", "at most", "aim"),
    *("paper's code, 16 it.", "100 it.", "its LSTM", "verdict"),
)


def text_targets(rows: Sequence[Row]) -> str:
    """The targets for the terminal."""
    lines = [list(TARGET_TITLES), *target_rows(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(TARGET_TITLES))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def describe_machine(report: dict[str, Any]) -> str:
    """Device, versions, measured speeds and the setting in one sentence."""
    machine, setting = report["machine"], report["setting"]
    versions = f"torch {machine['torch']}, Triton {machine['triton']}"
    return (
        f"{machine['device']}, {versions}: a copy moves {machine['copy_gb_per_s'] / 1e3:.2f} TB/s, "
        f"a large product runs at {machine['gemm_tflop_per_s']:.0f} "
        f"TFLOP/s; precision {setting['precision']}, d_model {setting['m']}, expand "
        f"{setting['expand']}, n {setting['n']}, k {setting['k']}."
    )


def text(report: dict[str, Any]) -> str:
    """The whole report for the terminal."""
    rows = report["rows"]
    parts = describe_machine(report), text_header(), *map(text_line, rows), text_targets(rows)
    return "\n".join(parts)
