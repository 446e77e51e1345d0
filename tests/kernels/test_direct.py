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
from tests.kernels.sweeps import Case, How, run
from torch import Tensor

from bedouin.kernels.operands import Activation, Operands
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.testing import assert_close

F64 = torch.float64
SCALES, RANGES = get_args(InputScale), get_args(Eigenvalues)
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
    assert found["pivot"][1] == 0 and bool((found["pivot"][[0, 2]] > 0.4).all())
    assert torch.equal(found["y"][[0, 2]], clean.y[[0, 2]])
    assert torch.equal(found["y"][1, :2], clean.y[1, :2])
    assert not found["y"][1, 2:].isfinite().any()
