"""What is special to single operations; test_operations.py compares each with its definition.

Products of reflections where rounding matters, the state and memory of the scan, hard decays of the
tracker, hooks on the convolution; hard inputs of the delta rule, and flash-linear-attention. The
checks of the kernels run on the CPU in the interpreter and compiled on a GPU.
Letters: b batch, t time, d channels, n states, H heads, c channels of a head; of the delta rule k
steps a token, h heads, p key and v value channels of a head.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.rows import scan
from tests.kernels.rows_memory import BY_TOKEN, rule, tracker
from tests.kernels.table import (
    BF16,
    F32,
    F64,
    Call,
    Tensors,
    implementations,
    in_2_norm,
    kernels,
    results,
)
from torch import Tensor
from torch.nn import functional as F

from bedouin.baselines import DeltaProduct
from bedouin.kernels.delta_rule import (
    DeltaInputs,
    delta_rule,
    delta_rule_chunked,
    delta_rule_reference,
)
from bedouin.kernels.delta_rule.fla import check_call, delta_rule_fla, fla_is_wrong
from bedouin.kernels.householder import apply_complement, unit, wy_factor
from bedouin.kernels.scan import Eigenvalues, discretize, selective_scan
from bedouin.kernels.track import TrackInputs, track_reference
from bedouin.layers.convolution import ShortConvolution


def test_the_complement_of_a_small_beta_does_not_cancel() -> None:
    v, U, beta = torch.randn(2, 64), unit(torch.randn(2, 4, 64)), 1e-6 * torch.rand(2, 4)
    found, expected = (
        apply_complement(v, None, U, wy_factor(U, beta))
        for v, U, beta in ((v, U, beta), (v.double(), U.double(), beta.double()))
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 7, 512])
def test_unit_at_the_zero_vector_has_a_moderate_gradient(length: int, dtype: torch.dtype) -> None:
    v = torch.zeros(length, dtype=dtype, requires_grad=True)
    out = unit(v)
    assert torch.equal(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad, torch.full_like(grad, (length * 1e-6) ** -0.5))


eigenvalues = st.sampled_from(get_args(Eigenvalues))


@settings(max_examples=25)
@given(seed=st.integers(0, 999), eig=eigenvalues)
def test_the_coupled_scale_never_gains(seed: int, eig: Eigenvalues) -> None:
    torch.manual_seed(seed)
    tensors: Any = scan(2, 3).tensors
    decay, s = discretize(tensors["delta"], tensors["A"], "one_minus_decay", eig)
    assert bool((decay.abs() + s <= 1 + 1e-15).all()) and bool((s >= 0).all())


@kernels
def test_memory_is_kept_at_every_sixteenth_token_for_a_backward_alone(device: str) -> None:
    tensors = [v if v is None else v.to(device, F32) for v in scan(2, 18).tensors.values()]
    run = torch.ops.bedouin.selective_scan
    for keep in (True, False):
        _, _, kept = run(*tensors, "delta", "positive", False, keep)
        assert kept.shape == (2, 2 if keep else 0, 3, 2)
    leaves = [v if v is None else v.requires_grad_() for v in tensors]
    with pytest.raises(ValueError, match="keep must be True where gradients are recorded"):
        run(*leaves, "delta", "positive", False, False)


@pytest.mark.gpu
def test_peak_memory_is_far_below_one_tensor_of_all_states() -> None:
    tensors = scan(2, 4096, 64, 64).given(F32, "cuda")
    leaves = [v if v is None else v.requires_grad_() for v in tensors.values()]
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y, h = selective_scan(*leaves, backend="triton")  # type: ignore[arg-type]
        torch.autograd.grad(y.sum() + h.sum(), [v for v in leaves if v is not None])
        del y, h
    all_states = 2 * 4096 * 64 * 64 * 4
    assert torch.cuda.max_memory_allocated() - before < all_states / 2


def by(backend: str, call: Call, tensors: Tensors, weighed: int | None = None) -> dict[str, Tensor]:
    return results(call, lambda *v: call.run(*v, backend=backend), tensors, weighed)


def wide(tensors: Tensors) -> Tensors:
    return {name: None if v is None else v.double() for name, v in tensors.items()}


def check(call: Call, tensors: Tensors, backend: str, tolerance: float, atol: float = 0.0) -> None:
    """Agreement with the definition in float64 on the same tensors."""
    found = by(backend, call, tensors)
    for name, theirs in results(call, call.exact, wide(tensors)).items():
        if atol:
            ours = found[name].double()
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=atol)
        else:
            in_2_norm(name, found[name].double(), theirs, tolerance)


def test_the_loop_has_the_derivative_of_finite_differences() -> None:
    given = [v.requires_grad_() for v in tracker(2, 4, c=3, n=2).tensors.values() if v is not None]

    def run(*tensors: Tensor) -> Any:
        return tuple(track_reference(TrackInputs(*tensors), 1e-5, 1e-4))

    assert torch.autograd.gradcheck(run, given)


@kernels
def test_closed_tokens_pass_the_memory(device: str) -> None:
    call = tracker(2, 20, 1)
    tensors: Any = call.given(F32, device)
    for name in ("delta", "erase"):
        tensors[name][:, 7:] = -1e30
    short = {k: v[:, :7] if v is not None and k in BY_TOKEN else v for k, v in tensors.items()}
    found, expected = (by("triton", call, v, 1) for v in (tensors, short))
    for name, v in expected.items():
        ours = found[name]
        if name.startswith("gradient") and name.removeprefix("gradient of ") in BY_TOKEN:
            assert not ours[:, 7:].any()
        ours = ours[:, :7] if ours.shape[1:2] == (20,) else ours
        torch.testing.assert_close(ours, v, rtol=1e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("A_log", [-math.inf, -69.0, 9.2])
def test_rates_without_a_decay_and_with_a_strong_one(A_log: float, device: str) -> None:
    call = tracker(t=20, H=1)
    tensors: Any = call.given(F32, device)
    tensors["A_log"][1:] = A_log
    check(call, tensors, "triton", 1e-4, 1e-4)


def test_a_hook_on_the_module_acts() -> None:
    conv = ShortConvolution(6, 4, bias=False)
    x, window = torch.randn(2, 7, 6), torch.zeros(2, 3, 6)
    expected = F.silu(2 * conv(x, window)[0])
    conv.register_forward_hook(lambda module, inputs, output: (2 * output[0], output[1]))
    torch.testing.assert_close(conv.activated(x, window)[0], expected)


def inputs_of(tensors: Any) -> tuple[DeltaInputs, Tensor]:
    *inputs, memory = tensors.values()
    return DeltaInputs(*inputs), memory


def of_rule(run: Callable[..., tuple[Tensor, Tensor]], tensors: Tensors) -> dict[str, Tensor]:
    """Outputs, last memory, and the gradients of a sum that weighs both unevenly."""
    return results(rule(), lambda *v: run(DeltaInputs(*v[:5]), v[5]), tensors)


def equal_keys(decay: float | None, v: Any) -> Tensors:
    """With beta = 2 and a strong decay, if there is one."""
    strong = None if decay is None else torch.full_like(v["log_decay"], decay)
    key, beta = v["key"][:, :1, :1].expand_as(v["key"]), torch.full_like(v["beta"], 2)
    return {"key": key, "beta": beta, "log_decay": strong}


def reflections_that_keep_the_memory(v: Any) -> Tensors:
    return {"beta": 2 - 1e-3 * v["beta"], "log_decay": 1e-4 * v["log_decay"]}


def equal_keys_and_some_of_length_zero(v: Any) -> Tensors:
    key, beta = v["key"][:, :1].expand_as(v["key"]).clone(), v["beta"].clone()
    key[:, 3], beta[:, 7] = 0, 0
    return {"key": key, "beta": beta}


@implementations
@pytest.mark.parametrize(
    ("t", "k", "p", "change", "tolerance", "atol"),
    [
        # the gradient of a decay is a difference of far larger sums
        *(
            (t, k, 16, partial(equal_keys, decay), 1e-5, 1e-5)
            for t, k, decay in ((9, 2, -500.0), (30, 2, -500.0), (70, 1, -20.0), (70, 1, -1000.0))
        ),
        # reflections along one line, whose gradients are differences of far larger sums
        (30, 2, 16, partial(equal_keys, None), 1e-4, 0.0),
        (130, 1, 32, reflections_that_keep_the_memory, 1e-5, 0.0),
        # 1 - beta times the rounded square of a key's length is a factor of every later error
        (70, 1, 16, equal_keys_and_some_of_length_zero, 5e-5, 0.0),
    ],
)
def test_hard_inputs(
    t: int, k: int, p: int, change: Any, tolerance: float, atol: float, backend: str, device: str
) -> None:
    dtype = F32
    if backend == "reference" and atol:
        dtype, tolerance, atol = F64, 1e-9, 1e-9
    call = rule(1, t, k, p=p, dtype=dtype)
    tensors = call.given(dtype, device)
    check(call, tensors | change(tensors), backend, tolerance, atol)


@kernels
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "sizes", [(1, 2, 1, 1), (3, 1, 63, 100), (2, 2, 64, 65), (1, 3, 130, 16)], ids=str
)
def test_a_token_without_gradient_equals_the_loop(
    sizes: tuple[int, ...], dtype: torch.dtype, starts: bool, device: str
) -> None:
    """It has a kernel of its own."""
    b, h, p, v = sizes
    tensors = rule(b, 1, 1, h, p, v, gated=starts).given(dtype, device)
    inputs, memory = inputs_of(tensors)
    exact = DeltaInputs(*[None if w is None else w.double() for w in inputs])  # type: ignore[arg-type]
    wanted = delta_rule_reference(exact, memory.double() * starts)
    found = delta_rule(inputs, memory if starts else None, "triton")
    assert [v.dtype for v in found] == [dtype, F32]
    for name, ours, theirs in zip(("o", "last"), found, wanted, strict=True):
        in_2_norm(name, ours.double(), theirs, 1e-2 if dtype == BF16 else 1e-5)


def test_plain_torch_computes_in_at_least_float32() -> None:
    tensors = {k: None if v is None else v.to(BF16) for k, v in rule(1, 9).tensors.items()}
    inputs, _ = inputs_of(tensors)
    o, last = delta_rule(inputs, None, "torch")
    wide = DeltaInputs(*(v if v is None else v.float() for v in inputs))  # type: ignore[arg-type]
    expected, last_expected = delta_rule(wide, None, "torch")
    assert (o.dtype, last.dtype) == (BF16, F32)
    assert torch.equal(o, expected.bfloat16()) and torch.equal(last, last_expected)


@pytest.mark.gpu
def test_a_compiled_layer_under_autocast() -> None:
    """The layer looks for flash-linear-attention while it is traced."""
    torch.compiler.reset()
    layer = DeltaProduct(64, num_householder=1, gated=True, device="cuda")
    x = torch.randn(2, 20, 64, device="cuda")
    with torch.autocast("cuda", BF16):
        torch.testing.assert_close(torch.compile(layer)(x), layer(x), rtol=0.05, atol=0.05)


# -- at the sizes of a layer, on a GPU


# Bounds of the relative error: with beta near 2 and hardly a decay, the rounding of a factor stays
# for as long as what is written, for hundreds of tokens, and adds up.
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(F32, 3e-5), (BF16, 0.3)])
@pytest.mark.parametrize("sizes", [(8, 1000, 4, 128, 256), (1, 32768, 2, 128, 128)], ids=str)
def test_the_sizes_of_a_layer(sizes: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    """Of one that hardly forgets: beta in [1.9, 2], exp(log_decay) in [0.999, 1]."""
    b, t, h, p, v = sizes
    call = rule(b, t, 1, h, p, v, dtype=dtype)
    tensors: Any = call.given(dtype, "cuda")
    tensors |= {"beta": 2 - tensors["beta"] / 20, "log_decay": tensors["log_decay"] / 1000}
    found, again = (by("triton", call, tensors) for _ in range(2))
    assert all(torch.equal(found[name], again[name]) for name in found)
    for name, theirs in of_rule(delta_rule_chunked, wide(tensors)).items():
        in_2_norm(name, found[name].double(), theirs, bound)


# -- flash-linear-attention


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
def test_fla_is_avoided_and_refused_where_triton_miscompiles_it(
    version: str, capability: tuple[int, int], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bedouin.kernels.backend._TRITON", version)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert fla_is_wrong(torch.device("cuda")) is wrong
    if wrong:
        query: Any = SimpleNamespace(is_cuda=True, dtype=BF16, device=torch.device("cuda"))
        with pytest.raises(ValueError, match="miscompiles its backward pass: use backend='auto'"):
            check_call(query)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_fla_equals_the_loop(k: int, gated: bool) -> None:
    if fla_is_wrong(torch.device("cuda")):
        pytest.skip("this Triton miscompiles flash-linear-attention for this GPU")
    tensors = rule(2, 100, k, 2, 32, 64, gated=gated).given(BF16, "cuda")
    got = of_rule(delta_rule_fla, tensors)
    # the kernels' products are in bfloat16: eight bits of each of hundreds of summands
    exact: Tensors = {name: None if v is None else v.double() for name, v in tensors.items()}
    for name, theirs in of_rule(delta_rule_reference, exact).items():
        in_2_norm(name, got[name].double(), theirs, 0.03)
