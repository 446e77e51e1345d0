"""Scan and output stage of several heads: one call equals a loop over heads of calls of one head.

Letters: b samples of a head, t time, d channels, n state per channel, H heads.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.output import gated_output
from bedouin.kernels.scan import selective_scan
from bedouin.testing import assert_close

# In the max norm. The expected values are computed in float64 from the same operands.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2}
PLAIN = pytest.param("cpu", "reference", id="reference")
INTERPRETED = pytest.param("cpu", "triton", marks=pytest.mark.interpreter, id="interpreter")
COMPILED = pytest.param("cuda", "triton", marks=pytest.mark.gpu, id="gpu")
implementations = pytest.mark.parametrize(("device", "backend"), [PLAIN, INTERPRETED, COMPILED])
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
    return (gated_output(*operands, backend=backend),)


@implementations
@dtypes
@pytest.mark.parametrize(("num_heads", "b", "t"), [(1, 2, 3), (2, 3, 5), (3, 1, 18)])
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
