"""Residual, pivot and convergence of a sweep, reduced in one launch, against their definitions."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bedouin.kernels.direct import ROUNDING
from bedouin.kernels.direct.registered import summarize
from bedouin.solvers.convergence import relative_residual, within_rounding

NAN, INF = math.nan, math.inf

devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


def statistics(t: int) -> Tensor:
    """(4, b, t) of samples that each meet another case."""
    torch.manual_seed(0)
    b = 9
    values = torch.rand(4, b, t)
    values[0] *= 100 * torch.finfo(torch.float32).eps
    defect, scale, magnitude, pivot = values
    defect[1, 5] = 0.1
    scale[2, :3], defect[2, :3], magnitude[2, :3] = 0, 0, 0
    scale[3, :2], magnitude[3, :2] = 0, 0
    values[:, 4, 6:] = NAN
    pivot[4, 5] = 1e-9
    scale[5, 3], pivot[5] = INF, INF
    defect[6, t - 1] = INF
    scale[7, 4], defect[7, 4:] = NAN, 0
    magnitude[8, 2], pivot[8] = NAN, NAN
    return values


def expected(values: list[Tensor]) -> list[Tensor]:
    defect, scale, magnitude, pivot = values
    smallest = pivot.nan_to_num(nan=INF).amin(1)
    converged = within_rounding(defect, scale, magnitude)
    return [relative_residual(defect, scale), smallest, converged]


@pytest.fixture(params=[1024, 4])  # one block of tokens, and three
def max_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The most tokens that a program reads at a time."""
    from bedouin.kernels.direct import triton_summary

    monkeypatch.setattr(triton_summary, "MAX_TOKENS", request.param)
    yield


@devices
@pytest.mark.usefixtures("max_tokens")
def test_the_summary_is_what_the_definitions_say(device: str) -> None:
    values = statistics(11).to(device)
    check(values, *summarize(values))


@devices
@pytest.mark.usefixtures("max_tokens")
def test_padding_is_left_out_of_all_but_the_pivot(device: str) -> None:
    values = statistics(11).to(device)
    lengths = torch.tensor([11, 5, 2, 0, 8, 3, 10, 4, 2], device=device)
    real = torch.arange(11, device=device) < lengths.unsqueeze(1)
    without = [v.masked_fill(~real, 0) for v in values[:3]]
    summary, converged = summarize(values, lengths)
    for ours, theirs in zip([*summary, converged], expected([*without, values[3]]), strict=True):
        assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
    assert converged.tolist() == [True] * 4 + [False] + [True] * 4


@pytest.mark.gpu
def test_a_long_sequence_takes_several_blocks() -> None:
    values = statistics(2100).cuda()
    check(values, *summarize(values))


def check(values: Tensor, summary: Tensor, converged: Tensor) -> None:
    residual, pivot = summary
    for ours, theirs in zip([residual, pivot, converged], expected([*values]), strict=True):
        assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
    assert converged.tolist()[:5] == [True, False, True, False, False]


def test_nothing_is_summed_up_without_tokens_or_samples() -> None:
    (residual, pivot), converged = summarize(torch.empty(4, 2, 0))
    assert residual.tolist() == [0, 0] and pivot.tolist() == [INF, INF]
    assert converged.tolist() == [True, True]
    assert summarize(torch.empty(4, 0, 3))[0].shape == (2, 0)


@devices
@pytest.mark.usefixtures("max_tokens")
def test_the_summary_of_an_adjoint(device: str) -> None:
    from bedouin.kernels.direct.triton_summary import summarize_adjoint

    values = statistics(11).to(device).flip(2)[:2]
    steps, residual, converged = summarize_adjoint(values)
    defect, scale = values
    expected_residual = relative_residual(defect.flip(1), scale.flip(1))
    assert torch.equal(residual.nan_to_num(nan=-1.0), expected_residual.nan_to_num(nan=-1.0))
    bound = ROUNDING * torch.finfo(torch.float32).eps
    assert torch.equal(converged, expected_residual < bound) and converged.any()
    assert torch.equal(steps, torch.ones_like(steps))
