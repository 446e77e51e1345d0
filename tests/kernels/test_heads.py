"""Operations on samples of several heads: one call equals a loop over heads of calls of one head.

Letters: b samples of a head, t time, d channels, n state per channel, H heads.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.heads import fold, unfold
from bedouin.kernels.iteration import IterationRule
from bedouin.kernels.operands import Operands, Parameterization, RawLayout
from bedouin.kernels.operation import OPERATIONS
from bedouin.kernels.output import gated_output, registered
from bedouin.kernels.scan import selective_scan
from bedouin.testing import assert_close

# In the max norm. The expected values are computed in float64 from the same operands.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
implementations = pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "reference"),
        pytest.param("cpu", "triton", marks=pytest.mark.interpreter),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
    ],
)
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE))
Operation = Callable[..., Sequence[Tensor]]


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def scan_operands(num_heads: int, b: int, t: int, d: int, n: int) -> list[Tensor]:
    """x, delta, A, B, C, h0 and D in float64; A and D with a leading axis H."""
    g = torch.Generator().manual_seed(num_heads + 10 * b + 100 * t)
    samples = num_heads * b
    x, delta = draw(g, samples, t, d), torch.nn.functional.softplus(draw(g, samples, t, d))
    A, D = -draw(g, num_heads, d, n).exp(), draw(g, num_heads, d)
    B, C, h0 = draw(g, samples, t, n), draw(g, samples, t, n), draw(g, samples, d, n)
    return [x, delta, A, B, C, h0, D]


def output_operands(num_heads: int, b: int, t: int, d: int, *, norm: bool) -> list[Tensor]:
    """y, x, D, gate, fed and, with `norm`, z and weight; D and weight with a leading axis H."""
    g = torch.Generator().manual_seed(num_heads + 10 * b + 100 * t)
    y, x, gate, fed, z = draw(g, 5, num_heads * b, t, d)
    D, weight = draw(g, 2, num_heads, d)
    return [y, x, D, gate, fed, *([z, weight] if norm else [])]


def results(operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
    """The values, and the gradients of a weighted sum of them, in float64."""
    leaves = [v.detach().requires_grad_() for v in operands]
    values = operation(*leaves)
    loss = sum((v.double() * weights_like(v)).sum() for v in values)
    grads = torch.autograd.grad(loss, leaves)  # type: ignore[arg-type]
    return [v.detach().double() for v in (*values, *grads)]


def weights_like(v: Tensor) -> Tensor:
    """Weights of a loss, which do not depend on the samples of other heads."""
    one = torch.linspace(0, 7, v[0].numel(), dtype=torch.float64, device=v.device).cos()
    return one.view(v.shape[1:]).expand(v.shape)


def check_against_a_loop(
    operation: Operation, operands: list[Tensor], of_heads: set[int], dtype: torch.dtype, **at: Any
) -> None:
    """`of_heads`: the positions of operands with a leading axis H; the others are folded."""
    num_heads = operands[min(of_heads)].shape[0]
    given = [v.to(at["device"], dtype) for v in operands]
    actual = results(lambda *v: operation(*v, backend=at["backend"]), given)
    heads = []
    for j in range(num_heads):
        one = [
            v.double()[j] if i in of_heads else v.double().chunk(num_heads)[j]
            for i, v in enumerate(given)
        ]
        heads.append(results(lambda *v: operation(*v, backend="reference"), one))
    count = len(actual) - len(operands)
    for i, (ours, *theirs) in enumerate(zip(actual, *heads, strict=True)):
        join = torch.stack if i - count in of_heads else torch.cat
        name = f"operand {i - count}" if i >= count else f"result {i}"
        assert_close(name, ours, join(theirs), TOLERANCE[dtype], atol=TOLERANCE[dtype])


def scan(*operands: Tensor, backend: Any) -> Sequence[Tensor]:
    return selective_scan(
        *operands, input_scale="one_minus_decay", eigenvalues="full", backend=backend
    )


def output(*operands: Tensor, backend: Any) -> Sequence[Tensor]:
    D = operands[2]
    return (fold(gated_output(*operands, backend=backend), len(D) if D.dim() == 2 else 1),)


@implementations
@pytest.mark.parametrize(
    ("num_heads", "b", "t", "dtype"),
    [
        (1, 2, 2, torch.float32),
        (2, 2, 2, torch.float32),
        (3, 1, 3, torch.float32),
        (2, 1, 2, torch.bfloat16),
    ],
)
def test_scan(
    num_heads: int, b: int, t: int, dtype: torch.dtype, device: str, backend: str
) -> None:
    operands = scan_operands(num_heads, b, t, 5, 3)
    check_against_a_loop(scan, operands, {2, 6}, dtype, device=device, backend=backend)


@implementations
@dtypes
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("num_heads", "b", "t"), [(1, 2, 3), (2, 3, 5), (3, 1, 4)])
def test_output(
    num_heads: int, b: int, t: int, norm: bool, dtype: torch.dtype, device: str, backend: str
) -> None:
    operands = output_operands(num_heads, b, t, 5, norm=norm)
    of_heads = {2, 6} if norm else {2}
    check_against_a_loop(output, operands, of_heads, dtype, device=device, backend=backend)


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
def test_output_where_a_program_takes_many_tokens_of_its_head(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered, "PROGRAMS", 3)
    operands = [v.to(device, torch.float32) for v in output_operands(2, 3, 7, 65, norm=True)]
    exact = [v.double() for v in operands]
    out, *expected = results(lambda *v: output(*v, backend="reference"), exact)
    y, x, D, gate, _, _, weight = expected
    backward, grad = OPERATIONS["bedouin::gated_output_backward"], weights_like(out).float()
    actual = backward(unfold(grad, 2), *operands, 1e-5)
    wanted = y, x, gate, torch.stack([D, weight])
    for i, (ours, theirs) in enumerate(zip(actual, wanted, strict=True)):
        assert_close(f"result {i}", ours.double(), theirs, 2e-6, atol=2e-6)


RULES = {
    "picard": IterationRule("picard", 0.05, 1e-6, damping=0.9),
    "paper": IterationRule("picard", 0.05, 0.0, whole_sequence=True),
}


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
@pytest.mark.parametrize(
    ("num_heads", "b", "rule", "fed", "low"),
    [
        (2, 2, "picard", True, torch.float32),
        (2, 1, "paper", True, torch.float32),
        (3, 1, "picard", False, torch.float32),
        (2, 1, "picard", True, torch.bfloat16),
    ],
)
def test_iteration(
    num_heads: int, b: int, rule: str, fed: bool, low: torch.dtype, device: str
) -> None:
    """Every step of a solve: samples of all heads converge by themselves."""
    from bedouin.kernels.iteration.steps import FusedIteration

    t, d, n = 2, 3, 2
    layout, g = RawLayout("softplus", True, 1, 1.0), torch.Generator().manual_seed(num_heads)
    r, samples = layout.size(d, n), num_heads * b
    x, raw = draw(g, samples, t, d), draw(g, samples, t, r)
    W_y, A = 0.1 * draw(g, num_heads, r, d), -draw(g, num_heads, d, n).exp()
    h0, y0 = draw(g, samples, d, n), draw(g, samples, d)
    raw[::2] *= 0.1  # some converge early
    tokens, state = (v.to(device) for v in (x, raw, W_y)), (v.to(device) for v in (A, h0, y0))
    (x, raw, W_y), (A, h0, y0) = (v.to(low) for v in tokens), (v.float() for v in state)
    options = Parameterization(layout, "one_minus_decay", "positive", 1e-5)
    joint = Operands(x, raw, W_y if fed else None, A, h0, y0)
    parts = zip(*(v.chunk(num_heads) for v in (x, raw, h0, y0)), W_y, A, strict=True)
    alone = [Operands(x, raw, W_y if fed else None, A, h0, y0) for x, raw, h0, y0, W_y, A in parts]
    start = torch.zeros(samples, t, d, device=device)
    together = FusedIteration(joint, start, options, RULES[rule])
    heads = [FusedIteration(one, start[:b], options, RULES[rule]) for one in alone]
    tolerance = TOLERANCE[torch.float32]  # a product of other shapes sums in another order
    for _ in range(2):
        for steps in (together, *heads):
            steps.advance()
        for name, ours in together.progress._asdict().items():
            theirs = [getattr(steps.progress, name) for steps in heads]
            if ours is None:
                assert theirs == [None] * num_heads
            else:
                torch.testing.assert_close(ours, torch.cat(theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(("num_heads", "b", "t", "d"), [(8, 3, 300, 65), (2, 1, 100, 128)])
def test_awkward_sizes_compiled(num_heads: int, b: int, t: int, d: int, dtype: torch.dtype) -> None:
    at = {"device": "cuda", "backend": "triton"}
    check_against_a_loop(scan, scan_operands(num_heads, b, t, d, 16), {2, 6}, dtype, **at)
    operands = output_operands(num_heads, b, t, d, norm=True)
    check_against_a_loop(output, operands, {2, 6}, dtype, **at)


def test_scan_of_a_compiled_function() -> None:
    operands = scan_operands(2, 2, 3, 2, 2)
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    expected = results(lambda *v: scan(*v, backend="reference"), operands)
    actual = results(lambda *v: compiled(*v, backend="reference"), operands)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("operation", "operands", "changed", "message"),
    [
        (scan, scan_operands(2, 2, 3, 5, 3), {2: torch.ones(3, 5, 3)}, "A has 3 heads, got 4"),
        (scan, scan_operands(2, 2, 3, 5, 3), {2: torch.ones(0, 5, 3)}, "A must have at least one"),
        (
            scan,
            scan_operands(2, 2, 3, 5, 3),
            {2: torch.ones(2, 4, 3)},
            "A must have shape (d, n) = (5, n) or (H, d, n), got (2, 4, 3)",
        ),
        (
            scan,
            scan_operands(2, 2, 3, 5, 3),
            {6: torch.ones(5)},
            "D must have shape (2, 5), got (5,)",
        ),
        (
            output,
            output_operands(2, 2, 3, 5, norm=True),
            {2: torch.ones(3, 5), 6: torch.ones(3, 5)},
            "D has 3 heads, got 4",
        ),
        (
            output,
            output_operands(2, 2, 3, 5, norm=True),
            {2: torch.ones(2, 4)},
            "D must have shape (H, d) = (2, 5), got (2, 4)",
        ),
        (
            output,
            output_operands(2, 2, 3, 5, norm=True),
            {6: torch.ones(5)},
            "weight must have shape (H, d) = (2, 5), got (5,)",
        ),
    ],
)
def test_errors(
    operation: Operation, operands: list[Tensor], changed: dict[int, Tensor], message: str
) -> None:
    given = [changed.get(i, v) for i, v in enumerate(operands)]
    with pytest.raises(ValueError, match=re.escape(message)):
        operation(*given, backend="reference")
