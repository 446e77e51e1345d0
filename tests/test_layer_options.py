"""The option d_conv, and the options and names that earlier versions had."""

from typing import Any

import pytest
import torch

from bedouin import Bedouin, FixedPointRNN, Initialization
from bedouin.state import BedouinState

M = 8


def make(options: dict[str, Any], **others: Any) -> Bedouin:
    """Feedback is as large as other weights, so that its gradients are, too."""
    torch.manual_seed(0)
    known: dict[str, Any] = {"d_state": 3, "feedback_init": 1.0, "dtype": torch.float64}
    return Bedouin(M, **(known | options | others))


def test_a_width_of_one_is_silu_alone() -> None:
    layer = make({"d_conv": 1})
    plain = make({})
    plain.load_state_dict({n: v for n, v in layer.state_dict().items() if "extra" not in n})
    assert layer.conv is not None and not list(layer.conv.parameters())
    x = torch.randn(2, 5, M, dtype=torch.float64)
    window = layer(x, return_state=True)[1].conv
    assert window is not None and window.shape == (2, 0, 2 * M)
    assert not torch.allclose(layer(x), plain(x))


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
