"""Channel mixers: their matrices, and layers that use them."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bedouin import (
    Bedouin,
    ChannelMixer,
    FixedPointRNN,
    HouseholderProduct,
    Kronecker,
    LowRank,
    Monarch,
    NoMixing,
)
from bedouin.kernels.direct.limits import choose_sweep
from bedouin.kernels.iteration import IterationRule, choose_iteration
from bedouin.layers.mixers import StructuredMixer
from bedouin.solvers import (
    Direct,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    Picard,
    Solver,
    UnrolledAdjoint,
)
from bedouin.testing import assert_close, decode_gap, layer_gradients


def matrix(mixer: ChannelMixer, raw: Tensor, d: int) -> Tensor:
    """Q (d, d), column by column."""
    basis = torch.eye(d, dtype=raw.dtype)
    return basis - torch.stack([mixer.complement(raw, e) for e in basis], 1)


def bounded(raw: Tensor) -> Tensor:
    """I - R for the raw values (p, p) of R, whose norm is scaled to below 1."""
    return torch.eye(len(raw), dtype=raw.dtype) - raw / (1 + raw.square().sum()).sqrt()


@settings(max_examples=25)
@given(st.sampled_from([(1, 5), (2, 3), (3, 2), (4, 4)]), st.integers(0, 999))
def test_kronecker_and_monarch_are_their_definitions(factors: tuple[int, int], seed: int) -> None:
    torch.manual_seed(seed)
    (i, j), d = factors, factors[0] * factors[1]
    raw = torch.randn(i * i + j * j, dtype=torch.float64)
    A, B = (bounded(v) for v in (raw[: i * i].view(i, i), raw[i * i :].view(j, j)))
    mixer = Kronecker(factors)
    assert mixer.raw_size(d) == len(raw)
    assert_close("Kronecker", matrix(mixer, raw, d), torch.kron(A, B), 1e-13, atol=1e-14)
    assert_close("dense", mixer.dense(raw), torch.kron(A, B), 1e-13, atol=1e-14)

    raw = torch.randn(j * i * i + i * j * j, dtype=torch.float64)
    columns, rows = raw[: j * i * i].view(j, i, i), raw[j * i * i :].view(i, j, j)
    R = torch.block_diag(*(bounded(v) for v in columns))
    L = torch.block_diag(*(bounded(v) for v in rows))
    order = torch.arange(d).view(i, j).T.flatten()  # columns of the matrix (i, j) one by one
    P = torch.eye(d, dtype=torch.float64)[order]
    monarch = Monarch(factors)
    assert monarch.raw_size(d) == len(raw)
    assert_close("Monarch", matrix(monarch, raw, d), L @ P.T @ R @ P, 1e-13, atol=1e-14)
    assert_close("dense", monarch.dense(raw), L @ P.T @ R @ P, 1e-13, atol=1e-14)


def test_dense_systems_are_those_of_small_heads() -> None:
    """Larger ones are iterated, and of several sizes of heads each needs a mixer."""
    wide = Bedouin(128, num_heads=1, mixer=Kronecker())
    assert (
        wide.solver == Picard() and Bedouin(128, num_heads=2, mixer=Kronecker()).solver == Direct()
    )
    with pytest.raises(TypeError, match=r"heads of at most 128 channels \(this layer: 256\)"):
        wide.solver = Direct()


@settings(max_examples=50)
@given(st.sampled_from([HouseholderProduct(3, 2.0), NoMixing(), LowRank(3)]), st.integers(0, 999))
def test_the_form_and_mixing_are_the_complement(mixer: StructuredMixer, seed: int) -> None:
    torch.manual_seed(seed)
    raw = torch.randn(2, 4, mixer.raw_size(5), dtype=torch.float64)
    x, v = torch.randn(2, 2, 4, 5, dtype=torch.float64)
    if mixer.raw_size(5):  # I - Q = 0 has no form
        e, U, M = mixer(raw)
        dense = torch.diag_embed(e.expand(2, 4, 5)) + U.mT @ M @ U
        assert_close("(I - Q) v", mixer.complement(raw, v), (dense @ v[..., None])[..., 0], 1e-12)
    expected = x + mixer.complement(raw, v - x)
    assert_close("x~", mixer.mix(raw, x, v), expected, 1e-12)
    assert_close("default", ChannelMixer.mix(mixer, raw, x, v), expected, 1e-12)


class Identity(HouseholderProduct):
    """The mathematics of another mixer, Q = I."""

    def forward(self, raw: Tensor) -> Any:
        e, U, M = super().forward(raw)
        return e, U, torch.zeros_like(M)


class Swapped(HouseholderProduct):
    """Another order of the raw values."""

    def complement(self, raw: Tensor, v: Tensor) -> Tensor:
        return super().complement(raw.flip(-1), v)


class Named(HouseholderProduct):
    """A subclass that changes neither how raw values are read nor what is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def extra_repr(self) -> str:
        return f"named, {super().extra_repr()}"


class NamedNoMixing(NoMixing):
    """As `Named`."""


class LearnedBeta(HouseholderProduct):
    """A beta_max with a gradient, which kernels do not compute."""

    def __init__(self) -> None:
        super().__init__()
        del self.beta_max
        self.beta_max = nn.Parameter(torch.ones((), dtype=torch.float64))  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("mixer", "part"),
    [
        (Identity(), "forward of "),
        (Swapped(), "complement of "),
        (LearnedBeta(), "a tensor beta_max of "),
        *((mixer, "") for mixer in (LowRank(2), Kronecker())),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_mixer_without_kernels_is_named_once_on_a_gpu(
    mixer: ChannelMixer, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = "those of HouseholderProduct" if part else "HouseholderProduct"
    cause = rf"{part}the mixer {type(mixer).__name__} \(only {only}\)"
    layer = Bedouin(4, d_state=3, mixer=mixer)
    f: Any = layer.map(torch.randn(2, 5, 4))
    y, rule = torch.zeros(2, 5, 8), IterationRule(1e-4, 1e-8)
    values = f.operands, f.parameterization, f.mixer_values
    calls: list[Any] = [
        lambda backend: choose_sweep(backend, *values),
        lambda backend: choose_iteration(backend, values[0], y, *values[1:], rule),
    ]
    assert layer.layout() is None
    monkeypatch.setattr("bedouin.kernels.backend.is_cuda_device", lambda device: True)
    monkeypatch.setattr("bedouin.kernels.backend._TRITON", "3.6.0")
    monkeypatch.setattr("bedouin.kernels.backend._IS_OLD", False)
    for call in calls:
        monkeypatch.setattr("bedouin.kernels.backend._TOLD", set())
        with pytest.warns(UserWarning, match=f"which is slow: .* do not support {cause}"):
            assert call("auto") == "reference"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert call("auto") == call("reference") == "reference"
        with pytest.raises(ValueError, match=f"does not support {cause}"):
            call("triton")


@pytest.mark.parametrize("kind", [Bedouin, FixedPointRNN])
@pytest.mark.parametrize("mixer", [Named(), NamedNoMixing()], ids=repr)
def test_a_subclass_that_computes_the_same_keeps_the_kernels(
    mixer: ChannelMixer, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    f = kind(4, mixer=mixer).map(torch.randn(2, 5, 4))
    values = f.operands, f.parameterization, f.mixer_values
    y, rule = torch.zeros(2, 5, 8), IterationRule(1e-4, 1e-8)
    assert choose_sweep("triton", *values) == "triton"
    assert choose_iteration("triton", values[0], y, *values[1:], rule) == "triton"
    same = HouseholderProduct() if isinstance(mixer, Named) else NoMixing()
    assert kind(4, mixer=mixer).layout() == kind(4, mixer=same).layout()


def test_a_layer_without_mixing_has_no_parameters_of_a_mixer() -> None:
    layer: Any = Bedouin(4, d_state=3, mixer=NoMixing())
    assert layer.raw_size == 8 + 2 * 3 and NoMixing().raw_size(8) == 0
    assert layer.x_proj.weight.shape == (layer.raw_size + 8, 8)
    layer(torch.randn(2, 3, 4))
    assert layer.stats.conditioning.tolist() == [1.0, 1.0]
    vector = FixedPointRNN(4, mixer=NoMixing())
    # of the feedback only the gate is left
    assert vector.raw_size == 8 and vector.y_proj is not None
    assert vector.y_proj.weight.shape == (8, 8)
    assert vector._feedback_weights(torch.float32)[0] is None


def test_shorthand_is_the_mixer() -> None:
    layer = Bedouin(4, num_householder=3, beta_max=2.0)
    assert isinstance(layer.mixer, HouseholderProduct)
    assert (layer.mixer.num_householder, layer.mixer.beta_max) == (3, 2.0)
    default = FixedPointRNN(4).mixer
    assert isinstance(default, HouseholderProduct)
    assert (default.num_householder, default.beta_max) == (2, 1.0)


class Dense(ChannelMixer):
    """I - Q = tanh(raw) W / 2 with one learned dense matrix W for all tokens."""

    def __init__(self, d_inner: int) -> None:
        super().__init__()
        weight = torch.linalg.qr(torch.randn(d_inner, d_inner, dtype=torch.float64)).Q
        self.weight = nn.Parameter(weight)

    def raw_size(self, d_inner: int) -> int:
        return 1

    def complement(self, raw: Tensor, v: Tensor) -> Tensor:
        return 0.5 * torch.tanh(raw) * (v @ self.weight.mT)


def dense_layer(**options: object) -> Bedouin:
    common = {"mixer": Dense(8), "max_steps": 200, "dtype": torch.float64}
    return Bedouin(4, **(common | options))  # type: ignore[arg-type]


def test_an_unstructured_mixer_is_solved_by_picard() -> None:
    layer, x = dense_layer(), torch.randn(2, 5, 4, dtype=torch.float64)
    assert layer.solver == Picard()
    layer(x)
    assert layer.stats is not None and layer.stats.converged.all()
    assert layer.stats.conditioning is None
    layer.solver = Picard(rtol=1e-13, atol=1e-300)
    assert decode_gap(layer, x) < 1e-10


@pytest.mark.parametrize("solver", [Direct(), Jacobi()], ids=str)
def test_structure_is_required_by_the_constructor(solver: Solver) -> None:
    message = f"mixer Dense does not have, got {type(solver).__name__}.*: use Picard"
    with pytest.raises(TypeError, match=f"solver must .*{message}"):
        dense_layer(solver=solver)
    with pytest.raises(TypeError, match=f"the adjoint's solver must .*{message}"):
        dense_layer(adjoint=ImplicitAdjoint(solver))
    layer = dense_layer(solver=Picard())
    with pytest.raises(TypeError, match=f"solver must .*{message}"):
        layer.solver = solver
    assert layer.solver == Picard()


class Learned(StructuredMixer):
    """I - Q = m W^T W with learned rows W: a structured mixer that has parameters, a buffer of
    floating dtype and one of integers."""

    shift: Tensor
    sign: Tensor

    def __init__(self, d_inner: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(0.3 * torch.randn(2, d_inner, dtype=torch.float64))
        self.register_buffer("shift", torch.tensor(0.3, dtype=torch.float64))
        self.register_buffer("sign", torch.tensor(-1))

    def raw_size(self, d_inner: int) -> int:
        return 2

    def forward(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        assert self.shift.dtype == self.rows.dtype == raw.dtype
        U = self.rows.expand(*raw.shape[:-1], *self.rows.shape)
        strength = torch.sigmoid(raw + self.sign * self.shift)
        return torch.zeros_like(raw[..., :1]), U, torch.diag_embed(strength)


@pytest.mark.parametrize(
    ("kind", "solver", "name"),
    [
        (Learned, Direct(), "rows"),
        (Dense, Picard(rtol=1e-13, atol=1e-300), "weight"),
        (lambda p: LearnedBeta(), Direct(), "beta_max"),
    ],
)
@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_mixer_with_parameters_has_exact_gradients(
    kind: Any, solver: Solver, name: str, num_heads: int
) -> None:
    """Of parameters that all heads share."""
    options: dict[str, Any] = {"num_heads": num_heads, "max_steps": 200, "dtype": torch.float64}
    layer = Bedouin(4, mixer=kind(8 // num_heads), solver=solver, **options)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    exact = layer_gradients(layer, x, ImplicitAdjoint())
    unrolled = layer_gradients(layer, x, UnrolledAdjoint())
    assert exact[f"mixer.{name}"].abs().max() > 0
    for name, gradient in unrolled.items():
        assert_close(name, exact[name], gradient, 1e-9)


OWNERS: list[tuple[type[ChannelMixer], dict[str, Any]]] = [
    (Dense, {"solver": Picard(1e-6)}),
    (Dense, {"solver": Picard(1e-6), "adjoint": OneStepAdjoint()}),
    (Learned, {}),
    (Learned, {"solver": Picard(1e-6)}),
    (Learned, {"solver": Jacobi(1e-6), "adjoint": ImplicitAdjoint(Jacobi(1e-6))}),
    (Learned, {"adjoint": UnrolledAdjoint()}),
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "options"), OWNERS, ids=str)
def test_a_mixer_with_parameters_in_half_precision(
    kind: type[Any], options: dict[str, Any], dtype: torch.dtype, autocast: bool
) -> None:
    """Used in float32, with gradients in the dtype of the parameters; or under autocast."""
    own = torch.float32 if autocast else dtype
    layer = Bedouin(4, mixer=kind(8), max_steps=200, **options).to(own)
    reference = Bedouin(4, mixer=kind(8), max_steps=200, **options).to(torch.float64)
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 4).to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        output, state = layer(x, return_state=True)
        step, _ = layer.step(x[:, 0], state)
        found = layer_gradients(layer, x)
    assert output.dtype == step.dtype == dtype and state.ssm.dtype == torch.float32
    assert_close("output", output.double(), reference(x.double()), 0.05)
    expected = layer_gradients(reference, x.double())
    for name, gradient in found.items():
        if name.startswith("mixer"):
            assert gradient.dtype == own
            assert_close(name, gradient.double(), expected[name], 0.1)


def test_a_mixer_of_another_precision_than_the_layer() -> None:
    """As when it was made before the layer, whose dtype is not its own."""
    layer = Bedouin(4, mixer=Learned(8), dtype=torch.float32)
    layer(torch.randn(2, 5, 4)).sum().backward()
    assert isinstance(layer.mixer, Learned)
    assert layer.mixer.rows.grad is not None and layer.mixer.rows.grad.dtype == torch.float64
