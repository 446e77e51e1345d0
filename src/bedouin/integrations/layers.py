"""What the adapters share: layers by name, and masks. Letters: b batch, t time."""

from typing import Any

from torch import Tensor

from bedouin.bedouin_layer import Bedouin
from bedouin.checks import one_of
from bedouin.layers.gated_delta_net import GatedDeltaNet
from bedouin.layers.tracker import Tracker
from bedouin.layers.tracking import TrackingDeltaNet
from bedouin.parameters import convolved_error

LAYERS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Bedouin, GatedDeltaNet, Tracker, TrackingDeltaNet)
}


def make_layer(layer: str, d_model: int, convolution: str = "d_conv", **options: Any) -> Any:
    """The layer of this name, one of `LAYERS`. convolution: the name of d_conv for messages.

    Raises ValueError for another name and for a `Bedouin` with d_conv unless projection is "input":
    with "inner", a convolution was `Convolved` around the layer up to version 0.1.0. Raises what
    the layer raises, too.
    """
    kind = LAYERS[one_of("layer", layer, tuple(LAYERS))]
    width, projection = options.get("d_conv"), options.get("projection", "inner")
    if kind is Bedouin and width is not None and projection == "inner":
        expected = f'{convolution} needs projection="input"'
        raise convolved_error(expected, f"{convolution}={width!r} and projection={projection!r}")
    return kind(d_model, **options)


def row_mask(
    attention_mask: Tensor | None,  # (b, t) or (b, tokens before + t)
    x: Tensor,  # (b, t, m)
) -> Tensor | None:  # (b, t) bool
    """The columns of a mask of ones and zeros that belong to x, which are the last ones.

    Raises ValueError for another shape.
    """
    if attention_mask is None:
        return None
    b, t = x.shape[:2]
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != b or shape[1] < t:
        raise ValueError(
            f"attention_mask must have shape (b, t) = {(b, t)}, or more columns with a cache, got "
            f"{shape}: 1 for real tokens, 0 for padding"
        )
    return attention_mask[:, shape[1] - t :].bool()
