"""The recurrence of the tracker: the loop against finite differences, the kernels against the loop
in float64, values and all gradients.

The same checks of the kernels run on the CPU in the interpreter (small sizes) and compiled on a
GPU. Letters: b batch, t time, H heads, c channels and n states of a head.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.operation import OPERATIONS
from bedouin.kernels.track import Tracked, TrackInputs, limits, track, track_reference
from bedouin.kernels.track.types import ROWS
from bedouin.layers.tracking import Tracker

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
EPS = 1e-5, 1e-4
# of the norm; feedback amplifies the roundings of bfloat16, which has 8 bits
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 8e-3}

Leaves = list[Tensor | None]
"""The fields of `TrackInputs`."""

A_LOG, H0 = map(TrackInputs._fields.index, ("A_log", "h0"))
"""Their places."""


def draw(t: int, c: int, n: int, H: int = 1, b: int = 1, *, starts: bool = True) -> Leaves:
    """Random inputs in float64, with decays between hardly one and strong."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    d = H * c
    rows: Leaves = [normal(b, t, size) for size in (d, H * n, H * n, d, H, d, d)]
    parameters = [0.3 * normal(d), normal(H), (2 * normal(d, n).abs()).log(), normal(d), normal(d)]
    state: Leaves = [normal(b, d, n), normal(b, d)] if starts else [None, None]
    W_y = normal(H, 3 * c, c) * 0.3 / c**0.5
    return [*rows, *parameters, W_y, *state]


def in_dtype(leaves: Leaves, dtype: torch.dtype, device: str) -> Leaves:
    """The rows of tokens in `dtype`, the others in float32."""
    kinds = [dtype if i < ROWS else torch.float32 for i in range(len(leaves))]
    return [
        None if v is None else v.detach().to(device, kind)
        for v, kind in zip(leaves, kinds, strict=True)
    ]


def with_kernels(inputs: TrackInputs) -> Tracked:
    return track(inputs, *EPS, backend="triton")


def by_the_loop(inputs: TrackInputs) -> Tracked:
    return track_reference(inputs, *EPS)


def weights(v: Tensor) -> Tensor:
    return torch.linspace(0, 7, v.numel(), dtype=torch.float64, device=v.device).cos().view_as(v)


def results(
    run: Callable[[TrackInputs], Tracked], leaves: Leaves, weighs: str = "hidden h y"
) -> dict[str, Tensor]:
    """Outputs and the gradients of a weighted sum of those that are weighed; a leaf that is a view
    keeps its strides."""
    given = [None if v is None else v.detach().requires_grad_() for v in leaves]
    found = run(TrackInputs(*given))._asdict()  # type: ignore[arg-type]
    loss = sum((found[name].double() * weights(found[name])).sum() for name in weighs.split())
    names = [k for k, v in zip(TrackInputs._fields, given, strict=True) if v is not None]
    present = [v for v in given if v is not None]
    grads = torch.autograd.grad(loss, present, allow_unused=True)
    found = {name: v.detach() for name, v in found.items()}
    return found | {f"of {k}": g for k, g in zip(names, grads, strict=True) if g is not None}


def exact(leaves: Leaves) -> Leaves:
    return [None if v is None else v.double() for v in leaves]


def check(
    leaves: Leaves,
    device: str,
    dtype: torch.dtype = torch.float32,
    weighs: str = "hidden h y",
) -> None:
    """The kernels agree with the loop in float64 on the same inputs, which are first rounded."""
    low = in_dtype(leaves, dtype, device)
    found, expected = results(with_kernels, low, weighs), results(by_the_loop, exact(low), weighs)
    rows = {"hidden", *(f"of {name}" for name in TrackInputs._fields[:ROWS])}
    for name, theirs in expected.items():
        ours = found[name]
        assert ours.shape == theirs.shape, name
        assert ours.dtype == (dtype if name in rows else torch.float32), name
        error = (ours.double() - theirs).norm() / (1e-30 + theirs.norm())
        # the gradient of a bias of beta is one sum, of numbers that cancel
        most = TOLERANCE[dtype] * (5 if name == "of erase_bias" else 1)
        assert error <= most, (name, float(error))


def test_the_loop_has_the_derivative_of_finite_differences() -> None:
    leaves = draw(4, 3, 2, H=2, b=2)
    given = [v.requires_grad_() for v in leaves if v is not None]

    def run(*tensors: Tensor) -> Any:
        return tuple(track_reference(TrackInputs(*tensors), *EPS))

    assert torch.autograd.gradcheck(run, given)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize(("c", "n"), [(3, 5), (16, 64)])
def test_lengths(t: int, c: int, n: int, dtype: torch.dtype, device: str) -> None:
    check(draw(t, c, n, H=2), device, dtype)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize(("c", "n"), [(3, 128), (16, 5), (40, 100), (64, 64), (64, 128)])
def test_sizes(c: int, n: int, starts: bool, dtype: torch.dtype, device: str) -> None:
    check(draw(19, c, n, starts=starts), device, dtype)


@devices
@pytest.mark.parametrize("H", [1, 2])
def test_samples_of_heads(H: int, device: str) -> None:
    check(draw(18, 16, 16, H, b=3), device)


@devices
@pytest.mark.parametrize("weighs", ["hidden", "h", "y", "hidden y"])
def test_cotangents_of_a_part_of_the_results(weighs: str, device: str) -> None:
    check(draw(20, 3, 5, H=2, b=2), device, weighs=weighs)


@devices
def test_rows_that_are_slices(device: str) -> None:
    leaves, (c, n) = draw(20, 16, 16, b=2), (16, 16)
    # a copy to a device has rows of its own
    of_convolution, of_projection = (
        torch.randn(2, 20, size).to(device) for size in (2 * c + 2 * n, 2 * c + 3)
    )
    leaves[6], leaves[1], leaves[2], leaves[0] = of_convolution.split([c, n, n, c], -1)
    leaves[3], leaves[4], leaves[5] = of_projection[..., 2:].split([c, 1, c], -1)
    parts = [v for v in leaves[:ROWS] if v is not None]
    assert not any(v.is_contiguous() for v in parts)
    low = [*parts, *in_dtype(leaves, torch.float32, device)[ROWS:]]
    expected = results(by_the_loop, exact(low))
    for name, v in results(with_kernels, low).items():
        torch.testing.assert_close(v.double(), expected[name], rtol=1e-4, atol=1e-4)
    leaves[0] = leaves[0].mT.contiguous().mT  # type: ignore[union-attr]
    check(leaves, device)


@devices
def test_segments_of_the_backward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WORKSPACE", 2**14)
    monkeypatch.setattr(limits, "GRADIENT_CHUNKS", 2)
    assert limits.Sizes.of(1, 100, 1, 3, 5, torch.float32).segment == 1
    check(draw(100, 3, 5), device)
    check(draw(100, 3, 5), device, weighs="hidden")
    monkeypatch.setattr(limits, "WORKSPACE", 3 * 2**14)
    check(draw(100, 3, 5), device)


@devices
def test_closed_tokens_pass_the_memory(device: str) -> None:
    leaves = in_dtype(draw(20, 3, 5, b=2), torch.float32, device)
    assert leaves[3] is not None and leaves[4] is not None
    leaves[3][:, 7:], leaves[4][:, 7:] = -1e30, -1e30
    short = [v[:, :7] if v is not None and i < ROWS else v for i, v in enumerate(leaves)]
    found, expected = (results(with_kernels, v, "h") for v in (leaves, short))
    for name, v in expected.items():
        ours = found[name]
        if name in ("hidden", "y", *(f"of {k}" for k in TrackInputs._fields[:ROWS])):
            if name.startswith("of"):
                assert not ours[:, 7:].any()
            ours = ours[:, :7]
        torch.testing.assert_close(ours, v, rtol=1e-4, atol=1e-5)


@devices
@pytest.mark.parametrize("A_log", [-math.inf, -69.0, 9.2])
def test_rates_without_a_decay_and_with_a_strong_one(A_log: float, device: str) -> None:
    leaves = draw(20, 3, 5)
    rates = leaves[A_LOG]
    assert rates is not None
    rates[1:] = A_log
    low = in_dtype(leaves, torch.float32, device)
    found, expected = results(with_kernels, low), results(by_the_loop, exact(low))
    for name, theirs in expected.items():
        torch.testing.assert_close(found[name].double(), theirs, rtol=1e-4, atol=1e-4)


@devices
def test_no_gradient_keeps_less_and_nothing_to_compute(device: str) -> None:
    low = in_dtype(draw(20, 3, 5), torch.float32, device)
    inputs = TrackInputs(*low)  # type: ignore[arg-type]
    operation = OPERATIONS["bedouin::track"]
    bare, whole = operation(*inputs, *EPS, False), operation(*inputs, *EPS, True)
    assert [v.numel() for v in bare[6:]] == [0, 0, 0]
    torch.testing.assert_close(bare[:3], whole[:3], rtol=0, atol=0)
    for b, t in ((0, 3), (2, 0)):
        empty = in_dtype(draw(t, 3, 5, b=b), torch.float32, device)
        hidden, h, _ = with_kernels(TrackInputs(*empty))  # type: ignore[arg-type]
        assert hidden.shape == (b, t, 3)
        torch.testing.assert_close(h, empty[H0])


@pytest.mark.interpreter
def test_the_layer_takes_the_kernels_for_sizes_that_fit() -> None:
    x = torch.randn(1, 3, 16)
    layer = Tracker(16, tracker_dim=8, tracker_state=5, backend="triton").eval()
    plain = Tracker(16, tracker_dim=8, tracker_state=5, backend="reference").eval()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-5)
    for c, n in ((65, 128), (64, 129)):
        large = Tracker(16, tracker_dim=c, tracker_state=n, backend="triton")
        with pytest.raises(ValueError, match="at most 64 channels with 128 states"):
            large(x)


@devices
def test_a_compiled_layer_is_one_graph(device: str) -> None:
    torch.compiler.reset()
    layer = Tracker(16, tracker_dim=8, tracker_state=5, backend="triton", device=device).eval()
    call: Any = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")

    def run(function: Any, x: Tensor) -> list[Tensor]:
        y = function(x)
        return [y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]

    for t in (20, 9):
        x = torch.randn(2, t, 16, device=device)
        torch.testing.assert_close(run(call, x), run(layer, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [k for k in TrackInputs._fields if k != "erase"])
def test_shapes_that_do_not_fit(name: str) -> None:
    leaves = draw(4, 3, 5, H=2)
    inputs = TrackInputs(*leaves)  # type: ignore[arg-type]
    wrong = inputs._replace(**{name: getattr(inputs, name)[..., :-1]})
    with pytest.raises(ValueError, match="must have shape"):
        track(wrong, *EPS)


# -- at the sizes of a layer, on a GPU


def large(dtype: torch.dtype, t: int = 1000) -> Leaves:
    return in_dtype(draw(t, 64, 128, H=2, b=4), dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_calls_are_equal(dtype: torch.dtype) -> None:
    leaves = large(dtype)
    first = results(with_kernels, leaves)
    for _ in range(3):
        again = results(with_kernels, leaves)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_the_sizes_of_a_layer(dtype: torch.dtype, bound: float) -> None:
    leaves = large(dtype, 300)
    found, expected = results(with_kernels, leaves), results(by_the_loop, exact(leaves))
    for name, theirs in expected.items():
        error = (found[name].double() - theirs).norm() / theirs.norm()
        assert error <= bound, (name, float(error))


@pytest.mark.gpu
def test_a_graph(no_synchronization: Any) -> None:
    leaves, graph = large(torch.bfloat16, 70), torch.cuda.CUDAGraph()
    results(with_kernels, leaves)
    with no_synchronization():
        results(with_kernels, leaves)
    with torch.cuda.graph(graph):
        captured = results(with_kernels, leaves)
    assert leaves[0] is not None
    leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    expected = results(with_kernels, leaves)
    assert all(torch.equal(captured[name], expected[name]) for name in expected)
