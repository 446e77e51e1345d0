"""The direct sweep: exact solutions, and gradients equal to those of autograd through the loop.

Letters: b batch, t time, d channels, n state per channel, k reflections, r size of raw.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus

from bedouin.kernels.direct import Sweep, direct_sweep, direct_sweep_reference
from bedouin.kernels.feedback import project_feedback
from bedouin.kernels.householder import apply_complement, unit, wy_factor
from bedouin.kernels.operands import Bind, Coefficients, Operands, Parameterization
from bedouin.kernels.scan import Eigenvalues, InputScale, selective_scan

D, N, K = 4, 3, 2
R = D + 2 * N + K * (D + 1)
TOLERANCE = {torch.float32: 5e-4, torch.float64: 1e-10}
NAMES = ("x", "raw", "W_y", "A", "h0", "y0", "bind parameter")
SCALES: tuple[InputScale, ...] = ("delta", "bounded_delta", "one_minus_decay")
RANGES: tuple[Eigenvalues, ...] = ("positive", "full")


def _split(raw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n = (raw.shape[-1] - D - K * (D + 1)) // 2
    delta, B, C, u, alpha = raw.split([D, n, n, K * D, K], dim=-1)
    return softplus(delta - 1), unit(B), unit(C), unit(u.unflatten(-1, (K, D))), alpha


def _householder(raw: Tensor) -> Coefficients:
    delta, B, C, U, alpha = _split(raw)
    T = wy_factor(U, torch.sigmoid(alpha))
    return Coefficients(delta, B, C, torch.zeros_like(raw[..., :1]), U, T, raw[..., :0])


def _low_rank(raw: Tensor, strength: Tensor) -> Coefficients:
    """A bind with a parameter, and an e that differs from channel to channel."""
    delta, B, C, U, alpha = _split(raw)
    e = torch.sigmoid(strength * delta)
    M = torch.diag_embed(-torch.sigmoid(alpha))
    return Coefficients(delta, B, C, e, U, M, raw[..., :0])


@dataclass(frozen=True)
class Case:
    """Operands of one sweep."""

    x: Tensor
    raw: Tensor
    W_y: Tensor | None
    A: Tensor
    h0: Tensor
    y0: Tensor
    bind_parameters: tuple[Tensor, ...]
    bind: Bind
    options: Parameterization

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.x, self.raw, self.W_y, self.A, self.h0, self.y0, *self.bind_parameters]

    @property
    def inputs(self) -> list[Tensor]:
        return [v for v in self.tensors if v is not None]

    @property
    def arguments(self) -> tuple[Any, ...]:
        operands = Operands(self.x, self.raw, self.W_y, self.A, self.h0, self.y0)
        return operands, self.options, self.bind, self.bind_parameters

    def with_tensors(self, *tensors: Tensor | None) -> "Case":
        x, raw, W_y, A, h0, y0, *rest = tensors
        assert x is not None and raw is not None and A is not None
        assert h0 is not None and y0 is not None
        parameters = tuple(v for v in rest if v is not None)
        return Case(x, raw, W_y, A, h0, y0, parameters, self.bind, self.options)

    def tracked(self) -> "Case":
        detached = (None if v is None else v.detach().requires_grad_() for v in self.tensors)
        return self.with_tensors(*detached)


def _case(
    b: int = 2,
    t: int = 5,
    *,
    feedback: bool = True,
    mixer: str = "householder",
    input_scale: InputScale = "bounded_delta",
    eigenvalues: Eigenvalues = "positive",
    norm_eps: float | None = 1e-5,
    n: int = N,
    heads: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """b samples of each head."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    r = R + 2 * (n - N)
    b, lead = b * heads, () if heads == 1 else (heads,)
    bind = _householder if mixer == "householder" else _low_rank
    return Case(
        draw(b, t, D),
        draw(b, t, r),
        0.2 * draw(*lead, r, D) if feedback else None,
        -draw(*lead, D, n).exp(),
        draw(b, D, n),
        draw(b, D),
        () if mixer == "householder" else (draw(D),),
        bind,
        Parameterization(None, input_scale, eigenvalues, norm_eps),
    )


def _gradients(sweep: Sweep, case: Case) -> tuple[Tensor, ...]:
    """Of a fixed random linear function of outputs and last state."""
    generator = torch.Generator().manual_seed(2)
    total = sweep.h.new_zeros(())
    for v in (sweep.y, sweep.h):
        total = total + (v * torch.randn(v.shape, generator=generator, dtype=v.dtype)).sum()
    return torch.autograd.grad(total, case.inputs, materialize_grads=True)


def _assert_same_gradients(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float
) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        scale = e.abs().max().item() if e.numel() else 0.0
        torch.testing.assert_close(
            a, e, rtol=0, atol=tolerance * (1 + scale), msg=f"gradient {i}: {a} is not {e}"
        )


def _assert_like_autograd(case: Case, tolerance: float = 1e-10) -> None:
    case = case.tracked()
    expected = direct_sweep_reference(*case.arguments)
    actual = direct_sweep(*case.arguments)
    for name in ("y", "h", "defect", "scale", "pivot"):
        a, e = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance, msg=f"{name}: {a} is not {e}")
    assert bool((actual.magnitude >= (1 - tolerance) * expected.magnitude).all())
    _assert_same_gradients(_gradients(actual, case), _gradients(expected, case), tolerance)


def _apply_map(case: Case, y: Tensor) -> Tensor:
    """F(y), from the operations of an iterative solver."""
    raw = case.raw
    if case.W_y is not None:
        before = torch.cat([case.y0[:, None], y[:, :-1]], 1)
        raw = raw + project_feedback(before, case.W_y, case.options.feedback_norm_eps)
    c = case.bind(raw, *case.bind_parameters)
    mixed = case.x + apply_complement(y - case.x, c.e, c.U, c.M)
    scales: dict[str, Any] = {
        "input_scale": case.options.input_scale,
        "eigenvalues": case.options.eigenvalues,
    }
    return selective_scan(mixed, c.delta, case.A, c.B, c.C, case.h0, **scales)[0]


@pytest.mark.parametrize("mixer", ["householder", "low rank"])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("input_scale", SCALES)
def test_the_sweep_finds_the_fixed_point(
    input_scale: InputScale, eigenvalues: Eigenvalues, feedback: bool, mixer: str
) -> None:
    case = _case(
        t=20, feedback=feedback, mixer=mixer, input_scale=input_scale, eigenvalues=eigenvalues
    )
    swept = direct_sweep(*case.arguments)
    scale = swept.y.abs().max()
    assert (_apply_map(case, swept.y) - swept.y).abs().max() < 1e-11 * scale
    assert (swept.defect / swept.scale).max() < 1e-12
    assert bool((swept.pivot > 0).all())


@pytest.mark.parametrize("mixer", ["householder", "low rank"])
@pytest.mark.parametrize("norm_eps", [1e-5, None])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("input_scale", SCALES)
def test_every_gradient_is_that_of_the_loop(
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
    feedback: bool,
    norm_eps: float | None,
    mixer: str,
) -> None:
    case = _case(
        feedback=feedback,
        mixer=mixer,
        input_scale=input_scale,
        eigenvalues=eigenvalues,
        norm_eps=norm_eps,
    )
    _assert_like_autograd(case)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("t", [1, 15, 16, 17, 40])
def test_chunks_of_kept_memory_do_not_show(t: int, dtype: torch.dtype) -> None:
    _assert_like_autograd(_case(t=t, dtype=dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("input_scale", SCALES)
def test_one_state_per_channel(input_scale: InputScale) -> None:
    _assert_like_autograd(_case(n=1, input_scale=input_scale))


@pytest.mark.parametrize(("b", "t"), [(0, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize("feedback", [True, False])
def test_empty_batch_and_time(b: int, t: int, feedback: bool) -> None:
    _assert_like_autograd(_case(b, t, feedback=feedback))


def test_empty_time_keeps_the_state() -> None:
    case = _case(2, 0)
    assert torch.equal(direct_sweep(*case.arguments).h, case.h0)


@pytest.mark.parametrize("t", [1, 17, 40])
@pytest.mark.parametrize(("mixer", "heads"), [("householder", 1), ("low rank", 1), ("low rank", 2)])
def test_a_given_fixed_point_gets_the_same_gradient(t: int, mixer: str, heads: int) -> None:
    case = _case(t=t, mixer=mixer, heads=heads).tracked()
    solved = direct_sweep(*case.arguments)
    attached = direct_sweep(*case.arguments, y_star=solved.y.detach())
    assert torch.equal(attached.y, solved.y)
    torch.testing.assert_close(attached.h, solved.h)
    _assert_same_gradients(_gradients(attached, case), _gradients(solved, case), 1e-12)
    assert torch.equal(attached.defect, torch.zeros_like(attached.defect))


@settings(max_examples=20)
@given(
    b=st.integers(0, 3),
    t=st.integers(0, 18),
    n=st.integers(1, 4),
    heads=st.integers(1, 3),
    feedback=st.booleans(),
    mixer=st.sampled_from(["householder", "low rank"]),
    input_scale=st.sampled_from(SCALES),
    eigenvalues=st.sampled_from(RANGES),
)
def test_any_shape_and_option_is_like_autograd(b: int, t: int, **options: Any) -> None:
    _assert_like_autograd(_case(b, t, **options), 1e-9)


def _head(case: Case, j: int, heads: int) -> Case:
    """Head j of a case of several heads, by itself."""
    shared = case.W_y, case.A
    return case.with_tensors(
        *(
            v if v is None or v is case.bind_parameters[0]
            else v[j] if any(v is w for w in shared)
            else v.unflatten(0, (heads, -1))[j]
            for v in case.tensors
        )
    )  # fmt: skip


@pytest.mark.parametrize("input_scale", SCALES)
def test_a_batch_of_heads_is_a_loop_over_them(input_scale: InputScale) -> None:
    case = _case(heads=3, mixer="low rank", input_scale=input_scale)
    together = direct_sweep(*case.arguments)
    alone = [direct_sweep(*_head(case, j, 3).arguments) for j in range(3)]
    for name in ("y", "h", "defect", "scale", "magnitude", "pivot"):
        expected = torch.cat([getattr(swept, name) for swept in alone])
        torch.testing.assert_close(getattr(together, name), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sweep", [direct_sweep, direct_sweep_reference])
def test_heads_that_do_not_fit_raise(sweep: Callable[..., Sweep]) -> None:
    case = _case(heads=2)
    assert case.W_y is not None
    with pytest.raises(ValueError, match=r"W_y and A .* got \(3, 20, 4\) and \(2, 4, 3\)"):
        sweep(*replace(case, W_y=case.W_y[[0, 0, 0]]).arguments)
    odd = replace(case, x=case.x[:3], raw=case.raw[:3], h0=case.h0[:3], y0=case.y0[:3])
    with pytest.raises(ValueError, match="2 heads, got 3 samples"):
        sweep(*odd.arguments)


def test_finite_differences() -> None:
    case = _case(b=1, t=3, mixer="low rank").tracked()

    def sweep(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        swept = direct_sweep(*case.with_tensors(*tensors).arguments)
        return swept.y, swept.h

    assert torch.autograd.gradcheck(sweep, case.inputs)


def test_the_adjoint_sweep_reports_its_defect_once_per_token() -> None:
    reports: list[tuple[Tensor, Tensor]] = []
    case = _case(t=19).tracked()
    swept = direct_sweep(*case.arguments, report=lambda *r: reports.append(r))
    assert not reports
    swept.y.sum().backward()
    ((defect, scale),) = reports
    assert defect.shape == scale.shape == (2, 19)
    assert (defect / scale).max() < 1e-12


@pytest.mark.parametrize("heads", [1, 2])
def test_vmap_of_grad_over_stacked_weights_is_a_loop_over_them(heads: int) -> None:
    case = _case(b=2, t=18, heads=heads)
    assert case.W_y is not None
    stacked = torch.stack([case.W_y, 0.5 * case.W_y, 0 * case.W_y])

    def loss(W_y: Tensor) -> Tensor:
        swept = direct_sweep(*replace(case, W_y=W_y).arguments)
        return swept.y.square().sum() + swept.h.sin().sum()

    vmapped = torch.func.vmap(torch.func.grad(loss))(stacked)
    looped = torch.stack([torch.func.grad(loss)(W_y) for W_y in stacked])
    torch.testing.assert_close(vmapped, looped)
    reference = torch.autograd.functional.jacobian(loss, stacked[1])
    torch.testing.assert_close(looped[1], reference)


def test_no_state_of_every_token_is_kept() -> None:
    n, t = 32, 64
    case = _case(b=2, t=t, n=n).tracked()
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        direct_sweep(*case.arguments)
    every_state = 2 * t * D * n
    allowed = sum(v.numel() for v in case.inputs) + case.x.numel() + every_state // 16
    assert sum(saved) <= allowed
    assert max(saved) < every_state


@pytest.mark.parametrize("power", [1, 2])
def test_the_second_derivative_raises_however_it_is_asked_for(power: int) -> None:
    case = _case().tracked()
    loss = direct_sweep(*case.arguments).y.pow(power).sum()
    gradients = torch.autograd.grad(loss, case.inputs, create_graph=True)
    for grad in gradients:
        with pytest.raises(RuntimeError, match="once differentiable"):
            torch.autograd.grad(grad.square().sum(), case.inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        gradients[0].sum().backward()


def test_statistics_have_no_gradient() -> None:
    swept = direct_sweep(*_case().tracked().arguments)
    assert not (swept.defect.requires_grad or swept.scale.requires_grad)
    assert not swept.pivot.requires_grad
    assert swept.y.requires_grad and swept.h.requires_grad


def test_a_token_that_is_not_finite_spoils_its_own_sample_from_there_on() -> None:
    case = _case(b=3, t=5, feedback=False, mixer="low rank", input_scale="one_minus_decay")
    raw = case.raw.clone()
    raw[1, 2, 0] = torch.nan
    swept = direct_sweep(*replace(case, raw=raw).arguments)
    clean = direct_sweep(*case.arguments)
    assert torch.equal(swept.y[[0, 2]], clean.y[[0, 2]])
    assert torch.equal(swept.y[1, :2], clean.y[1, :2])
    assert not bool(swept.y[1, 2:].isfinite().all(-1).any())


def _plain(raw: Tensor) -> Coefficients:
    """Step 1, B = C = e_1 and one projection with the given beta: singular at beta = 1."""
    B = torch.zeros_like(raw[..., :2])
    B[..., 0] = 1.0
    U = torch.zeros_like(raw[..., :D]).unsqueeze(-2)
    U[..., 0, 1] = 1.0
    return Coefficients(
        *(torch.ones_like(raw[..., :D]), B, B, torch.zeros_like(B[..., :1])),
        *(U, raw[..., :1, None], raw[..., :0]),
    )


def test_an_exactly_singular_token_is_contained_and_its_pivot_kept() -> None:
    x, beta = torch.randn(3, 5, D), torch.full((3, 5, D), 0.5)
    options = Parameterization(None, "delta", "positive", None)
    rest = (None, -torch.ones(D, 2), torch.zeros(3, D, 2), torch.zeros(3, D))
    clean = direct_sweep(Operands(x, beta, *rest), options, _plain)
    beta[1, 2] = 1.0
    swept = direct_sweep(Operands(x, beta, *rest), options, _plain)
    assert swept.pivot.tolist() == [0.5, 0.0, 0.5]
    assert torch.equal(swept.y[[0, 2]], clean.y[[0, 2]])
    assert torch.equal(swept.y[1, :2], clean.y[1, :2])
    assert not bool(swept.y[1, 2].isfinite().all())
