"""The Triton kernels of the sweep without feedback against plain PyTorch: values and gradients.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, interpreter_is_on
from bedouin.kernels.direct import Sweep, direct_sweep
from bedouin.kernels.direct.buffers import allocate_reverse, allocate_sweep, collect_gradients
from bedouin.kernels.direct.layout import choose_bind
from bedouin.kernels.householder import mix_channels
from bedouin.kernels.operands import Operands, Parameterization, RawLayout
from bedouin.kernels.scan import Eigenvalues, InputScale, selective_scan_reference
from bedouin.solvers.convergence import relative_residual

DEVICE = "cpu" if interpreter_is_on() else "cuda"
needs_triton = pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu

# of float32, what the sums over 2048 channels and 100 tokens leave
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """Shapes and options; b samples of each head; `inputs` is the dtype of x and raw, `shift` is
    added to raw Delta and alpha; if `apart`, the tokens of x and raw are not contiguous."""

    b: int = 2
    t: int = 4
    d: int = 6
    n: int = 3
    k: int = 2
    scale: InputScale = "bounded_delta"
    eigenvalues: Eigenvalues = "positive"
    dtype: torch.dtype = torch.float64
    inputs: torch.dtype | None = None
    selective: bool = True
    beta_max: float = 1.0
    shift: float = 0.0
    heads: int = 1
    apart: bool = False

    def options(self) -> Parameterization:
        layout = RawLayout("softplus", self.selective, self.k, self.beta_max)
        return Parameterization(layout, self.scale, self.eigenvalues, None)

    def operands(self) -> Operands:
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        b, t, d, n = self.heads * self.b, self.t, self.d, self.n
        own = () if self.heads == 1 else (self.heads,)
        layout = self.options().known_layout()
        raw = draw(b, t, layout.size(d, n))
        raw[..., :d] += self.shift
        raw[..., -self.k :] += self.shift
        x, raw = (v.to(DEVICE, self.inputs or self.dtype) for v in (draw(b, t, d), raw))
        if self.apart:
            x, raw = (v.mT.contiguous().mT for v in (x, raw))
        A, h0 = (v.to(DEVICE, self.dtype) for v in (-draw(*own, d, n).exp(), draw(b, d, n)))
        return Operands(x, raw, None, A, h0, None)

    def cotangents(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(6)
        b = self.heads * self.b
        shapes = (b, self.t, self.d), (b, self.d, self.n)
        y, h = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        return y.to(DEVICE, self.dtype), h.to(DEVICE, self.dtype)


def _run(
    case: Case, backend: Any, dtype: torch.dtype | None = None
) -> tuple[Sweep, list[Tensor], list[Tensor]]:
    """Sweep, gradients, and the adjoint's report; with `dtype` all operands have that."""
    drawn = [v if v is None or dtype is None else v.to(dtype) for v in case.operands()]
    leaves: Any = [v if v is None else v.detach().requires_grad_() for v in drawn]
    reports: list[Tensor] = []
    sweep = direct_sweep(
        Operands(*leaves),
        case.options(),
        report=lambda *report: reports.extend(report),
        backend=backend,
    )
    cotangents = [v.to(sweep.y.dtype) for v in case.cotangents()]
    inputs = [v for v in leaves if v is not None]
    outputs = (sweep.y, sweep.h)
    grads = torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True)
    return sweep, list(grads), reports


def _assert_like(actual: Any, expected: Any, tolerance: float) -> None:
    sweep, plain = actual[0], expected[0]
    pairs = [(getattr(sweep, name), getattr(plain, name)) for name in ("y", "h", "scale", "pivot")]
    pairs += [(sweep.defect, plain.defect), *zip(actual[1], expected[1], strict=True)]
    pairs += list(zip(actual[2], expected[2], strict=True))
    for i, (a, e) in enumerate(pairs):
        assert a.shape == e.shape, i
        if a.numel() and not torch.equal(a, e):
            size = 1 + e.abs().max().item()
            assert (a.double() - e.double()).abs().max().item() <= tolerance * size, i


class Chunks(Protocol):
    """Makes walks take chunks of so many tokens, with so many channels in a program."""

    def __call__(self, tokens: int, channels: int) -> None: ...


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chunks]:
    """A test fails if it has not walked in chunks."""
    from bedouin.kernels.direct.open_loop import walks

    launched = []
    launch = walks.CHUNKS.launch

    def count(*given: Any) -> Any:
        launched.append(given)
        return launch(*given)

    def force(tokens: int, channels: int) -> None:
        limits = walks.ChunkLimits(
            tokens,
            couplings=2048,
            shortest=1,
            states=1,
            channels=channels,
            most_channels=max(channels, 512),
            bytes=4096,
            programs=None if DEVICE == "cuda" else 1024,
        )
        monkeypatch.setattr(walks, "CHUNK_LIMITS", limits)

    monkeypatch.setattr(walks.CHUNKS, "launch", count)
    yield force
    assert launched


def _assert_like_the_plain_sweep(case: Case) -> None:
    tolerance = max(TOLERANCE[v] for v in (case.dtype, case.inputs) if v is not None)
    _assert_like(_run(case, "triton"), _run(case, "reference", case.dtype), tolerance)


MOST_REFLECTIONS = Case(b=1, t=1, d=3, n=2, k=8, scale="delta", eigenvalues="full", beta_max=2.0)


@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        Case(d=5, n=1, k=1, selective=False),
        MOST_REFLECTIONS,
        Case(b=1, t=2, d=9, n=64, k=3, scale="one_minus_decay"),
        Case(b=1, t=5, d=7, k=4, scale="one_minus_decay", eigenvalues="full"),
        # a thread has all states of its channels
        Case(b=1, t=3, d=128, n=4, k=5, scale="delta", eigenvalues="full", dtype=torch.float32),
        Case(b=1, t=3, d=20, n=5, dtype=torch.float32, inputs=torch.bfloat16),
    ],
    ids=str,
)
def test_values_and_gradients(case: Case) -> None:
    _assert_like_the_plain_sweep(case)


def interpreted(*values: Any) -> Any:
    """Parameters with more couplings in a chunk than `ChunkLimits.couplings`, so that no call takes
    them. The compiler would need minutes for their kernels."""
    return pytest.param(*values, marks=pytest.mark.interpreter)


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "channels", "case"),
    [
        # one program a sample, and several; a token, a chunk, and part of one behind it
        (2, 8, Case(t=1, d=5, n=1, k=1, selective=False)),
        (2, 4, MOST_REFLECTIONS),
        interpreted(8, 4, MOST_REFLECTIONS),
        interpreted(8, 8, Case(b=1, t=7, d=9, k=3, scale="one_minus_decay")),
        interpreted(8, 4, Case(t=8, d=9, k=4, apart=True)),
        (4, 8, Case(b=1, t=7, d=9, k=3, scale="one_minus_decay")),
        (4, 4, Case(t=8, d=9, k=4, apart=True)),
        (4, 4, Case(b=1, t=9, d=7, n=5, scale="one_minus_decay", eigenvalues="full")),
        (4, 4, Case(b=1, t=35, d=6, scale="delta")),
        (8, 4, Case(b=1, t=16, d=5, n=2, eigenvalues="full")),
        (4, 8, Case(b=1, t=20, d=12, n=2, k=1)),
        (4, 4, Case(b=1, t=6, d=6, heads=3, scale="one_minus_decay")),
        (2, 8, Case(b=1, t=5, d=6, heads=2, apart=True)),
        (4, 32, Case(t=6, d=70, n=4, dtype=torch.float32)),
        (4, 8, Case(b=1, t=11, d=20, n=5, dtype=torch.float32, inputs=torch.bfloat16)),
    ],
    ids=str,
)
def test_walks_in_chunks(tokens: int, channels: int, case: Case, chunks: Chunks) -> None:
    chunks(tokens, channels)
    _assert_like_the_plain_sweep(case)


@needs_triton
@pytest.mark.parametrize(
    ("b", "t", "d", "n", "k", "every", "expected"),
    [
        (16, 1024, 1024, 16, 4, 16, (4, 128, 8)),
        (8, 4096, 1024, 16, 4, 64, (4, 64, 16)),
        (1, 64, 1000, 16, 5, 16, (2, 64, 16)),
        (33, 64, 1024, 16, 4, 16, (4, 256, 4)),
        (34, 64, 1024, 16, 4, 16, None),
        (1, 64, 2048, 64, 4, 16, None),
        (16, 16, 1024, 16, 4, 16, None),
        (16, 1024, 1024, 16, 4, 2, None),
        (16, 1024, 64, 16, 4, 16, None),
    ],
)
def test_which_walks_take_chunks(
    b: int, t: int, d: int, n: int, k: int, every: int, expected: tuple[int, ...] | None
) -> None:
    from bedouin.kernels.direct.open_loop.walks import plan_chunks
    from bedouin.kernels.direct.triton_constants import Like

    for shape in (n, d), (1, n, d):
        assert plan_chunks(b, t, Like(shape, torch.float32), k, every, 132) == expected
        # in the interpreter programs do not run at the same time
        assert plan_chunks(b, t, Like(shape, torch.float32), k, every, None) is None


@needs_triton
@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("scale", ["delta", "one_minus_decay"])
def test_segments_of_the_backward_begin_with_cotangents_of_the_walk(
    scale: InputScale, in_chunks: bool, request: pytest.FixtureRequest
) -> None:
    if in_chunks:
        request.getfixturevalue("chunks")(2, 4)
    from bedouin.kernels.direct.open_loop.launch import launch_open_reverse, launch_open_sweep
    from bedouin.kernels.scan.launch import ScanLimits, plan_scan

    case, keep_every = Case(t=7, scale=scale), 2
    limits = ScanLimits(backward_segment=3)
    operands, options = case.operands(), case.options()
    plan = plan_scan(operands.x, case.n, reverse=True, chunk=keep_every, limits=limits)
    assert plan.segments == 2 and plan.segment_chunks == 2
    buffers = allocate_sweep(operands, options, keep_every, together=False)
    launch_open_sweep(buffers, options, keep_every)
    given = (*case.cotangents(), buffers.y, buffers.kept, operands, options)
    known, grads = allocate_reverse(*given)
    launch_open_reverse(known, grads, options, keep_every, limits)
    found = collect_gradients(grads, None, buffers.y, operands, options, wants_y0=False)
    _, expected, _ = _run(case, "reference")
    x, raw, _, A, h0, _ = found
    for actual, plain in zip((x, raw, A, h0), expected, strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-10, atol=1e-10)


NEAR_SINGULAR = Case(
    b=2, t=4, d=10, n=2, k=3, scale="delta", beta_max=2.0, shift=1.5, dtype=torch.float32
)


@needs_triton
@pytest.mark.parametrize("form", ["reference", "triton", "chunks"])
def test_nearly_singular_tokens_are_exact_up_to_their_pivots(
    form: str, request: pytest.FixtureRequest
) -> None:
    backend: Backend = "reference" if form == "reference" else "triton"
    if form == "chunks":
        request.getfixturevalue("chunks")(4, 8)
    exact, exact_grads, _ = _run(NEAR_SINGULAR, "reference", torch.float64)
    sweep, grads, _ = _run(NEAR_SINGULAR, backend)
    pairs = zip((sweep.y, *grads), (exact.y, *exact_grads), strict=True)
    errors = [((a - e).abs().max() / e.abs().max()).item() for a, e in pairs]
    pivot = exact.pivot.min().item()
    assert pivot < 0.1
    # what a backward stable solve leaves, in both: rounding, amplified by the condition
    assert max(errors) < 10 * torch.finfo(torch.float32).eps / pivot, errors


@needs_triton
@pytest.mark.parametrize("in_chunks", [False, True])
def test_the_residual_is_that_of_an_evaluation_of_the_map(
    in_chunks: bool, request: pytest.FixtureRequest
) -> None:
    if in_chunks:
        request.getfixturevalue("chunks")(2, 8)
    case, operands = NEAR_SINGULAR, NEAR_SINGULAR.operands().wide()
    sweep = direct_sweep(operands, case.options(), backend="triton")
    x, raw, _, A, h0, _ = (None if v is None else v.double() for v in operands)
    assert x is not None and raw is not None and A is not None and h0 is not None
    c = choose_bind(None, case.options(), A)(raw)
    mixed = mix_channels(x, sweep.y.double(), None, c.U, c.M)
    scan = (mixed, c.delta, A, c.B, c.C, h0, c.erase)
    F, _ = selective_scan_reference(
        *scan, input_scale=case.scale, eigenvalues=case.eigenvalues, exclusive=False
    )
    defect, size = (F - sweep.y).abs().amax(-1), F.abs().amax(-1)
    expected = relative_residual(defect, size)
    assert sweep.residual is not None and sweep.converged is not None
    ratio = sweep.residual.double() / expected
    # both are roundings of one token or another
    assert bool((ratio > 0.1).all()) and bool((ratio < 10).all()), ratio
    assert bool((expected > 1e-8).all()) and bool(sweep.converged.all())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *(Case(3, t, d, 16, 4) for t, d in [(1, 63), (63, 64), (64, 100), (100, 1)]),
        *(Case(3, 100, d, n, 2, "one_minus_decay", "full") for d, n in [(100, 5), (64, 64)]),
        Case(2, 600, 1024, 16, 4, dtype=torch.float32, inputs=torch.bfloat16),
        Case(130, 9, 1024, 16, 4, dtype=torch.float32),
        Case(2, 40, 2048, 16, 4, "one_minus_decay", dtype=torch.float32),
        Case(2, 40, 512, 64, 8, "delta", dtype=torch.float32),
        Case(2, 40, 256, 32, 2, dtype=torch.float32, inputs=torch.bfloat16),
    ],
    ids=str,
)
def test_sizes_on_a_gpu(case: Case) -> None:
    _assert_like_the_plain_sweep(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "channels", "case"),
    [
        *((4, 32, Case(3, t, d, 16, 4)) for t, d in [(1, 63), (63, 64), (64, 100), (100, 1)]),
        *((8, 32, Case(3, 100, d, 5, 1, "one_minus_decay", "full")) for d in (100, 256)),
        (2, 64, Case(2, 90, 256, 16, 8, "delta", "full", dtype=torch.float32)),
        (4, 128, Case(16, 300, 1024, 16, 4, dtype=torch.float32, inputs=torch.bfloat16)),
        (4, 64, Case(8, 600, 1024, 16, 4, dtype=torch.float32, inputs=torch.bfloat16)),
        (4, 256, Case(33, 90, 1024, 16, 4, dtype=torch.float32)),
        (4, 64, Case(2, 90, 300, 32, 3, "one_minus_decay", dtype=torch.float32)),
        (4, 64, Case(2, 90, 512, 16, 2, heads=4, dtype=torch.float32, inputs=torch.bfloat16)),
        (4, 512, Case(2, 90, 1024, 16, 4, dtype=torch.float32)),
    ],
    ids=str,
)
def test_sizes_of_walks_in_chunks_on_a_gpu(
    tokens: int, channels: int, case: Case, chunks: Chunks
) -> None:
    chunks(tokens, channels)
    _assert_like_the_plain_sweep(case)


@pytest.mark.gpu
def test_a_walk_in_chunks_repeats_itself(chunks: Chunks) -> None:
    """The programs of a sample depend on nothing but each other's sums, in a fixed order."""
    chunks(4, 64)
    case = Case(16, 500, 1024, 16, 4, dtype=torch.float32, inputs=torch.bfloat16)
    first, *others = (_run(case, "triton") for _ in range(5))
    for other in others:
        pairs = zip((other[0].y, *other[1]), (first[0].y, *first[1]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
