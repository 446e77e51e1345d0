"""The decoding kernel against one token in plain PyTorch: state, output stage, statistics.

With TRITON_INTERPRET=1, small shapes run on a CPU; without it, the tests need a CUDA device.
Letters: b batch, d channels, n state per channel, k reflections, r raw values, H heads, p = d / H
channels of a head.
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
    heads: int = 1
    options: StepOptions = OPTIONS
    bias: bool = True
    feedback: bool = True
    dtype: torch.dtype = torch.float64
    low: torch.dtype | None = None
    device: str = DEVICE

    def draw(self) -> tuple[StepOperands, StepParameters]:
        """The same numbers at every call."""
        generator = torch.Generator().manual_seed(1)
        low, (b, n, d) = self.low or self.dtype, (self.b, self.n, self.d)
        heads, p = self.heads, self.d // self.heads
        projected = (b,) if heads == 1 else (heads, b)

        def randn(*shape: int, dtype: torch.dtype) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(self.device, dtype)

        sizes = self.options.part_sizes(p, n)
        fed_size = p + sum(s for s, fed in zip(sizes, self.options.fed, strict=True) if fed)
        # x and z are halves of one projection, as in the layer
        xz = randn(b, 2 * d, dtype=low)
        has_norm = self.options.norm_eps is not None
        empty = torch.full((heads * b,), torch.nan, dtype=self.dtype, device=self.device)
        flags = torch.ones(heads * b, dtype=torch.uint8, device=self.device)
        operands = StepOperands(
            xz[:, :d],
            randn(*projected, p, dtype=self.dtype),
            xz[:, d:] if has_norm else None,
            randn(*projected, sum(sizes) + p, dtype=low),
            randn(*projected, fed_size, dtype=low) if self.feedback else None,
            randn(b, n, d, dtype=self.dtype),
            randn(b, d, dtype=self.dtype),
            torch.full((b, d), torch.nan, dtype=low, device=self.device),
            torch.full((b, d), torch.nan, dtype=low, device=self.device),
            empty,
            empty.clone(),
            torch.zeros_like(flags),
            flags,
        )
        decay = 0.3 * randn(d, n, dtype=low)
        return operands, StepParameters(
            None if self.options.decay == "one" else decay,
            randn(d, dtype=low),
            randn(heads * sum(sizes), dtype=low) if self.bias else None,
            randn(d, dtype=low),
            randn(d, dtype=low) if has_norm else None,
        )


def _run(case: Case, backend: Any, **changes: Tensor) -> StepOperands:
    operands, parameters = case.draw()
    for name, value in changes.items():
        getattr(operands, name).copy_(value)
    options = replace(case.options, num_heads=case.heads)
    decode_token(operands, parameters, options, backend=backend)
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
    for k in (0, 1, 8):
        options = replace(OPTIONS, layout=RawLayout("softplus", True, k, 1.0))
        found.append(Case(d=11, n=5, options=options))
    found += [Case(heads=2), Case(1, heads=3, feedback=False), Case(3, heads=2, bias=False)]
    sigmoid = RawLayout("sigmoid", False, 2, 1.0)
    options = replace(OPTIONS, layout=sigmoid, decay="one", norm_eps=None)
    found += [Case(1, 10, 1, heads=2, options=options)]
    found += [Case(heads=2, dtype=torch.float32, low=torch.bfloat16)]
    found += [Case(feedback=False), Case(bias=False), Case(b=1, d=1, n=1)]
    found += [Case(options=replace(OPTIONS, norm_eps=None))]
    found += [Case(options=replace(OPTIONS, feedback_norm_eps=None))]
    found += [Case(dtype=torch.float32), Case(dtype=torch.float32, low=torch.bfloat16)]
    return found


@needs_triton
@pytest.mark.parametrize("case", _variants(), ids=lambda case: str(case)[5:120])
def test_kernel_equals_the_plain_token(case: Case) -> None:
    _assert_agree(case)


def test_heads_are_tokens_of_one_head_each() -> None:
    """The plain token of several heads equals that of each head on its slices."""
    case = Case(heads=3, d=12, device="cpu")
    options = replace(case.options, num_heads=3)
    together, parameters = case.draw()
    alone, _ = case.draw()
    decode_token(together, parameters, options, backend="reference")
    folded = {"drive", "raw", "fed"}
    for j in range(3):
        statistics = [v.chunk(3)[j] for v in alone[9:]]
        sliced = [
            v[j] if name in folded else v.chunk(3, -1)[j]
            for name, v in zip(StepOperands._fields[:9], alone[:9], strict=True)
            if v is not None
        ]
        head = StepOperands(*sliced, *statistics)
        of_head = StepParameters(*(v if v is None else v.chunk(3)[j] for v in parameters))  # type: ignore[arg-type]
        decode_token(head, of_head, case.options, backend="reference")
        for name in ("h", "y", "normed", "hidden"):
            actual = getattr(together, name).chunk(3, -1)[j]
            assert_close(name, actual, getattr(head, name), 1e-12)
        assert_close("pivot", together.pivot.chunk(3)[j], head.pivot, 1e-12)


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
    ("b", "d", "n", "k", "low", "heads"),
    [
        *itertools.product([1, 5], [1024], [16], [4], LOW, [1, 16]),
        *itertools.product([1, 5], [1024], [16], [1], LOW, [1]),
        *itertools.product([1, 5], [64], [1], [2], LOW, [1, 2]),
        (3, 390, 13, 3, torch.bfloat16, 6),
        (5, 1000, 13, 8, torch.bfloat16, 1),  # its kernel takes half a minute to compile
    ],
)
def test_sizes_and_dtypes_on_the_device(
    b: int, d: int, n: int, k: int, low: torch.dtype | None, heads: int
) -> None:
    options = replace(OPTIONS, layout=RawLayout("softplus", True, k, 1.0))
    _assert_agree(Case(b, d, n, heads, options, dtype=torch.float32, low=low))


def test_what_the_kernel_does_not_cover_is_named() -> None:
    layout = RawLayout("softplus", True, 9, 1.0)
    assert unsupported_token(64, 16, replace(layout, num_householder=4)) is None
    assert "9 reflections" in str(unsupported_token(64, 16, layout))
    assert "4096 channels" in str(unsupported_token(4096, 16, OPTIONS.layout))
    assert "only HouseholderProduct" in str(unsupported_token(64, 16, None))
