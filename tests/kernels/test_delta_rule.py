"""The delta rule: loop, definition, chunks, the Triton kernel by tokens and flash-linear-attention
agree. test_delta_rule_chunks.py has the kernels of chunks."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.baselines import DeltaProduct
from bedouin.kernels.delta_rule import (
    DeltaInputs,
    delta_rule,
    delta_rule_chunked,
    delta_rule_reference,
)
from bedouin.kernels.delta_rule.fla import check_call, delta_rule_fla, fla_is_wrong

B, H, P, V = 2, 3, 4, 5

# dynamo instantiates torch.autograd.Function when it traces a subclass
INSTANTIATED = "ignore:.*should not be instantiated:DeprecationWarning"


def draw(
    t: int, k: int, p: int = P, v: int = V, b: int = B, *, gated: bool
) -> tuple[DeltaInputs, Tensor]:
    """Random inputs in float64 and a random memory, all with gradients."""
    key = torch.randn(b, t, k, H, p, dtype=torch.float64)
    inputs = DeltaInputs(
        torch.randn(b, t, H, p, dtype=torch.float64).requires_grad_(),
        (key / key.norm(dim=-1, keepdim=True)).requires_grad_(),
        torch.randn(b, t, k, H, v, dtype=torch.float64).requires_grad_(),
        (2 * torch.rand(b, t, k, H, dtype=torch.float64)).requires_grad_(),
        (-3 * torch.rand(b, t, H, dtype=torch.float64)).requires_grad_() if gated else None,
    )
    return inputs, torch.randn(b, H, p, v, dtype=torch.float64).requires_grad_()


def results(pair: tuple[Tensor, Tensor], inputs: DeltaInputs, memory: Tensor) -> list[Tensor]:
    """Outputs, last memory, and the gradients of a sum that weighs both unevenly."""
    weights = [torch.linspace(-1, 2, v.numel()).view_as(v).to(v) for v in pair]
    loss = torch.stack([(v * w).sum() for v, w in zip(pair, weights, strict=True)]).sum()
    leaves = [v for v in (*inputs, memory) if v is not None]
    return [*pair, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("gated", [False, True])
def test_loop_equals_the_matrices(gated: bool) -> None:
    inputs, memory = draw(3, 2, gated=gated)
    query, key, value, beta, log_decay = inputs
    o, last = delta_rule_reference(inputs, memory)
    S, eye = memory, torch.eye(P, dtype=torch.float64)
    for t in range(3):
        S = S if log_decay is None else log_decay[:, t, :, None, None].exp() * S
        for j in range(2):
            row, b = key[:, t, j].unsqueeze(-1), beta[:, t, j, :, None, None]
            S = (eye - b * row @ row.mT) @ S + b * row @ value[:, t, j].unsqueeze(-2)
        torch.testing.assert_close(o[:, t], (S.mT @ query[:, t].unsqueeze(-1)).squeeze(-1) / P**0.5)
    torch.testing.assert_close(last, S)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("t", "k", "chunk_steps"),
    [(1, 1, 64), (7, 1, 3), (9, 2, 6), (5, 3, 1), (8, 4, 16), (40, 2, 64)],
)
def test_chunks_equal_the_loop(t: int, k: int, chunk_steps: int, gated: bool) -> None:
    inputs, memory = draw(t, k, gated=gated)
    expected = results(delta_rule_reference(inputs, memory), inputs, memory)
    chunked = delta_rule_chunked(inputs, memory, chunk_steps=chunk_steps)
    torch.testing.assert_close(results(chunked, inputs, memory), expected, rtol=1e-9, atol=1e-9)


def test_chunks_survive_a_decay_to_zero_and_equal_keys() -> None:
    inputs, memory = draw(30, 2, gated=True)
    key = inputs.key[:, :1, :1].expand_as(inputs.key)
    decay = torch.full((B, 30, H), -500.0, dtype=torch.float64)
    for log_decay in (decay, None):
        hard = inputs._replace(key=key, beta=torch.full_like(inputs.beta, 2.0), log_decay=log_decay)
        pair = delta_rule_chunked(hard, memory)
        torch.testing.assert_close(pair, delta_rule_reference(hard, memory), rtol=1e-9, atol=1e-9)


def converted(
    inputs: DeltaInputs, memory: Tensor, dtype: torch.dtype, device: str = "cpu"
) -> tuple[DeltaInputs, Tensor]:
    """Leaves with the same values, whose rows are not contiguous."""
    leaves: list[Any] = [
        v if v is None else v.detach().to(device, dtype).mT.contiguous().mT.requires_grad_()
        for v in (*inputs, memory)
    ]
    return DeltaInputs(*leaves[:-1]), leaves[-1]


def kernel_error(
    inputs: DeltaInputs, memory: Tensor, device: str, dtype: torch.dtype = torch.float32
) -> float:
    """The largest distance between results and gradients of the kernel, from inputs of `dtype`,
    and of the loop in float64, relative to the latter's norm."""
    low = converted(inputs, memory, dtype, device)
    exact = converted(*low, torch.float64)
    found = results(delta_rule(*low, dtype, "triton"), *low)
    expected = results(delta_rule_reference(*exact), *exact)
    assert [(v.shape, dtype) for v in expected] == [(v.shape, v.dtype) for v in found]
    with torch.no_grad():
        pairs = zip(found, expected, strict=True)
        errors = [(a.cpu() - e).norm() / (1e-9 + e.norm()) for a, e in pairs]
    return float(torch.stack(errors).amax())  # NaN if one is, which Python's max would not be


# t, k, p, v, b, gated
SIZES = [
    (1, 1, 4, 5, 2, True),
    (9, 2, 4, 5, 1, True),
    (3, 4, 68, 68, 1, True),
    (5, 1, 64, 128, 1, False),
    (3, 1, 128, 20, 1, True),
    (63, 2, 1, 1, 1, True),
    (64, 1, 2, 8, 1, False),
    (100, 1, 6, 3, 1, True),
    (4, 2, 4, 5, 0, True),
]
sizes_of_the_kernel = pytest.mark.parametrize("sizes", SIZES, ids=str)


@pytest.mark.interpreter
@sizes_of_the_kernel
def test_the_kernel_equals_the_loop(sizes: tuple[Any, ...]) -> None:
    assert kernel_error(*draw(*sizes[:5], gated=sizes[5]), "cpu") < 5e-5


@pytest.mark.gpu
@sizes_of_the_kernel
def test_the_kernel_equals_the_loop_on_a_gpu(sizes: tuple[Any, ...]) -> None:
    assert kernel_error(*draw(*sizes[:5], gated=sizes[5]), "cuda") < 5e-5


@pytest.mark.interpreter
def test_the_kernel_takes_bfloat16_and_survives_a_decay_to_zero() -> None:
    inputs, memory = draw(9, 2, b=1, gated=True)
    # results are rounded to 8 bits
    assert kernel_error(inputs, memory, "cpu", torch.bfloat16) < 5e-3
    key = inputs.key[:, :1, :1].expand_as(inputs.key)
    decay = torch.full((1, 9, H), -500.0, dtype=torch.float64)
    hard = inputs._replace(key=key, beta=torch.full_like(inputs.beta, 2.0), log_decay=decay)
    low = converted(hard, memory, torch.float32)
    pair = delta_rule(*low, torch.float32, "triton")
    torch.testing.assert_close(pair, delta_rule_reference(*low))


@pytest.mark.interpreter
def test_calls_that_the_kernel_does_not_take() -> None:
    def run(inputs: DeltaInputs, memory: Tensor) -> Tensor:
        return delta_rule(inputs, memory, torch.float32, "triton")[0]

    drawn = draw(2, 1, gated=False)
    with pytest.raises(ValueError, match=r"torch.float64 .*: use backend='auto' or 'torch'"):
        run(*drawn)
    with pytest.raises(ValueError, match="heads of 257 key channels, more than 256"):
        run(*converted(*draw(2, 1, 257, gated=False), torch.float32))
    inputs, memory = converted(*drawn, torch.float32)
    with pytest.raises(ValueError, match="does not support torch.func transforms"):
        torch.func.vmap(run, (None, 0))(inputs, memory.unsqueeze(0))


@pytest.mark.gpu
def test_auto_takes_the_kernel_on_a_gpu_where_it_can() -> None:
    drawn = draw(3, 2, gated=True)
    for dtype, takes in ((torch.float32, True), (torch.float64, False)):
        inputs, memory = converted(*drawn, dtype, "cuda")
        o, _ = delta_rule(inputs, memory, dtype, "auto")
        assert o.grad_fn is not None and (o.grad_fn.name() == "delta_ruleBackward") is takes
        mapped, _ = torch.func.vmap(delta_rule, (None, 0, None, None))(
            inputs, memory.unsqueeze(0), dtype, "auto"
        )
        torch.testing.assert_close(mapped[0], o, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_layer_with_the_kernel_in_a_graph(no_synchronization: Any) -> None:
    torch.manual_seed(0)
    layer = DeltaProduct(64, gated=True, backend="triton", device="cuda")
    x, graph = torch.randn(3, 70, 64, device="cuda"), torch.cuda.CUDAGraph()

    def run() -> list[Tensor]:
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
    torch.testing.assert_close(captured, run(), rtol=1e-4, atol=1e-4)


@pytest.mark.interpreter
def test_a_compiled_layer_keeps_the_kernel() -> None:
    torch.compiler.reset()
    layer = DeltaProduct(16, num_heads=2, gated=True, backend="triton")
    x = torch.randn(1, 5, 16)

    def run(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = call(x)
        return [y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled), run(layer))


def test_full_eigenvalues_keep_the_norm_of_a_memory() -> None:
    inputs, memory = draw(20, 2, gated=False)
    still = inputs._replace(
        value=torch.zeros_like(inputs.value), beta=torch.full_like(inputs.beta, 2)
    )
    _, last = delta_rule_chunked(still, memory)
    torch.testing.assert_close(last.mT @ last, memory.mT @ memory)


def test_fla_needs_a_gpu_and_low_precision() -> None:
    inputs, memory = draw(3, 1, gated=False)
    message = "needs a CUDA device and bfloat16 or float16, got cpu and torch.float64: use"
    with pytest.raises(ValueError, match=re.escape(message)):
        delta_rule(inputs, memory, torch.float64, "fla")


def test_fla_is_refused_where_triton_miscompiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedouin.kernels.delta_rule.fla.fla_is_wrong", lambda device: True)
    query: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    with pytest.raises(ValueError, match="miscompiles its backward pass: use backend='auto'"):
        check_call(query, torch.bfloat16)


@pytest.mark.parametrize(
    ("version", "capability", "wrong"),
    [
        ("3.3.1", (9, 0), False),
        ("3.4.0", (9, 0), True),
        ("3.6.0+git1", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("", (9, 0), False),
        ("unknown", (9, 0), False),
    ],
)
def test_fla_is_avoided_where_triton_miscompiles_it(
    version: str, capability: tuple[int, int], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bedouin.kernels.backend._TRITON", version)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert fla_is_wrong(torch.device("cuda")) is wrong


@pytest.mark.gpu
def test_a_compiled_layer_under_autocast() -> None:
    """The layer looks for flash-linear-attention while it is traced."""
    torch.compiler.reset()
    layer = DeltaProduct(64, num_householder=1, gated=True, device="cuda")
    x = torch.randn(2, 20, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        torch.testing.assert_close(torch.compile(layer)(x), layer(x), rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_fla_equals_the_loop(k: int, gated: bool) -> None:
    if fla_is_wrong(torch.device("cuda")):
        pytest.skip("this Triton miscompiles flash-linear-attention for this GPU")

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, device="cuda"), dim=-1)

    b, t, h, p, v = 2, 100, 2, 32, 64
    leaves = DeltaInputs(
        unit(b, t, h, p).requires_grad_(),
        unit(b, t, k, h, p).requires_grad_(),
        torch.randn(b, t, k, h, v, device="cuda").requires_grad_(),
        (2 * torch.rand(b, t, k, h, device="cuda")).requires_grad_(),
        (-torch.rand(b, t, h, device="cuda")).requires_grad_() if gated else None,
    )
    memory = torch.randn(b, h, p, v, device="cuda").requires_grad_()
    expected = results(delta_rule_reference(leaves, memory), leaves, memory)
    got = results(delta_rule_fla(leaves, memory, torch.bfloat16), leaves, memory)
    for ours, theirs in zip(expected, got, strict=True):
        # the kernels' products are in bfloat16: eight bits of each of hundreds of summands
        assert (ours - theirs).norm() < 0.03 * ours.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings(INSTANTIATED)
def test_compiled_layers_take_lengths_that_vary() -> None:
    torch.compiler.reset()
    layer = DeltaProduct(16, num_heads=2, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    # chunks of 32 tokens, of which the last is filled up
    for t, stance in ((40, "default"), (50, "fail_on_recompile"), (150, "fail_on_recompile")):
        x = torch.randn(2, t, 16, dtype=torch.float64, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 1)
        leaves = [x, *layer.parameters()]
        with torch.compiler.set_stance(stance):
            outputs = compiled(x), layer(x)
        gradients = [torch.autograd.grad(y.sum(), leaves) for y in outputs]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*gradients)


def test_an_exported_layer_takes_any_batch_and_length() -> None:
    layer = DeltaProduct(16, num_householder=1, num_heads=2, gated=True, dtype=torch.float64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
    x = torch.randn(2, 70, 16, dtype=torch.float64)
    exported = torch.export.export(layer, (x,), dynamic_shapes=(sizes,), strict=False).module()
    for b, t in ((2, 70), (3, 5), (4, 200)):
        x = torch.randn(b, t, 16, dtype=torch.float64)
        torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.parametrize("k", [1, 2])
def test_transforms_and_second_derivatives_of_plain_torch(k: int) -> None:
    inputs, memory = draw(5, k, b=1, gated=True)

    def run(value: Tensor, memory: Tensor) -> Tensor:
        o, last = delta_rule(inputs._replace(value=value), memory, torch.float64, "auto")
        return torch.cat([o.flatten(), last.flatten()])

    def both(value: Tensor, log_decay: Tensor) -> Tensor:
        given = inputs._replace(value=value, log_decay=log_decay)
        return delta_rule(given, memory, torch.float64, "auto")[0]

    assert inputs.log_decay is not None
    mapped = torch.func.vmap(run, (None, 0))(inputs.value, torch.stack([memory, 2 * memory]))
    torch.testing.assert_close(mapped[1], run(inputs.value, 2 * memory))
    # the outputs are linear in the memory
    jacobian = torch.func.jacrev(run, argnums=1)(inputs.value, memory).flatten(1)
    linear = run(inputs.value, memory) - run(inputs.value, torch.zeros_like(memory))
    torch.testing.assert_close(jacobian @ memory.flatten(), linear)
    assert torch.autograd.gradgradcheck(both, (inputs.value, inputs.log_decay))


def test_plain_torch_computes_in_at_least_float32() -> None:
    drawn = draw(9, 1, gated=True)
    inputs, _ = converted(*drawn, torch.bfloat16)
    o, last = delta_rule(inputs, None, torch.bfloat16, "torch")
    wide = DeltaInputs(*(v if v is None else v.float() for v in inputs))  # type: ignore[arg-type]
    expected, last_expected = delta_rule(wide, None, torch.float32, "torch")
    assert (o.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(o, expected.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(last, last_expected, rtol=0, atol=0)


def test_no_tokens() -> None:
    inputs, memory = draw(0, 2, gated=True)
    o, last = delta_rule(inputs, memory, torch.float64, "auto")
    assert o.shape == (B, 0, H, V) and torch.equal(last, memory)


def test_shapes_that_do_not_fit() -> None:
    inputs, memory = draw(3, 1, gated=True)

    def refuses(message: str, memory: Tensor = memory, **changes: Tensor) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            delta_rule(inputs._replace(**changes), memory, torch.float64, "auto")

    refuses("for one Householder step a token, use key.unsqueeze(2)", key=inputs.key[:, :, 0])
    refuses("query must have shape (b, t, h, p) = (2, 3, 3, 4)", query=inputs.query[:, :2])
    refuses("value must have shape (b, t, k, h, v)", value=inputs.value[:, :, :, :2])
    refuses("beta must have shape (b, t, k, h)", beta=inputs.beta[..., 0])
    refuses("log_decay must have shape (b, t, h)", log_decay=inputs.beta)
    refuses("memory must have shape (b, h, p, v) = (2, 3, 4, 5)", memory.mT)
    with pytest.raises(ValueError, match="backend must be one of"):
        delta_rule(inputs, memory, torch.float64, "cuda")  # type: ignore[arg-type]
