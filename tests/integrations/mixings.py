"""Layers with which the adapters are tested, as options of `BedouinLayer` and `BedouinMixer`."""

from typing import Any

import torch
from torch import Tensor

from bedouin.solvers import Direct, ImplicitAdjoint

VOCAB = 24
SMALL: dict[str, Any] = {"tracker_dim": 4, "tracker_state": 3}
OTHERS: list[dict[str, Any]] = [
    {"layer": "TrackingDeltaNet", "num_heads": 2, "feedback_noise": 0.0, **SMALL},
    {"layer": "GatedDeltaNet", "d_conv": None},
    {"layer": "Tracker", "num_trackers": 2, "feedback_noise": 0.0, **SMALL},
    {"layer": "rnn", "num_heads": 2},
    {"layer": "paper", "d_state": 4, "solver": Direct(), "adjoint": ImplicitAdjoint()},
]
NOISY = [mixing | {"feedback_noise": 3.0} for mixing in (OTHERS[0], OTHERS[2])]


def sized(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with fewer states than a Bedouin has by default."""
    return options if "layer" in options else {"d_state": 4, **options}


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
