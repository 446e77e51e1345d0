"""Layers as those of flash-linear-attention: their call, their cache, their packed documents.

    layer = BedouinLayer(hidden_size=512, layer_idx=0)
    o, _, past_key_values = layer(x, attention_mask, past_key_values, use_cache=True)

    for i, block in enumerate(model.model.layers):  # of GLAForCausalLM and others
        block.attn = BedouinLayer(hidden_size=512, layer_idx=i)

Tested with flash-linear-attention 0.6 (pip install ".[fla]"), which it does not import.

Letters: b batch, t time, m hidden_size.
"""

from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from bedouin.checks import check_bool, one_of
from bedouin.integrations.layers import layer_options, make_layer, mix, row_mask
from bedouin.layers.common import without_noise
from bedouin.state import RecurrentState

Mode = Literal["chunk", "fused_recurrent"]


class BedouinLayer(nn.Module):
    """A layer, its attribute `layer`, with the constructor, call and cache of FLA's layers.

    Args:
        hidden_size, layer_idx, norm_eps: as of FLA's layers. A layer_idx is needed for a cache.
        mode: "chunk" or "fused_recurrent"; both are the layer's one exact sweep.
        layer: the layer: "bedouin", "paper" (`Bedouin.from_paper`), "rnn" (`FixedPointRNN`),
            "tracking" (`TrackingDeltaNet`), these names themselves, "GatedDeltaNet" or "Tracker".
        use_short_conv, conv_size: whether the layer has a short convolution, and its width, which
            counts only with the first. None: not in a fixed-point layer.
        options: other options of the layer.

    Raises TypeError for d_model, which is hidden_size, and what the layer raises.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        mode: Mode = "chunk",
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        layer: str = "Bedouin",
        use_short_conv: bool | None = None,
        conv_size: int = 4,
        **options: Any,
    ) -> None:
        super().__init__()
        self.mode = one_of("mode", mode, get_args(Mode))
        self.hidden_size, self.layer_idx = hidden_size, layer_idx
        if "d_model" in options:
            raise TypeError(
                f"d_model is hidden_size here, got d_model={options['d_model']!r}: give that alone"
            )
        usual = layer_options(layer)
        if use_short_conv is None:
            use_short_conv = usual.get("d_conv") is not None and "d_conv" not in options
        check_bool("use_short_conv", use_short_conv)
        if use_short_conv and "d_conv" in options:
            raise ValueError(
                "d_conv and use_short_conv are both a short convolution: give one, got d_conv="
                f"{options['d_conv']!r} and use_short_conv=True"
            )
        if use_short_conv or "d_conv" in usual:
            options = {"d_conv": conv_size if use_short_conv else None, **options}
        options |= {"layer_idx": layer_idx, "norm_eps": norm_eps}
        self.layer = make_layer(layer, hidden_size, **options)

    def forward(
        self,
        hidden_states: Tensor,  # (b, t, m)
        attention_mask: Tensor | None = None,  # (b, t) or (b, tokens before + t)
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        *,
        cu_seqlens: Tensor | None = None,  # (documents + 1,)
        **others: Any,
    ) -> tuple[Tensor, None, Any]:
        """(b, t, m) -> (output (b, t, m), None, past_key_values).

        attention_mask: 1 for real tokens, padding anywhere, also within the documents of
            cu_seqlens; of more than t columns the last t.
        past_key_values: fla.models.utils.Cache, whose recurrent_state is the tuple of the state's
            tensors before the tokens, and with use_cache after them, of each row or document. Calls
            with a cache and without gradients have no noise of feedback_noise.
        others: what FLA's models pass to every layer, without effect.

        Raises ValueError for a mask of another shape, output_attentions, a cache without layer_idx.
        """
        if output_attentions:
            raise ValueError("output_attentions must be False: a Bedouin layer has no attention")
        mask = row_mask(attention_mask, hidden_states)
        state = None if past_key_values is None else self._read(past_key_values)
        # with gradients a cache serves truncated backpropagation, without them a generation
        generates = past_key_values is not None and not torch.is_grad_enabled()
        with without_noise() if generates else nullcontext():
            output, after = mix(self.layer, hidden_states, state, mask, cu_seqlens=cu_seqlens)
        if use_cache and past_key_values is not None:
            new = {"recurrent_state": after.tensors, "offset": hidden_states.shape[1]}
            past_key_values.update(**new, layer_idx=self.layer_idx)
        return output, None, past_key_values

    def _read(self, cache: Any) -> RecurrentState | None:
        """The state before the tokens; None: zeros."""
        if self.layer_idx is None:
            raise ValueError(
                "layer_idx must be an int for calls with past_key_values, got None: use "
                "BedouinLayer(..., layer_idx=i)"
            )
        kept = cache[self.layer_idx] if len(cache) > self.layer_idx else None
        tensors = None if kept is None else kept["recurrent_state"]
        return None if tensors is None else self.layer.state_type._make(tensors)
