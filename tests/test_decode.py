"""Decoding on fixed buffers: the numbers of `step`, no aliasing, no stale parameters; captured
layers: the numbers of the layer, and an error wherever a replay would differ.

On a GPU a token is a CUDA graph. The fixture `graphs` captures on a CPU, too, where a replay
computes the token again on the same buffers. Letters: b batch, t time, m d_model.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.layer_cases import (
    CPU,
    FIXED_POINTS,
    GPU,
    MEMORIES,
    WITH_KERNELS,
    Place,
    assert_all_close,
    draw,
    earlier_state,
    make,
)
from tests.messages import of, of_kind, refused
from torch import Tensor

from bedouin import (
    Bedouin,
    Decoder,
    Kronecker,
    SequenceModel,
    TrackingDeltaNet,
    decode,
)
from bedouin.decode import CHECK_TOKENS
from bedouin.graphed import Graphed
from bedouin.solvers import ConvergenceWarning, GammaCap, Picard
from bedouin.testing import assert_close

CONVOLVED: dict[str, Any] = {"num_heads": 2, "d_conv": 4, "feedback": ("delta",)}
gpu = pytest.mark.gpu
on_gpu = pytest.param("cuda", marks=gpu)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "place"),
    [*((name, CPU) for name in FIXED_POINTS | MEMORIES), pytest.param("tracking", GPU, marks=gpu)],
)
@pytest.mark.parametrize("most", [0, 40, decode.MOST_TOGETHER])
def test_captured_steps_equal_plain_steps(
    name: str, place: Place, most: int, request: pytest.FixtureRequest
) -> None:
    graphs = request.getfixturevalue("graphs") if place is CPU else None
    request.getfixturevalue("monkeypatch").setattr(decode, "MOST_TOGETHER", most)
    layer, x = make(name, place), draw(3, 5, place)
    state = earlier_state(layer, 3)
    decoder = Decoder(layer, 3, state=state)
    kept: list[Tensor] = []
    for x_t in x.unbind(1):
        expected, state = layer.step(x_t, state)
        stats = getattr(layer, "stats", None)
        assert_close("output", decoder(x_t), expected, place.rtol)
        after = decoder.state
        assert_all_close(after.tensors, state.tensors, place.rtol)
        assert all(v.untyped_storage().nbytes() == v.nbytes for v in after.tensors)
        # what the token before returned is left alone
        assert all(map(torch.equal, kept[: len(kept) // 2], kept[len(kept) // 2 :]))
        kept = [*after.tensors]
        if stats is not None:
            kept.append(layer.stats.residual)
            assert layer.stats.backward is None
            assert_close("conditioning", layer.stats.conditioning, stats.conditioning, 1e-12)
            assert layer.stats.converged.tolist() == stats.converged.tolist() == [True] * 3
            assert layer.stats.num_steps.tolist() == [1] * 3
            assert layer.stats.residual.max() < 1e-12
        kept += [v.clone() for v in kept]
    # no kernel takes a token of these two
    assert graphs is None or len(graphs) == (name not in ("low rank", "dense"))
    decoder.reset()
    expected, _ = layer.step(x[:, 0], layer.init_state(3))
    assert_close("anew", decoder(x[:, 0]), expected, place.rtol)
    with pytest.raises(ValueError, match="batch_size = 3 rows, got 1"):
        decoder(x[:1, 0])


@torch.no_grad()
@pytest.mark.usefixtures("graphs")
def test_a_sample_has_failed_if_one_of_its_heads_has() -> None:
    """In a step, and in one that is captured."""
    layer = make("one head", num_heads=2, on_unconverged="ignore")
    x_t, state = draw(3, 1)[:, 0], layer.init_state(3)
    expected, _ = layer.step(x_t, state)
    state.y[1, 4] = torch.nan  # the second of two heads of four channels
    decoder = Decoder(layer, 3, state=state)
    for run in (lambda: layer.step(x_t, state), lambda: (decoder(x_t), decoder.state)):
        y_t, after = run()
        assert layer.stats.converged.tolist() == [True, False, True]
        assert layer.stats.residual.isnan().tolist() == [False, True, False]
        assert after.y[1].isnan().tolist() == [False] * 4 + [True] * 4
        assert_close("output", y_t[::2], expected[::2], 1e-12)


@torch.no_grad()
def test_another_precision_is_captured_anew(graphs: list[Tensor]) -> None:
    layer, x = make("one head", dtype=torch.float32).train(), draw(3, 4).float()
    decoder = Decoder(layer, 3)
    state = layer.init_state(3)
    for t in range(4):
        expected, state = layer.step(x[:, t], state)
        with torch.autocast("cpu", torch.bfloat16, enabled=t == 2):
            y_t = decoder(x[:, t])
        assert y_t.dtype == (torch.bfloat16 if t == 2 else torch.float32)
        assert_close("output", y_t.float(), expected, 0.05 if t > 1 else 1e-5)
    assert len(graphs) == 3


@torch.no_grad()
def test_a_decoder_leaves_the_layer_and_its_mode_as_they_are(graphs: list[Tensor]) -> None:
    """Also where the capture is in inference mode, and its buffers are written outside of it."""
    layer, x = make("one head"), draw(3, 3)
    before = layer.solve_options
    decoder = Decoder(layer, 3)
    with torch.inference_mode():
        decoder(x[:, 0])
    assert layer.solve_options == before and layer.num_calls == 0
    state = decoder.state
    expected, _ = layer.step(x[:, 1], state)
    assert_close("output", decoder(x[:, 1]), expected, 1e-12)
    state.ssm[1] = state.y[1] = 0
    decoder.reset(state)
    fresh, _ = layer.step(x[1:2, 2], layer.init_state(1))
    assert_close("sample that was reset", decoder(x[:, 2])[1:2], fresh, 1e-12)


def scaled(module: Any) -> Any:
    module = copy.deepcopy(module)
    module.weight.mul_(1.1)
    return module


CHANGES: dict[str, tuple[Callable[[Any], object], int]] = {
    "in place": (lambda layer: [p.mul_(1.1) for p in layer.parameters()], 1),
    "behind the version": (lambda layer: layer.x_proj.weight.data.mul_(1.1), 1),
    "storage": (lambda layer: setattr(layer.x_proj.weight, "data", 1.1 * layer.x_proj.weight), 2),
    "parameter": (lambda layer: setattr(layer, "D", torch.nn.Parameter(1.1 * layer.D)), 2),
    "module": (lambda layer: setattr(layer, "out_proj", scaled(layer.out_proj)), 2),
}
"""Changes of parameters, with the number of captures that a decoder then has made."""


@torch.no_grad()
@pytest.mark.parametrize(("change", "captures"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_changed_parameters_are_seen(
    device: str, change: Callable[..., None], captures: int, request: pytest.FixtureRequest
) -> None:
    graphs = request.getfixturevalue("graphs") if device == "cpu" else [None] * captures
    dtype, rtol = (torch.float64, 1e-12) if device == "cpu" else (torch.float32, 1e-5)
    layer, x = make("one head", dtype=dtype, device=device), draw(3, 2).to(device, dtype)
    decoder = Decoder(layer, 3)
    decoder(x[:, 0])
    change(layer)
    expected, state = layer.step(x[:, 1], decoder.state)
    assert_close("output", decoder(x[:, 1]), expected, rtol)
    assert_all_close(decoder.state.tensors, state.tensors, rtol)
    assert len(graphs) == captures


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_failed_tokens_are_reported_when_they_are_checked(
    device: str, request: pytest.FixtureRequest
) -> None:
    if device == "cpu":
        request.getfixturevalue("graphs")
    layer = make("one head", dtype=torch.float32, device=device)
    x_t = draw(3, 1)[:, 0].to(device, torch.float32)
    decoder = Decoder(layer, 3)
    decoder(x_t)
    layer.on_unconverged = "ignore"  # of the steps that a CPU runs in place of a graph
    x_t[1, 0] = torch.nan
    decoder(x_t)
    layer.on_unconverged = "warn"
    with pytest.warns(ConvergenceWarning, match="1 of 3 samples"):
        for _ in range(2 * CHECK_TOKENS + 1):
            decoder(x_t)
            if device == "cuda":
                torch.cuda.synchronize()


def test_where_no_graph_is_captured(graphs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(2, 1)[:, 0]
    for options in ({"mixer": Kronecker()}, {"backend": "reference"}, {"on_unconverged": "raise"}):
        Decoder(make("one head", **options), 2)(x)
    hooked = make("one head")
    hooked.in_proj.register_forward_hook(lambda *_: None)
    Decoder(hooked, 2)(x)
    monkeypatch.undo()
    Decoder(make("one head"), 2)(x)  # on a CPU
    assert not graphs


# -- on a GPU

LOW = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]


@gpu
@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.parametrize("dtype, autocast", LOW)
@pytest.mark.parametrize("b", [1, 5])
def test_graph_equals_forward(name: str, dtype: torch.dtype, autocast: Any, b: int) -> None:
    layer = make(name, GPU._replace(dtype=dtype))
    x = torch.randn(b, 12, 64, device="cuda", dtype=dtype)
    rtol = 1e-4 if dtype == torch.float32 and autocast is None else 0.05
    with torch.inference_mode(), torch.autocast("cuda", autocast, enabled=autocast is not None):
        whole = layer(x)
        _, state = layer(x[:, :4], return_state=True)
        decoder = Decoder(layer, b, state=state)
        for t in range(4, 12):
            y_t, state = layer.step(x[:, t], state)
            assert_close(f"step {t}", y_t, whole[:, t], rtol)
            assert_close(f"decoder {t}", decoder(x[:, t]), y_t, rtol)
    assert layer.stats is not None and bool(layer.stats.converged.all())


@gpu
@pytest.mark.parametrize("options", [CONVOLVED, CONVOLVED | {"num_householder": 0}, {}])
@torch.no_grad()
def test_a_graph_of_several_layers_has_the_bits_of_single_launches(options: Any) -> None:
    layers = [Bedouin(64, **options, device="cuda") for _ in range(3)]
    model = SequenceModel(11, 64, layers, device="cuda")
    decoder, state = Decoder(model, 2), model.init_state(2)
    for t, token in enumerate(torch.randint(11, (48, 2), device="cuda")):
        expected, state = model.step(token, state)
        assert torch.equal(decoder(token), expected), t
        for parameter in model.parameters() if t % 8 == 7 else ():
            parameter.mul_(1.01)
    for found, kept in zip(decoder.state, state, strict=True):
        assert all(map(torch.equal, found.tensors, kept.tensors))


@gpu
def test_tokens_do_not_wait_for_the_gpu(no_synchronization: Any) -> None:
    layer = Bedouin(64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 40, 64, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        _, state = layer.step(x[:, 0], layer.init_state(1))
        decoder = Decoder(layer, 1, state=state)
        decoder(x[:, 1])
        torch.cuda.synchronize()
        with no_synchronization():
            for t in range(2, 40):
                decoder(x[:, t])
                _, state = layer.step(x[:, t], state)


@gpu
@torch.no_grad()
def test_steps_can_be_part_of_a_larger_capture() -> None:
    layer = Bedouin(64, device="cuda")
    x, state = torch.randn(2, 64, device="cuda"), layer.init_state(2)
    expected, expected_state = layer.step(x, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_t, new_state = layer.step(x, state)
    graph.replay()
    assert_close("output", y_t, expected, 1e-5)
    assert_all_close(new_state.tensors, expected_state.tensors, 1e-5)


def small(**options: Any) -> Bedouin:
    return Bedouin(4, d_state=2, **options)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures that run the layer instead, as a machine without a GPU can."""

    def rerun(layer: Any, sample: Tensor, parameters: Any) -> Callable[..., Tensor]:
        return lambda x, *unused: layer(x)

    monkeypatch.setattr("bedouin.graphed.capture", rerun)
    monkeypatch.setattr("bedouin.graphed.is_cuda_device", lambda device: True)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["", "in_proj"])
def test_hooks_are_refused_before_and_after_the_capture(name: str) -> None:
    layer, x = small(), torch.randn(1, 2, 4)
    call = layer.graphed(x)
    layer.get_submodule(name).register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="a hook registered, after the capture"):
        call(x)
    with pytest.raises(ValueError, match=f"without hooks.*got some on {name or 'the layer'}: "):
        layer.graphed(x)


def graphed(shape: tuple[int, ...] = (1, 2, 4), **options: Any) -> Any:
    return small(**options).graphed(torch.randn(shape))


X = torch.randn(1, 2, 4)
REFUSED = of_kind(ValueError, [
    (of(graphed, (2, 4)), "x must"),
    (of(graphed, (0, 2, 4)), "must not be empty"),
    (of(graphed, solver=Picard(), max_steps=GammaCap(4.0)), "max_steps to an int"),
    (lambda: graphed()(torch.randn(1, 3, 4)), "shape (1, 2, 4), got (1, 3, 4)"),
    (lambda: graphed()(X.double()), "dtype"),
    (lambda: graphed()(X.to("meta")), "device"),
    (lambda: graphed()(X.clone().requires_grad_()), "requires a gradient"),
])  # fmt: skip

test_what_cannot_be_captured = pytest.mark.usefixtures("on_cpu")(refused(REFUSED))


@pytest.mark.usefixtures("on_cpu")
def test_another_mode() -> None:
    layer, x = small(), torch.randn(1, 2, 4)
    run = layer.graphed(x)
    with torch.no_grad():
        frozen = layer.graphed(x)
        run(x)
    with pytest.raises(RuntimeError, match="outside torch.no_grad"):
        frozen(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        run(x)
    layer.eval()
    with pytest.raises(RuntimeError, match="training=False"):
        run(x)
    layer.train()
    layer.D = torch.nn.Parameter(torch.ones_like(layer.D))
    with pytest.raises(RuntimeError, match="replaced"):
        run(x)
    with pytest.raises(TypeError, match="tensor"):
        run(None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_cpu")
def test_a_late_or_a_second_backward_pass_is_refused() -> None:
    run, x = small().graphed(torch.randn(1, 2, 4)), torch.randn(1, 2, 4)
    first, second = run(x), run(x)
    with pytest.raises(RuntimeError, match="before the layer's next call"):
        first.sum().backward()
    total = second.sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        total.backward()


def passes(call: Callable[[Tensor], Tensor], layer: Bedouin, x: Tensor) -> list[Tensor]:
    """The output, the gradient of x and those of the parameters."""
    out = call(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.usefixtures("on_cpu")
def test_layers_without_a_solver() -> None:
    layer = TrackingDeltaNet(4, tracker_dim=2, tracker_state=3).eval()
    x = torch.randn(1, 2, 4)
    call = layer.graphed(x)
    assert torch.equal(call(x), layer(x))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"num_heads": 2}, {"feedback": ()}, None])
@pytest.mark.parametrize("cast", [False, True])
def test_the_numbers_of_the_layer(options: dict[str, Any] | None, cast: bool) -> None:
    layer: Any
    if options is None:
        layer = TrackingDeltaNet(32, feedback_noise=0.0, device="cuda")
    else:
        layer = Bedouin(32, device="cuda", **options)
    sample = torch.randn(2, 5, 32, device="cuda", requires_grad=True)
    casts = partial(torch.autocast, "cuda", torch.bfloat16, enabled=cast)
    with casts():
        run = layer.graphed(sample)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kept: list[Tensor] = []
    for _ in range(3):
        # a new context, as in training: one keeps its casts of the weights
        with casts():
            x = torch.randn_like(sample).requires_grad_()
            ours = passes(run, layer, x)
            theirs = passes(layer, layer, x)
            assert all(map(torch.equal, ours, theirs))
            # what earlier calls returned is left alone
            assert all(map(torch.equal, kept[: len(kept) // 2], kept[len(kept) // 2 :]))
            kept = [*ours, *(v.clone() for v in ours)]
            # in place, as the graph needs
            run(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.gpu
def test_gradients_accumulate() -> None:
    layer = Bedouin(32, device="cuda")
    x = torch.randn(2, 5, 32, device="cuda")
    run = layer.graphed(x)
    run(x).sum().backward()
    once = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    run(x).sum().backward()
    for p, one in zip(layer.parameters(), once, strict=True):
        assert p.grad is not None and torch.equal(p.grad, 2 * one)


@pytest.mark.gpu
def test_a_capture_leaves_the_layer_as_it_was() -> None:
    layer = Bedouin(32, device="cuda")
    x = torch.randn(2, 5, 32, device="cuda")
    with patch.object(Graphed, "__call__", side_effect=AssertionError):
        layer.graphed(x)
        assert layer(x[:1]).shape == (1, 5, 32)
    assert all(p.grad is None for p in layer.parameters())
