"""Decoding on fixed buffers: the numbers of `step`, no aliasing, no stale parameters.

On a GPU a token is a CUDA graph. On a CPU `StepGraphs` replays a token by computing it again on the
same buffers; a layer and a `Decoder` use this path only in Triton's interpreter.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import (
    Bedouin,
    BedouinState,
    Decoder,
    FixedPointRNN,
    LowRank,
    NoMixing,
    SequenceModel,
)
from bedouin.decoding.graphs import MAX_GRAPHS, StepGraphs, graph_key
from bedouin.decoding.parts import CHECK_TOKENS, is_buffered, takes_graph
from bedouin.kernels.backend import interpreter_is_on
from bedouin.layer import FixedPointLayer
from bedouin.solvers import ConvergenceWarning, Picard
from bedouin.testing import assert_close

VARIANTS: list[tuple[type[Bedouin] | type[FixedPointRNN], dict[str, Any]]] = [
    (Bedouin, {}),
    (Bedouin, {"decay": "griffin", "input_scale": "one_minus_decay", "d_state": 1}),
    (Bedouin, {"feedback": ("B", "mixer"), "feedback_norm": False, "input_scale": "delta"}),
    (Bedouin, {"feedback": ()}),
    (Bedouin, {"num_householder": 4, "beta_max": 2.0, "solver": Picard()}),
    (FixedPointRNN, {}),
    (FixedPointRNN, {"decay": "griffin", "feedback": ()}),
    (Bedouin, {"num_heads": 2}),
    (Bedouin, {"num_heads": 4, "feedback": ("B", "mixer")}),
    (FixedPointRNN, {"num_heads": 2, "num_householder": 2}),
    (Bedouin, {"num_heads": 2, "mixer": NoMixing(), "feedback": ("delta",)}),
    (FixedPointRNN, {"mixer": NoMixing()}),
]
CONVOLVED: dict[str, Any] = {"num_heads": 2, "d_conv": 4, "feedback": ("delta",)}
gpu = pytest.mark.gpu
backends = pytest.mark.parametrize(
    ("backend", "dtype", "rtol"),
    [
        ("auto", torch.float64, 1e-10),
        pytest.param("triton", torch.float32, 2e-6, marks=pytest.mark.interpreter),
    ],
)


def make(kind: type[Bedouin] | type[FixedPointRNN] = Bedouin, **options: Any) -> FixedPointLayer:
    torch.manual_seed(0)
    return kind(6, **({"dtype": torch.float64} | options))


def tokens(t: int = 5, b: int = 3, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(b, t, 6, generator=generator, dtype=torch.float64)
    return x.to(**options)


def assert_same(state: BedouinState, expected: BedouinState, rtol: float = 1e-12) -> None:
    for name, value, other in zip(("ssm", "y", "conv"), state, expected, strict=False):
        assert_close(name, value, other, rtol)


@torch.no_grad()
@pytest.mark.parametrize("kind, options", [*VARIANTS, (Bedouin, CONVOLVED)])
def test_captured_steps_equal_plain_steps(kind: type[Bedouin], options: dict[str, Any]) -> None:
    layer, graphs, x = make(kind, **options), StepGraphs(), tokens()
    state = plain_state = layer.init_state(3)
    for t in range(x.shape[1]):
        expected, plain_state = layer.step(x[:, t], plain_state)
        stats = layer.stats
        y_t, state = graphs.step(layer, x[:, t], state)
        assert_close("output", y_t, expected, 1e-12)
        assert_same(state, plain_state)
        assert layer.stats is not None and stats is not None and stats.conditioning is not None
        assert layer.stats.conditioning is not None
        assert_close("conditioning", layer.stats.conditioning, stats.conditioning, 1e-12)
        assert layer.stats.converged.tolist() == stats.converged.tolist() == [True] * 3
        assert layer.stats.num_steps.tolist() == [1] * 3
        assert layer.stats.residual.max() < 1e-12
    assert len(graphs) == 1


@torch.no_grad()
def test_nothing_returned_changes_later_and_old_states_branch() -> None:
    layer, graphs, x = make(), StepGraphs(), tokens()
    start = layer.init_state(3)
    y_0, first = graphs.step(layer, x[:, 0], start)
    stats = layer.stats
    assert stats is not None
    kept = [v.clone() for v in (y_0, *first, stats.residual)]
    y_1, second = graphs.step(layer, x[:, 1], first)
    for value, before in zip((y_0, *first, stats.residual), kept, strict=True):
        assert torch.equal(value, before)
    again, from_first = graphs.step(layer, x[:, 1], first)
    assert torch.equal(again, y_1)
    assert_same(from_first, second, 0.0)
    assert not start.ssm.any() and not start.y.any()


@torch.no_grad()
def test_statistics_own_their_memory_and_copy() -> None:
    layer, graphs, x = make(), StepGraphs(), tokens()
    _, state = graphs.step(layer, x[:, 0], layer.init_state(3))
    stats = layer.stats
    assert stats is not None and stats.conditioning is not None and stats.backward is None
    graphs.step(layer, x[:, 1], state)
    for copied in (copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert torch.equal(copied.residual, stats.residual)
        assert copied.conditioning is not None
        assert torch.equal(copied.conditioning, stats.conditioning)
        assert copied.converged.tolist() == [True] * 3
    assert "residual=tensor" in repr(stats)


@torch.no_grad()
def test_a_sample_has_failed_if_one_of_its_heads_has() -> None:
    layer, graphs = make(num_heads=3, on_unconverged="ignore"), StepGraphs()
    x_t, state = tokens()[:, 0], layer.init_state(3)
    state.y[1, 4] = torch.nan  # the second of three heads of four channels
    found = []
    for step in (layer.step, lambda *given: graphs.step(layer, *given)):
        y_t, after = step(x_t, state)
        stats = layer.stats
        assert stats is not None and stats.converged.tolist() == [True, False, True]
        assert stats.residual.isnan().tolist() == [False, True, False]
        assert after.y[1].isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4
        found.append(y_t)
    assert_close("output", found[1][::2], found[0][::2], 1e-12)


@torch.no_grad()
def test_a_kept_graph_is_replayed_without_other_checks() -> None:
    layer, graphs, x = make(), StepGraphs(), tokens()
    state = layer.init_state(3)
    assert graphs.replay(layer, x[:, 0], state) is None
    expected, _ = graphs.step(layer, x[:, 0], state)
    found = graphs.replay(layer, x[:, 0], state)
    assert found is not None and torch.equal(found[0], expected)
    for other in (x[:2, 0], x[:, 0].float(), x[:, :1]):
        assert graphs.replay(layer, other, state) is None
    with torch.autocast("cpu", torch.bfloat16):
        # autocast leaves float64 as it is, so the graph is the same one
        found = graphs.replay(layer, x[:, 0], state)
        assert found is not None and torch.equal(found[0], expected)
    with pytest.raises(TypeError, match="state must be a BedouinState"):
        graphs.replay(layer, x[:, 0], tuple(state))  # type: ignore[arg-type]
    _parameter(layer)
    assert graphs.replay(layer, x[:, 0], state) is None


def test_a_graph_is_made_for_what_autocast_casts_to() -> None:
    x = torch.zeros(3, 4)
    keys = [graph_key(x)]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(graph_key(x))
    assert len(set(keys)) == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_state_changed_in_place_is_read_again(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    layer, graphs, x = make(), StepGraphs(), tokens()
    with mode():
        _, state = graphs.step(layer, x[:, 0], layer.init_state(3))
        state.ssm[1] = 0
        state.y[1] = 0
        y_t, _ = graphs.step(layer, x[:, 1], state)
        fresh, _ = layer.step(x[1:2, 1], layer.init_state(1))
    assert_close("sample that was reset", y_t[1:2], fresh, 1e-12)


def _in_place(layer: FixedPointLayer) -> None:
    for parameter in layer.parameters():
        parameter.mul_(1.1)


def _behind_the_version(layer: FixedPointLayer) -> None:
    layer.x_proj.weight.data.mul_(1.1)


def _storage(layer: FixedPointLayer) -> None:
    layer.x_proj.weight.data = layer.x_proj.weight.data * 1.1


def _parameter(layer: FixedPointLayer) -> None:
    layer.D = torch.nn.Parameter(layer.D * 1.1)


def _module(layer: FixedPointLayer) -> None:
    layer.out_proj = copy.deepcopy(layer.out_proj)
    layer.out_proj.weight.mul_(1.1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "is_replacement"),
    [
        (_in_place, False),
        (_behind_the_version, False),
        (_storage, True),
        (_parameter, True),
        (_module, True),
    ],
)
def test_changed_parameters_are_seen(
    change: Callable[[FixedPointLayer], None], is_replacement: bool
) -> None:
    layer, graphs, x = make(), StepGraphs(), tokens()
    _, state = graphs.step(layer, x[:, 0], layer.init_state(3))
    change(layer)
    expected, expected_state = layer.step(x[:, 1], state)
    replayed = graphs.replay(layer, x[:, 1], state)
    assert (replayed is None) == is_replacement
    y_t, new_state = replayed or graphs.step(layer, x[:, 1], state)
    assert_close("output", y_t, expected, 1e-12)
    assert_same(new_state, expected_state)
    assert len(graphs) == 1


@torch.no_grad()
def test_a_graph_for_each_batch_and_precision_and_not_too_many() -> None:
    layer, graphs = make(dtype=torch.float32), StepGraphs()
    for _ in range(2):
        for b in (1, 3):
            x = tokens(b=b, dtype=torch.float32)
            expected, _ = layer.step(x[:, 0], layer.init_state(b))
            y_t, _ = graphs.step(layer, x[:, 0], layer.init_state(b))
            assert_close("output", y_t, expected, 1e-5)
    assert len(graphs) == 2
    with torch.autocast("cpu", torch.bfloat16):
        y_t, _ = graphs.step(layer, x[:, 0], layer.init_state(3))
    assert len(graphs) == 3 and y_t.dtype == torch.bfloat16
    assert_close("output", y_t.float(), expected, 0.05)
    for b in range(1, MAX_GRAPHS + 3):
        x_t = tokens(b=b, dtype=torch.float32)[:, 0]
        graphs.step(layer, x_t, layer.init_state(b))
    assert len(graphs) == MAX_GRAPHS


@torch.no_grad()
def test_copies_of_a_layer_start_without_graphs() -> None:
    layer, x = make(), tokens()
    graphs = StepGraphs()
    graphs.step(layer, x[:, 0], layer.init_state(3))
    assert len(copy.deepcopy(graphs)) == len(pickle.loads(pickle.dumps(graphs))) == 0
    assert len(copy.deepcopy(layer).graphs) == 0


@torch.no_grad()
def test_wrong_states_are_named() -> None:
    layer, graphs, x = make(), StepGraphs(), tokens()
    with pytest.raises(ValueError, match=r"state.ssm must have shape \(3, 12, 16\)"):
        graphs.step(layer, x[:, 0], layer.init_state(2))
    with pytest.raises(ValueError, match="dtype"):
        graphs.step(layer, x[:, 0], layer.init_state(3).to(torch.int64))
    with pytest.raises(TypeError, match="state must be a BedouinState"):
        graphs.step(layer, x[:, 0], (1, 2))  # type: ignore[arg-type]


@torch.no_grad()
@backends
def test_decoder_continues_a_prompt(backend: str, dtype: torch.dtype, rtol: float) -> None:
    layer, x = make(backend=backend, dtype=dtype), tokens(dtype=dtype)
    whole, end = layer(x, return_state=True)
    _, state = layer(x[:, :2], return_state=True)
    decoder = Decoder(layer, 3, state=state)
    for t in range(2, x.shape[1]):
        assert_close(f"token {t}", decoder(x[:, t]), whole[:, t], rtol)
    found = decoder.state
    assert_same(found, end, rtol)
    decoder(x[:, 0])
    assert_same(found, end, rtol)
    decoder.reset()
    assert_close("anew", decoder(x[:, 0]), whole[:, 0], rtol)
    with pytest.raises(ValueError, match="batch_size = 3 rows, got 2"):
        decoder(x[:2, 0])


@torch.no_grad()
@backends
def test_decoder_keeps_its_state_when_a_parameter_is_replaced(
    backend: str, dtype: torch.dtype, rtol: float
) -> None:
    layer, x = make(backend=backend, dtype=dtype), tokens(dtype=dtype)
    decoder = Decoder(layer, 3)
    decoder(x[:, 0])
    _parameter(layer)
    expected, _ = layer.step(x[:, 1], decoder.state)
    assert_close("output", decoder(x[:, 1]), expected, rtol)


@torch.no_grad()
def test_failed_tokens_are_reported_when_they_are_checked() -> None:
    layer, graphs, x_t = make(), StepGraphs(), tokens()[:, 0]
    x_t[1, 0] = torch.nan
    with pytest.warns(ConvergenceWarning, match="1 of 3 samples"):
        for _ in range(CHECK_TOKENS + 1):
            graphs.step(layer, x_t, layer.init_state(3))


def test_where_no_graph_is_captured() -> None:
    x = torch.randn(2, 6, dtype=torch.float64)
    with torch.no_grad():
        assert not takes_graph(make(), x) and not is_buffered(make(), x)
    assert not takes_graph(make(backend="triton"), x)  # gradients are on
    assert not takes_graph(make(backend="reference"), x)


@pytest.mark.interpreter
@torch.no_grad()
@pytest.mark.parametrize("kind, options", [*VARIANTS, (Bedouin, CONVOLVED)])
def test_interpreted_steps_equal_plain_steps_in_float64(
    kind: type[Bedouin], options: dict[str, Any]
) -> None:
    options = {name: value for name, value in options.items() if name != "solver"}
    layer, x = make(kind, backend="triton", dtype=torch.float32, **options), tokens(t=3).float()
    plain = make(kind, backend="reference", **options)
    plain.load_state_dict(layer.state_dict())
    assert interpreter_is_on() and takes_graph(layer, x[:, 0])
    state, expected_state = layer.init_state(3), plain.init_state(3)
    decoder = Decoder(layer, 3)
    for t in range(3):
        y_t, state = layer.step(x[:, t], state)
        expected, expected_state = plain.step(x[:, t].double(), expected_state)
        assert_close("output", y_t.double(), expected, 5e-6)
        assert_close("decoder", decoder(x[:, t]).double(), expected, 5e-6)
        assert_same(state.to(torch.float64), expected_state, 5e-6)


# -- on a GPU

LOW = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]


def _on_gpu(kind: type[Bedouin], dtype: torch.dtype, **options: Any) -> FixedPointLayer:
    torch.manual_seed(0)
    return kind(64, device="cuda", dtype=dtype, **options)


@gpu
@pytest.mark.parametrize("kind, options", [*VARIANTS, (Bedouin, CONVOLVED)])
@pytest.mark.parametrize("dtype, autocast", LOW)
@pytest.mark.parametrize("b", [1, 5])
def test_graph_equals_forward(
    kind: type[Bedouin], options: dict[str, Any], dtype: torch.dtype, autocast: Any, b: int
) -> None:
    options = {name: value for name, value in options.items() if name != "solver"}
    if options.get("beta_max") == 2.0:
        options = options | {"beta_max": 1.0}  # expanding mixers amplify rounding
    layer = _on_gpu(kind, dtype, **options)
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
    assert len(layer.graphs) == 1
    assert layer.stats is not None and bool(layer.stats.converged.all())


@gpu
@torch.no_grad()
def test_a_decoder_on_a_gpu_keeps_its_state_when_a_parameter_is_replaced() -> None:
    layer, x = _on_gpu(Bedouin, torch.float32), torch.randn(3, 2, 64, device="cuda")
    decoder = Decoder(layer, 3)
    decoder(x[:, 0])
    _parameter(layer)
    expected, _ = layer.step(x[:, 1], decoder.state)
    assert_close("output", decoder(x[:, 1]), expected, 1e-5)


@gpu
@pytest.mark.parametrize("options", [CONVOLVED, CONVOLVED | {"num_householder": 0}, {}])
@torch.no_grad()
def test_a_graph_of_several_layers_has_the_numbers_of_single_launches(
    options: dict[str, Any],
) -> None:
    """Bit for bit, with a chain of launches beside the others in each layer."""
    torch.manual_seed(0)
    layers = [Bedouin(64, **options, device="cuda") for _ in range(3)]
    model = SequenceModel(11, 64, layers, device="cuda")
    tokens = torch.randint(11, (48, 2), device="cuda")
    decoder, state = Decoder(model, 2), model.init_state(2)
    for t, token in enumerate(tokens):
        logits = decoder(token)
        expected, state = _launch_by_launch(model, token, state)
        assert torch.equal(logits, expected), t
        if t % 8 == 7:
            for parameter in model.parameters():
                parameter.mul_(1.01)
    for found, kept in zip(decoder.state, state, strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, kept, strict=True))


def _launch_by_launch(
    model: SequenceModel,
    token: Tensor,  # (b,)
    states: Any,
) -> tuple[Tensor, Any]:
    """`model.step` without a graph of any layer."""
    pairs = zip(model.mixers, states, strict=True)
    found = [_Launched(mixer, state) for mixer, state in pairs]
    logits: Tensor = model.decode(token, found)
    return logits, [each.state for each in found]


class _Launched:
    """A layer with its state."""

    def __init__(self, layer: Any, state: BedouinState) -> None:
        self.layer, self.state = layer, state

    def __call__(self, x_t: Tensor) -> Tensor:  # (b, m) -> (b, m)
        output: Tensor
        output, self.state = self.layer._one_token(x_t, self.state)
        return output


@gpu
@torch.no_grad()
def test_graph_sees_an_update_in_place_and_a_new_batch() -> None:
    layer = _on_gpu(Bedouin, torch.float32)
    plain = _on_gpu(Bedouin, torch.float32, backend="reference")
    for b in (2, 7, 2):
        x = torch.randn(b, 6, 64, device="cuda")
        state = expected_state = layer.init_state(b)
        for t in range(6):
            y_t, state = layer.step(x[:, t], state)
            expected, expected_state = plain.step(x[:, t], expected_state)
            assert_close("output", y_t, expected, 1e-4)
            for module in (layer, plain):
                for parameter in module.parameters():
                    parameter.mul_(1.01)
    assert len(layer.graphs) == 2


@gpu
def test_steps_do_not_wait_for_the_gpu(
    no_synchronization: Callable[[], AbstractContextManager[None]],
) -> None:
    layer = _on_gpu(Bedouin, torch.bfloat16)
    x = torch.randn(1, 40, 64, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        _, state = layer.step(x[:, 0], layer.init_state(1))
        torch.cuda.synchronize()
        with no_synchronization():
            for t in range(1, 40):
                _, state = layer.step(x[:, t], state)


@gpu
@torch.no_grad()
def test_a_failed_token_is_warned_about_some_tokens_later() -> None:
    layer = _on_gpu(Bedouin, torch.float32)
    x = torch.randn(2, 64, device="cuda")
    bad = x.clone()
    bad[0, 3] = torch.nan
    layer.step(bad, layer.init_state(2))
    with pytest.warns(ConvergenceWarning, match="1 of 2 samples"):
        for _ in range(70):
            layer.step(x, layer.init_state(2))
            torch.cuda.synchronize()


@gpu
@torch.no_grad()
def test_steps_can_be_part_of_a_larger_capture() -> None:
    layer = _on_gpu(Bedouin, torch.float32)
    x, state = torch.randn(2, 64, device="cuda"), layer.init_state(2)
    expected, expected_state = layer.step(x, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_t, new_state = layer.step(x, state)
    graph.replay()
    assert_close("output", y_t, expected, 1e-5)
    assert_same(new_state, expected_state, 1e-5)


@gpu
@torch.no_grad()
def test_a_mixer_without_kernels_steps_plainly() -> None:
    layer = _on_gpu(Bedouin, torch.float32, mixer=LowRank(2))
    x = torch.randn(2, 3, 64, device="cuda")
    whole, state = layer(x), layer.init_state(2)
    for t in range(3):
        y_t, state = layer.step(x[:, t], state)
        assert_close("output", y_t, whole[:, t], 1e-4)
    assert len(layer.graphs) == 0
