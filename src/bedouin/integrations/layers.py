"""What the adapters share: layers by name, their calls, and masks.

Letters: b batch, t time, m channels.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from bedouin.checks import find_method, one_of
from bedouin.layers.bedouin import FIXED_BY_PAPER, Bedouin, FixedPointRNN
from bedouin.layers.delta_net import GatedDeltaNet
from bedouin.layers.tracking import Tracker, TrackingDeltaNet

_KINDS = (Bedouin, FixedPointRNN, GatedDeltaNet, Tracker, TrackingDeltaNet)
LAYERS: dict[str, Any] = {
    **{kind.__name__: kind for kind in _KINDS},
    "Bedouin.from_paper": Bedouin.from_paper,
}
SHORT_NAMES = {
    "bedouin": "Bedouin",
    "paper": "Bedouin.from_paper",
    "rnn": "FixedPointRNN",
    "tracking": "TrackingDeltaNet",
}


def layer_name(layer: Any) -> str:
    """The name in LAYERS of a layer by this or by its short name. Raises ValueError for another."""
    name: str = one_of("layer", layer, (*LAYERS, *SHORT_NAMES))
    return SHORT_NAMES.get(name, name)


def layer_options(layer: str) -> dict[str, Any]:
    """The options of the layer of this name, and their defaults."""
    name = layer_name(layer)
    found = dict(inspect.signature(LAYERS[name]).parameters)
    if name == "Bedouin.from_paper":
        del found["options"]  # those of Bedouin that are not fixed
        free = inspect.signature(Bedouin).parameters
        fixed = (*FIXED_BY_PAPER, "mixer")
        found = {option: v for option, v in free.items() if option not in fixed} | found
    return {option: v.default for option, v in found.items() if option != "d_model"}


def make_layer(layer: str, d_model: int, **options: Any) -> Any:
    """The layer of this name. Raises ValueError for another name, and what the layer raises."""
    return LAYERS[layer_name(layer)](d_model, **options)


def mix(
    layer: Any, x: Tensor, state: Any, mask: Tensor | None, **documents: Tensor | None
) -> tuple[Tensor, Any]:  # (b, t, m), (b, t) bool -> (b, t, m) and the state after x
    """A call from a state. A single token after others is decoded by `step`; where its mask is
    False the output is 0 and the state stays."""
    is_token = x.shape[1] == 1 and all(v is None for v in documents.values())
    if isinstance(mask, Tensor):  # the layer says what is wrong with another mask
        is_token = is_token and mask.shape == x.shape[:2] and mask.dtype == torch.bool
    if state is None or not is_token:
        output, after = layer(x, state=state, return_state=True, mask=mask, **documents)
        return output, after
    output, after = find_method(layer, "step")(x.squeeze(1), state)
    if mask is not None:
        output = torch.where(mask, output, 0.0)
        pairs = zip(after.tensors, state.tensors, strict=True)
        after = state._make(
            torch.where(mask.view(-1, *(1,) * (new.dim() - 1)), new, old) for new, old in pairs
        )
    return output.unsqueeze(1), after


def row_mask(attention_mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The last t columns of a mask (b, t or more) as bool; ValueError for another shape."""
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
