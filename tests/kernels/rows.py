"""A table of the operations of the kernels: how each is called and what it has to compute.

`test_operations.py` tests every row in the same way.
Letters: b batch, t time, d channels, n states, k steps or reflections, H heads, p key and v value
channels, c channels of a head or of a convolution, w width.
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.kernels.sweeps import Case
from torch import Tensor
from torch.nn.functional import normalize, softplus

from bedouin.kernels.convolution import Groups, short_convolution
from bedouin.kernels.delta_rule import DeltaInputs, delta_rates, delta_rule, delta_rule_reference
from bedouin.kernels.direct import direct_sweep, direct_sweep_reference
from bedouin.kernels.operands import Operands
from bedouin.kernels.output import gated_norm, gated_output, shifted_norm
from bedouin.kernels.scan import selective_scan
from bedouin.kernels.track import TrackInputs, track, track_reference
from bedouin.kernels.track.types import ROWS as TOKENS
from bedouin.testing import assert_close

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Tensors = dict[str, Tensor | None]
Options = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """An operation on tensors in float64, and what it computes, differentiable."""

    run: Callable[..., Any]  # of the tensors and a backend
    exact: Callable[..., Any]  # of the tensors
    tensors: Tensors
    low: Collection[str]  # the tensors that may have less than float32
    dtypes: tuple[torch.dtype, ...]  # of the results
    constant: str = ""  # the tensor that needs no gradient
    slack: dict[str, float] = field(default_factory=dict)  # factors of the tolerance

    def given(self, dtype: torch.dtype, device: str) -> Tensors:
        wide = torch.promote_types(dtype, F32)
        return {
            name: None if v is None else v.to(device, dtype if name in self.low else wide)
            for name, v in self.tensors.items()
        }


def in_max_norm(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert_close(name, ours, theirs, tolerance, atol=tolerance)


def in_2_norm(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    error = (ours - theirs).norm() / (1e-30 + theirs.norm())
    assert ours.shape == theirs.shape and error <= tolerance, (name, float(error))


@dataclass(frozen=True)
class Row:
    """An operation of the table.

    The options of a call are those of `make`, and may have the dtype of its lower tensors, values
    that constants of a launch take (`patch`), and a tolerance of its own.
    """

    make: Callable[..., Call]
    tolerance: dict[torch.dtype, float]
    variants: dict[str, Options]  # small calls, which keep to all laws
    cases: list[Options] = field(default_factory=list)  # for values and gradients
    plain: list[Options] = field(default_factory=list)  # the same, of plain torch alone
    compiled: list[Options] = field(default_factory=list)  # on a GPU alone
    wrong: list[tuple[Options, dict[str, tuple[int, ...]], str]] = field(default_factory=list)
    refused: list[tuple[Options, str]] = field(default_factory=list)
    empty: tuple[str, ...] = ("b", "t")
    assert_near: Callable[[str, Tensor, Tensor, float], None] = in_max_norm
    spares: bool = False  # keeps less where no gradient is wanted


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def unit(*shape: int) -> Tensor:
    return normalize(normal(*shape), dim=-1)


def of_samples(v: Tensor, b: int) -> Tensor:
    """(H, ...) -> (b, ...): what each of the b samples of H heads reads."""
    return v.repeat_interleave(b // len(v), 0) if len(v) else v


def times(*axes: Any) -> list[Options]:
    """All combinations of an option of each axis."""
    return [
        {name: v for part in parts for name, v in part.items()}
        for parts in itertools.product(*axes)
    ]


def each(name: str, *values: Any) -> list[Options]:
    return [{name: v} for v in values]


def sizes(names: str, *rows: tuple[int, ...]) -> list[Options]:
    return [dict(zip(names, row, strict=True)) for row in rows]


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

    def exact(*given: Any) -> Any:
        return scan_by_hand(*given, **options)

    return Call(run, exact, tensors, low, (dtype, dtype if starts and low_state else wide))


def scan_by_hand(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor | None,
    D: Tensor | None,
    input_scale: str = "delta",
    eigenvalues: str = "positive",
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """The recurrence of the paper, with every (b, t, d, n) tensor in memory."""
    if A.dim() == 3:
        A = of_samples(A, len(x)).unsqueeze(1)
        D = None if D is None else of_samples(D, len(x)).unsqueeze(1)
    decay = torch.exp(delta[..., None] * A)
    gain = {
        "delta": delta[..., None].expand_as(decay),
        "bounded_delta": (delta / (1 + delta))[..., None].expand_as(decay),
        "one_minus_decay": 1 - decay,
    }[input_scale]
    if eigenvalues == "full":
        decay = 2 * decay - 1
        if input_scale == "one_minus_decay":
            gain = 1 - decay.abs()
    h = x.new_zeros(len(x), *A.shape[-2:]) if h0 is None else h0
    reads = [torch.zeros_like(x[:, :0])]
    written = torch.einsum("btdn,btd,btn->btdn", gain, x, B)
    for i in range(x.shape[1]):
        kept = decay[:, i] * h
        h = kept + written[:, i]
        reads.append(torch.einsum("bdn,bn->bd", kept if exclusive else h, C[:, i])[:, None])
    return torch.cat(reads, 1) + (0 if D is None else D * x), h


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
            {"t": 3, "patch": {"bedouin.kernels.scan.launch.WARP": 32}} | size
            for size in sizes("bdn", (1, 1, 1), (2, 20, 1), (1, 17, 16), (1, 3, 33))
        ),
        *({"heads": 3, "t": 3, "dtype": dtype} | SCANS[10] for dtype in (F32, BF16)),
    ],
    times(each("t", 0, 1, 63, 64, 100), SCANS, each("n", 4)),
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
        ({}, {"A": (3,)}, "A must have shape (d, n) = (3, n) or (H, d, n), got (3,)"),
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

    return Call(run, output_by_hand, tensors, set(tensors) - {"y", *wide}, (dtype,))


def output_by_hand(
    y: Tensor,
    x: Tensor,
    D: Tensor,
    gate: Tensor,
    fed: Tensor | None,
    z: Tensor | None,
    weight: Tensor | None,
) -> Tensor:
    """The definition, with the heads of a sample side by side."""
    heads = len(D) if D.dim() == 2 else 1

    def rows(v: Tensor) -> Tensor:
        return of_samples(v.view(heads, -1), len(y)).unsqueeze(1)

    v, gate = y + rows(D) * x, gate if fed is None else gate + fed
    if z is None or weight is None:
        out = gate * v * torch.sigmoid(v)
    else:
        normed = v / torch.sqrt(v.square().mean(-1, keepdim=True) + 1e-5)
        out = (gate + z) * torch.sigmoid(gate + z) * normed * rows(weight)
    return torch.cat(out.chunk(heads), -1) if len(out) else out.repeat(1, 1, heads)


def shifted(
    b: int = 2, t: int = 5, d: int = 3, *, eps: float | None = 1e-5, dtype: torch.dtype = F32
) -> Call:
    def run(y: Tensor, y0: Tensor, backend: Any) -> Tensor:
        return shifted_norm(y, y0, eps, dtype=dtype, backend=backend)

    def exact(y: Tensor, y0: Tensor) -> Tensor:
        before = torch.cat([y0[:, None], y], 1)[:, :t]
        if eps is None:
            return before
        return before / torch.sqrt(before.square().mean(-1, keepdim=True) + eps)

    return Call(run, exact, {"y": normal(b, t, d), "y0": normal(b, d)}, (), (dtype,))


PARTS = times(each("norm", True, False), each("fed", True, False))
IN_MANY = {"patch": {"bedouin.kernels.output.registered.PROGRAMS": 3}, "tolerance": 2e-6}
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

    def run(o: Tensor, gate: Tensor, weight: Tensor, backend: Any) -> Tensor:
        return gated_norm(o, gate, weight, 1e-5, backend=backend)

    def exact(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        normed = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * weight
        return normed.flatten(-2) * gate * torch.sigmoid(gate)

    return Call(run, exact, tensors, ("o", "gate"), (dtype,))


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

    def run(x: Tensor, weight: Tensor, *rest: Any, backend: Any) -> Any:
        return short_convolution(x, weight, rest[0], rest[1], groups, backend=backend)

    def exact(x: Tensor, weight: Tensor, window: Tensor, added: Tensor | None) -> Any:
        rows, number, size = torch.cat([window, x], 1), 0, 0
        windows = rows.unfold(1, w, 1) if t else rows.new_zeros(b, 0, c, w)
        v = torch.einsum("btcw,cw->btc", windows, weight)
        more = [] if added is None else [silu(v[..., :adds] + added)]
        v, parts = silu(v), []
        if groups is not None:
            number, size = groups.number, groups.size
            for part in v[..., : number * size].split(size, -1):
                length = torch.sqrt(part.square().sum(-1, keepdim=True) + groups.eps)
                parts.append(part / length)
        return torch.cat([*parts, v[..., number * size :], *more], -1), rows[:, t:]

    wide = torch.promote_types(dtype, F32)
    return Call(run, exact, tensors, ("x", "added"), (dtype, wide))


def silu(v: Tensor) -> Tensor:
    return v * torch.sigmoid(v)


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


# -- delta rule


def rule(
    b: int = 1,
    t: int = 20,
    k: int = 1,
    H: int = 2,
    p: int = 16,
    v: int = 16,
    *,
    gated: bool = True,
    starts: bool = True,
    low: Collection[str] = ("query", "key", "value"),
    dtype: torch.dtype = F32,
) -> Call:
    """Keys have length 1 and beta lies in [0, 2]."""
    tensors: Tensors = {"query": unit(b, t, H, p), "key": unit(b, t, k, H, p)}
    tensors |= {"value": normal(b, t, k, H, v), "beta": 2 * uniform(b, t, k, H)}
    tensors |= {"log_decay": -uniform(b, t, H) if gated else None}
    tensors |= {"memory": normal(b, H, p, v) if starts else None}

    def run(*given: Any, backend: Any) -> Any:
        chosen: Any = "torch" if backend == "reference" else backend
        return delta_rule(DeltaInputs(*given[:5]), given[5], dtype, chosen)

    def exact(*given: Any) -> Any:
        memory = given[0].new_zeros(b, H, p, v) if given[5] is None else given[5]
        if not t:
            return given[2].new_zeros(b, 0, H, v), memory
        return delta_rule_reference(DeltaInputs(*given[:5]), memory)

    last = dtype if "memory" in low else torch.promote_types(dtype, F32)
    return Call(run, exact, tensors, low, (dtype, last))


EVERY = ("query", "key", "value", "beta", "log_decay", "memory")
BY_CHUNKS = {"patch": {"bedouin.kernels.delta_rule.MOST_BY_TOKEN": 0}}
TOKEN_RULE = Row(
    rule,
    {torch.float64: 1e-9, F32: 5e-5, BF16: 5e-3},
    {"": {"t": 3, "k": 2}},
    [
        *(
            dict(zip("tkpvb", size, strict=True)) | {"H": 3, "gated": gated, "low": EVERY}
            for size, gated in (
                ((1, 1, 4, 5, 2), True),
                ((9, 2, 4, 5, 1), True),
                ((3, 4, 68, 68, 1), True),
                ((5, 1, 64, 128, 1), False),
                ((3, 1, 128, 20, 1), True),
                ((63, 2, 1, 1, 1), True),
                ((64, 1, 2, 8, 1), False),
                ((100, 1, 6, 3, 1), True),
            )
        ),
        {"t": 9, "k": 2, "p": 4, "v": 5, "low": EVERY, "dtype": BF16},
    ],
    wrong=[
        ({}, {"key": (1, 20, 2, 16)}, "for one Householder step a token, use key.unsqueeze(2)"),
        ({}, {"query": (1, 2, 2, 16)}, "query must have shape (b, t, h, p) = (1, 3, 2, 16)"),
        ({}, {"value": (1, 20, 1, 3, 16)}, "value must have shape (b, t, k, h, v)"),
        ({}, {"beta": (1, 20, 1)}, "beta must have shape (b, t, k, h)"),
        ({}, {"log_decay": (1, 20, 1, 2)}, "log_decay must have shape (b, t, h)"),
        ({}, {"memory": (1, 2, 16, 5)}, "memory must have shape (b, h, p, v) = (1, 2, 16, 16)"),
    ],
    refused=[
        ({"backend": "cuda"}, "backend must be one of"),
        ({"backend": "triton", "p": 257}, "heads of 257 key channels, more than 256"),
        (
            {"backend": "triton", "dtype": torch.float64, "low": EVERY},
            "does not support products in torch.float64: use backend='auto' or 'torch'",
        ),
    ],
    assert_near=in_2_norm,
)
CHUNK_RULE = Row(
    rule,
    # in half precision each factor of a product is rounded to 8 or 11 bits, and errors of one token
    # are factors of those of the next
    {torch.float64: 1e-9, F32: 1e-5, BF16: 4e-2, F16: 8e-3},
    {
        "": {},
        "without a decay": {"gated": False},
        "without a memory": {"starts": False},
    },
    [
        *times(
            sizes("tpv", (1, 16, 16), (2, 32, 64), (63, 40, 100), (64, 16, 64), (65, 128, 64)),
            [BY_CHUNKS],
        ),
        {"t": 130, "p": 64},
        *({"t": t, "p": 32, "v": 40, "dtype": of} for t, of in ((17, F16), (70, BF16))),
        *times([{"t": 70, "gated": False}], each("starts", True, False)),
    ],
    [],
    times(
        each("dtype", F32, BF16, F16),
        each("t", 16, 32, 1000),
        sizes("pv", (16, 16), (40, 100), (64, 128), (96, 64), (256, 64)),
        [BY_CHUNKS],
    ),
    assert_near=in_2_norm,
    spares=True,
)


def rates(
    b: int = 2, t: int = 3, k: int = 2, H: int = 2, p: int = 16, *, dtype: torch.dtype = F32
) -> Call:
    tensors: Tensors = {"strength": normal(b, t, k * H), "a": normal(b, t, H)}
    tensors |= {"A_log": normal(H), "dt_bias": normal(H), "key": unit(b, t, k, H, p)}

    def run(strength: Tensor, *rest: Any, backend: Any) -> Any:
        return delta_rates(strength, rest[3], rest[:3], 2.0, backend=backend)

    def exact(strength: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor, key: Tensor) -> Any:
        excess = key.square().sum(-1).clamp(min=1) if dtype == BF16 else 1
        beta = 2 / (1 + torch.exp(-strength)).unflatten(-1, (k, H)) / excess
        return beta, -torch.exp(A_log) * torch.log1p(torch.exp(a + dt_bias))

    wide = torch.promote_types(dtype, F32)
    return Call(run, exact, tensors, ("strength", "a", "key"), (wide, wide), "key")


RATES = sizes("btkHp", (2, 3, 1, 2, 16), (1, 1, 1, 1, 3), (3, 70, 2, 3, 40), (1, 5, 1, 2, 300))
RATE = Row(
    rates,
    {torch.float64: 1e-12, F32: 1e-5, BF16: 1e-2},
    {"": {}},
    [*RATES, {"dtype": BF16}],
    times(RATES, [{"dtype": BF16}]),
    times(RATES, [{"dtype": BF16}]),
)


# -- tracker


def tracker(
    b: int = 1,
    t: int = 18,
    H: int = 2,
    c: int = 3,
    n: int = 5,
    *,
    starts: bool = True,
    dtype: torch.dtype = F32,
) -> Call:
    """With decays between hardly one and strong."""
    d = H * c
    rows = [normal(b, t, size) for size in (d, H * n, H * n, d, H, d, d)]
    parameters = [0.3 * normal(d), normal(H), (2 * normal(d, n).abs()).log(), normal(d), normal(d)]
    state = [normal(b, d, n), normal(b, d)] if starts else [None, None]
    every = [*rows, *parameters, normal(H, 3 * c, c) * 0.3 / c**0.5, *state]
    tensors: Tensors = dict(zip(TrackInputs._fields, every, strict=True))

    def run(*given: Any, backend: Any) -> Any:
        return track(TrackInputs(*given), 1e-5, 1e-4, backend=backend)

    def exact(*given: Any) -> Any:
        return track_reference(TrackInputs(*given), 1e-5, 1e-4)

    wide = torch.promote_types(dtype, F32)
    low, dtypes = TrackInputs._fields[:TOKENS], (dtype, wide, wide)
    # the gradient of a bias of beta is one sum, of numbers that cancel
    return Call(run, exact, tensors, low, dtypes, slack={"erase_bias": 5})


SEGMENTS = {
    "bedouin.kernels.track.limits.WORKSPACE": 2**14,
    "bedouin.kernels.track.limits.GRADIENT_CHUNKS": 2,
}
TRACK = Row(
    tracker,
    # feedback amplifies the roundings of bfloat16, which has 8 bits
    {torch.float64: 1e-12, F32: 2e-5, BF16: 4e-2, F16: 8e-3},
    {"": {}, "from zeros": {"starts": False}},
    [
        *times(
            each("t", 1, 2, 63, 64, 65, 130),
            sizes("cn", (3, 5), (16, 64)),
            each("dtype", F32, BF16),
        ),
        *times(
            sizes("cn", (3, 128), (16, 5), (40, 100), (64, 64), (64, 128)),
            each("starts", True, False),
            each("dtype", F32, BF16, F16),
            [{"H": 1, "t": 19}],
        ),
        *times(each("H", 1, 2), [{"b": 3, "c": 16, "n": 16}]),
        {"t": 100, "H": 1, "patch": SEGMENTS},
        {"t": 100, "H": 1, "patch": {"bedouin.kernels.track.limits.WORKSPACE": 3 * 2**14}},
    ],
    wrong=[
        ({"b": 2}, {name: shape}, f"{name} must have shape")
        for name, shape in {
            "x": (2, 18, 5),
            "B": (2, 18, 9),
            "C": (2, 18, 9),
            "delta": (2, 18, 5),
            "gate": (2, 18, 5),
            "skip": (2, 18, 5),
            "dt_bias": (5,),
            "erase_bias": (1,),
            "A_log": (5, 5),
            "D": (5,),
            "weight": (5,),
            "W_y": (2, 8, 3),
            "h0": (2, 6, 4),
            "y0": (2, 5),
        }.items()
    ],
    refused=[
        ({"backend": "triton", "c": c, "n": n, "t": 1}, "at most 64 channels with 128 states")
        for c, n in ((65, 128), (64, 129))
    ],
    assert_near=in_2_norm,
    spares=True,
)


# -- sweep


def sweep(*, known: bool = False, **options: Any) -> Call:
    """y and the last h, of the fixed point or where y is known."""
    sizes: Options = {"b": 1, "t": 18, "p": 5, "n": 2, "k": 1, "dtype": torch.float64}
    case = Case(**sizes | options)
    names = Operands._fields
    tensors: Tensors = dict(zip(names, case.operands(), strict=True))
    if known:
        tensors |= {"y_star": normal(*case.operands().x.shape)}

    def run(*given: Any, backend: Any) -> Any:
        y_star = given[6] if known else None
        found = direct_sweep(Operands(*given[:6]), case.options(), y_star=y_star, backend=backend)
        return found.y, found.h

    def exact(*given: Any) -> Any:
        if known:
            return run(*given, backend="reference")
        found = direct_sweep_reference(Operands(*given), case.options())
        return found.y, found.h

    dtype = options.get("dtype", F32)
    wide = torch.promote_types(dtype, F32)
    low, constant = ("x", "raw", "W_y"), "y_star" if known else ""
    return Call(run, exact, tensors, low, (wide, wide), constant)


OF_HEADS = {"heads": 2, "has_axis": True}
SWEEP = Row(
    sweep,
    {torch.float64: 1e-10, F32: 2e-5, BF16: 3e-2},
    {
        "": {"has_axis": False, "heads": 1, "b": 2},
        "of heads": {"k": 2},
        "without reflections": {"k": 0},
        "without feedback": {"feedback": False},
        "of a known y": {"known": True},
    },
    wrong=[
        (
            OF_HEADS,
            {"W_y": (3, 15, 5)},
            "W_y and A must have the same heads as first axis, got (3, 15",
        ),
        (OF_HEADS, {"x": (3, 18, 5), "raw": (3, 18, 15)}, "2 heads, got 3 samples"),
        (OF_HEADS, {"W_y": (2, 0, 5)}, "W_y must have from 1 to 15 rows"),
        (OF_HEADS, {"W_y": (2, 16, 5)}, "W_y must have from 1 to 15 rows"),
    ],
)

ROWS: dict[str, Row] = {
    "scan": SCAN,
    "output": OUTPUT,
    "shifted norm": SHIFTED,
    "gated norm": NORM,
    "convolution": CONVOLUTION,
    "rule by tokens": TOKEN_RULE,
    "rule in chunks": CHUNK_RULE,
    "rates": RATE,
    "tracker": TRACK,
    "sweep": SWEEP,
}
