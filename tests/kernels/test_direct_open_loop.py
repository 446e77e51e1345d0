"""The Triton kernels of the sweep without feedback against plain PyTorch: values and gradients.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

from dataclasses import dataclass
from typing import Any

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
    """Shapes and options; `inputs` is the dtype of x and raw, `shift` is added to raw Delta and
    alpha."""

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

    def options(self) -> Parameterization:
        layout = RawLayout("softplus", self.selective, self.k, self.beta_max)
        return Parameterization(layout, self.scale, self.eigenvalues, None)

    def operands(self) -> Operands:
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        b, t, d, n = self.b, self.t, self.d, self.n
        layout = self.options().known_layout()
        raw = draw(b, t, layout.size(d, n))
        raw[..., :d] += self.shift
        raw[..., -self.k :] += self.shift
        x, raw = (v.to(DEVICE, self.inputs or self.dtype) for v in (draw(b, t, d), raw))
        A, h0 = (v.to(DEVICE, self.dtype) for v in (-draw(d, n).exp(), draw(b, d, n)))
        return Operands(x, raw, None, A, h0, None)

    def cotangents(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(6)
        shapes = (self.b, self.t, self.d), (self.b, self.d, self.n)
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


def _assert_like_the_plain_sweep(case: Case) -> None:
    tolerance = max(TOLERANCE[v] for v in (case.dtype, case.inputs) if v is not None)
    _assert_like(_run(case, "triton"), _run(case, "reference", case.dtype), tolerance)


@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        Case(d=5, n=1, k=1, selective=False),
        Case(b=1, t=1, d=3, n=2, k=8, scale="delta", eigenvalues="full", beta_max=2.0),
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


@needs_triton
@pytest.mark.parametrize("scale", ["delta", "one_minus_decay"])
def test_segments_of_the_backward_begin_with_cotangents_of_the_walk(scale: InputScale) -> None:
    from bedouin.kernels.direct.open_loop.launch import launch_open_reverse, launch_open_sweep
    from bedouin.kernels.scan.launch import Limits, plan_scan

    case, keep_every = Case(t=7, scale=scale), 2
    limits = Limits(backward_segment=3)
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
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_nearly_singular_tokens_are_exact_up_to_their_pivots(backend: Backend) -> None:
    exact, exact_grads, _ = _run(NEAR_SINGULAR, "reference", torch.float64)
    sweep, grads, _ = _run(NEAR_SINGULAR, backend)
    pairs = zip((sweep.y, *grads), (exact.y, *exact_grads), strict=True)
    errors = [((a - e).abs().max() / e.abs().max()).item() for a, e in pairs]
    pivot = exact.pivot.min().item()
    assert pivot < 0.1
    # what a backward stable solve leaves, in both: rounding, amplified by the condition
    assert max(errors) < 10 * torch.finfo(torch.float32).eps / pivot, errors


@needs_triton
def test_the_residual_is_that_of_an_evaluation_of_the_map() -> None:
    case, operands = NEAR_SINGULAR, NEAR_SINGULAR.operands().wide()
    sweep = direct_sweep(operands, case.options(), backend="triton")
    x, raw, _, A, h0, _ = (None if v is None else v.double() for v in operands)
    assert x is not None and raw is not None and A is not None and h0 is not None
    c = choose_bind(None, case.options(), A)(raw)
    mixed = mix_channels(x, sweep.y.double(), None, c.U, c.M)
    scan = (mixed, c.delta, A, c.B, c.C, h0)
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
