"""The split of the projected input in Triton, in layers with projection="input", against the same
layers in plain PyTorch: values and all gradients.

With TRITON_INTERPRET=1, set before Triton is imported, small shapes run on a CPU; without it the
tests need a CUDA device.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin
from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.projection.parts import (
    GATE,
    MAX_SAMPLES,
    MAX_VALUES,
    Part,
    Parts,
    X,
    takes_split,
)
from bedouin.state import BedouinState
from bedouin.testing import assert_close

DEVICE = "cpu" if interpreter_is_on() else "cuda"
needs_triton = pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5 if interpreter_is_on() else 1e-3, torch.bfloat16: 5e-2}
# for tests of the split alone: the sweep behind it has little to do
PLAIN: dict[str, Any] = {"num_heads": 1, "feedback": (), "erase": 0.0}


def state_of(layer: Bedouin, b: int) -> BedouinState:
    zeros = layer.init_state(b)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(v.shape, generator=generator).to(v).requires_grad_() for v in zeros]
    return BedouinState(*drawn)


def run(
    layer: Bedouin,
    x: Tensor,  # (b, t, m)
    *,
    starts: bool,
    mask: Tensor | None,  # (b, t)
) -> list[Tensor]:
    """Output, state after it, and the gradients of x, the state before it and all parameters."""
    dtype = layer.D.dtype
    given = x.detach().to(DEVICE, dtype, copy=True).requires_grad_()
    state = state_of(layer, len(x)) if starts else None
    y, after = layer(given, state=state, mask=mask, return_state=True)
    sum(v.double().square().sum() for v in (y, *after)).backward()
    leaves = [given, *([] if state is None else state), *layer.parameters()]
    return [y, *after, *(v.grad for v in leaves if v.grad is not None)]


def check(
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    *,
    starts: bool = True,
    lengths: tuple[int, ...] | None = None,
    **options: Any,
) -> None:
    sizes: dict[str, Any] = {"num_heads": 2, "d_state": 4, "feedback_noise": 0.0} | options
    ours, theirs = (Bedouin.recall(6, backend=b, **sizes) for b in ("triton", "reference"))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(*shape, 6, generator=torch.Generator().manual_seed(0))
    mask = None
    if lengths is not None:
        ends = torch.tensor(lengths, device=DEVICE).unsqueeze(1)
        mask = torch.arange(shape[1], device=DEVICE) < ends
    how: dict[str, Any] = {"starts": starts, "mask": mask}
    found = run(ours.to(DEVICE, dtype), x, **how)
    expected = run(theirs.to(DEVICE, torch.float64), x, **how)
    assert len(found) == len(expected)
    tolerance = TOLERANCE[dtype]
    for i, (a, e) in enumerate(zip(found, expected, strict=True)):
        assert_close(f"{i}", a.to(e.dtype), e, tolerance, atol=tolerance)


@needs_triton
@pytest.mark.parametrize("d_conv", [None, 1, 3, 4])
def test_every_width(d_conv: int | None) -> None:
    check((2, 5), d_conv=d_conv, **PLAIN)


@needs_triton
@pytest.mark.parametrize("splits", [1, 16])
def test_tokens_in_several_tiles(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 tokens each; in the backward two rows of 9 tokens, and three programs with such of
    4."""
    launch = pytest.importorskip("bedouin.kernels.projection.launch")
    monkeypatch.setattr(launch, "TILE", 1)
    monkeypatch.setattr(launch, "ROW_TILE", 32)
    monkeypatch.setattr(launch, "LENGTH", 4)
    monkeypatch.setattr(launch, "MOST_SPLITS", splits)
    launch._constants.cache_clear()
    check((1, 18), d_state=2, **PLAIN)
    launch._constants.cache_clear()


@needs_triton
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1), {}),
        ((3, 2), PLAIN | {"starts": False}),
        ((2, 5), {"num_heads": 1, "erase": 0.0}),
        ((1, 5), {"num_heads": 3, "d_state": 3, "feedback": ()}),
        ((2, 5), PLAIN | {"lengths": (5, 2)}),
        ((3, 5), PLAIN | {"lengths": (1, 5, 3), "starts": False, "d_conv": 2}),
        ((2, 3), {"num_householder": 2, "input_scale": "bounded_delta", "feedback": ("delta",)}),
        ((1, 5), {"dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_every_option(shape: tuple[int, int], options: dict[str, Any]) -> None:
    if options.get("num_householder"):
        # the kernels of heads with reflections do not erase
        options = options | {"erase": 0.0}
    check(shape, **options)


@needs_triton
def test_parts_too_wide_for_the_kernel() -> None:
    check((1, 3), d_conv=MAX_VALUES, **PLAIN)


def test_which_parts_the_kernel_takes() -> None:
    parts = Part(256, X, True), Part(MAX_VALUES, 0, False)
    assert takes_split(parts, 4, MAX_SAMPLES)
    assert not takes_split(parts, 5, 1) and not takes_split(parts, 4, MAX_SAMPLES + 1)
    assert not takes_split([*parts, Part(MAX_VALUES + 1, 0, False)], 1, 1)


def test_auto_takes_the_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Bedouin.recall(6)
    projected = layer.in_proj(torch.randn(1, 2, 6))
    assert not layer._splits_at_once(projected)
    monkeypatch.setattr("bedouin.kernels.backend.is_cuda_device", lambda device: True)
    monkeypatch.setattr("bedouin.kernels.backend._TRITON", "3.6.0")
    monkeypatch.setattr("bedouin.kernels.backend._IS_OLD", False)
    assert layer._splits_at_once(projected) and not layer._splits_at_once(projected.double())


def test_places() -> None:
    parts = (
        *(Part(8, X, True), Part(1, 12, False, 1), Part(8, 0, False, 6), Part(4, 8, True)),
        Part(8, GATE, False),
    )
    placed = Parts.of(tuple(int(value) for part in parts for value in part), 2)
    assert (placed.p, placed.r, placed.c, placed.q) == (8, 13, 24, 7)
    assert [p.part for p in placed.placed] == list(parts)
    assert [p.column for p in placed.placed] == [0, 16, 18, 34, 42]
    assert [p.channel for p in placed.placed if p.part.convolved] == [0, 16]
    # the biases are in the order of the raw values
    assert [p.bias for p in placed.placed if p.part.biased] == [6, 0]
