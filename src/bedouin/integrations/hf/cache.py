"""The state of a layer in a cache of transformers. Letters: b batch."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from bedouin.state import RecurrentState

# From transformers 5.24 on outputs and what `generate` passes call it `cache`.
_IS_RENAMED = "cache" in [field.name for field in fields(BaseModelOutputWithPast)]
CACHE_NAME = "cache" if _IS_RENAMED else "past_key_values"
LAYER_TYPE = "bedouin"


class BedouinCacheLayer(LinearAttentionLayer, CacheLayerMixin):  # type: ignore[misc]
    """The state of one layer in a `Cache`, whose tensors are the recurrent states, in their order.

    `DynamicCache(config=model.config)` consists of these layers, and of transformers' own for
    layers of attention. It counts its tokens, gradients flow through it, and it cannot be cropped.

    seen: (b, num_tokens) bool, which tokens so far attention in later calls sees: the real ones of
        a row's last document. None: all.
    """

    _layer_type = LAYER_TYPE
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, **sizes: Any) -> None:
        # sizes: those of a static cache, which a state of constant size does not need
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self)
        self.num_tokens = 0
        self.seen: Tensor | None = None

    @property
    def state(self) -> RecurrentState | None:
        """The state after the tokens so far; None before the first one."""
        found = self.recurrent_states.values()
        return self._kind._make(found) if self.has_previous_state[0] else None

    def write(self, state: RecurrentState, num_tokens: int) -> None:
        """Keep `state`, that after `num_tokens` more tokens."""
        # assigned, not copied: a graph of autograd may contain the previous tensors
        self._kind, self.recurrent_states = type(state), dict(enumerate(state.tensors))
        self.device, self.dtype = state.tensors[0].device, state.tensors[0].dtype
        self.number_of_states, of_each = len(state.tensors), self.recurrent_states
        self.conv_states = dict.fromkeys(of_each)
        self.is_conv_states_initialized = dict.fromkeys(of_each, False)
        self.is_recurrent_states_initialized = dict.fromkeys(of_each, True)
        self.has_previous_state = dict.fromkeys(of_each, True)
        self.is_initialized = True
        self.num_tokens += num_tokens

    def reset(self) -> None:
        self.has_previous_state = dict.fromkeys(self.recurrent_states, False)
        self.num_tokens, self.seen = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing, for 0 tokens; before transformers 5.24 a positive number is that of the tokens
        to keep. Raises ValueError where tokens would be removed."""
        kept = tokens_to_remove if tokens_to_remove > 0 else self.num_tokens + tokens_to_remove
        if kept < self.num_tokens:
            raise ValueError(
                f"tokens_to_remove must be 0, got {tokens_to_remove} after {self.num_tokens} "
                "tokens: a recurrent state cannot be taken back to an earlier token. Go on from a "
                "copy.deepcopy of the cache that was made there, and let models of attention alone "
                "propose tokens as assistant_model"
            )

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        raise TypeError("a Bedouin layer has no keys and values: its cache is written by `write`")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda v: v.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:  # indices: (samples kept,)
        self._each(lambda v: v[indices.to(v.device)])

    def reorder_cache(self, beam_idx: Tensor) -> None:  # beam_idx: (b,)
        self.batch_select_indices(beam_idx)

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.write(self.state._each(change), 0)
        if self.seen is not None:
            self.seen = change(self.seen)


STATIC_LAYER_TYPE_MAPPING[LAYER_TYPE] = BedouinCacheLayer


def cache_layer(cache: Cache, layer_idx: int) -> BedouinCacheLayer:
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if not isinstance(layer, BedouinCacheLayer):
        raise TypeError(
            f"past_key_values must have a BedouinCacheLayer for layer {layer_idx}, got "
            f"{type(cache).__name__} with {type(layer).__name__}: use "
            "DynamicCache(config=model.config)"
        )
    return layer


def one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache, which has two names."""
    if past_key_values is not None and cache is not None:
        raise ValueError("past_key_values and cache are names of the same: give one of them")
    return cache if past_key_values is None else past_key_values
