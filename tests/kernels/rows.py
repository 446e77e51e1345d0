"""A table of the operations of the kernels: how each is called and what it has to compute.

`test_operations.py` tests every row in the same way. Here are scan, output and convolution, whose
specification is their reference in plain torch: of layers that use it, test_fixed_point_map.py,
test_written_out.py and test_tracking.py have the equations, with values and gradients.
Letters: b batch, t time, d channels, n states, H heads, c channels of a convolution, w width.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from tests.kernels.rows_memory import CHUNK_RULE, RATE, STEP_RULE, SWEEP, TRACK
from tests.kernels.table import (
    BF16,
    F16,
    F32,
    Call,
    Options,
    Row,
    Tensors,
    each,
    normal,
    sizes,
    times,
)
from torch import Tensor
from torch.nn.functional import softplus

from bedouin.kernels.convolution import Groups, short_convolution
from bedouin.kernels.output import gated_norm, gated_output, shifted_norm
from bedouin.kernels.scan import selective_scan

# -- scan


def scan(
    b: int = 1,
    t: int = 17,
    d: int = 3,
    n: int = 2,
    *,
    heads: int = 0,
    skip: bool = True,
    starts: bool = True,
    low_state: bool = True,
    dtype: torch.dtype = F32,
    **options: Any,
) -> Call:
    """b samples of each head."""
    b, axis = b * max(heads, 1), (heads,) if heads else ()
    tensors: Tensors = {"x": normal(b, t, d), "delta": softplus(normal(b, t, d))}
    tensors |= {"A": -normal(*axis, d, n).exp(), "B": normal(b, t, n), "C": normal(b, t, n)}
    tensors |= {"h0": normal(b, d, n) if starts else None, "D": normal(*axis, d) if skip else None}
    low = set(tensors) if low_state else {"x", "delta", "B", "C"}
    wide = torch.promote_types(dtype, F32)

    def run(*given: Tensor, backend: Any) -> Any:
        return selective_scan(*given, **options, backend=backend)

    dtypes = dtype, dtype if starts and low_state else wide
    return Call(run, partial(run, backend="reference"), tensors, low, dtypes)


SCANS = times(
    each("input_scale", "delta", "bounded_delta", "one_minus_decay"),
    each("eigenvalues", "positive", "full"),
    each("exclusive", False, True),
)
FEW = [SCANS[0], SCANS[4], SCANS[11]]
SCAN = Row(
    scan,
    {torch.float64: 1e-12, F32: 2e-5, F16: 2e-3, BF16: 1e-2},
    {
        "": {"eigenvalues": "full"},
        "without a skip": {"skip": False},
        "without a state": {"starts": False, "b": 2},
        "of heads": {"heads": 2, "eigenvalues": "full", "input_scale": "one_minus_decay"},
    },
    [
        *(o | {"t": 17 if o in FEW else 3, "d": 5, "n": 3} for o in SCANS),
        *times(each("t", 1, 16, 33), FEW),
        *({"t": 17, "d": 4, "n": 3, "dtype": dtype} | SCANS[5] for dtype in (F16, BF16)),
        {"t": 17, "d": 4, "n": 3, "dtype": BF16, "low_state": False} | SCANS[5],
        # blocks of channels and states
        *(
            {"t": 3, "patch": {"bedouin.kernels.scan.WARP": 32}} | size
            for size in sizes("bdn", (1, 1, 1), (2, 20, 1), (1, 17, 16), (1, 3, 33))
        ),
        *({"heads": 3, "t": 3, "dtype": dtype} | SCANS[10] for dtype in (F32, BF16)),
    ],
    [],
    [
        *times(
            each("t", 1, 63, 64, 100),
            SCANS,
            each("dtype", F32, F16, BF16),
            [{"b": 3, "d": 65, "n": 16}],
        ),
        *times(
            sizes("btdn", (1, 1, 63, 5), (100, 63, 64, 16), (1, 1000, 100, 16)),
            each("dtype", F32, BF16),
            [SCANS[4]],
        ),
        *times(
            [{"heads": 8, "b": 3, "t": 300, "d": 65}, {"heads": 2, "t": 100, "d": 128}],
            each("dtype", F32, BF16),
            [SCANS[10] | {"n": 16}],
        ),
    ],
    [
        ({}, {"x": (2, 3)}, "x must have shape (b, t, d), got (2, 3)"),
        ({}, {"delta": (1, 17, 4)}, "delta must have shape (1, 17, 3), got (1, 17, 4)"),
        ({}, {"A": (4, 4)}, "A must have shape (d, n) = (3, n) or (H, d, n), got (4, 4)"),
        ({}, {"B": (1, 17, 3)}, "B must have shape (1, 17, 2), got (1, 17, 3)"),
        ({}, {"C": (1, 4, 2)}, "C must have shape (1, 17, 2), got (1, 4, 2)"),
        ({}, {"h0": (2, 3, 2)}, "h0 must have shape (1, 3, 2), got (2, 3, 2)"),
        ({}, {"D": (1,)}, "D must have shape (3,), got (1,)"),
        ({"heads": 2, "b": 2}, {"A": (3, 3, 2)}, "A has 3 heads, got 4"),
        ({"heads": 2}, {"A": (0, 3, 2)}, "A must have at least one"),
        ({"heads": 2}, {"A": (2, 4, 2)}, "A must have shape (d, n) = (3, n) or (H, d, n), got (2"),
        ({"heads": 2}, {"D": (3,)}, "D must have shape (2, 3), got (3,)"),
    ],
    [
        ({"input_scale": "dleta"}, "input_scale must be one of ('delta', 'bounded_delta', "),
        ({"eigenvalues": "both"}, "eigenvalues must be one of ('positive', 'full')"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"backend": "triton", "dtype": torch.float64}, "does not support torch.float64"),
    ],
    ("b", "t", "d"),
    spares=True,
)


# -- output


def output(
    b: int = 2,
    t: int = 3,
    d: int = 5,
    *,
    heads: int = 0,
    norm: bool = True,
    fed: bool = True,
    wide: Collection[str] = (),
    dtype: torch.dtype = F32,
) -> Call:
    """b samples of each head; y and the tensors `wide` have at least float32."""
    b, axis = b * max(heads, 1), (heads,) if heads else ()
    tensors: Tensors = {"y": normal(b, t, d), "x": normal(b, t, d), "D": normal(*axis, d)}
    tensors |= {"gate": normal(b, t, d), "fed": normal(b, t, d) if fed else None}
    more = {"z": normal(b, t, d), "weight": normal(*axis, d)}
    tensors |= more if norm else dict.fromkeys(more)

    def run(*given: Any, backend: Any) -> Tensor:
        return gated_output(*given, dtype=dtype, backend=backend)

    exact = partial(gated_output, backend="reference")
    # z is rounded with the gate, and for one channel a gradient is one sum, of numbers that cancel
    slack = {"weight": 4.0} if d == 1 else {}
    return Call(run, exact, tensors, set(tensors) - {"y", *wide}, (dtype,), slack=slack)


def shifted(
    b: int = 2, t: int = 5, d: int = 3, *, eps: float | None = 1e-5, dtype: torch.dtype = F32
) -> Call:
    def run(y: Tensor, y0: Tensor, backend: Any) -> Tensor:
        return shifted_norm(y, y0, eps, dtype=dtype, backend=backend)

    exact = partial(shifted_norm, eps=eps, backend="reference")
    return Call(run, exact, {"y": normal(b, t, d), "y0": normal(b, d)}, (), (dtype,))


PARTS = times(each("norm", True, False), each("fed", True, False))
IN_MANY = {"patch": {"bedouin.kernels.output.PROGRAMS": 3}, "tolerance": 2e-6}
WIDTHS = [{"b": 3, "d": d, "t": 700 if d < 4096 else 7} for d in (1, 63, 512, 1024, 2048, 4096)]
WIDTHS += [{"b": 3, "t": 7, "d": 16384}]
OUTPUT = Row(
    output,
    SCAN.tolerance,
    {"": {}, "of heads": {"heads": 2}, "of the paper": {"norm": False, "fed": False}},
    [
        *times(sizes("btd", (2, 3, 5), (1, 1, 1), (3, 7, 64), (1, 2, 1025)), PARTS),
        *times(each("dtype", F16, BF16), PARTS, sizes("btd", (2, 5, 40))),
        {"d": 8, "dtype": BF16, "wide": ("gate", "D")},
        *times(
            sizes("btd", (2, 3, 5), (3, 5, 5), (1, 4, 5)),
            each("norm", True, False),
            each("heads", 1, 3),
            each("dtype", F32, BF16),
        ),
        # a program takes many tokens
        *times(each("norm", True, False), [{"b": 3, "t": 67, "d": 65} | IN_MANY]),
        {"heads": 2, "b": 3, "t": 7, "d": 65} | IN_MANY,
    ],
    [],
    [
        *times(WIDTHS, each("norm", True, False), each("dtype", F32, F16, BF16)),
        {"heads": 8, "b": 3, "t": 300, "d": 65},
        {"heads": 2, "b": 1, "t": 100, "d": 128, "dtype": BF16},
    ],
    [
        ({"heads": 2}, {"D": (3, 5), "weight": (3, 5)}, "D has 3 heads, got 4"),
        ({"heads": 2}, {"D": (2, 4)}, "D must have shape (H, d) = (2, 5), got (2, 4)"),
        ({"heads": 2}, {"weight": (5,)}, "weight must have shape (H, d) = (2, 5), got (5,)"),
        ({}, {"x": (2, 3, 4)}, "x must have shape (b, t, d) = (2, 3, 5), got (2, 3, 4)"),
    ],
    [({"backend": "triton", "d": 16385}, "does not support 16385 channels (at most 16384)")],
    ("b", "t", "d"),
)
SHIFTED = Row(
    shifted,
    SCAN.tolerance,
    {"": {}, "as it is": {"eps": None}},
    times(
        [*sizes("btd", (1, 1, 1), (3, 4, 64), (1, 2, 1025)), *each("dtype", F16, BF16)],
        each("eps", None, 1e-5),
    ),
    [],
    times(WIDTHS, each("dtype", F32, F16, BF16)),
    [({}, {"y0": (2, 4)}, "y0 must have shape (b, d) = (2, 3), got (2, 4)")],
    [],
    ("b", "t", "d"),
)


# -- gated norm


def norm(b: int = 2, t: int = 3, h: int = 2, v: int = 16, *, dtype: torch.dtype = F32) -> Call:
    tensors: Tensors = {"o": normal(b, t, h, v), "gate": normal(b, t, h * v), "weight": normal(v)}

    run = partial(gated_norm, eps=1e-5)
    return Call(run, partial(run, backend="reference"), tensors, ("o", "gate"), (dtype,))


NORMS = sizes("bthv", (1, 1, 1, 3), (2, 70, 3, 40), (1, 5, 1, 300))
NORM = Row(
    norm,
    {torch.float64: 1e-12, F32: 1e-5, BF16: 1e-2},
    {"": {}},
    [*NORMS, {"dtype": BF16}],
    [],
    times(NORMS, [{"dtype": BF16}]),
    [
        ({}, {"gate": (2, 2, 32)}, "gate must have shape (b, t, h v)"),
        ({}, {"weight": (15,)}, "weight must have shape (v,)"),
    ],
)


# -- convolution


def convolution(
    b: int = 2,
    t: int = 9,
    c: int = 24,
    w: int = 4,
    *,
    adds: int = 0,
    groups: Groups | None = None,
    dtype: torch.dtype = F32,
) -> Call:
    tensors: Tensors = {"x": normal(b, t, c), "weight": normal(c, w), "window": normal(b, w - 1, c)}
    tensors |= {"added": normal(b, t, adds) if adds else None}

    run = partial(short_convolution, groups=groups)
    wide = torch.promote_types(dtype, F32)
    return Call(run, partial(run, backend="reference"), tensors, ("x", "added"), (dtype, wide))


CONVOLUTIONS: list[Options] = [
    {"adds": 8},
    {"b": 1, "t": 1, "c": 8, "groups": Groups(1, 8, 1e-6)},
    {"t": 70, "c": 40, "groups": Groups(3, 8, 1e-6)},
    {"b": 3, "t": 2, "c": 20, "adds": 20, "groups": Groups(2, 10, 1e-6)},
    {"t": 130, "c": 36, "w": 3, "groups": Groups(2, 16, 1e-6)},
    {"b": 1, "t": 5, "c": 100, "w": 1, "adds": 3},
]
CONVOLUTION = Row(
    convolution,
    # the cotangent of the convolution's result is stored in the dtype of x
    {torch.float64: 1e-12, F32: 1e-5, BF16: 2e-2},
    {"": {"adds": 8, "groups": Groups(2, 8, 1e-6)}, "alone": {}},
    [*CONVOLUTIONS, {"adds": 8, "dtype": BF16}],
    [],
    times(CONVOLUTIONS, [{"dtype": BF16}]),
    [
        ({}, {"window": (2, 2, 24)}, "window must have shape (b, w - 1, c)"),
        ({"adds": 8}, {"added": (2, 8, 8)}, "added must have shape (b, t, a)"),
    ],
    [({"groups": Groups(4, 8, 0.0)}, "groups and added must have at most the 24 channels of x")],
)


ROWS: dict[str, Row] = {
    "scan": SCAN,
    "output": OUTPUT,
    "shifted norm": SHIFTED,
    "gated norm": NORM,
    "convolution": CONVOLUTION,
    "rule of steps": STEP_RULE,
    "rule in chunks": CHUNK_RULE,
    "rates": RATE,
    "tracker": TRACK,
    "sweep": SWEEP,
}
