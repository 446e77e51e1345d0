"""The selective scan against the recurrence as a loop: values, gradients and error messages.

Letters: b batch, t time, d channels, n state per channel.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bedouin.kernels.scan import Eigenvalues, InputScale, contract, discretize, selective_scan

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
SCALES: tuple[InputScale, ...] = ("delta", "bounded_delta", "one_minus_decay")
RANGES: tuple[Eigenvalues, ...] = ("positive", "full")


@dataclass(frozen=True)
class Case:
    """Operands of one scan, in the order of its arguments."""

    x: Tensor  # (b, t, d)
    delta: Tensor  # (b, t, d)
    A: Tensor  # (d, n)
    B: Tensor  # (b, t, n)
    C: Tensor  # (b, t, n)
    h0: Tensor  # (b, d, n)
    D: Tensor  # (d,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.delta, self.A, self.B, self.C, self.h0, self.D


def _case(
    b: int, t: int, d: int = 3, n: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    delta, A = torch.nn.functional.softplus(draw(b, t, d)), -draw(d, n).exp()
    return Case(draw(b, t, d), delta, A, draw(b, t, n), draw(b, t, n), draw(b, d, n), draw(d))


def _naive(
    case: Case, input_scale: InputScale, eigenvalues: Eigenvalues, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """The recurrence of the paper, with every (b, t, d, n) tensor in memory."""
    decay = torch.exp(torch.einsum("btd,dn->btdn", case.delta, case.A))
    gain = {
        "delta": case.delta[..., None].expand_as(decay),
        "bounded_delta": (case.delta / (1 + case.delta))[..., None].expand_as(decay),
        "one_minus_decay": 1 - decay,
    }[input_scale]
    if eigenvalues == "full":
        decay = 2 * decay - 1
        if input_scale == "one_minus_decay":
            gain = 1 - decay.abs()
    h, reads = case.h0, []
    written = torch.einsum("btdn,btd,btn->btdn", gain, case.x, case.B)
    for i in range(case.x.shape[1]):
        kept = decay[:, i] * h
        h = kept + written[:, i]
        reads.append(torch.einsum("bdn,bn->bd", kept if exclusive else h, case.C[:, i]))
    y = torch.stack(reads, 1) if reads else torch.zeros_like(case.x)
    return y + case.D * case.x, h


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("input_scale", SCALES)
@pytest.mark.parametrize("t", [0, 1, 63, 64, 100])
def test_scan_is_the_recurrence(
    t: int,
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
    exclusive: bool,
    dtype: torch.dtype,
) -> None:
    case = _case(2, t, dtype=dtype)
    actual = selective_scan(
        *case.tensors, input_scale=input_scale, eigenvalues=eigenvalues, exclusive=exclusive
    )
    expected = _naive(case, input_scale, eigenvalues, exclusive)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("t", [0, 5])
def test_small_batches(b: int, t: int) -> None:
    case = _case(b, t)
    y, h = selective_scan(*case.tensors)
    assert y.shape == (b, t, 3) and h.shape == (b, 3, 4)
    torch.testing.assert_close((y, h), _naive(case, "delta", "positive", False))


def test_empty_time_returns_the_state_unchanged() -> None:
    case = _case(2, 0)
    assert torch.equal(selective_scan(*case.tensors)[1], case.h0)


def test_without_state_and_skip_both_are_zero() -> None:
    case = _case(2, 9)
    zeros = replace(case, h0=torch.zeros_like(case.h0), D=torch.zeros_like(case.D))
    actual = selective_scan(*case.tensors[:5])
    torch.testing.assert_close(actual, _naive(zeros, "delta", "positive", False))


def test_strides_do_not_matter() -> None:
    case = _case(2, 11, d=4, n=4)

    def scatter(v: Tensor) -> Tensor:
        return v.mT.contiguous().mT if v.dim() > 1 else v.repeat_interleave(2)[::2]

    scattered = [scatter(v) for v in case.tensors]
    assert not any(v.is_contiguous() for v in scattered)
    expected = selective_scan(*case.tensors)
    torch.testing.assert_close(selective_scan(*scattered), expected)


@settings(max_examples=20)
@given(cut=st.integers(0, 12), scale=st.sampled_from(SCALES), eig=st.sampled_from(RANGES))
def test_two_halves_with_the_state_between_are_the_whole(
    cut: int, scale: InputScale, eig: Eigenvalues
) -> None:
    x, delta, A, B, C, h0, _ = _case(2, 12).tensors

    def scan(start: int, stop: int, h: Tensor) -> tuple[Tensor, Tensor]:
        part = [v[:, start:stop] for v in (x, delta, B, C)]
        return selective_scan(
            part[0], part[1], A, part[2], part[3], h, input_scale=scale, eigenvalues=eig
        )

    y_head, h_middle = scan(0, cut, h0)
    y_tail, h_last = scan(cut, 12, h_middle)
    torch.testing.assert_close((torch.cat([y_head, y_tail], 1), h_last), scan(0, 12, h0))


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("input_scale", SCALES)
def test_gradients_of_output_and_last_state(
    input_scale: InputScale, eigenvalues: Eigenvalues, exclusive: bool
) -> None:
    def scan(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"input_scale": input_scale, "eigenvalues": eigenvalues}
        return selective_scan(*tensors, exclusive=exclusive, **options)

    operands = [v.requires_grad_() for v in _case(2, 4, d=2, n=2).tensors]
    assert torch.autograd.gradcheck(scan, operands)


def test_the_last_state_alone_has_a_gradient() -> None:
    case = _case(2, 6)
    h0 = case.h0.clone().requires_grad_()
    _, h = selective_scan(case.x, case.delta, case.A, case.B, case.C, h0)
    (grad,) = torch.autograd.grad(h.sum(), h0)
    total_decay = torch.exp(torch.einsum("bd,dn->bdn", case.delta.sum(1), case.A))
    torch.testing.assert_close(grad, total_decay)


@settings(max_examples=25)
@given(seed=st.integers(0, 999), eigenvalues=st.sampled_from(RANGES))
def test_the_coupled_scale_never_gains(seed: int, eigenvalues: Eigenvalues) -> None:
    case = _case(2, 3, seed=seed)
    decay, s = discretize(case.delta, case.A, "one_minus_decay", eigenvalues)
    assert bool((decay.abs() + s <= 1 + 1e-15).all()) and bool((s >= 0).all())


def test_bounded_delta_stays_below_one_and_full_eigenvalues_reach_minus_one() -> None:
    delta = torch.tensor([0.0, 1.0, 1e6])
    decay, s = discretize(delta, -torch.ones(3, 1), "bounded_delta", "full")
    torch.testing.assert_close(s.flatten(), torch.tensor([0.0, 0.5, 1e6 / (1e6 + 1)]))
    torch.testing.assert_close(decay[[0, 2]].flatten(), torch.tensor([1.0, -1.0]))


def test_contract_sums_over_the_state() -> None:
    h, C = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5)
    torch.testing.assert_close(contract(h, C), torch.einsum("btdn,btn->btd", h, C))


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (2, 3), r"x must have shape \(b, t, d\), got \(2, 3\)"),
        (1, (2, 5, 4), r"delta must have shape \(2, 5, 3\), got \(2, 5, 4\)"),
        (2, (4, 4), r"A must have shape \(d, n\) = \(3, n\) or \(H, d, n\), got \(4, 4\)"),
        (2, (3,), r"A must have shape \(d, n\) = \(3, n\) or \(H, d, n\), got \(3,\)"),
        (3, (2, 5, 3), r"B must have shape \(2, 5, 4\), got \(2, 5, 3\)"),
        (4, (2, 4, 4), r"C must have shape \(2, 5, 4\), got \(2, 4, 4\)"),
        (5, (1, 3, 4), r"h0 must have shape \(2, 3, 4\), got \(1, 3, 4\)"),
        (6, (1,), r"D must have shape \(3,\), got \(1,\)"),
    ],
)
def test_a_wrong_shape_is_named(index: int, shape: tuple[int, ...], message: str) -> None:
    operands = list(_case(2, 5).tensors)
    operands[index] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        selective_scan(*operands)


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("input_scale", "dleta", ValueError, "input_scale must be one of .*'bounded_delta'"),
        ("eigenvalues", "both", ValueError, "eigenvalues must be one of .*'positive', 'full'"),
        ("backend", "cuda", ValueError, "backend must be one of"),
        ("backend", "triton", ValueError, "needs tensors on a CUDA device"),
    ],
)
def test_a_wrong_option_is_named(
    option: str, value: str, error: type[Exception], message: str
) -> None:
    options: Any = {option: value}
    with pytest.raises(error, match=message):
        selective_scan(*_case(1, 2).tensors, **options)
