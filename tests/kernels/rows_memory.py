"""Rows of the table of operations: delta rule, tracker and exact sweep.

Letters: b batch, t time, k steps or reflections, H heads, p key and v value channels, c channels
of a head, n states.
"""

from collections.abc import Collection
from typing import Any

import torch
from tests.kernels.sweeps import Case
from tests.kernels.table import (
    BF16,
    F16,
    F32,
    Call,
    Options,
    Row,
    Tensors,
    each,
    in_2_norm,
    normal,
    sizes,
    times,
    uniform,
    unit,
)
from torch import Tensor

from bedouin.kernels.delta_rule import DeltaInputs, delta_rates, delta_rule, delta_rule_reference
from bedouin.kernels.direct import direct_sweep, direct_sweep_reference
from bedouin.kernels.operands import Operands
from bedouin.kernels.track import TrackInputs, track, track_reference

# The inputs of the tracker with a row for each token.
BY_TOKEN = TrackInputs._fields[: TrackInputs._fields.index("dt_bias")]

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
        return delta_rule(DeltaInputs(*given[:5]), given[5], chosen)

    def exact(*given: Any) -> Any:
        memory = given[0].new_zeros(b, H, p, v) if given[5] is None else given[5]
        if not t:
            return given[2].new_zeros(b, 0, H, v), memory
        return delta_rule_reference(DeltaInputs(*given[:5]), memory)

    last = dtype if "memory" in low else torch.promote_types(dtype, F32)
    return Call(run, exact, tensors, low, (dtype, last))


EVERY = ("query", "key", "value", "beta", "log_decay", "memory")
IN_CHUNKS = {torch.float64: 1e-9, F32: 1e-5, BF16: 4e-2, F16: 8e-3}
"""In half precision each factor of a product is rounded to 8 or 11 bits, and errors of one token
are factors of those of the next."""
STEP_RULE = Row(
    rule,
    IN_CHUNKS | {F32: 5e-5},
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
        (
            {"backend": "fla"},
            "needs a CUDA device and bfloat16 or float16, got cpu and torch.float32: use",
        ),
        ({"backend": "triton", "p": 257}, "heads of 257 key channels, more than 256"),
        (
            {"backend": "triton", "dtype": torch.float64, "low": EVERY},
            "does not support products in torch.float64: use backend='auto'",
        ),
    ],
    assert_near=in_2_norm,
    spares=True,
)
CHUNK_RULE = Row(
    rule,
    IN_CHUNKS,
    {"": {}, "without a decay": {"gated": False}, "without a memory": {"starts": False}},
    [
        *sizes("tpv", (1, 16, 16), (2, 32, 64), (63, 40, 100), (64, 16, 64), (65, 128, 64)),
        {"t": 130, "p": 64},
        *({"t": t, "p": 32, "v": 40, "dtype": of} for t, of in ((17, F16), (70, BF16))),
        *times([{"t": 70, "gated": False}], each("starts", True, False)),
    ],
    [],
    times(
        each("dtype", F32, BF16, F16),
        each("t", 16, 32, 1000),
        sizes("pv", (16, 16), (40, 100), (64, 128), (96, 64), (256, 64)),
    ),
    assert_near=in_2_norm,
    spares=True,
)


def rates(
    b: int = 2, t: int = 3, k: int = 2, H: int = 2, p: int = 16, *, shift: int = 0, dtype: Any = F32
) -> Call:
    tensors: Tensors = {"strength": normal(b, t, k * H), "a": normal(b, t, H) + shift}
    tensors |= {"A_log": normal(H) - shift, "dt_bias": normal(H), "key": unit(b, t, k, H, p)}

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
    [*RATES, {"dtype": BF16}, {"shift": -14}],
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
    dtypes = dtype, wide, wide
    # the gradient of a bias of beta is one sum, of numbers that cancel
    return Call(run, exact, tensors, BY_TOKEN, dtypes, slack={"erase_bias": 5})


TRACK = Row(
    tracker,
    # feedback amplifies the roundings of bfloat16, which has 8 bits
    {torch.float64: 1e-12, F32: 2e-5, BF16: 4e-2, F16: 8e-3},
    {"": {}, "from zeros": {"starts": False}},
    [{"t": t, "c": 3, "n": 5} for t in (1, 63)],
    # plain torch is the loop itself
    kernels=[
        # of the tracker's chunks and of the parts of one gradient, which have 16 and 128 tokens
        *times(
            sizes("tcn", (1, 3, 5), (63, 3, 5), (64, 3, 5), (130, 3, 5), (2, 16, 64), (33, 16, 64)),
            each("dtype", F32, BF16),
        ),
        *times(
            sizes("cn", (3, 128), (16, 5), (40, 100), (64, 64), (64, 128)),
            each("starts", True, False),
            each("dtype", F32, BF16, F16),
            # at other lengths the terms of the one gradient of erase_bias cancel to 1 %
            [{"H": 1, "t": 22}],
        ),
        *times(each("H", 1, 2), [{"b": 3, "c": 16, "n": 16}]),
        {"t": 100, "H": 1, "patch": {"bedouin.kernels.track.PART": 2}},
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


OF_HEADS, COUPLED = {"heads": 2, "has_axis": True}, {"input_scale": "one_minus_decay"}
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
    [
        {"known": True} | case
        for case in (
            {"heads": 2, "t": 2, "feedback": False},
            {"heads": 2, "t": 2, "dtype": BF16},
            {"heads": 1, "b": 2, "t": 17, "p": 20, "k": 2, "has_axis": False},
            {"heads": 3, "t": 2, "n": 1, "k": 0, "selective": False, **COUPLED},
            {"heads": 2, "t": 33, "p": 33, "n": 17, "k": 4, "starts": False},
        )
    ],
    wrong=[
        (
            OF_HEADS,
            {"W_y": (3, 15, 5)},
            "W_y and A must have the same heads as first axis, got (3, 15",
        ),
        (OF_HEADS, {"x": (3, 18, 5), "raw": (3, 18, 15)}, "2 heads, got 3 samples"),
        (OF_HEADS, {"W_y": (2, 0, 5)}, "W_y must have 15 rows"),
        (OF_HEADS, {"W_y": (2, 16, 5)}, "W_y must have 15 rows"),
    ],
)
