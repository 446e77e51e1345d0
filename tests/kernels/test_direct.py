"""The direct sweep by every implementation: fixed points, statistics, and the gradient of autograd
through the loop over tokens; the Triton kernels against plain PyTorch: values and all gradients.

With TRITON_INTERPRET=1, set before Triton is imported, small shapes of the kernels run on a CPU;
without it their tests need a CUDA device.
Letters: b samples of a head, t time, p channels of a head, n states, k reflections.
"""

from dataclasses import replace
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.kernels.sweeps import Case, How, assert_same, run, shared_memory
from tests.kernels.table import BF16, DEVICE, F32, each, needs_triton, sizes, times
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.limits import CHUNK, SCRATCH, head_blocks
from bedouin.kernels.launch import next_power_of_two
from bedouin.kernels.operands import Activation, Operands
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.testing import assert_close

F64 = torch.float64
SCALES: tuple[InputScale, ...] = get_args(InputScale)
RANGES = get_args(Eigenvalues)
ONE = Case(heads=1, t=5, p=4, n=3, has_axis=False, dtype=F64)
"""A single head, whose tensors have no axis of heads."""

hows = pytest.mark.parametrize("how", ["loop", "buffers"])
"""Plain torch, for any coefficients and for those of a layout."""


def of_heads(heads: int, **options: Any) -> Case:
    return replace(ONE, heads=heads, has_axis=heads > 1, **options)


OPTIONS: dict[str, Any] = {
    "k": st.sampled_from([0, 1, 2, 3, 4, 8]),
    "heads": st.integers(1, 3),
    "feedback": st.booleans(),
    "fed": st.sampled_from([None, 1, 4, 6]),
    "input_scale": st.sampled_from(SCALES),
    "eigenvalues": st.sampled_from(RANGES),
}


@settings(max_examples=100)
@given(
    how=st.sampled_from(["buffers", "buffers", "loop"]),
    low_rank=st.booleans(),
    b=st.integers(0, 3),
    t=st.sampled_from([0, 1, 2, 15, 16, 17, 40, 63, 64, 100]),
    n=st.integers(1, 4),
    activation=st.sampled_from(get_args(Activation)),
    selective=st.booleans(),
    beta_max=st.sampled_from([1.0, 1.5]),
    norm_eps=st.sampled_from([1e-5, None]),
    **OPTIONS,
)
def test_any_shape_and_option_is_like_autograd(how: How, **options: Any) -> None:
    if how == "buffers":
        options["low_rank"] = False
    else:
        options["t"] = min(options["t"], 40)
    if options["low_rank"]:
        options |= {"k": 2, "selective": True, "fed": None}
    if not options["selective"]:
        options["n"] = 1
    case = of_heads(**options)
    given_operands = case.operands()
    given_operands = given_operands._replace(raw=given_operands.raw - 0.5)
    expected = run(case, "autograd", given=given_operands)
    if not expected["y"].numel():
        found = run(case, how, given=given_operands)
        torch.testing.assert_close([found[name] for name in expected], list(expected.values()))
        assert case.t or torch.equal(found["h"], given_operands.h0)  # type: ignore[arg-type]
        return
    # a near-singular token, or growth over time, amplifies the difference of two roundings
    size = float(expected["y"].abs().max().square() / expected["pivot"].min())
    # x fed back without a norm may diverge
    assume(size < 1e8)
    tolerance, actual = 1e-11 * (1 + size), run(case, how, given=given_operands)
    near = run(case, how, given=given_operands._replace(raw=given_operands.raw * (1 + 1e-10)))
    # a chaotic recurrence, too
    assume(float((near["y"] - actual["y"]).abs().max() / actual["y"].abs().max()) < 1e-6)
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


# -- a fixed point that is given


@settings(max_examples=20)
@given(t=st.sampled_from([1, 16, 17, 40]), **OPTIONS)
def test_the_gradient_is_that_at_the_y_that_is_given(t: int, **options: Any) -> None:
    """A solver's y that is not the fixed point is differentiated where it is."""
    case = of_heads(t=t, **options)
    y_star = torch.randn(case.operands().x.shape, dtype=F64)
    ours, theirs = (run(case, how, y_star=y_star) for how in ("buffers", "loop"))
    for name in (name for name in ours if name.startswith("gradient")):
        assert_close(name, ours[name], theirs[name], 1e-9, atol=1e-9)


# -- derivatives


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


# -- tokens that are not finite, or singular


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
    assert found["converged"].tolist() == [True, False, True]
    assert found["gradient of x"][[0, 2]].isfinite().all()
    assert found["pivot"][1] == 0 and bool((found["pivot"][[0, 2]] > 0.4).all())
    assert torch.equal(found["y"][[0, 2]], clean.y[[0, 2]])
    assert torch.equal(found["y"][1, :2], clean.y[1, :2])
    assert not found["y"][1, 2:].isfinite().any()


# numpy's, of rows of a program that have no sample and of values that are not finite
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# of the largest value; compiled, exponentials and quotients in float32 are approximations
TOLERANCE = {
    F32: 2e-5 if interpreter_is_on() else 2e-3,
    BF16: 1.5e-2 if interpreter_is_on() else 3e-2,
}


def launched(
    case: Case, samples: int, chunk: int = CHUNK, parts: int | None = None
) -> dict[str, Tensor]:
    """What `run` returns, by the launches with so many samples of a program and parts of each, and
    so many tokens between two kept h."""
    from bedouin.kernels.direct import launch, registered

    chosen = samples, parts or launch.choose_parts(max(16, next_power_of_two(case.p)), samples)
    with (
        patch.object(launch, "choose_rows", return_value=chosen),
        patch.object(launch, "CHUNK", chunk),
        patch.object(registered, "CHUNK", chunk),
    ):
        return run(case, "triton", DEVICE)


def expect(case: Case) -> dict[str, Tensor]:
    """The results of plain torch, of which only the loop bounds a scale with a state axis by 1."""
    with torch.no_grad():
        magnitude = case.sweep(case.operands(DEVICE), "autograd").magnitude
    return run(case, "buffers", DEVICE) | {"magnitude": magnitude}


def check(case: Case) -> dict[str, Tensor]:
    """The results of the kernels, compared with plain torch."""
    actual, tolerance = run(case, "triton", DEVICE), TOLERANCE[case.low or case.dtype]
    assert_same(actual, expect(case), tolerance)
    assert bool(actual["converged"].all()) and actual["residual"].max().item() < tolerance
    return actual


def scale_of(i: int, n: int) -> InputScale:
    """One of the input scales that kernels have for n states."""
    return SCALES[i % (3 if n == 1 else 2)]


# in sizes that do not fill their blocks
CASES = [
    *(Case(b=1, t=2, n=1 if i == 2 else 2, k=1, input_scale=SCALES[i]) for i in range(3)),
    Case(b=1, t=1, p=1, n=1, k=1, input_scale="delta"),
    Case(b=3, t=2, p=16, n=5, k=3, activation="sigmoid", feedback=False, starts=False),
    Case(heads=3, b=1, t=2, p=20, n=1, k=4, starts=False, low=BF16),
    Case(b=1, t=1, k=4, n=1, selective=False, activation="sigmoid", input_scale="one_minus_decay"),
    Case(heads=3, b=1, t=2, p=5, n=9, k=1, activation="softplus_of_minus", norm_eps=None),
    Case(b=1, t=2, p=33, n=1, k=3, selective=False, norm_eps=None, low=BF16),
    Case(b=1, t=2, k=2, input_scale="delta", feedback=False, low=BF16),
    # feedback of Delta, of some of it, and of Delta and some of B
    Case(heads=3, b=1, t=2, p=9, n=16, k=2, fed=4, activation="sigmoid", starts=False),
    Case(b=1, t=3, p=7, n=3, k=4, fed=7, norm_eps=None, low=BF16),
    Case(heads=1, b=1, t=2, p=17, n=33, k=0, fed=17, input_scale="delta"),
    Case(b=1, t=2, k=1, fed=9, starts=False),
    Case(b=1, t=2, p=4, n=1, k=3, selective=False, fed=4, input_scale="delta"),
    # without reflections
    Case(b=1, t=3, p=5, n=3, k=0, norm_eps=None),
    Case(heads=1, b=2, t=2, p=20, n=18, k=0, input_scale="delta", low=BF16),
    Case(b=1, t=2, p=3, n=1, k=0, selective=False, starts=False),
    # a coupled scale, of one state
    Case(heads=1, b=1, t=2, p=20, n=1, k=0, input_scale="one_minus_decay", low=BF16),
    Case(b=2, t=2, p=17, n=1, k=2, fed=17, input_scale="one_minus_decay"),
    # states in two blocks, and in four
    Case(b=1, t=2, p=3, n=32, k=1, input_scale="delta"),
    *(Case(heads=1, b=1, t=2, p=17, n=n, k=1, input_scale=SCALES[n // 64]) for n in (48, 64)),
    # a single head
    Case(heads=1, b=2, t=2, p=33, k=2, has_axis=False),
    Case(heads=1, b=1, t=3, p=5, k=0, has_axis=False, starts=False, low=BF16),
    Case(heads=1, b=1, t=2, fed=9, k=1, has_axis=False, input_scale="delta"),
    # products with W^y between launches
    Case(heads=1, b=1, t=1, p=129, n=2, k=2, has_axis=False),
    Case(heads=1, b=3, t=2, p=130, n=2, k=2, has_axis=False, low=BF16),
    Case(b=1, t=3, p=129, n=1, k=1, fed=129, input_scale="delta", starts=False),
    Case(heads=1, b=3, t=3, p=200, n=3, k=4, norm_eps=None),
    Case(heads=1, b=1, t=2, p=130, n=1, k=0, selective=False, input_scale="one_minus_decay"),
    Case(heads=1, b=3, t=33, p=136, n=2, k=2, has_axis=False),
    Case(heads=1, b=1, t=2, p=1024, n=16, k=4, has_axis=False, low=BF16),
    # samples of several warps, and states in several blocks
    *(
        replace(case, feedback=False)
        for case in (
            Case(b=3, t=2, p=1, n=1, k=1, input_scale="delta", activation="sigmoid"),
            Case(heads=3, b=1, t=3, p=33, n=5, k=0, low=BF16),
            Case(heads=1, b=2, t=3, p=33, n=5, k=2, starts=False),
            Case(heads=1, b=2, t=3, p=9, n=5, k=1, has_axis=False),
            Case(heads=1, b=1, t=3, p=260, n=16, k=3, has_axis=False),
            Case(b=1, t=3, p=33, n=34, k=0),
            Case(heads=1, b=1, t=3, p=70, n=17, k=3, input_scale="delta"),
            Case(b=1, t=3, p=33, n=1, k=4, selective=False, activation="softplus_of_minus"),
            Case(b=1, t=3, p=5, n=1, k=0, selective=False, input_scale="one_minus_decay"),
            Case(b=1, t=3, p=9, n=16, k=4, input_scale="delta"),
            Case(heads=1, b=1, t=2, p=20, n=64, k=4, low=BF16),
        )
    ),
    # tokens around a multiple of those between two kept h
    *(
        Case(b=1, t=t, p=5, n=n, k=k, input_scale=scale_of(k, n), low=low, feedback=False)
        for t in (1, 31, 32, 33)
        for k, n in enumerate((3, 3, 1))
        for low in (None, BF16)
    ),
]


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option(case: Case) -> None:
    check(case)


LOW = each("low", None, BF16)
SIZES = sizes("pnk", (16, 1, 1), (100, 17, 3), (64, 64, 2), (33, 5, 4))
OF_DELTA = sizes("pnk", (64, 64, 1), (64, 64, 0), (100, 17, 0), (33, 40, 1))
ALONE = [{"heads": 1, "b": 3, "n": 16, "has_axis": False}]
UNFED = [{"heads": 3, "b": 1, "feedback": False}]
LARGE: list[dict[str, Any]] = [
    # of the benchmark
    *times(each("p", 64, 128), LOW, [{"b": 16, "t": 256, "n": 16, "k": 4, "starts": False}]),
    # awkward sizes
    *times(SIZES, each("scale", 0, 1, 2), LOW, [{"heads": 3, "b": 5, "t": 35}]),
    # of a single head, and of wide ones
    *times(each("p", 200, 512, 1024), LOW, [{"b": 3, "t": 65, "n": 16, "k": 4}]),
    *times(each("p", 1, 63, 64, 100), each("t", 1, 63, 64, 100), LOW, ALONE),
    # without feedback
    *times(
        sizes("pn", (64, 16), (100, 17), (128, 64), (16, 1)),
        each("k", 0, 1, 2),
        each("scale", 0, 1, 2),
        LOW,
        each("t", 1, 63, 64, 65),
        UNFED,
    ),
    # feedback of Delta
    *times(OF_DELTA, LOW, [{"heads": 3, "b": 5, "t": 35, "fed": True, "scale": 0}]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", LARGE, ids=str)
def test_large_and_awkward_sizes_compiled(options: dict[str, Any]) -> None:
    options = {"heads": 1024 // options["p"]} | options
    options["fed"] = options["p"] if options.get("fed") else None
    options["input_scale"] = scale_of(options.pop("scale", 1), options["n"])
    check(Case(**options))


LAUNCHES: list[tuple[Case, dict[str, int]]] = [
    (Case(b=3, t=2, n=1, k=1), {"samples": 1, "parts": 1}),
    (Case(heads=1, b=3, t=2, p=20, k=1, input_scale="delta"), {"samples": 2, "parts": 2}),
    (Case(heads=1, b=1, t=2, p=33, n=2, k=3, norm_eps=None, low=BF16), {"samples": 1, "parts": 4}),
    (Case(heads=1, b=1, t=2, p=9, n=1, k=4, selective=False), {"samples": 1, "parts": 2}),
    (Case(b=9, t=2, n=1, k=1), {"samples": 8, "parts": 1}),
    (Case(heads=1, b=1, t=2, p=33, n=34, k=1), {"samples": 1, "parts": 2}),
    (Case(heads=1, b=3, t=3, p=20, n=3, k=0, norm_eps=None), {"samples": 2, "parts": 2}),
    (Case(heads=1, b=2, t=3, p=33, n=2, k=0), {"samples": 2, "parts": 4}),
    # in several chunks
    (Case(b=1, t=5, p=2, n=2, k=1), {"samples": 2, "chunk": 2}),
    (Case(heads=1, b=3, t=4, p=3, n=17, k=1, input_scale="delta"), {"samples": 2, "chunk": 2}),
    (Case(b=2, t=5, p=33, n=5, k=0, starts=False), {"samples": 2, "chunk": 2}),
    (Case(b=2, t=8, p=33, n=5, k=2, feedback=False), {"samples": 1, "chunk": 2}),
    (Case(heads=1, b=3, t=5, p=130, n=2, k=2), {"samples": 1, "chunk": 2}),
    (Case(heads=1, b=3, t=5, p=5, n=49, k=1, low=BF16, feedback=False), {"samples": 1, "chunk": 2}),
    (Case(b=1, t=3, p=5, n=1, k=0, selective=False, feedback=False), {"samples": 1, "chunk": 2}),
]
LARGE_LAUNCHES = [
    pytest.param(Case(b=9, t=20, p=p, n=16, low=BF16), how, marks=pytest.mark.gpu)
    for p, rows in (
        (64, sizes(("samples", "parts"), (8, 1), (4, 2), (1, 2))),
        (100, sizes(("samples", "parts"), (4, 2))),
        (128, sizes(("samples", "parts"), (2, 4), (1, 4), (2, 1))),
    )
    for how in rows
]


@needs_triton
@pytest.mark.parametrize(("case", "how"), [*LAUNCHES, *LARGE_LAUNCHES], ids=str)
def test_every_number_of_samples_of_their_parts_and_of_tokens_in_a_chunk(
    case: Case, how: dict[str, int]
) -> None:
    assert_same(launched(case, **how), expect(case), TOLERANCE[case.low or case.dtype])


# tiles of all widths: of everything but the reflections, of two of them, of one, of many states
STREAMED = [
    Case(b=3, t=5, p=16, n=3, k=3, heads=2),
    Case(b=1, t=18, p=33, n=17, k=2, heads=1),
    Case(b=2, t=4, p=64, n=16, k=1),
    Case(b=2, t=3, p=64, n=40, k=4, low=BF16),
    Case(b=2, t=3, p=100, n=5, k=0, fed=100),
    Case(b=9, t=3, p=128, n=16, k=2, heads=1),
]


@needs_triton
@pytest.mark.parametrize("case", STREAMED, ids=str)
def test_weights_that_are_read_anew_for_each_token(case: Case) -> None:
    layout = case.options().known_layout()
    itemsize = 4 if case.low is None else case.low.itemsize
    blocks = head_blocks(case.p, case.n, layout)
    least = SCRATCH + blocks.rows_of_tile * blocks.channels * itemsize
    assert blocks.streams(itemsize, least)
    with shared_memory(least):
        check(case)


@needs_triton
def test_weights_of_which_no_tile_fits() -> None:
    with shared_memory(2**14):
        check(Case(b=3, t=3, p=128, n=2))


@needs_triton
@pytest.mark.parametrize(("inputs", "weights"), [(BF16, F32), (F32, BF16), (torch.float16,) * 2])
def test_dtypes_of_inputs_and_weights(inputs: torch.dtype, weights: torch.dtype) -> None:
    case = Case(b=1, t=2, n=1, k=1, starts=False)
    given: Any = case.operands(DEVICE)
    x, raw, W_y = given.x.to(inputs), given.raw.to(inputs), given.W_y.to(weights)
    given = given._replace(x=x, raw=raw, W_y=W_y)
    expected = run(case, "buffers", DEVICE, given)
    assert_same(run(case, "triton", DEVICE, given), expected, TOLERANCE[BF16])


@needs_triton
@pytest.mark.parametrize("feedback", [True, False])
def test_a_token_that_is_not_finite_spoils_its_own_sample_from_there_on(feedback: bool) -> None:
    case = Case(b=4, t=2, p=7 if feedback else 33, n=2, k=1, feedback=feedback)
    given, (d, n) = case.operands(DEVICE), (case.p, case.n)
    raw, x = given.raw.clone(), given.x.clone()
    for sample, column in enumerate((0, d, d + n, d + 2 * n, 2 * d + 2 * n)):
        raw[sample, 1, column] = torch.nan
    if feedback:
        x[5, 1, 0] = torch.inf
    clean = run(case, "triton", DEVICE)
    spoiled, count = run(case, "triton", DEVICE, given._replace(x=x, raw=raw)), 5 + feedback
    for name in ("y", "gradient of x", "gradient of raw", "scale", "defect", "report 1"):
        assert torch.equal(spoiled[name][count:], clean[name][count:]), name
    assert torch.equal(spoiled["y"][:, 0], clean["y"][:, 0])
    for name in ("scale", *(["residual"] if feedback else ["defect", "report 1"])):
        last = spoiled[name] if spoiled[name].dim() == 1 else spoiled[name][:, 1]
        assert not bool(last[:count].isfinite().any()), name
    if feedback:
        assert not bool(spoiled["y"][:count, 1].isfinite().all(-1).any())
        assert not bool(spoiled["report 1"][:count].isfinite().all(-1).any())
    assert spoiled["converged"].tolist() == [False] * count + [True] * (8 - count)


@needs_triton
@pytest.mark.parametrize("how", ["buffers", "triton"])
@pytest.mark.parametrize("k", [3, 4])
def test_nearly_singular_tokens_are_exact_up_to_their_pivots(k: int, how: Any) -> None:
    case = Case(1, 6, 4, 10, 2, k, beta_max=2.0, input_scale="delta", feedback=False)
    operands = case.operands(DEVICE)
    operands.raw[..., : case.p] += 1.5
    operands.raw[..., -k:] += 1.5
    wide = Operands(*(None if v is None else v.double() for v in operands))  # type: ignore[arg-type]
    exact, found = run(case, "buffers", DEVICE, wide), run(case, how, DEVICE, operands)
    pivot = exact["pivot"].min().item()
    assert pivot < 0.1
    # what a backward stable solve leaves, in both: rounding, amplified by the condition
    bound = 10 * torch.finfo(torch.float32).eps / pivot
    for name in ("y", *(name for name in exact if name.startswith("gradient"))):
        if exact[name].any():
            error = (found[name] - exact[name]).abs().max() / exact[name].abs().max()
            assert error.item() < bound, name
