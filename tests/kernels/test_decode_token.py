"""The decoding kernel against one token in plain PyTorch: state, output stage, statistics.

With TRITON_INTERPRET=1, small shapes run on a CPU; without it, the tests need a CUDA device.
Letters: b batch, d channels, n state per channel, k reflections, r raw values.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.decode import (
    DecayKind,
    StepOperands,
    StepOptions,
    StepParameters,
    decode_token,
    unsupported_token,
)
from bedouin.kernels.operands import RawLayout
from bedouin.testing import assert_close

DEVICE = "cpu" if interpreter_is_on() else "cuda"

needs_triton = pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu
compiled = pytest.mark.gpu

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-3}
OPTIONS = StepOptions(
    RawLayout("softplus", True, 2, 1.0),
    *("bounded_delta", "positive", 1e-5, "exp", 8.0),
    fed=(True, True, True, True),
    norm_eps=1e-5,
)


@dataclass(frozen=True)
class Case:
    """Shapes and options of a token; `low` is the dtype of what comes from products."""

    b: int = 2
    d: int = 6
    n: int = 3
    options: StepOptions = OPTIONS
    bias: bool = True
    feedback: bool = True
    dtype: torch.dtype = torch.float64
    low: torch.dtype | None = None

    def draw(self) -> tuple[StepOperands, StepParameters]:
        """The same numbers at every call."""
        generator = torch.Generator().manual_seed(1)
        low, (b, n, d) = self.low or self.dtype, (self.b, self.n, self.d)

        def randn(*shape: int, dtype: torch.dtype) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(DEVICE, dtype)

        sizes = self.options.part_sizes(d, n)
        fed_size = d + sum(s for s, fed in zip(sizes, self.options.fed, strict=True) if fed)
        # x and z are halves of one projection, as in the layer
        xz = randn(b, 2 * d, dtype=low)
        has_norm = self.options.norm_eps is not None
        empty = torch.full((b,), torch.nan, dtype=self.dtype, device=DEVICE)
        flags = torch.ones(b, dtype=torch.uint8, device=DEVICE)
        operands = StepOperands(
            xz[:, :d],
            randn(b, d, dtype=self.dtype),
            xz[:, d:] if has_norm else None,
            randn(b, sum(sizes) + d, dtype=low),
            randn(b, fed_size, dtype=low) if self.feedback else None,
            randn(b, n, d, dtype=self.dtype),
            randn(b, d, dtype=self.dtype),
            torch.full((b, d), torch.nan, dtype=low, device=DEVICE),
            torch.full((b, d), torch.nan, dtype=low, device=DEVICE),
            empty,
            empty.clone(),
            torch.zeros_like(flags),
            flags,
        )
        decay = 0.3 * randn(d, n, dtype=low)
        return operands, StepParameters(
            None if self.options.decay == "one" else decay,
            randn(d, dtype=low),
            randn(sum(sizes), dtype=low) if self.bias else None,
            randn(d, dtype=low),
            randn(d, dtype=low) if has_norm else None,
        )


def _run(case: Case, backend: Any, **changes: Tensor) -> StepOperands:
    operands, parameters = case.draw()
    for name, value in changes.items():
        getattr(operands, name).copy_(value)
    decode_token(operands, parameters, case.options, backend=backend)
    return operands


def _assert_agree(case: Case) -> None:
    got, expected = _run(case, "triton"), _run(case, "reference")
    tolerance = TOLERANCE[case.dtype] if case.low is None else 1e-2
    for name in ("h", "y", "normed", "hidden", "pivot"):
        assert_close(name, getattr(got, name), getattr(expected, name), tolerance)
    eps = torch.finfo(case.dtype).eps
    # residuals are rounding: they need not agree, only be as small
    assert got.residual.max() < 1e3 * eps and expected.residual.max() < 1e3 * eps
    assert bool(got.converged.all()) and bool(got.all_converged.all())


def _variants() -> list[Case]:
    kinds: tuple[DecayKind, ...] = ("exp", "softplus", "one")
    found = [Case(options=replace(OPTIONS, decay=kind)) for kind in kinds]
    for activation in ("softplus_of_minus", "sigmoid"):
        for selective in (False, True):
            layout = RawLayout(activation, selective, 3, 2.0)
            found.append(Case(n=3 if selective else 1, options=replace(OPTIONS, layout=layout)))
    for scale in ("delta", "one_minus_decay"):
        for eigenvalues in ("positive", "full"):
            options = replace(OPTIONS, input_scale=scale, eigenvalues=eigenvalues)
            found.append(Case(options=options))
    for fed in ((False, True, False, True), (True, False, True, False), (False,) * 4):
        found.append(Case(options=replace(OPTIONS, fed=fed)))
    for k in (1, 8):
        options = replace(OPTIONS, layout=RawLayout("softplus", True, k, 1.0))
        found.append(Case(d=11, n=5, options=options))
    found += [Case(feedback=False), Case(bias=False), Case(b=1, d=1, n=1)]
    found += [Case(options=replace(OPTIONS, norm_eps=None))]
    found += [Case(options=replace(OPTIONS, feedback_norm_eps=None))]
    found += [Case(dtype=torch.float32), Case(dtype=torch.float32, low=torch.bfloat16)]
    return found


@needs_triton
@pytest.mark.parametrize("case", _variants(), ids=lambda case: str(case)[5:120])
def test_kernel_equals_the_plain_token(case: Case) -> None:
    _assert_agree(case)


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sample_that_left_the_numbers_is_not_converged(bad: float) -> None:
    case = Case()
    y = case.draw()[0].drive.clone()
    y[1, 2] = bad
    for backend in ("triton", "reference"):
        found = _run(case, backend, drive=y)
        assert found.converged.tolist() == [1, 0] and found.all_converged.tolist() == [1, 0]
        assert found.residual[0] < 1e-10 and bool(found.residual[1].isnan())


@needs_triton
def test_held_remembers_a_failure() -> None:
    found = _run(Case(), "triton", all_converged=torch.tensor([0, 1], dtype=torch.uint8))
    assert found.converged.tolist() == [1, 1] and found.all_converged.tolist() == [0, 1]


LOW = (None, torch.bfloat16, torch.float16)


@compiled
@pytest.mark.parametrize(
    ("b", "d", "n", "k", "low"),
    [
        *itertools.product([1, 5], [1024], [16], [4], LOW),
        *itertools.product([1, 5], [1024], [16], [1], LOW),
        *itertools.product([1, 5], [64], [1], [2], LOW),
        (5, 1000, 13, 8, torch.bfloat16),  # its kernel takes half a minute to compile
    ],
)
def test_sizes_and_dtypes_on_the_device(
    b: int, d: int, n: int, k: int, low: torch.dtype | None
) -> None:
    options = replace(OPTIONS, layout=RawLayout("softplus", True, k, 1.0))
    _assert_agree(Case(b, d, n, options, dtype=torch.float32, low=low))


def test_what_the_kernel_does_not_cover_is_named() -> None:
    layout = RawLayout("softplus", True, 9, 1.0)
    assert unsupported_token(64, 16, replace(layout, num_householder=4)) is None
    assert "9 reflections" in str(unsupported_token(64, 16, layout))
    assert "4096 channels" in str(unsupported_token(4096, 16, OPTIONS.layout))
    assert "only HouseholderProduct" in str(unsupported_token(64, 16, None))
