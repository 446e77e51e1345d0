"""The option d_conv, and the options and names that earlier versions had."""

from typing import Any

import pytest
import torch

from bedouin import Bedouin, Decoder, FixedPointRNN, Initialization
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import Direct, ImplicitAdjoint, Jacobi, Picard, UnrolledAdjoint
from bedouin.state import BedouinState
from bedouin.testing import assert_close, decode_gap, layer_gradients, log_growth

M, T = 8, 6

CASES: list[dict[str, Any]] = [
    {"d_conv": 3, "num_heads": 2},
    {"d_conv": 1},
    {"d_conv": 4, "num_householder": 0, "feedback": (), "input_scale": "delta"},
]

cases = pytest.mark.parametrize("options", CASES, ids=lambda v: "-".join(map(str, v)))


def make(options: dict[str, Any], **others: Any) -> Bedouin:
    """Feedback is as large as other weights, so that its gradients are, too."""
    torch.manual_seed(0)
    known: dict[str, Any] = {"d_state": 3, "feedback_init": 1.0, "dtype": torch.float64}
    return Bedouin(M, **(known | options | others))


def random_state(layer: FixedPointLayer, b: int = 2) -> BedouinState:
    return BedouinState(*(0.3 * torch.randn_like(v) for v in layer.init_state(b)))


@cases
def test_all_ways_to_compute_agree(options: dict[str, Any]) -> None:
    """The sweep, one token after the other, chunks, a Decoder, and Jacobi, exact in t steps."""
    layer = make(options)
    x, state = torch.randn(2, T, M, dtype=torch.float64), random_state(layer)
    y, after = layer(x, state=state, return_state=True)
    assert layer.stats is not None and bool(layer.stats.converged.all())
    first, middle = layer(x[:, :2], state=state, return_state=True)
    second, end = layer(x[:, 2:], state=middle, return_state=True)
    assert_close("chunks", torch.cat([first, second], 1), y, 1e-10)
    for ours, theirs in zip(end, after, strict=True):
        assert_close("state", ours, theirs, 1e-10, atol=1e-14)
    assert decode_gap(layer, x) < 1e-10
    decoder = Decoder(layer, batch_size=2, state=state)
    assert_close("decoder", torch.stack([decoder(v).clone() for v in x.unbind(1)], 1), y, 1e-10)
    layer.solver = Jacobi(rtol=1e-13)
    assert_close("Jacobi", layer(x, state=state), y, 1e-10)
    assert int(layer.stats.num_steps.max()) <= T + 1
    assert log_growth(layer, x).isfinite().all()


@cases
def test_gradients(options: dict[str, Any]) -> None:
    """Of all parameters, the input and the state: the reverse sweep and its iterative solve against
    back-propagation through the plain loop."""
    layer = make(options)
    x, state = torch.randn(2, 4, M, dtype=torch.float64), random_state(layer)
    expected = layer_gradients(layer, x, UnrolledAdjoint(), solver=Direct(), state=state)
    jacobi = Jacobi(rtol=1e-13)
    ours = {
        "sweep": layer_gradients(layer, x, ImplicitAdjoint(), solver=Direct(), state=state),
        "exact": layer_gradients(layer, x, ImplicitAdjoint(), solver=jacobi, state=state),
        "iterative": layer_gradients(layer, x, ImplicitAdjoint(jacobi), solver=jacobi, state=state),
    }
    for way, grads in ours.items():
        for name, grad in grads.items():
            assert_close(f"{way}: {name}", grad, expected[name], 1e-8, atol=1e-12)


@cases
def test_padding_and_documents(options: dict[str, Any]) -> None:
    """Padding does not enter the window, and a document starts with an empty one."""
    layer, x = make(options), torch.randn(2, T, M, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    for solver in (Direct(), Jacobi(rtol=1e-13), Picard(rtol=1e-12)):
        layer.solver = solver
        y, after = layer(x, mask=mask, return_state=True)
        for i in range(2):
            alone, end = layer(x[i : i + 1, mask[i]], return_state=True)
            assert_close("row", y[i : i + 1, mask[i]], alone, 1e-9)
            for ours, theirs in zip(after[i : i + 1], end, strict=True):
                assert_close("state", ours, theirs, 1e-9, atol=1e-12)
    layer.solver = Direct()
    packed = layer(x[:1], cu_seqlens=torch.tensor([0, 2, 2, T]))
    assert_close("documents", packed, torch.cat([layer(x[:1, :2]), layer(x[:1, 2:])], 1), 1e-10)


@pytest.mark.interpreter
def test_kernels_take_convolutions() -> None:
    layer = make(CASES[0], dtype=torch.float32)
    x, state = torch.randn(2, 3, M), random_state(layer)
    expected = layer_gradients(layer, x, state=state)
    layer.backend = "triton"
    for name, grad in layer_gradients(layer, x, state=state).items():
        assert_close(name, grad, expected[name], 1e-4, atol=1e-5)


def test_a_width_of_one_is_silu_alone() -> None:
    layer = make({"d_conv": 1})
    plain = make({})
    plain.load_state_dict({n: v for n, v in layer.state_dict().items() if "extra" not in n})
    assert layer.conv is not None and not list(layer.conv.parameters())
    x = torch.randn(2, 5, M, dtype=torch.float64)
    window = layer(x, return_state=True)[1].conv
    assert window is not None and window.shape == (2, 0, 2 * M)
    assert not torch.allclose(layer(x), plain(x))


@pytest.mark.parametrize("decay", ["sigmoid", "griffin"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_the_vector_state(num_heads: int, decay: Any) -> None:
    layer = FixedPointRNN(M, num_heads=num_heads, decay=decay, d_conv=3, dtype=torch.float64)
    x = torch.randn(2, 4, M, dtype=torch.float64)
    expected = layer_gradients(layer, x, UnrolledAdjoint())
    for name, grad in layer_gradients(layer, x).items():
        assert_close(name, grad, expected[name], 1e-8, atol=1e-12)
    assert decode_gap(layer, x) < 1e-10


def test_errors_of_the_window() -> None:
    layer, plain = make({"d_conv": 3}), make({})
    with pytest.raises(ValueError, match="state.conv must be None, since the layer has no conv"):
        plain.step(torch.randn(2, M, dtype=torch.float64), layer.init_state(2))
    with pytest.raises(ValueError, match=r"state.conv must be a tensor of shape \(2, 2, 16\)"):
        layer.step(torch.randn(2, M, dtype=torch.float64), plain.init_state(2))
    with pytest.raises(ValueError, match="states of one layer, got one with 2 and one with 3"):
        BedouinState.cat([plain.init_state(1), layer.init_state(1)])


def test_recall_is_gone_and_says_so() -> None:
    assert not hasattr(Bedouin, "recall") and not hasattr(Bedouin(M), "recall")
    with pytest.raises(AttributeError, match=r"Bedouin has no recall: version 0\.2\.0 .* Tracking"):
        getattr(Bedouin, "recall")  # noqa: B009


@pytest.mark.parametrize(
    "option",
    [
        *("erase", "projection", "feedback_scope", "feedback_heads", "num_groups", "bounded_x"),
        "feedback_noise",
    ],
)
def test_options_of_earlier_versions_are_named(option: str) -> None:
    message = rf"Bedouin has no option {option}: version 0\.2\.0 .* use TrackingDeltaNet"
    with pytest.raises(TypeError, match=message):
        Bedouin(M, **{option: 1})  # type: ignore[arg-type]


def test_names_of_earlier_versions_in_other_options_are_named() -> None:
    for name in ("x", "erase"):
        with pytest.raises(ValueError, match=rf"feedback must not contain '{name}', .* 0\.2\.0"):
            Bedouin(M, feedback=iter(("delta", name)))  # type: ignore[arg-type]
    for option in ("memory_heads", "memory_rates", "memory_delta"):
        with pytest.raises(TypeError, match=rf"Initialization has no option {option}: .* 0\.2\.0"):
            Initialization(**{option: 1})
    with pytest.raises(TypeError, match=r"FixedPointRNN has no option projection: .* 0\.2\.0"):
        FixedPointRNN(M, projection="input")  # type: ignore[call-arg]


def test_the_output_of_the_paper_is_that_of_from_paper() -> None:
    for option in ("output", "bias"):
        with pytest.raises(TypeError, match=f"Bedouin has no option {option}: Bedouin.from_paper"):
            Bedouin(M, **{option: None})  # type: ignore[arg-type]
    layer = Bedouin.from_paper(M)
    assert (layer.norm, layer.raw_bias, layer.projected_sizes) == (None, None, {"x": 2 * M})
    assert Bedouin(M).projected_sizes == {"x": 2 * M, "z": 2 * M}
