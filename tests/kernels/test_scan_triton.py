"""The Triton scan against its reference in float64: values and all gradients.

The same checks run on the CPU in the interpreter (small sizes, all branches) and compiled on a GPU.
Letters: b batch, t time, d channels, n state per channel.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bedouin.kernels.scan import Eigenvalues, InputScale, selective_scan
from bedouin.kernels.scan.types import ScanOperands
from bedouin.testing import assert_close

SCALES: tuple[InputScale, ...] = ("delta", "bounded_delta", "one_minus_decay")
RANGES: tuple[Eigenvalues, ...] = ("positive", "full")
OPTIONS: list[dict[str, Any]] = [
    {"input_scale": scale, "eigenvalues": eigenvalues, "exclusive": exclusive}
    for scale, eigenvalues, exclusive in itertools.product(SCALES, RANGES, (False, True))
]
FEW: list[dict[str, Any]] = [OPTIONS[0], OPTIONS[4], OPTIONS[11]]
# In the max norm; half precision rounds the results, the memory stays in float32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
NAMES = ("y", "h", "grad x", "grad delta", "grad A", "grad B", "grad C", "grad h0", "grad D")


def draw(
    b: int,
    t: int,
    d: int,
    n: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None,
) -> ScanOperands:
    """Random operands; A, h0 and D have `state_dtype`, by default the dtype of the others."""
    generator = torch.Generator().manual_seed(b + 10 * t + 1000 * d)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    delta, A = torch.nn.functional.softplus(normal(b, t, d)), -normal(d, n).exp()
    tokens = normal(b, t, d), delta, normal(b, t, n), normal(b, t, n)
    x, delta, B, C = (v.to(device, dtype) for v in tokens)
    A, h0, D = (v.to(device, state_dtype or dtype) for v in (A, normal(b, d, n), normal(d)))
    return ScanOperands(x, delta, A, B, C, h0, D)


def results(operands: ScanOperands, backend: str, **options: Any) -> list[Tensor]:
    """y, the last h, and the gradients of a weighted sum of both."""
    leaves = [v.detach().requires_grad_() for v in operands if v is not None]
    y, h = selective_scan(*leaves, backend=backend, **options)  # type: ignore[arg-type]
    loss = sum((v.double() * _weights(v)).sum() for v in (y, h))
    # An empty scan does not touch all of them.
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)  # type: ignore[arg-type]
    return [y.detach(), h.detach(), *grads]


def _weights(v: Tensor) -> Tensor:
    weights = torch.linspace(0, 7, v.numel(), dtype=torch.float64, device=v.device).cos()
    return weights.to(v.dtype).double().view_as(v)


def check(operands: ScanOperands, **options: Any) -> None:
    options = OPTIONS[0] | options
    actual = results(operands, "triton", **options)
    given = [v for v in operands if v is not None]
    exact = ScanOperands(*(v.double() for v in given))
    expected = results(exact, "reference", **options)
    dtypes = [operands.x.dtype, operands.h0.dtype, *(v.dtype for v in given)]
    for name, ours, theirs, dtype in zip(NAMES, actual, expected, dtypes, strict=True):
        assert ours.dtype == dtype, name
        # h and the gradients of A, h0 and D sum what was rounded in x's dtype on its way in.
        tolerance = max(TOLERANCE[dtype], TOLERANCE[operands.x.dtype])
        assert_close(name, ours.double(), theirs, tolerance, atol=tolerance)


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_option(options: dict[str, Any], device: str) -> None:
    # in the interpreter, the others pass the end of a chunk in the tests of lengths
    t = 17 if device == "cuda" or options in FEW else 3
    check(draw(1, t, 5, 3, device), **options)


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
@pytest.mark.parametrize("options", FEW, ids=["plain", "bounded", "coupled"])
@pytest.mark.parametrize("t", [1, 16, 33])
def test_lengths_around_a_chunk(t: int, options: dict[str, Any], device: str) -> None:
    check(draw(1, t, 3, 2, device), **options)


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
@pytest.mark.parametrize(("b", "d", "n"), [(1, 1, 1), (2, 20, 1), (1, 17, 16), (1, 3, 33)])
def test_blocks_of_channels_and_states(
    b: int, d: int, n: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bedouin.kernels.scan import registered

    monkeypatch.setattr(registered, "WARP", 32)
    check(draw(b, 3, d, n, device))


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, None),
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
    ],
)
def test_precisions(dtype: torch.dtype, state_dtype: torch.dtype | None, device: str) -> None:
    check(draw(1, 17, 4, 3, device, dtype, state_dtype), **OPTIONS[5])


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
def test_scattered_operands(device: str) -> None:
    operands = draw(2, 3, 4, 3, device)
    wide = torch.cat([operands.B, operands.C, operands.x, operands.delta], -1)
    B, C, x, delta = wide.split([3, 3, 4, 4], -1)
    check(ScanOperands(x, delta, operands.A.mT.contiguous().mT, B, C, operands.h0, operands.D))
    tensors: list[Any] = list(operands)
    check(ScanOperands(*(v.mT.contiguous().mT if v.dim() > 1 else v for v in tensors)))


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
def test_without_state_and_skip(device: str) -> None:
    operands = draw(2, 5, 4, 3, device)
    actual = selective_scan(*operands[:5], backend="triton")
    torch.testing.assert_close(actual, selective_scan(*operands[:5], backend="reference"))


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
@pytest.mark.parametrize("output", [0, 1])
def test_one_output_alone_has_gradients(output: int, device: str) -> None:
    drawn: list[Any] = list(draw(1, 17, 3, 2, device))
    leaves = [v.requires_grad_() for v in drawn]
    grads = [
        torch.autograd.grad(selective_scan(*leaves, backend=b)[output].sum(), leaves[:2])
        for b in ("triton", "reference")
    ]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
@pytest.mark.parametrize(("b", "t", "d", "n"), [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2)])
def test_empty_operands(b: int, t: int, d: int, n: int, device: str) -> None:
    operands = draw(b, t, d, n, device)
    ours, theirs = results(operands, "triton"), results(operands, "reference")
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


class KeptMemories(TorchDispatchMode):
    """Shapes of the memories that scans store for their backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.bedouin.selective_scan.default:
            self.shapes.append(tuple(out[2].shape))
        return out


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
@pytest.mark.parametrize("tracked", [False, True])
def test_memory_is_kept_for_a_backward_only(tracked: bool, device: str) -> None:
    operands = draw(2, 18, 3, 4, device)
    operands.x.requires_grad_(tracked)
    with KeptMemories() as kept:
        selective_scan(*operands, backend="triton")
    assert kept.shapes == [(2, 2 if tracked else 0, 3, 4)]


@pytest.mark.parametrize(
    ("b", "t", "d", "n"),
    [
        (128, 16, 1024, 16),
        (64, 256, 1024, 16),
        (16, 1024, 1024, 16),
        (8, 4096, 1024, 16),
        (2, 4096, 64, 64),
        (1, 4096, 2048, 128),
        (1, 300, 1024, 1),
    ],
)
def test_workspaces_are_a_sixteenth_of_all_states_or_sixteen_tokens(
    b: int, t: int, d: int, n: int
) -> None:
    from bedouin.kernels.launch import ceil_div, next_power_of_two
    from bedouin.kernels.scan.registered import choose_block

    block = choose_block(torch.empty(b, t, d, device="meta"), n, reverse=True)
    blocks = ceil_div(d, block)
    limit = max(b * t * d * n / 16, b * 16 * d * n)
    assert b * blocks * 16 * block * next_power_of_two(n) <= limit
    assert b * t * blocks * n <= limit, "parts of the gradient of B, and of C"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("t", [1, 63, 64, 100])
def test_awkward_lengths_compiled(t: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    check(draw(3, t, 65, 16, "cuda", dtype), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("b", "t", "d", "n"), [(1, 1, 63, 5), (100, 63, 64, 16), (1, 1000, 100, 16)]
)
def test_awkward_sizes_compiled(b: int, t: int, d: int, n: int, dtype: torch.dtype) -> None:
    check(draw(b, t, d, n, "cuda", dtype), **OPTIONS[4])


@pytest.mark.gpu
def test_auto_on_a_gpu_is_triton_and_repeats_bit_for_bit() -> None:
    operands = draw(4, 600, 96, 16, "cuda", torch.float32)
    first, second = results(operands, "auto"), results(operands, "triton")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


@pytest.mark.gpu
def test_peak_memory_is_far_below_one_tensor_of_all_states() -> None:
    operands = draw(2, 4096, 64, 64, "cuda", torch.float32)
    results(operands, "triton")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensors: list[Any] = list(operands)
    leaves = [v.detach().requires_grad_() for v in tensors]
    sum(v.sum() for v in selective_scan(*leaves, backend="triton")).backward()  # type: ignore[union-attr]
    all_states = 2 * 4096 * 64 * 64 * 4
    assert torch.cuda.max_memory_allocated() - before < all_states / 2


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
def test_recording_gradients_without_kept_memory_is_refused(device: str) -> None:
    leaves = [v if v is None else v.requires_grad_() for v in draw(1, 3, 2, 2, device)]
    with pytest.raises(ValueError, match="keep must be True where gradients are recorded"):
        torch.ops.bedouin.selective_scan(*leaves, "delta", "positive", False, False)
