"""Causal attention of transformers as the mixer of some layers, and the masks that it needs.

Letters: b batch, t time, s tokens before these, m hidden_size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding

from bedouin.integrations.hf.cache import CACHE_NAME, LAYER_TYPE, cache_layer
from bedouin.integrations.hf.configuration import BedouinConfig
from bedouin.packing import check_rows, document_begins


def attention_config(config: BedouinConfig) -> MistralConfig:
    """Mistral's configuration of the attention layers."""
    options: Any = config.attn
    return MistralConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=options["num_heads"],
        num_key_value_heads=options["num_kv_heads"],
        sliding_window=options["window"],
        rope_parameters={"rope_type": "default", "rope_theta": options["rope_theta"]},
    )


class BedouinAttention(MistralAttention):  # type: ignore[misc]
    """Causal grouped-query attention with rotary positions: Mistral's, which has no biases."""

    def __init__(self, config: BedouinConfig, layer_idx: int) -> None:
        super().__init__(attention_config(config), layer_idx)
        # the model's, in which set_attn_implementation sets the function that computes it
        self.config = config


def attention_options(
    config: BedouinConfig,
    rotary: MistralRotaryEmbedding,
    x: Tensor,  # (b, t, m)
    mask: Tensor | None,  # (b, t) bool
    seq_idx: Tensor | None,  # (b, t)
    cache: Cache | None,
) -> dict[str, Any]:
    """What every attention layer of one call is given: its mask and the rotary embedding. Positions
    count the real tokens of a document; which tokens before are real, and in a row's last document,
    is kept in the cache of the first Bedouin layer. Raises ValueError and TypeError for seq_idx and
    a cache that do not fit x."""
    first = config.attn_layers[0]
    kept = None if cache is None else cache_layer(cache, config.layer_types.index(LAYER_TYPE))
    s, seen = (0, None) if kept is None else (kept.num_tokens, kept.seen)
    if seen is not None and len(seen) != len(x):
        raise ValueError(
            f"past_key_values must be of {len(x)} rows, as the ids, got {len(seen)}: use its "
            "batch_select_indices or batch_repeat_interleave"
        )
    options: dict[str, Any] = {"attention_mask": None, "layer_idx": first, CACHE_NAME: cache}
    # a static layer has empty places, which transformers expects in a wholly static cache alone
    options["allow_is_causal_skip"] = cache is None or not cache.layers[first].is_compileable
    if mask is None and seq_idx is None and seen is None:
        positions = torch.arange(s, s + x.shape[1], device=x.device).unsqueeze(0)
    else:
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        seen = x.new_ones(x.shape[0], s, dtype=torch.bool) if seen is None else seen
        options["attention_mask"] = torch.cat([seen, real], 1)
        within = seen.sum(1, keepdim=True) + real.cumsum(1)
        if seq_idx is not None:
            check_rows("seq_idx", seq_idx, x, (torch.int32, torch.int64))
            begins = document_begins(seq_idx, mask)
            within = within - torch.where(begins, within - real.long(), 0).cummax(1).values
            document = begins.cumsum(1)  # the first one is that of the tokens before
            last = document[:, -1:]
            seen, real = seen & (last == 0), real & (document == last)
            of_places = torch.cat([document.new_zeros(seen.shape), document], 1)

            def same_document(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                # a static cache has places after the last token
                return of_places[b, q] == of_places[b, k.clamp(max=of_places.shape[1] - 1)]

            options["and_mask_function"] = same_document
        positions = (within - 1).clamp(min=0)
        if kept is not None:
            kept.seen = torch.cat([seen, real], 1)
    windowed = config.sliding_window is not None
    make_mask = create_sliding_window_causal_mask if windowed else create_causal_mask
    return {
        "attention_mask": make_mask(config=config, inputs_embeds=x, **options),
        "position_embeddings": rotary(x, positions),
    }
