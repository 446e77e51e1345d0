"""Small models of bedouin.integrations.hf for its tests."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.16")

from tests.integrations.mixings import OTHERS  # noqa: E402

from bedouin import Initialization  # noqa: E402
from bedouin.integrations.hf import BedouinConfig, BedouinForCausalLM  # noqa: E402

PAD, VOCAB = 0, 31

CONVOLVED: dict[str, Any] = {
    "conv_kernel": 3,
    "num_heads": 2,
    "num_householder": 0,
    "input_scale": "delta",
    "feedback": ["delta", "B"],
    "initialization": Initialization(0.5, (8, 0.001)),
}
"""Options that are not the defaults."""

HYBRID: dict[str, Any] = CONVOLVED | {
    "num_hidden_layers": 3,
    "attn_layers": [1],
    "attn": {"num_heads": 4, "num_kv_heads": 2},
}
WINDOWED: dict[str, Any] = HYBRID | {"attn": {"num_heads": 2, "window": 3}}
LAYERS = [{"type": v["layer"], **{n: w for n, w in v.items() if n != "layer"}} for v in OTHERS]
TRACKING: dict[str, Any] = {"layer": LAYERS[0]}
TRACKER: dict[str, Any] = {
    "layer": LAYERS[2],
    "num_hidden_layers": 3,
    "attn_layers": [1],
    "attn": {"num_heads": 2},
}
MIXINGS = {
    "defaults": {},
    "convolved": CONVOLVED,
    "hybrid": HYBRID,
    "windowed": WINDOWED,
    "tracking": TRACKING,
    "memory": {"layer": "GatedDeltaNet"},
    "tracker": TRACKER,
    "rnn": {"layer": LAYERS[3]},
    "paper": {"layer": LAYERS[4]},
}


def make_config(**options: Any) -> BedouinConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2}
    if "layer" not in options:
        sizes["state_size"] = 4
    return BedouinConfig(**(sizes | {"pad_token_id": PAD, "intermediate_size": 12} | options))


def make_model(**options: Any) -> BedouinForCausalLM:
    """In evaluation and float64, in which greedy choices are the same whatever the path."""
    config = make_config(initializer_range=0.5, **options)
    model: BedouinForCausalLM = BedouinForCausalLM(config).double().eval()
    return model


def with_noise(mixing: dict[str, Any]) -> dict[str, Any]:
    """The options with noise of feedback, where the layer has such noise."""
    layer = mixing.get("layer")
    if not isinstance(layer, dict) or "feedback_noise" not in layer:
        return mixing
    return mixing | {"layer": layer | {"feedback_noise": 3.0}}


def mixers(model: BedouinForCausalLM) -> list[Any]:
    return [block.mixer for block in model.model.layers]


def left_padded(ids: Tensor, pads: list[int]) -> tuple[Tensor, Tensor]:
    """Row i of the ids after pads[i] tokens of padding, cut on the right, and the mask."""
    rows, t = [], ids.shape[1] + max(pads)
    mask = torch.ones(len(ids), t, dtype=torch.long)
    for i, count in enumerate(pads):
        padding = torch.full((count,), PAD)
        rows.append(torch.cat([padding, ids[i], ids[i]])[:t])
        mask[i, :count] = 0
    return torch.stack(rows), mask
