"""Files of earlier versions load strictly and compute what they computed then.

Write the file of a new version with `python -P tests/test_saved.py tests/saved/NAME.pt`, and keep
the older ones.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bedouin import Bedouin, FixedPointRNN, LowRank, SequenceModel
from bedouin.baselines import LSTM
from bedouin.layers.fixed_point import FixedPointLayer

FILES = sorted((Path(__file__).parent / "saved").glob("*.pt"))
SMALL: dict[str, Any] = {"expand": 1, "dtype": torch.float64}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "Bedouin": lambda: Bedouin(4, d_state=2, **SMALL),
    "Bedouin with heads": lambda: Bedouin(4, d_state=2, num_heads=2, decay="griffin", **SMALL),
    "paper": lambda: Bedouin.from_paper(4, d_state=2, **SMALL),
    "low rank": lambda: Bedouin(4, d_state=2, mixer=LowRank(1), feedback=("B",), **SMALL),
    "FixedPointRNN": lambda: FixedPointRNN(4, **SMALL),
    "SequenceModel": lambda: SequenceModel(
        5, 4, [Bedouin(4, d_state=2, **SMALL)], mlp_expand=1, dtype=torch.float64
    ),
}


def save(path: str) -> None:
    saved = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        is_model = isinstance(model, SequenceModel)
        x = torch.randint(5, (2, 3)) if is_model else torch.randn(2, 3, 4, dtype=torch.float64)
        model(x)  # one training call, which the extra state counts
        with torch.no_grad():
            saved[name] = {"x": x, "y": model.eval()(x), "state_dict": model.state_dict()}
    torch.save(saved, path)


def test_there_is_a_file() -> None:
    assert FILES


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_saved_model_loads_and_computes_the_same(path: Path, name: str) -> None:
    saved, model = torch.load(path, weights_only=True)[name], MODELS[name]().eval()
    model.load_state_dict(saved["state_dict"], strict=True)
    with torch.no_grad():
        torch.testing.assert_close(model(saved["x"]), saved["y"], rtol=1e-9, atol=1e-12)
    assert [m.num_calls for m in model.modules() if isinstance(m, FixedPointLayer)] == [1]


@pytest.mark.parametrize("name", ["Bedouin", "SequenceModel"])
def test_a_state_dict_without_the_counter_loads(name: str) -> None:
    model, other = MODELS[name](), MODELS[name]()
    values = {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    assert len(values) == len(list(model.parameters()))
    assert other.load_state_dict(values, strict=True) == ([], [])
    for actual, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(actual, expected)
    values.popitem()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        other.load_state_dict(values)


@pytest.mark.parametrize("make", [Bedouin, FixedPointRNN, LSTM])
@pytest.mark.parametrize("place", ["", "blocks.0.mixer."])
def test_parameters_of_convolved_name_the_version_that_reads_them(
    make: Callable[[int], nn.Module], place: str
) -> None:
    layer = make(4)
    model = SequenceModel(5, 4, [layer]) if place else layer
    values = {k: v for k, v in model.state_dict().items() if not k.startswith(place)}
    values |= {f"{place}conv.weight": torch.zeros(4, 4), f"{place}conv.bias": torch.zeros(4)}
    values |= {f"{place}layer.{k}": v for k, v in layer.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(
            ValueError,
            match=rf"parameters of a {make.__name__} under '{place}', got those of a Convolved: "
            "bedouin 0.1.0 is the last version that reads it; use that version, or train a layer",
        ):
            model.load_state_dict(values, strict=strict)


if __name__ == "__main__":
    save(sys.argv[1])
