"""The chunk kernels of the delta rule against the loop in float64: values and all gradients.

The same checks run on the CPU in the interpreter (small sizes) and compiled on a GPU.
Letters: b batch, t time, h heads, p key channels and v value channels of a head.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bedouin.kernels.delta_rule as package
from bedouin.baselines import DeltaNet
from bedouin.kernels.delta_rule import (
    DeltaInputs,
    delta_rule,
    delta_rule_chunked,
    delta_rule_reference,
)
from bedouin.kernels.delta_rule.registered import chunk_kernels

# Of the norm. In half precision each factor of a product is rounded to 8 or 11 bits, and errors of
# one token are factors of those of the next.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 8e-3}
INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
NAMES = ("o", "last", "query", "key", "value", "beta", "log_decay", "memory")

Leaves = list[Tensor | None]
"""The tensors of `DeltaInputs` and the memory."""


@pytest.fixture(autouse=True)
def chunks_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of any length take the chunk kernels."""
    monkeypatch.setattr(package, "MOST_BY_TOKEN", 0)


def draw(t: int, p: int, v: int, b: int = 1, h: int = 2, *, gated: bool = True) -> Leaves:
    """Random inputs in float64, with keys of length 1 and beta in [0, 2]."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    beta = 2 * torch.rand(b, t, 1, h, dtype=torch.float64)
    decay = -torch.rand(b, t, h, dtype=torch.float64) if gated else None
    query, key, value = unit(b, t, h, p), unit(b, t, 1, h, p), normal(b, t, 1, h, v)
    return [query, key, value, beta, decay, normal(b, h, p, v)]


def in_dtype(leaves: Leaves, dtype: torch.dtype, device: str) -> Leaves:
    """Query, key and value in `dtype`, the others in float32."""
    dtypes = [dtype] * 3 + [torch.float32] * 3
    return [
        None if v is None else v.detach().to(device, kind)
        for v, kind in zip(leaves, dtypes, strict=True)
    ]


def results(
    run: Callable[[DeltaInputs, Tensor | None], tuple[Tensor, Tensor]],
    leaves: Leaves,
    weighs: tuple[bool, bool] = (True, True),
) -> dict[str, Tensor]:
    """Outputs, the last memory, and the gradients of a weighted sum of those that are weighed."""
    given = [None if v is None else v.detach().requires_grad_() for v in leaves]
    pair = run(DeltaInputs(*given[:5]), given[5])  # type: ignore[arg-type]
    loss = sum((v.double() * weights(v)).sum() for v, on in zip(pair, weighs, strict=True) if on)
    present = [v for v in given if v is not None]
    grads = torch.autograd.grad(loss, present, allow_unused=True)  # type: ignore[arg-type]
    names = [name for name, v in zip(NAMES[2:], given, strict=True) if v is not None]
    found = {"o": pair[0].detach(), "last": pair[1].detach()}
    return found | {n: g for n, g in zip(names, grads, strict=True) if g is not None}


def weights(v: Tensor) -> Tensor:
    return torch.linspace(0, 7, v.numel(), dtype=torch.float64, device=v.device).cos().view_as(v)


def with_kernels(dtype: torch.dtype) -> Callable[[DeltaInputs, Tensor | None], Any]:
    return lambda inputs, memory: delta_rule(inputs, memory, dtype, "triton")


def by_the_loop(inputs: DeltaInputs, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    if memory is None:
        (b, _, _, h, p), v = inputs.key.shape, inputs.value.shape[-1]
        memory = inputs.key.new_zeros(b, h, p, v)
    return delta_rule_reference(inputs, memory)


def check(
    leaves: Leaves,
    device: str,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    weighs: tuple[bool, bool] = (True, True),
) -> None:
    """The kernels agree with the loop in float64 on the same inputs, which are first rounded."""
    low = in_dtype(leaves, dtype, device)
    exact: Leaves = [None if v is None else v.double() for v in low]
    found = results(with_kernels(dtype), low, weighs)
    expected = results(by_the_loop, exact, weighs)
    assert set(expected) <= set(found)
    for name, theirs in expected.items():
        ours = found[name]
        wanted = dtype if name in ("o", "query", "key", "value") else torch.float32
        assert ours.dtype == wanted and ours.shape == theirs.shape, name
        error = (ours.double() - theirs).norm() / (1e-30 + theirs.norm())
        assert error <= (tolerance or TOLERANCE[dtype]), (name, float(error))


@devices
@pytest.mark.parametrize(
    ("t", "p", "v"),
    [
        (1, 16, 16),
        (2, 32, 64),
        (63, 40, 100),
        (64, 16, 64),
        (65, 128, 64),
        (130, 64, 16),
    ],
)
def test_lengths_and_sizes(t: int, p: int, v: int, device: str) -> None:
    check(draw(t, p, v), device)


@devices
@pytest.mark.parametrize(("t", "dtype"), [(17, torch.float16), (70, torch.bfloat16)])
def test_half_precision(t: int, dtype: torch.dtype, device: str) -> None:
    check(draw(t, 32, 40), device, dtype)


@devices
def test_without_a_decay_or_memory(device: str) -> None:
    leaves = draw(70, 16, 16, gated=False)
    check(leaves, device)
    check([*leaves[:5], None], device)


@devices
@pytest.mark.parametrize("weighs", [(True, False), (False, True)], ids=["outputs", "last"])
def test_one_cotangent(weighs: tuple[bool, bool], device: str) -> None:
    leaves = draw(70, 16, 16)
    check(leaves, device, weighs=weighs)
    check([*leaves[:5], None], device, weighs=weighs)


@devices
@pytest.mark.parametrize("decay", [-20.0, -1000.0])
def test_a_strong_decay(decay: float, device: str) -> None:
    leaves = draw(70, 16, 16)
    assert leaves[4] is not None
    leaves[4].fill_(decay)
    # the gradient of a decay is a difference of far larger sums
    low = in_dtype(leaves, torch.float32, device)
    found = results(with_kernels(torch.float32), low)
    expected = results(by_the_loop, [None if v is None else v.double() for v in low])
    for name, theirs in expected.items():
        torch.testing.assert_close(found[name].double(), theirs, rtol=1e-5, atol=1e-5)


@devices
def test_reflections_that_keep_the_memory(device: str) -> None:
    leaves = draw(130, 32, 16)
    assert leaves[3] is not None and leaves[4] is not None
    leaves[3] = 2 - 1e-3 * leaves[3]
    leaves[4] = 1e-4 * leaves[4]
    check(leaves, device)


@devices
def test_equal_keys_and_unequal_ones_of_length_zero(device: str) -> None:
    leaves = draw(70, 16, 16)
    assert leaves[1] is not None and leaves[3] is not None
    leaves[1] = leaves[1][:, :1].expand_as(leaves[1]).clone()
    leaves[1][:, 3], leaves[3][:, 7] = 0, 0
    # 1 - beta times the rounded square of a key's length is a factor of every later error
    check(leaves, device, tolerance=5e-5)


@devices
def test_tensors_that_are_not_contiguous(device: str) -> None:
    leaves = draw(20, 16, 24, b=2)
    scattered = [None if v is None else v.mT.contiguous().mT for v in leaves]
    check(scattered, device)
    joint = torch.randn(2, 20, 2 * (16 + 16 + 24), dtype=torch.float64) / 4
    q, k, v = joint.split([32, 32, 48], -1)
    parts = q.unflatten(-1, (2, 16)), k.unflatten(-1, (1, 2, 16)), v.unflatten(-1, (1, 2, 24))
    check([*parts, *leaves[3:]], device)


@devices
def test_nothing_to_compute(device: str) -> None:
    for b, t in ((0, 20), (2, 0)):
        leaves = in_dtype(draw(t, 16, 16, b=b), torch.float32, device)
        o, last = with_kernels(torch.float32)(DeltaInputs(*leaves[:5]), leaves[5])  # type: ignore[arg-type]
        assert o.shape == (b, t, 2, 16) and leaves[5] is not None
        torch.testing.assert_close(last, leaves[5])


@devices
def test_a_product_in_bfloat16_of_float32_inputs(device: str) -> None:
    leaves = in_dtype(draw(40, 16, 16), torch.float32, device)
    found = results(with_kernels(torch.bfloat16), leaves)
    expected = results(by_the_loop, leaves)
    for name, theirs in expected.items():
        assert found[name].dtype == torch.float32
        error = (found[name] - theirs).norm() / theirs.norm()
        assert error <= TOLERANCE[torch.bfloat16], (name, float(error))


@devices
def test_a_rounded_key_does_not_make_the_memory_grow(device: str) -> None:
    leaves = draw(1000, 64, 16, h=1, gated=False)
    key, beta, memory = leaves[1], leaves[3], leaves[5]
    assert key is not None and beta is not None and memory is not None
    leaves[1], leaves[3] = key[:, :1].expand_as(key), torch.full_like(beta, 2)
    leaves[2] = torch.zeros(1, 1000, 1, 1, 16)
    low = in_dtype(leaves, torch.float32, device)
    _, last = with_kernels(torch.bfloat16)(DeltaInputs(*low[:5]), low[5])  # type: ignore[arg-type]
    torch.testing.assert_close(float(last.norm()), float(memory.norm()), rtol=0.05, atol=0)


@devices
def test_without_gradients_nothing_is_kept(device: str) -> None:
    leaves = in_dtype(draw(70, 16, 16), torch.float32, device)
    o, last, *kept = chunk_kernels(*leaves, False)
    again, last_again, *_ = chunk_kernels(*leaves, True)
    assert [v.numel() for v in kept] == [0, 0, 0, 0]
    torch.testing.assert_close((o, last), (again, last_again), rtol=0, atol=0)


@devices
def test_a_compiled_layer_is_one_graph(device: str) -> None:
    torch.compiler.reset()
    layer = DeltaNet(16, num_heads=1, gated=True, backend="triton", device=device)
    x = torch.randn(1, 40, 16, device=device)

    def run(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = call(x)
        return [y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled), run(layer))


@pytest.mark.interpreter
def test_which_kernel_a_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "MOST_BY_TOKEN", 16)
    for t, k, name in ((16, 1, "delta_rule"), (17, 1, "delta_rule_chunks"), (17, 2, "delta_rule")):
        leaves = in_dtype(draw(t, 16, 16), torch.float32, "cpu")
        for i in (1, 2, 3):
            repeated = leaves[i]
            assert repeated is not None
            leaves[i] = repeated.expand(-1, -1, k, *repeated.shape[3:]).requires_grad_()
        o, _ = with_kernels(torch.float32)(DeltaInputs(*leaves[:5]), leaves[5])  # type: ignore[arg-type]
        assert o.grad_fn is not None and o.grad_fn.name() == f"{name}Backward"


# -- at the sizes of a layer, on a GPU


def large(b: int, t: int, h: int, p: int, v: int, dtype: torch.dtype) -> Leaves:
    """Inputs of a layer that hardly forgets: beta in [1.9, 2], exp(log_decay) in [0.999, 1]."""
    leaves = draw(t, p, v, b, h)
    assert leaves[3] is not None and leaves[4] is not None
    leaves[3], leaves[4] = 2 - leaves[3] / 20, leaves[4] / 1000
    return in_dtype(leaves, dtype, "cuda")


def relative_errors(leaves: Leaves, dtype: torch.dtype) -> dict[str, float]:
    """Of the kernels, from the chunks in float64 in plain torch."""
    found = results(with_kernels(dtype), leaves)
    exact: Leaves = [None if v is None else v.double() for v in leaves]
    expected = results(delta_rule_chunked, exact)  # type: ignore[arg-type]
    return {
        name: float((found[name].double() - theirs).norm() / theirs.norm())
        for name, theirs in expected.items()
    }


# Bounds of the relative error: with beta near 2 and hardly a decay, the rounding of a factor stays
# for as long as what is written, for hundreds of tokens, and adds up.
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-5), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("sizes", [(8, 1000, 4, 128, 256), (1, 32768, 2, 128, 128)], ids=str)
def test_the_sizes_of_a_layer(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, bound: float
) -> None:
    errors = relative_errors(large(*sizes, dtype), dtype)
    assert max(errors.values()) <= bound, errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("t", [16, 32, 1000])
@pytest.mark.parametrize(("p", "v"), [(16, 16), (40, 100), (64, 128), (96, 64), (256, 64)])
def test_every_configuration_compiled(p: int, v: int, t: int, dtype: torch.dtype) -> None:
    check(draw(t, p, v), "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_calls_are_equal(dtype: torch.dtype) -> None:
    leaves = large(8, 1000, 4, 128, 256, dtype)
    first = results(with_kernels(dtype), leaves)
    for _ in range(3):
        again = results(with_kernels(dtype), leaves)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_chunks_in_a_graph(no_synchronization: Any) -> None:
    layer = DeltaNet(64, gated=True, backend="triton", device="cuda")
    x, graph = torch.randn(3, 70, 64, device="cuda"), torch.cuda.CUDAGraph()

    def run() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
        grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
        # with its graph, y would keep nodes of the capture's stream alive
        return [y.detach(), *grads]

    run()
    with no_synchronization():
        run()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(captured, run(), rtol=1e-2, atol=1e-2)
