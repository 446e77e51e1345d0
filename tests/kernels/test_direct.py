"""The direct sweep by every implementation: fixed points, statistics, and the gradient of autograd
through the loop over tokens. test_direct_triton.py has what is special to the kernels.

Letters: b samples of a head, t time, p channels of a head, n states, k reflections.
"""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.kernels.sweeps import (
    Case,
    How,
    assert_same,
    cotangents,
    each_head,
    low_rank_bind,
    run,
)
from tests.kernels.table import BF16, F32, each, times
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.kernels.direct import Sweep, direct_sweep
from bedouin.kernels.direct.layout import bind_by_layout, is_covered
from bedouin.kernels.feedback import padded_rows, project_feedback
from bedouin.kernels.householder import apply_complement
from bedouin.kernels.operands import Activation, Operands
from bedouin.kernels.scan import Eigenvalues, InputScale, selective_scan
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.testing import assert_close

F64 = torch.float64
SCALES, RANGES = get_args(InputScale), get_args(Eigenvalues)
STATISTICS = ("defect", "scale", "magnitude", "pivot")
ONE = Case(heads=1, t=5, p=4, n=3, has_axis=False, dtype=F64)
"""A single head, whose tensors have no axis of heads."""

hows = pytest.mark.parametrize("how", ["loop", "buffers"])
"""Plain torch, for any coefficients and for those of a layout."""

all_heads = pytest.mark.parametrize("heads", [1, 2])
implementations = pytest.mark.parametrize(
    ("how", "low_rank"), [("loop", False), ("loop", True), ("buffers", False)]
)
erases_and_feeds_x = pytest.mark.parametrize(
    "more", [{}, {"erase": 1.0, "feeds_x": True}], ids=["", "erase and x"]
)


def of_heads(heads: int, **options: Any) -> Case:
    return replace(ONE, heads=heads, has_axis=heads > 1, **options)


def check(case: Case, how: How, tolerance: float = 1e-10) -> dict[str, Tensor]:
    """The results of an implementation, compared with autograd through the specification."""
    found, expected = run(case, how), run(case, "autograd")
    magnitude = expected.pop("magnitude")
    assert bool((found["magnitude"] >= (1 - tolerance) * magnitude).all())
    if how == "loop" and not case.low_rank:
        del expected["pivot"]  # of another elimination
    assert_same(found, expected, tolerance)
    return found


def evaluate(case: Case, y: Tensor) -> Tensor:
    """F(y) of a single head, from the operations of an iterative solver."""
    x, raw, W_y, A, h0, y0, *parameters = case.tensors()
    assert x is not None and raw is not None and A is not None and y0 is not None
    options, raw_y = case.options(), raw
    if W_y is not None:
        before = torch.cat([y0[:, None], y[:, :-1]], 1)
        raw_y = raw + project_feedback(before, W_y, options.feedback_norm_eps)
    bind: Any = low_rank_bind if case.low_rank else bind_by_layout(case.layout(), A)
    c = bind(raw_y, *parameters)
    mixed = x + apply_complement(y - x, c.e if c.e.shape[-1] else None, c.U, c.M)
    scales: Any = {"input_scale": case.input_scale, "eigenvalues": case.eigenvalues}
    return selective_scan(mixed, c.delta, A, c.B, c.C, h0, **scales)[0].detach()


@implementations
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        *(
            (options, 1e-10)
            for options in times(
                each("input_scale", *SCALES),
                each("eigenvalues", *RANGES),
                each("feedback", True, False),
                each("norm_eps", 1e-5, None),
            )
        ),
        # around a multiple of the tokens between two kept h
        *(({"t": t}, 1e-10) for t in (1, 15, 16, 17, 40)),
        *(({"t": t, "dtype": F32}, 5e-4) for t in (1, 17, 40)),
        *(({"n": 1, "input_scale": scale}, 1e-10) for scale in SCALES),
        *(
            ({"b": b, "t": t, "feedback": feedback}, 1e-10)
            for b, t in ((0, 4), (2, 0), (0, 0))
            for feedback in (True, False)
        ),
    ],
    ids=str,
)
def test_the_fixed_point_and_the_gradient_of_the_loop(
    options: dict[str, Any], tolerance: float, how: How, low_rank: bool
) -> None:
    case = replace(ONE, low_rank=low_rank, **options)
    found = check(case, how, tolerance)
    assert case.t or torch.equal(found["h"], case.operands().h0)  # type: ignore[arg-type]
    if case.dtype == F64 and found["y"].numel():
        error = (evaluate(case, found["y"]) - found["y"]).abs().max()
        assert error < 1e-11 * found["y"].abs().max()
        assert (found["defect"] / found["scale"]).max() < 1e-12
        assert bool((found["pivot"] > 0).all())


OPTIONS: dict[str, Any] = {
    "k": st.sampled_from([0, 1, 2, 3, 4, 8]),
    "heads": st.integers(1, 3),
    "feedback": st.booleans(),
    "fed": st.sampled_from([None, 1, 4, 6]),
    "input_scale": st.sampled_from(SCALES),
    "eigenvalues": st.sampled_from(RANGES),
    "feeds_x": st.booleans(),
}


@settings(max_examples=60)
@given(
    how=st.sampled_from(["buffers", "buffers", "loop"]),
    low_rank=st.booleans(),
    b=st.integers(0, 3),
    t=st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 100]),
    n=st.integers(1, 4),
    activation=st.sampled_from(get_args(Activation)),
    selective=st.booleans(),
    beta_max=st.sampled_from([1.0, 1.5]),
    norm_eps=st.sampled_from([1e-5, None]),
    erase=st.sampled_from([0.0, 1.0, 2.0]),
    **OPTIONS,
)
def test_any_shape_and_option_is_like_autograd(how: How, **options: Any) -> None:
    if how == "buffers":
        options["low_rank"] = False
    else:
        options["t"] = min(options["t"], 17)  # of longer ones the table above has some
    if options["low_rank"]:
        options |= {"k": 2, "selective": True, "erase": 0.0, "feeds_x": False, "fed": None}
    if not options["selective"]:
        options["n"] = 1
    case = of_heads(**options)
    given_operands = case.operands()
    given_operands = given_operands._replace(raw=given_operands.raw - 0.5)
    expected = run(case, "autograd", given=given_operands)
    if not expected["y"].numel():
        return  # the table above has some
    # a near-singular token, or growth over time, amplifies the difference of two roundings
    size = float(expected["y"].abs().max().square() / expected["pivot"].min())
    # x fed back without a norm may diverge
    assume(size < 1e8)
    tolerance, actual = 1e-11 * (1 + size), run(case, how, given=given_operands)
    # where an elimination with pivots loses digits, so does the inverse
    defect, magnitude = expected.pop("defect"), expected.pop("magnitude")
    allowed = 1e-12 * actual["magnitude"] + 100 * defect
    assert bool((actual["defect"] <= allowed.cummax(1).values).all())
    if how == "buffers":
        assert_close("magnitude", actual["magnitude"], magnitude, tolerance, atol=tolerance)
    assert bool((actual["magnitude"] >= (1 - tolerance) * magnitude).all())
    for name in ("residual", "converged", *(["pivot"] if how == "loop" else [])):
        del expected[name]
    for name, theirs in expected.items():
        allowed_error = tolerance * (10 * (1 + size) if name.startswith("gradient") else 1)
        assert_close(name, actual[name], theirs, allowed_error, atol=allowed_error)


@pytest.mark.parametrize("low", [F32, BF16])
@all_heads
@pytest.mark.parametrize("feedback", [{}, {"feedback": False}, {"fed": 4}], ids=str)
@erases_and_feeds_x
def test_both_sweeps_round_products_in_the_same_way(
    low: torch.dtype, heads: int, feedback: dict[str, Any], more: dict[str, Any]
) -> None:
    case = of_heads(heads, t=18, dtype=F32, **feedback, **more)
    operands = case.operands()
    if operands.W_y is not None:
        operands = operands._replace(W_y=operands.W_y.to(low))
    tolerance = 1e-5 if low == F32 else 1e-2
    found, expected = (run(case, how, given=operands) for how in ("buffers", "loop"))
    del expected["magnitude"], expected["pivot"]
    assert_same(found, expected, tolerance)
    assert (found["report 0"] / found["report 1"]).max() < 1e-5


# -- a fixed point that is given


@implementations
@all_heads
@pytest.mark.parametrize("t", [1, 17, 40])
def test_a_given_fixed_point_gets_the_same_gradient(
    t: int, heads: int, how: How, low_rank: bool
) -> None:
    case = of_heads(heads, t=t, low_rank=low_rank)
    solved = run(case, how)
    attached = run(case, how, y_star=solved["y"])
    assert torch.equal(attached["y"], solved["y"]) and not attached["defect"].any()
    for name in ("h", *(name for name in solved if name.startswith("gradient"))):
        assert_close(name, attached[name], solved[name], 1e-12, atol=1e-12)


@settings(max_examples=20)
@given(t=st.sampled_from([1, 16, 17, 40]), **OPTIONS)
def test_the_gradient_is_that_at_the_y_that_is_given(t: int, **options: Any) -> None:
    """A solver's y that is not the fixed point is differentiated where it is."""
    case = of_heads(t=t, **options)
    y_star = torch.randn(case.operands().x.shape, dtype=F64)
    ours, theirs = (run(case, how, y_star=y_star) for how in ("buffers", "loop"))
    for name in (name for name in ours if name.startswith("gradient")):
        assert_close(name, ours[name], theirs[name], 1e-9, atol=1e-9)


def test_a_given_fixed_point_with_erase_is_refused() -> None:
    case = replace(ONE, erase=1.0)
    y_star = torch.zeros_like(case.operands().x)
    with pytest.raises(ValueError, match=r"y_star must be None with erase, got erase=1\.0"):
        direct_sweep(case.operands(), case.options(), y_star=y_star)


# -- heads, and feedback of a part of the raw values


@pytest.mark.parametrize("input_scale", SCALES)
@implementations
def test_a_batch_of_heads_is_a_loop_over_them(
    input_scale: InputScale, how: How, low_rank: bool
) -> None:
    case = of_heads(3, input_scale=input_scale, low_rank=low_rank)
    together, operands = run(case, how), case.operands()
    sweep = Sweep(*(together[name] for name in Sweep._fields))
    weights = zip(*(v.chunk(3) for v in cotangents(sweep)), strict=True)
    alone = [
        run(replace(case, heads=1), how, given=one, weights=list(weight))
        for one, weight in zip(each_head(case, operands), weights, strict=True)
    ]
    for name, found in together.items():
        parts = [swept[name] for swept in alone]
        is_of_heads = name in ("gradient of W_y", "gradient of A")
        expected = torch.stack(parts) if is_of_heads else torch.cat(parts)
        if name == "gradient of bind parameter":
            expected = torch.stack(parts).sum(0)
        assert_close(name, found, expected, 1e-12, atol=1e-13)


FED = [1, 4, 7, Case.layout(ONE).size(4, 3) - 1]


@pytest.mark.parametrize("fed", FED)
@all_heads
@pytest.mark.parametrize(
    ("how", "low", "tolerance"),
    [
        ("loop", F64, 1e-11),
        ("buffers", F64, 1e-11),
        ("buffers", F32, 1e-4),
        ("buffers", BF16, 2e-2),
    ],
    ids=str,
)
def test_missing_rows_of_W_y_are_rows_of_zeros(
    fed: int, heads: int, how: How, low: torch.dtype, tolerance: float
) -> None:
    case = of_heads(heads, t=3, fed=fed, dtype=F64 if low == F64 else F32, low=low)
    operands = case.operands()
    assert operands.W_y is not None
    whole = operands._replace(W_y=padded_rows(operands.W_y, case.layout().size(4, 3)))
    y_star = operands.x.to(case.dtype).cos()
    either: list[dict[str, Any]] = [{}, {"y_star": y_star}]
    for known in either:
        found = run(case, how, given=operands, **known)
        expected = run(case, how, given=whole, **known)
        expected["gradient of W_y"] = expected["gradient of W_y"][..., :fed, :]
        assert_same(found, expected, tolerance)


# -- derivatives


def test_finite_differences() -> None:
    case = replace(ONE, b=1, t=3, low_rank=True)

    def sweep(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        swept = case.sweep(tensors, "loop")
        return swept.y, swept.h

    assert torch.autograd.gradcheck(sweep, [v for v in case.tensors() if v is not None])


@hows
def test_the_adjoint_sweep_reports_its_defect_once_per_token(how: How) -> None:
    reports: list[tuple[Tensor, Tensor]] = []
    swept = (case := replace(ONE, t=19)).sweep(
        case.tensors(), how, report=lambda *r: reports.append(r)
    )
    assert not reports
    swept.y.sum().backward()
    ((defect, scale),) = reports
    assert defect.shape == scale.shape == (2, 19)
    assert (defect / scale).max() < 1e-12


@hows
def test_h_is_kept_at_every_sixteenth_token_only(how: How) -> None:
    case = replace(ONE, t=64, n=32)
    tensors = case.tensors()
    saved: list[int] = []

    def pack(v: Tensor) -> Tensor:
        saved.append(v.numel())
        return v

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        case.sweep(tensors, how)
    every_state = 2 * 64 * 4 * 32
    given_and_y = sum(v.numel() for v in (*tensors, tensors[0]) if v is not None)
    assert sum(saved) <= given_and_y + every_state // 16 and max(saved) < every_state


@hows
def test_statistics_have_no_gradient(how: How) -> None:
    swept = ONE.sweep(ONE.tensors(), how)
    assert not any(getattr(swept, name).requires_grad for name in STATISTICS)
    assert swept.y.requires_grad and swept.h.requires_grad


# -- tokens that are not finite, or singular


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("buffers", {}),
        ("loop", {}),
        ("loop", {"feedback": False, "low_rank": True, "input_scale": "one_minus_decay"}),
    ],
    ids=str,
)
def test_a_token_that_is_not_finite_spoils_its_own_sample_from_there_on(
    how: How, options: dict[str, Any]
) -> None:
    case = replace(ONE, b=3, t=20, **options)
    operands = case.operands()
    raw = operands.raw.clone()
    raw[1, 17, 0] = torch.nan
    clean, spoilt = (run(case, how, given=v) for v in (operands, operands._replace(raw=raw)))
    for name in ("y", *STATISTICS):
        assert torch.equal(spoilt[name][[0, 2]], clean[name][[0, 2]])
    assert torch.equal(spoilt["y"][1, :17], clean["y"][1, :17])
    assert not spoilt["y"][1, 17:].isfinite().all(-1).any()
    assert "low_rank" in options or not spoilt["y"][1, 17:].isfinite().any()


@hows
def test_an_exactly_singular_token_is_contained_and_its_pivot_kept(how: How) -> None:
    """beta = sigma = |u| = 1: one reflection of one channel, with an input scale of Delta = 1."""
    alone: Any = {"heads": 1, "has_axis": False, "activation": "sigmoid", "input_scale": "delta"}
    alone |= {"selective": False, "norm_eps": None, "feedback": False, "beta_max": 2.0}
    case = Case(b=3, t=4, p=1, n=1, k=1, **alone)
    raw = torch.tensor([100.0, 1e6, 0.0]).repeat(3, 4, 1)  # Delta 1, u 1, beta 1
    raw[..., 2] = -1.0
    x, state = torch.ones(3, 4, 1), (torch.zeros(3, 1, 1), torch.zeros(3, 1))
    operands = Operands(x, raw, None, -torch.ones(1, 1), *state)
    clean, singular = case.sweep(operands, how), raw.clone()
    singular[1, 2, 2] = 0.0
    found = run(case, how, given=operands._replace(raw=singular))
    assert found["pivot"][1] == 0 and bool((found["pivot"][[0, 2]] > 0.4).all())
    assert torch.equal(found["y"][[0, 2]], clean.y[[0, 2]])
    assert torch.equal(found["y"][1, :2], clean.y[1, :2])
    assert not found["y"][1, 2:].isfinite().any()


# -- the layout of raw values

LAYERS: list[FixedPointLayer] = [
    Bedouin(3, d_state=2, num_householder=3, beta_max=2.0, dtype=F64),
    Bedouin(3, d_state=2, decay="griffin", num_householder=1, dtype=F64),
    FixedPointRNN(3, dtype=F64),
    FixedPointRNN(3, decay="griffin", dtype=F64),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda v: f"{type(v).__name__} {v.decay}")
def test_the_layout_is_what_the_layer_does(layer: FixedPointLayer) -> None:
    raw = torch.randn(2, 3, layer.raw_size, dtype=F64)
    layout, A = layer.layout(), layer._A()
    assert layout is not None and is_covered(layout, raw, A, ())
    delta, B, C, mixer_raw = layer._split(raw)
    expected = (delta, B, C, *layer.mixer(mixer_raw), raw[..., :0])
    for ours, theirs in zip(bind_by_layout(layout, A)(raw), expected, strict=True):
        assert torch.equal(ours, theirs)
