"""Causal attention of transformers as the mixer of some layers, and the masks that it needs.

Letters: b batch, t time, s tokens before these, m hidden_size.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding

from bedouin.integrations.hf.cache import CACHE_NAME, LAYER_TYPE, cache_layer
from bedouin.packing import document_begins
from bedouin.solvers.base import check_count, check_number, unknown_option

if TYPE_CHECKING:
    from bedouin.integrations.hf.configuration import BedouinConfig

_DEFAULTS = {"num_kv_heads": None, "window": None, "rope_theta": 1e4}


def check_attention(config: "BedouinConfig") -> dict[str, Any]:
    """The options of the attention layers, completed. Raises ValueError for those that do not fit,
    and for layers that the model does not have."""
    layers, n, m = config.attn_layers, config.num_hidden_layers, config.hidden_size
    if len(set(layers)) != len(layers) or not set(layers) < set(range(n)):
        raise ValueError(
            f"attn_layers must be different indices from 0 to num_hidden_layers - 1 = {n - 1}, not "
            f"all of them, got {layers}: a model of attention alone is one of transformers'"
        )
    given = config.attn or {}
    for name in given:
        if name not in ("num_heads", *_DEFAULTS):
            raise ValueError(unknown_option("attn", name, ["num_heads", *_DEFAULTS]))
    if "num_heads" not in given:
        raise ValueError(
            f'attn must have num_heads beside attn_layers, got {given}: use attn={{"num_heads": 8}}'
        )
    options = _DEFAULTS | given
    heads, kv_heads = options["num_heads"], options["num_kv_heads"] or options["num_heads"]
    check_count("attn['num_heads']", heads)
    check_count("attn['num_kv_heads']", kv_heads)
    check_count("attn['window']", options["window"], 2, optional=True)
    check_number("attn['rope_theta']", options["rope_theta"], 1, 1e12, open_low=True)
    if m % (2 * heads):
        raise ValueError(
            f"attn['num_heads'] must divide hidden_size = {m} into heads of an even width, got "
            f"{heads}: use a divisor of {m} / 2"
        )
    if heads % kv_heads:
        raise ValueError(
            f"attn['num_kv_heads'] must divide attn['num_heads'] = {heads}, got {kv_heads}"
        )
    return options | {"num_kv_heads": kv_heads}


def attention_config(config: "BedouinConfig") -> MistralConfig:
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

    def __init__(self, config: "BedouinConfig", layer_idx: int) -> None:
        super().__init__(attention_config(config), layer_idx)
        # the model's, in which set_attn_implementation sets the function that computes it
        self.config = config


def attention_options(
    config: "BedouinConfig",
    rotary: MistralRotaryEmbedding,
    x: Tensor,  # (b, t, m)
    mask: Tensor | None,  # (b, t) bool
    seq_idx: Tensor | None,  # (b, t)
    cache: Cache | None,
) -> dict[str, Any]:
    """What every attention layer of one call is given: its mask and the rotary embedding.

    Positions count the real tokens of a document. Which tokens before are real, and in a row's last
    document, is kept in the cache of the first Bedouin layer, so that later calls need not say it.
    """
    first = config.attn_layers[0]
    kept = None if cache is None else cache_layer(cache, config.layer_types.index(LAYER_TYPE))
    s, seen = (0, None) if kept is None else (kept.num_tokens, kept.seen)
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
            begins = document_begins(seq_idx, mask)
            begun = torch.where(begins, within - real.long(), 0).cummax(1).values
            within = within - begun
            document = begins.cumsum(1)  # the first one is that of the tokens before
            last = document[:, -1:]
            seen, real = seen & (last == 0), real & (document == last)
            of_places = torch.cat([document.new_zeros(seen.shape), document], 1)

            def same_document(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                # a static cache has places after the last token
                kept_k = k.clamp(max=of_places.shape[1] - 1)
                return of_places[b, q] == of_places[b, kept_k]

            options["and_mask_function"] = same_document
        positions = (within - 1).clamp(min=0)
        if kept is not None:
            kept.seen = torch.cat([seen, real], 1)
    make_mask = create_causal_mask
    if config.sliding_window is not None:
        make_mask = create_sliding_window_causal_mask
    return {
        "attention_mask": make_mask(config=config, inputs_embeds=x, **options),
        "position_embeddings": rotary(x, positions),
    }
