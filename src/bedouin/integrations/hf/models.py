"""Backbone and models of Bedouin layers, and of attention, for transformers.

Letters: b batch, t time, s tokens before these, m hidden_size, v vocab_size.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.initialization import normal_
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding
from transformers.utils import can_return_tuple, logging

from bedouin.integrations.hf.cache import CACHE_NAME, LAYER_TYPE, cache_layer, one_cache
from bedouin.integrations.hf.configuration import BedouinConfig
from bedouin.integrations.layers import mix, row_mask
from bedouin.integrations.linear_cross_entropy import choose_kernel, linear_cross_entropy
from bedouin.kernels.checks import unknown_option
from bedouin.layers.common import RecurrentLayer, without_noise
from bedouin.layers.convolution import ShortConvolution
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.model import ResidualBlock
from bedouin.packing import INDICES, check_bounds, check_rows, document_begins
from bedouin.wrapped import is_untouched

_LOGGER: Any = logging.get_logger(__name__)

# What DataCollatorWithFlattening also adds to a batch, and which follows from cu_seq_lens_q.
_LENGTHS = ("cu_seq_lens_k", "max_length_q", "max_length_k")
_OF_THE_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")


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
    is kept in the cache of the first Bedouin layer. Raises for a cache that does not fit."""
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
            check_rows("seq_idx", seq_idx, x, INDICES)
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


class BedouinBlock(GradientCheckpointingLayer, ResidualBlock):  # type: ignore[misc]
    """A block whose states, or keys and values, are in a cache."""

    def __init__(self, config: BedouinConfig, layer_idx: int) -> None:
        m, hidden = config.hidden_size, config.intermediate_size
        attends = layer_idx in config.attn_layers
        mixer = (BedouinAttention if attends else BedouinConfig.make_mixer)(config, layer_idx)
        expand = None if hidden is None else hidden / m
        ResidualBlock.__init__(self, m, mixer, expand, config.rms_norm_eps)
        self.layer_idx = layer_idx
        # known by a mark, since transformers initializes no module without parameters of its own
        if attends:
            mixer.o_proj.ends_branch = True
        if self.mlp is not None:
            self.mlp[1].out_proj.ends_branch = True  # type: ignore[union-attr]

    def forward(
        self,
        x: Tensor,  # (b, t, m)
        past_key_values: Cache | None = None,
        mask: Tensor | None = None,  # (b, t) bool
        seq_idx: Tensor | None = None,  # (b, t)
        attention: dict[str, Any] | None = None,  # of `attention_options`
    ) -> Tensor:  # (b, t, m)
        normed = self.norm(x)
        if isinstance(self.mixer, BedouinAttention):
            mixed, _ = self.mixer(normed, **(attention or {}), **{CACHE_NAME: past_key_values})
        elif past_key_values is None:
            mixed = self.mixer(normed, mask=mask, seq_idx=seq_idx)
        else:
            kept = cache_layer(past_key_values, self.layer_idx)
            mixed, state = mix(self.mixer, normed, kept.state, mask, seq_idx=seq_idx)
            kept.write(state, x.shape[1])
        return self._residual(x, mixed)


class BedouinPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What all models share: initialization, checkpointing, names for loading and saving."""

    config: BedouinConfig
    base_model_prefix = "model"
    _no_split_modules = ["BedouinBlock"]
    supports_gradient_checkpointing = True
    _is_stateful = True
    _can_compile_fullgraph = False
    # quantizers leave these modules alone: the solve needs the matrix of y_proj
    _keep_in_fp32_modules = ["y_proj"]
    # the counter of random caps, which tools that save parameters alone leave out
    _keys_to_ignore_on_load_missing = [r"\._extra_state$"]

    @property
    def _supports_sdpa(self) -> bool:
        """Whether transformers chooses "sdpa" by default."""
        return bool(self.config.attn_layers)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the parameters of `module` that no checkpoint has set."""
        super()._init_weights(module)
        layers = self.config.num_hidden_layers
        branches = layers if self.config.intermediate_size is None else 2 * layers
        scale = branches**-0.5 if self.config.rescale_prenorm_residual else 1.0
        if scale != 1 and getattr(module, "ends_branch", False):
            normal_(module.weight, std=self.config.initializer_range * scale)
        if not isinstance(module, FixedPointLayer | RecurrentLayer | ShortConvolution):
            return
        if next(module.parameters(recurse=False), None) is None:
            return  # it consists of layers, which have their initial values
        loaded = [p for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
        values = [p.clone() for p in loaded]
        # after the children, whose projections transformers has filled with its own values
        module.reset_parameters()
        if not isinstance(module, ShortConvolution):
            module.out_proj.weight.mul_(scale)
        for parameter, value in zip(loaded, values, strict=True):
            parameter.copy_(value)


class BedouinModel(BedouinPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: BedouinConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(BedouinBlock(config, i) for i in layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.attn_layers:
            self.rotary_emb = MistralRotaryEmbedding(attention_config(config))
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,  # (b, t)
        attention_mask: Tensor | None = None,  # (b, t) or (b, tokens before + t)
        inputs_embeds: Tensor | None = None,  # (b, t, m)
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        seq_idx: Tensor | None = None,  # (b, t)
        position_ids: Tensor | None = None,  # (b, t)
        cu_seq_lens_q: Tensor | None = None,  # (documents + 1,)
        cache: Cache | None = None,
        **lengths: Any,
    ) -> Any:
        """`BaseModelOutputWithPast`, or with return_dict=False a tuple.

        attention_mask: True or 1 for real tokens, padding anywhere; with a cache it may also cover
            the tokens before, as generate's does.
        past_key_values, cache: `DynamicCache(config=model.config)` by one of its names, updated in
            place; None: a new one if use_cache, which is False in training unless it is given.
        seq_idx, cu_seq_lens_q, position_ids: packed documents, as DataCollatorWithFlattening
            describes them, the first that is given counting. A document starts where seq_idx
            changes or position_ids is 0; padding belongs to none. The cache holds the state after
            a row's last document, whose keys alone later tokens see. Beside attention_mask
            position_ids do not describe documents, as in transformers, whose generate passes both.

        Raises TypeError for unknown names, ValueError for ids and embeddings both or neither, for
        two caches, for attention_mask of another shape, and what the layers raise.
        """
        for name in lengths:
            if name not in _LENGTHS:
                own = list(inspect.signature(BedouinModel.forward).parameters)
                raise TypeError(unknown_option("forward", name, [*own[1:-1], *_LENGTHS]))
        config = self.config
        if config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions must be False: no attention weights are returned")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = row_mask(attention_mask, x)
        b, t = x.shape[:2]
        # seq_idx (b, t): the index of each token's document; None for one document a row
        if seq_idx is None and cu_seq_lens_q is not None:
            if b != 1:
                raise ValueError(
                    f"cu_seq_lens_q needs a single row of documents, got {b} rows: use seq_idx"
                )
            check_bounds("cu_seq_lens_q", cu_seq_lens_q.tolist(), t)
            tokens = torch.arange(t, device=x.device)
            seq_idx = torch.searchsorted(cu_seq_lens_q[1:].long(), tokens, right=True).unsqueeze(0)
        elif seq_idx is None and position_ids is not None and mask is None:
            seq_idx = (position_ids == 0).cumsum(-1).expand(b, t)
        cache = one_cache(past_key_values, cache)
        if use_cache is None:
            use_cache = cache is not None or (config.use_cache and not self.training)
        if self.gradient_checkpointing and self.training:
            # the recomputation of a block would continue from the state after it
            if cache is not None:
                raise ValueError(
                    "past_key_values must be None under gradient checkpointing in training: call "
                    "model.gradient_checkpointing_disable() or model.eval()"
                )
        elif use_cache and cache is None:
            cache = DynamicCache(config=config)
        attention = None
        if config.attn_layers:
            attention = attention_options(config, self.rotary_emb, x, mask, seq_idx, cache)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        hidden: list[Tensor] = []
        for layer in self.layers:
            hidden.append(x)
            x = layer(x, cache, mask, seq_idx, attention)
        x = self.norm(x)
        return BaseModelOutputWithPast(x, cache, (*hidden, x) if output_hidden_states else None)


class BedouinForCausalLM(BedouinPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """`BedouinModel` with a linear head, a loss and `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: BedouinConfig) -> None:
        super().__init__(config)
        self.model = BedouinModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,  # (b, t)
        attention_mask: Tensor | None = None,  # (b, t) or (b, tokens before + t)
        inputs_embeds: Tensor | None = None,  # (b, t, m)
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,  # (b, t), -100 where there is no loss
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        seq_idx: Tensor | None = None,  # (b, t)
        position_ids: Tensor | None = None,  # (b, t)
        cu_seq_lens_q: Tensor | None = None,  # (documents + 1,)
        cache: Cache | None = None,
        skip_logits: bool | None = None,
        **others: Any,
    ) -> Any:
        """`CausalLMOutputWithPast`, or with return_dict=False a tuple.

        labels: input_ids themselves; the loss shifts them. logits_to_keep: the number of last
            tokens, or the indices of tokens, whose logits (b, kept, v) are computed; 0 for all.
        skip_logits: whether head and loss are computed together, as fuse_linear_cross_entropy says,
            and logits are None; None: in training with labels, unless lm_head has hooks. If all
            labels are ignored that loss is 0, where transformers' is NaN.
        Other arguments are those of `BedouinModel.forward` and of transformers' loss. `Trainer`
        drops the columns of a data set that have no name here.

        Raises what `BedouinModel.forward` and `linear_cross_entropy` raise, and ValueError for
        skip_logits without labels or fuse_linear_cross_entropy, or where it cannot be.
        """
        fused, skips = self.config.fuse_linear_cross_entropy, skip_logits
        if skips is None:
            # hooks on the head run in its call alone, which gives logits
            is_training = self.training and is_untouched(self.lm_head)
            skips = bool(fused and labels is not None and is_training)
        if skips and (labels is None or not fused):
            raise ValueError(
                "skip_logits=True needs labels and config.fuse_linear_cross_entropy, got "
                f"{fused} and {'no ' if labels is None else ''}labels: see BedouinConfig"
            )
        for_loss = {name: others.pop(name) for name in _OF_THE_LOSS if name in others}
        given: dict[str, Any] = {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        given |= {"use_cache": use_cache, "output_hidden_states": output_hidden_states}
        given |= {"seq_idx": seq_idx, "position_ids": position_ids, "return_dict": True}
        given |= {"past_key_values": one_cache(past_key_values, cache)}
        found = self.model(input_ids, **given, cu_seq_lens_q=cu_seq_lens_q, **others)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        x = found.last_hidden_state[:, kept]
        logits = None if skips else self.lm_head(x)
        loss = None
        if skips:
            loss = self._fused_loss(x, labels, **for_loss)
        elif labels is not None:
            for_loss["vocab_size"] = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, **for_loss)
        return CausalLMOutputWithPast(loss, logits, getattr(found, CACHE_NAME), found.hidden_states)

    def generate(self, *args: Any, **options: Any) -> Any:
        """`generate` of transformers' GenerationMixin, without the noise of feedback_noise."""
        with without_noise():
            return super().generate(*args, **options)

    def _fused_loss(
        self,
        x: Tensor,  # (b, t, m)
        labels: Tensor | None,  # (b, t)
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,  # (b, t)
        ignore_index: int = -100,
    ) -> Tensor:  # ()
        """transformers' ForCausalLMLoss from hidden states."""
        head, fused = self.lm_head, self.config.fuse_linear_cross_entropy
        is_plain = type(head) is nn.Linear and is_untouched(head)
        if not is_plain or self.loss_function is not ForCausalLMLoss:
            raise ValueError(
                "fuse_linear_cross_entropy needs an nn.Linear as lm_head and transformers' loss, "
                f"and no hooks on the head, got {type(head).__name__} and {self.loss_function!r}: "
                "set model.config.fuse_linear_cross_entropy = False"
            )
        kernel = choose_kernel(fused, x.device)
        if fused in (True, "auto") and not torch.compiler.is_compiling():
            _LOGGER.warning_once(f"fuse_linear_cross_entropy={fused!r}: {kernel} computes the loss")
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.flatten().to(x.device)
        options: Any = {"ignore_index": ignore_index, "kernel": kernel}
        total = linear_cross_entropy(x.flatten(0, 1), head.weight, target, head.bias, **options)
        if num_items_in_batch is None:
            num_items_in_batch = (target != ignore_index).sum().clamp_min(1)
        return total / torch.as_tensor(num_items_in_batch, device=x.device)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,  # (b, t)
        *,
        inputs_embeds: Tensor | None = None,  # (b, t, m)
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The arguments of `forward` for the next call of `generate`, by these names."""
        given = {"inputs_embeds": inputs_embeds, "is_first_iteration": is_first_iteration}
        inputs = super().prepare_inputs_for_generation(input_ids, **given, **kwargs)
        # transformers 5.16 does not say of chunks of a prompt that they are the first iteration
        decodes = not is_first_iteration and kwargs.get("next_sequence_length") is not None
        if kwargs.get(CACHE_NAME) is not None and decodes:
            # a token after the prompt is real and in its last document: `step` decodes it
            for name in ("attention_mask", "seq_idx", "position_ids", "cu_seq_lens_q"):
                inputs.pop(name, None)
        return inputs

    def _prepare_position_ids_for_generation(self, *args: Any, **options: Any) -> None:
        """None: positions that a caller does not give would be read as those of a document."""


class BedouinForSequenceClassification(GenericForSequenceClassification, BedouinPreTrainedModel):  # type: ignore[misc]
    """`BedouinModel` with transformers' head for a row of config.num_labels classes, read at the
    last token that is not config.pad_token_id."""

    accepts_loss_kwargs = False


class BedouinForTokenClassification(GenericForTokenClassification, BedouinPreTrainedModel):  # type: ignore[misc]
    """`BedouinModel` with transformers' head for every token, of config.num_labels classes."""

    accepts_loss_kwargs = False
