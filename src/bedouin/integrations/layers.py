"""The layers that other libraries' models may have, by name."""

from typing import Any

from bedouin.checks import one_of
from bedouin.layers.bedouin import Bedouin
from bedouin.layers.delta_net import GatedDeltaNet
from bedouin.layers.tracking import Tracker, TrackingDeltaNet

LAYERS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Bedouin, GatedDeltaNet, Tracker, TrackingDeltaNet)
}


def make_layer(layer: str, d_model: int, **options: Any) -> Any:
    """The layer of this name, one of `LAYERS`. Raises ValueError for another name, and what the
    layer raises."""
    return LAYERS[one_of("layer", layer, tuple(LAYERS))](d_model, **options)
