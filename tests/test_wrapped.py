"""Projections that another library has wrapped, replaced, hooked or parametrized;
test_every_layer_in_torch.py has adapters of every layer.

Letters: b batch, t time, m d_model, H heads, p inputs and r outputs of a projection.
"""

import contextlib
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.layer_cases import draw, make, merge, wrap
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bedouin import Bedouin, Decoder
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.heads import HeadNorm
from bedouin.layers.mixers import HouseholderProduct, LowRank, StructuredMixer, WYForm
from bedouin.solvers import Direct, Jacobi, Picard

FLOAT64: dict[str, Any] = {"dtype": torch.float64}
KINDS = "one head", "no feedback", "vector"
kinds = pytest.mark.parametrize("kind", KINDS)
with_convolution = pytest.mark.parametrize("kind", [*KINDS, "convolution"])
heads = pytest.mark.parametrize("num_heads", [1, 2])
backends = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("reference", torch.float64),
        pytest.param("triton", torch.float32, marks=pytest.mark.interpreter),
    ],
)
NAMES = ("in_proj", "x_proj", "y_proj", "b_proj", "out_proj")


def results(layer: FixedPointLayer, x: Tensor) -> list[Tensor]:
    """The output, the state, and what steps from that state give."""
    y, state = layer(x, return_state=True)
    y_t, after = layer.step(x[:, 0], state)
    with torch.no_grad():
        decoded = Decoder(layer, len(x), state=state)(x[:, 0])
    return [y, *state.tensors, y_t, *after.tensors, decoded]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        rtol, atol = (1e-9, 1e-12) if theirs.dtype == torch.float64 else (2e-6, 1e-7)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def test_dropout_of_an_adapter_acts_in_training_alone() -> None:
    layer, x = make("one head"), draw(2, 3)
    wrap(layer, "x_proj", "y_proj", dropout=0.5)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert_close(results(layer, x), results(merge(layer), x))
    assert layer.y_proj.training is False and layer.y_proj.dropout.training is False
    # the feedback drops the same channels at all tokens, so one token alone gives the same numbers
    wrap(other := make("one head"), "y_proj", dropout=0.5)
    torch.manual_seed(1)
    whole, _ = other(x, return_state=True)
    torch.manual_seed(1)
    assert_close([other(x[:, :2])], [whole[:, :2]])


@heads
def test_bias_and_wrong_width_of_a_replaced_projection(num_heads: int) -> None:
    layer, x = make("one head", num_heads=num_heads), draw(2, 3)
    own, expected = layer.x_proj, copy.deepcopy(layer)

    class Shifted(nn.Module):
        def forward(self, v: Tensor) -> Any:
            return own(v) + 1.0

    with torch.no_grad():
        expected.dt_bias.add_(1.0)
        expected.raw_bias.add_(1.0)
    layer.x_proj = Shifted()
    assert_close(results(layer, x), results(expected, x))
    layer.x_proj = nn.Linear(layer.head_dim, 3, **FLOAT64)
    with pytest.raises(ValueError, match=r"x_proj must return .*, 3\): replace"):
        layer(x)


@kinds
def test_weight_norm(kind: str) -> None:
    """Of every weight, also of the norm's."""
    layer, x = make(kind), draw(2, 3)
    expected = results(layer, x)
    for name in NAMES:
        if getattr(layer, name, None) is not None:
            parametrizations.weight_norm(getattr(layer, name))
    assert_close(results(layer, x), expected)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    parametrizations.weight_norm(layer.norm)
    assert_close(results(layer, x), expected)
    expected = [2 * layer(x)]
    with torch.no_grad():
        layer.norm.get_parameter("parametrizations.weight.original0").mul_(2)
    assert_close([layer(x)], expected)


@heads
@pytest.mark.parametrize("kind", [*KINDS, "no mixing", "low rank"])
@pytest.mark.parametrize("solver", [Direct(), Jacobi(1e-12), Picard(1e-12)])
@pytest.mark.filterwarnings("ignore:.*has hooks or a forward of its own:UserWarning")
def test_hooks_that_only_look_see_every_child(kind: str, num_heads: int, solver: Any) -> None:
    """As tools that count operations register them on every module."""
    layer, x = make(kind, num_heads=num_heads, solver=solver), draw(2, 3)
    expected, seen = results(layer, x), []
    for module in layer.modules():
        module.register_forward_pre_hook(lambda *_: None)
        module.register_forward_hook(lambda module, *_: seen.append(module))
    assert_close(results(layer, x), expected)
    assert set(layer.children()) <= set(seen)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_hooks_on_y_proj_act_where_they_are_linear() -> None:
    layer, x = make("one head"), draw(2, 3)
    doubled_weight = copy.deepcopy(layer)
    with torch.no_grad():
        doubled_weight.y_proj.weight.mul_(2)
    handle = layer.y_proj.register_forward_hook(doubled)
    assert_close(results(layer, x), results(doubled_weight, x))
    handle.remove()
    layer.y_proj.register_forward_hook(lambda module, inputs, output: output.clamp(max=0.01))
    with pytest.raises(TypeError, match="y_proj must stay linear with its hooks.*hook the layer"):
        layer(x)


@heads
def test_hooks_on_the_norm_act_and_are_told_once(num_heads: int) -> None:
    layer, x = make("one head", num_heads=num_heads), draw(2, 3)
    expected = 2 * layer(x)
    layer.norm.register_forward_hook(doubled)
    with pytest.warns(UserWarning, match="norm of Bedouin has hooks"):
        actual = layer(x)
    assert_close([actual, layer(x)], [expected, expected])


class Kept(nn.Module):
    """Trained copies in place of a module, as PEFT's modules_to_save keeps them; of a norm they are
    in use (tests/contracts/test_peft.py)."""

    disable_adapters = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module, self.active_adapters = module, ["default"]
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize(
    "replace",
    [
        lambda norm: nn.LayerNorm(8, **FLOAT64),
        lambda norm: nn.Identity(),
        lambda norm: nn.RMSNorm(8, **FLOAT64),  # eps is then that of the dtype of the input
        lambda norm: nn.RMSNorm(8, 1e-5, elementwise_affine=False),
        lambda norm: Kept(nn.LayerNorm(8, **FLOAT64)),
        lambda norm: hooked(Kept(norm)),
    ],
)
def test_a_norm_that_would_be_ignored_is_refused(replace: Any, num_heads: int) -> None:
    layer, x = Bedouin(4, num_heads=num_heads, **FLOAT64), draw(2, 3)
    layer.norm = replace(layer.norm)
    refused = pytest.raises(TypeError, match="norm must be an nn.RMSNorm with a weight and an eps")
    with refused:
        layer(x)
    with refused, torch.no_grad():
        layer.step(x[:, 0], layer.init_state(2))
    layer.norm = HeadNorm(num_heads, 8, 1e-3, **FLOAT64)
    assert layer(x).isfinite().all()


@with_convolution
@heads
def test_layers_that_accelerate_dispatches_or_offloads(kind: str, num_heads: int) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    accelerate = pytest.importorskip("accelerate")
    layer, x = make(kind, num_heads=num_heads), draw(2, 3)
    expected, first = results(layer, x), layer.step(x[:, 0], layer.init_state(2))
    hooks.attach_execution_device_hook(layer, "cpu")
    assert "forward" in vars(layer.out_proj)
    assert_close(results(layer, x), expected)
    hooks.remove_hook_from_module(layer, recurse=True)
    accelerate.cpu_offload(layer, torch.device("cpu"))
    assert all(p.is_meta for p in layer.parameters())
    with torch.no_grad():
        assert_close(results(layer, x), expected)
        assert_close(tensors(layer.step(x[:, 0], layer.init_state(2))), tensors(first))
    assert all(p.is_meta for p in layer.parameters())


def no_reflection(module: nn.Module, inputs: tuple[Tensor, ...], form: WYForm) -> WYForm:
    return WYForm(0 * form.e, form.U, 0 * form.M)


@heads
@pytest.mark.parametrize("mixer", [HouseholderProduct(), LowRank()], ids=str)
@pytest.mark.parametrize("solver", [Direct(), Jacobi(1e-12), Picard(1e-12)])
def test_hooks_on_a_mixer_act(solver: Any, mixer: StructuredMixer, num_heads: int) -> None:
    """Which is told once if the layer has kernels without them."""
    mixer = copy.deepcopy(mixer)
    layer, x = Bedouin(4, num_heads=num_heads, solver=solver, mixer=mixer, **FLOAT64), draw(2, 3)
    plain, unmixed = copy.deepcopy(layer), copy.deepcopy(layer)
    unhooked = copy.deepcopy(mixer)
    vars(unmixed.mixer)["forward"] = lambda raw: no_reflection(mixer, (), unhooked(raw))
    layer.mixer.register_forward_hook(no_reflection)
    found = []
    for one in (layer, unmixed):
        told: Any = contextlib.nullcontext()
        if isinstance(mixer, HouseholderProduct):
            told = pytest.warns(UserWarning, match="mixer of Bedouin has hooks or a forward of its")
        with told:
            found.append(results(one, x))
    assert_close(*found)
    assert (plain(x) - found[0][0]).abs().max() > 1e-3
    layer(x)  # said once


def tensors(found: Any) -> list[Tensor]:
    """Those of a step: the output and the state."""
    return [found[0], *found[1].tensors]


def doubled(module: nn.Module, inputs: Any, output: Any) -> Any:
    return (2 * output[0], output[1]) if isinstance(output, tuple) else 2 * output


@with_convolution
@backends
@torch.no_grad()
def test_hooks_on_a_layer_run_in_steps_and_decoders(
    kind: str, backend: str, dtype: torch.dtype
) -> None:
    layer, x = make(kind, dtype=dtype), torch.randn(2, 3, 4, dtype=dtype)
    layer.solve_options = replace(layer.solve_options, backend=backend)
    state, decoder = layer.init_state(2), Decoder(layer, 2)
    expected, after = layer.step(x[:, 0], state)
    assert_close([decoder(x[:, 0])], [expected])
    layer.register_forward_hook(doubled)
    for _ in range(2):
        y, found = layer.step(x[:, 0], state)
        assert_close(tensors((y, found)), tensors((2 * expected, after)))
    decoder.reset()
    assert_close([decoder(x[:, 0])], [2 * expected])


class Quantized(Tensor):
    """A weight that only nn.functional.linear can read, as those of torchao."""

    dense: Tensor

    @staticmethod
    def __new__(cls, dense: Tensor) -> "Quantized":
        make: Any = Tensor._make_wrapper_subclass
        made: Quantized = make(cls, dense.shape, dtype=dense.dtype)
        made.dense = dense
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].dense)
        if func is Tensor.detach:
            return cls(args[0].dense)
        otherwise: Any = super().__torch_function__
        return otherwise(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a quantized weight")


@kinds
@torch.no_grad()
def test_quantized_weights_are_read_in_calls(kind: str) -> None:
    layer, x = make(kind, num_heads=1), torch.randn(2, 30, 4, **FLOAT64)
    expected = results(layer, x)
    for name in NAMES:
        if getattr(layer, name, None) is not None:
            module = getattr(layer, name)
            module.weight = nn.Parameter(Quantized(module.weight), requires_grad=False)
    assert_close(results(layer, x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@with_convolution
def test_recording_by_torch_jit_is_refused(kind: str) -> None:
    layer, x = make(kind), draw(2, 3)
    trace: Any = torch.jit.trace
    with pytest.raises(RuntimeError, match=r"cannot be recorded by .*: use torch\.compile or"):
        trace(layer, x)


def test_a_layer_with_adapters_is_one_graph() -> None:
    torch.compiler.reset()
    layer, x = make("vector"), draw(2, 3)
    wrap(layer)
    call: Any = torch.compile(layer, fullgraph=True, backend="eager")
    assert_close([call(x)], [layer(x)])
