"""What the adapters share: layers by name, their calls, and masks.

Letters: b batch, t time, m channels.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.checks import find_method, one_of
from bedouin.layers.bedouin import Bedouin
from bedouin.layers.delta_net import GatedDeltaNet
from bedouin.layers.tracking import Tracker, TrackingDeltaNet
from bedouin.state import RecurrentState

LAYERS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Bedouin, GatedDeltaNet, Tracker, TrackingDeltaNet)
}


def make_layer(layer: str, d_model: int, **options: Any) -> Any:
    """The layer of this name. Raises ValueError for another name, and what the layer raises."""
    return LAYERS[one_of("layer", layer, tuple(LAYERS))](d_model, **options)


def mix(
    layer: Any,
    x: Tensor,  # (b, t, m)
    state: RecurrentState | None,
    mask: Tensor | None,  # (b, t) bool
    **documents: Tensor | None,  # seq_idx (b, t) or cu_seqlens (documents + 1,)
) -> tuple[Tensor, Any]:  # (b, t, m) and the state after x
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


def row_mask(
    attention_mask: Tensor | None,  # (b, t) or (b, tokens before + t)
    x: Tensor,  # (b, t, m)
) -> Tensor | None:  # (b, t) bool
    """The last t columns of a mask of ones and zeros. Raises ValueError for another shape."""
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
