"""The sweep of cpu.py: the values, statistics and gradients of the plain loop over tokens.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bedouin.kernels.direct import Sweep, direct_sweep, direct_sweep_reference
from bedouin.kernels.direct.cpu import cpu_reverse, cpu_sweep
from bedouin.kernels.direct.layout import bind_by_layout
from bedouin.kernels.direct.reference import sweep_tokens
from bedouin.kernels.direct.reverse import SolvedSweep, reverse_sweep
from bedouin.kernels.operands import Activation, Operands, Parameterization, RawLayout

D = 4
STATISTICS = ("defect", "scale", "magnitude", "pivot")
ERASES_AND_FEEDS_X = pytest.mark.parametrize(
    "more", [{}, {"erase": 1.0, "feeds_x": True}], ids=["", "erase and x"]
)


def draw(
    b: int,
    t: int,
    *,
    k: int = 2,
    heads: int = 1,
    feedback: bool | int = True,
    activation: Activation = "softplus",
    selective: bool = True,
    beta_max: float = 1.0,
    input_scale: Any = "bounded_delta",
    eigenvalues: Any = "positive",
    norm_eps: float | None = 1e-5,
    erase: float = 0.0,
    feeds_x: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Operands, Parameterization]:
    """b samples of each head; `feedback` may be the number of raw values that get it."""
    generator = torch.Generator().manual_seed(1)
    layout = RawLayout(activation, selective, k, beta_max, erase)
    b, n, lead = b * heads, 3 if selective else 1, () if heads == 1 else (heads,)
    r = layout.size(D, n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    f = r if feedback is True else min(feedback, r)
    rows = f + (D if feeds_x else 0)
    W_y = 0.05 * normal(*lead, rows, D) if rows else None
    A, state = -normal(*lead, D, n).exp(), (normal(b, D, n), normal(b, D))
    operands = Operands(normal(b, t, D), normal(b, t, r) - 0.5, W_y, A, *state)
    scales = input_scale, eigenvalues
    return operands, Parameterization(layout, *scales, norm_eps, feeds_x=feeds_x)


def pivots_of_samples(sweep: Sweep) -> Sweep:
    """With the smallest pivot of each sample, as the specification has it."""
    ends = torch.nn.functional.pad(sweep.pivot, (0, 1), value=torch.inf)
    return sweep._replace(pivot=ends.amin(1))


def gradients(sweep: Sweep, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    total = sweep.h.new_zeros(())
    for v in (sweep.y, sweep.h):
        total = total + (v * torch.randn(v.shape, generator=generator, dtype=v.dtype)).sum()
    return torch.autograd.grad(total, inputs, materialize_grads=True)


def assert_near(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    atol = tolerance * (1 + expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, msg=name)


@settings(max_examples=40)
@given(
    b=st.integers(1, 3),
    t=st.sampled_from([1, 2, 15, 16, 17, 63, 64, 100]),
    k=st.sampled_from([0, 1, 2, 3, 4, 8]),
    heads=st.integers(1, 2),
    feedback=st.sampled_from([False, True, 1, D, D + 2]),
    activation=st.sampled_from(get_args(Activation)),
    selective=st.booleans(),
    beta_max=st.sampled_from([1.0, 1.5]),
    input_scale=st.sampled_from(["delta", "bounded_delta", "one_minus_decay"]),
    eigenvalues=st.sampled_from(["positive", "full"]),
    norm_eps=st.sampled_from([1e-5, None]),
    erase=st.sampled_from([0.0, 1.0, 2.0]),
    feeds_x=st.booleans(),
)
def test_all_is_that_of_autograd_through_the_loop(b: int, t: int, **options: Any) -> None:
    operands, parameterization = draw(b, t, **options)
    inputs = [v.requires_grad_() for v in operands if v is not None]
    expected = direct_sweep_reference(operands, parameterization)
    actual = pivots_of_samples(direct_sweep(operands, parameterization))
    # a near-singular token, or growth over time, amplifies the difference of two roundings
    size = float(expected.y.detach().abs().max().square() / expected.pivot.min())
    tolerance = 1e-11 * (1 + size)
    # x fed back without a norm may diverge
    assume(size < 1e8)
    for name in ("y", "h", *STATISTICS[1:]):
        assert_near(name, getattr(actual, name), getattr(expected, name), tolerance)
    # where an elimination with pivots loses digits, so does the inverse
    allowed = 1e-12 * actual.magnitude + 100 * expected.defect
    assert bool((actual.defect <= allowed.cummax(1).values).all())
    grads = gradients(actual, inputs), gradients(expected, inputs)
    for i, (ours, theirs) in enumerate(zip(*grads, strict=True)):
        assert_near(f"gradient {i}", ours, theirs, 10 * tolerance * (1 + size))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@ERASES_AND_FEEDS_X
def test_on_a_gpu_and_in_its_graphs(k: int, dtype: torch.dtype, more: dict[str, Any]) -> None:
    operands, options = draw(2, 20, k=k, dtype=dtype, **more)

    def run(operands: Operands) -> tuple[Tensor, ...]:
        inputs = [v.requires_grad_() for v in operands if v is not None]
        sweep = direct_sweep(operands, options, backend="reference")
        loss = sweep.y.square().sum() + sweep.h.square().sum()
        return sweep.y.detach(), sweep.magnitude, *torch.autograd.grad(loss, inputs)

    expected = run(operands)
    moved: Any = [None if v is None else v.detach().cuda() for v in operands]
    there = Operands(*moved)
    run(there)  # the libraries of linear algebra set themselves up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(there)
    graph.replay()
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_near(f"result {i}", ours.cpu(), theirs, 1e-3 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("feedback", [True, False, D])
@ERASES_AND_FEEDS_X
def test_dtypes_are_those_of_the_plain_loops(
    low: torch.dtype, heads: int, feedback: int, more: dict[str, Any]
) -> None:
    """float32 with products in a lower dtype, whose roundings the two loops share."""
    options = {"heads": heads, "feedback": feedback, **more}
    operands, parameterization = draw(2, 18, dtype=torch.float32, **options)
    if operands.W_y is not None:
        operands = operands._replace(W_y=operands.W_y.to(low))
    operands, bind = operands.wide(), bind_by_layout(parameterization.known_layout(), operands.A)
    y, _, kept, _ = cpu_sweep(operands, parameterization, 16)
    theirs, others = sweep_tokens(operands, parameterization, bind, (), 16)
    tolerance = 1e-5 if low == torch.float32 else 1e-2
    assert_near("y", y, theirs.y, tolerance)
    assert_near("kept", kept, others, tolerance)
    solved = SolvedSweep.of(theirs.y, operands, parameterization, bind, ())
    grad_y, grad_h = torch.randn_like(y), torch.randn_like(theirs.h)
    *ours, (defect, scale) = cpu_reverse(
        grad_y, grad_h, theirs.y, others, operands, parameterization, 16
    )
    found: list[tuple[Tensor, Tensor]] = []
    report = lambda *values: found.append(values)  # noqa: E731
    grads = reverse_sweep(grad_y, grad_h, others, 16, solved, report)
    for i, (a, e) in enumerate(zip(ours, grads, strict=True)):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            assert_near(f"gradient {i}", a, e, tolerance)
    assert_near("scale", scale, found[0][1], tolerance)
    assert (defect / scale).max() < 1e-5


@pytest.mark.parametrize("t", [16, 17])
@pytest.mark.parametrize("feedback", [True, False, D])
@pytest.mark.parametrize("input_scale", ["delta", "one_minus_decay"])
@ERASES_AND_FEEDS_X
def test_a_second_backward_pass_and_batched_cotangents(
    t: int, feedback: int, input_scale: str, more: dict[str, Any]
) -> None:
    """Every backward pass of one sweep gives the same numbers, also for batched cotangents."""
    operands, options = draw(3, t, feedback=feedback, input_scale=input_scale, **more)
    inputs = [v.requires_grad_() for v in operands if v is not None]
    sweep = direct_sweep(operands, options)
    cotangents = torch.randn(2, *sweep.y.shape, dtype=sweep.y.dtype)
    given = {"retain_graph": True, "materialize_grads": True}
    found = [torch.autograd.grad(sweep.y, inputs, v, **given) for v in (*cotangents, cotangents[0])]
    batched = torch.autograd.grad(sweep.y, inputs, cotangents, is_grads_batched=True, **given)
    alone = direct_sweep_reference(operands, options)
    expected = torch.autograd.grad(alone.y, inputs, cotangents[0], materialize_grads=True)
    for i, (first, second, again) in enumerate(zip(*found, strict=True)):
        assert torch.equal(first, again)
        assert_near(f"gradient {i}", first, expected[i], 1e-10)
        assert_near(f"batched gradient {i}", batched[i], torch.stack([first, second]), 1e-12)


def test_a_token_that_is_not_finite_spoils_its_own_sample_from_there_on() -> None:
    operands, parameterization = draw(3, 20)
    raw = operands.raw.clone()
    raw[1, 17, 0] = torch.nan
    clean = direct_sweep(operands, parameterization)
    spoilt = direct_sweep(operands._replace(raw=raw), parameterization)
    for name in ("y", *STATISTICS):
        assert torch.equal(getattr(spoilt, name)[[0, 2]], getattr(clean, name)[[0, 2]])
    assert torch.equal(spoilt.y[1, :17], clean.y[1, :17])
    assert not spoilt.y[1, 17:].isfinite().any()


def test_an_exactly_singular_token_is_contained_and_its_pivot_kept() -> None:
    """beta = sigma = |u| = 1: one reflection of one channel, with an input scale of Delta = 1."""
    layout = RawLayout("sigmoid", False, 1, 2.0)
    options = Parameterization(layout, "delta", "positive", None)
    raw = torch.tensor([100.0, 1e6, 0.0]).repeat(3, 4, 1)  # Delta 1, u 1, beta 1
    raw[..., 2], raw[1, 2, 2] = -1.0, 0.0
    state = torch.zeros(3, 1, 1), torch.zeros(3, 1)
    operands = Operands(torch.ones(3, 4, 1), raw, None, -torch.ones(1, 1), *state)
    swept = pivots_of_samples(direct_sweep(operands, options))
    assert swept.pivot[1] == 0 and bool((swept.pivot[[0, 2]] > 0.4).all())
    assert swept.y[[0, 2]].isfinite().all() and swept.y[1, :2].isfinite().all()
    assert not swept.y[1, 2:].isfinite().any()


def test_the_gradient_of_a_given_fixed_point_is_that_of_the_sweep() -> None:
    operands, options = draw(3, 17)
    inputs = [v.requires_grad_() for v in operands if v is not None]
    sweep = direct_sweep(operands, options)
    cotangent = torch.randn_like(sweep.y)
    expected = torch.autograd.grad(sweep.y, inputs, cotangent, materialize_grads=True)
    given = direct_sweep(operands, options, y_star=sweep.y.detach())
    found = torch.autograd.grad(given.y, inputs, cotangent, materialize_grads=True)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_near(f"gradient {i}", ours, theirs, 1e-12)
    operands, options = draw(3, 17, erase=1.0)
    with pytest.raises(ValueError, match=r"y_star must be None with erase, got erase=1\.0"):
        direct_sweep(operands, options, y_star=sweep.y.detach())


def by_loop(operands: Operands, options: Parameterization, **known: Any) -> Sweep:
    """The sweep of the plain loops, which a parameterization without a layout takes."""
    bind = bind_by_layout(options.known_layout(), operands.A)
    return direct_sweep(operands, replace(options, layout=None), bind, **known)


@settings(max_examples=20)
@given(
    t=st.sampled_from([1, 16, 17, 40]),
    k=st.integers(0, 4),
    heads=st.integers(1, 2),
    feedback=st.sampled_from([False, True, D]),
    input_scale=st.sampled_from(["delta", "bounded_delta", "one_minus_decay"]),
    eigenvalues=st.sampled_from(["positive", "full"]),
    feeds_x=st.booleans(),
)
def test_the_gradient_is_that_at_the_y_that_is_given(t: int, **options: Any) -> None:
    """A solver's y that is not the fixed point is differentiated where it is."""
    operands, parameterization = draw(2, t, **options)
    inputs = [v.requires_grad_() for v in operands if v is not None]
    y_star = torch.randn(operands.x.shape, dtype=torch.float64)
    found = [sweep(operands, parameterization, y_star=y_star) for sweep in (direct_sweep, by_loop)]
    grads = [gradients(sweep, inputs) for sweep in found]
    for i, (ours, theirs) in enumerate(zip(*grads, strict=True)):
        assert_near(f"gradient {i}", ours, theirs, 1e-9)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("feedback", [True, False])
def test_inputs_that_are_not_contiguous(feedback: bool, heads: int) -> None:
    operands, options = draw(2, 18, feedback=feedback, heads=heads)
    strided: Any = [None if v is None else v.mT.contiguous().mT for v in operands[:5]]
    there = Operands(*[*strided, operands.y0])
    assert not there.x.is_contiguous()
    results = []
    for given_operands in (operands, there):
        own: Any = [None if v is None else v.detach().requires_grad_() for v in given_operands]
        inputs = [v for v in own if v is not None]
        sweep = direct_sweep(Operands(*own), options)
        results.append([sweep.y, sweep.h, *gradients(sweep, inputs)])
    for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
        assert_near(f"result {i}", ours, theirs, 1e-13)


@pytest.mark.parametrize(("b", "t"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("feedback", [True, False])
def test_no_samples_and_no_tokens(b: int, t: int, feedback: bool) -> None:
    operands, options = draw(b, t, feedback=feedback)
    inputs = [v.requires_grad_() for v in operands if v is not None]
    results = []
    ours = pivots_of_samples(direct_sweep(operands, options))
    for sweep in (ours, by_loop(operands, options)):
        results.append([*sweep[:6], *gradients(sweep, inputs)])
    for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(ours, theirs, msg=f"result {i}")


def test_the_adjoint_reports_its_defect_once_per_token() -> None:
    operands, options = draw(3, 19)
    operands.x.requires_grad_()
    reports: list[tuple[Tensor, Tensor]] = []
    direct_sweep(operands, options, report=lambda *r: reports.append(r)).y.sum().backward()
    ((defect, scale),) = reports
    assert defect.shape == scale.shape == (3, 19)
    assert (defect / scale).max() < 1e-12


def test_transforms_take_the_plain_loop() -> None:
    operands, options = draw(2, 18)
    assert operands.W_y is not None
    stacked = torch.stack([operands.W_y, 0 * operands.W_y])

    def loss(W_y: Tensor) -> Tensor:
        return direct_sweep(operands._replace(W_y=W_y), options).y.square().sum()

    vmapped = torch.func.vmap(torch.func.grad(loss))(stacked)
    looped = [torch.autograd.functional.jacobian(loss, W_y) for W_y in stacked]
    torch.testing.assert_close(vmapped, torch.stack(looped))


def test_h_is_kept_at_every_sixteenth_token_only() -> None:
    operands, options = draw(2, 64)
    _, _, kept, _ = cpu_sweep(operands, options, 16)
    assert kept.shape == (2, 4, 3, D)
    saved: list[int] = []

    def pack(v: Tensor) -> Tensor:
        saved.append(v.numel())
        return v

    operands.x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        direct_sweep(operands, options)
    others = sum(v.numel() for v in operands if v is not None)
    assert sum(saved) <= others + operands.x.numel() + kept.numel()
