"""Bedouin language models for transformers: configuration, backbone, causal language model, cache.

    from bedouin.integrations.hf import BedouinConfig, BedouinForCausalLM
    model = BedouinForCausalLM(BedouinConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2))
    model.generate(ids, max_new_tokens=20)

The import registers them with AutoConfig, AutoModel and AutoModelForCausalLM. Requires
transformers 5.16 or newer (pip install ".[hf]" in a clone).

Letters: b batch, t time, m hidden_size, d d_inner, n state_size, w conv_kernel, v vocab_size.
"""

import difflib
import inspect
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from bedouin.bedouin_layer import Bedouin
from bedouin.convolved import ConvolvedState, StateParts, layer_with_convolution
from bedouin.integrations.described import describe, restore
from bedouin.integrations.masks import row_mask
from bedouin.layer import FixedPointLayer
from bedouin.mixers import ChannelMixer, NoMixing
from bedouin.model import GatedMLP, find_method
from bedouin.short_convolution import ShortConvolution
from bedouin.solvers import Adjoint, Cap, Solver
from bedouin.solvers.base import unknown_option
from bedouin.state import BedouinState

_NEEDED = 'transformers 5.16 or newer: pip install "transformers>=5.16,<6"'

try:
    from huggingface_hub.dataclasses import strict
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.cache_utils import (
        STATIC_LAYER_TYPE_MAPPING,
        Cache,
        CacheLayerMixin,
        DynamicCache,
        LinearAttentionLayer,
    )
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.generation import GenerationConfig, GenerationMixin
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
    from transformers.modeling_utils import PreTrainedModel
except ImportError as error:
    raise ImportError(f"bedouin.integrations.hf needs {_NEEDED}", name="transformers") from error

_IS_RENAMED = "cache" in [field.name for field in fields(BaseModelOutputWithPast)]
_CACHE = "cache" if _IS_RENAMED else "past_key_values"
"""The name of the cache in outputs and in what `generate` passes, which transformers 5.24 has
changed. `forward` takes both."""

_LAYER_TYPE = "bedouin"
_LENGTHS = ("cu_seq_lens_k", "max_length_q", "max_length_k")
"""What DataCollatorWithFlattening also adds to a batch, and which follows from cu_seq_lens_q."""

_OF_DOCUMENTS = ("seq_idx", "position_ids", "cu_seq_lens_q")
"""The arguments that say where documents of a prompt are."""

_OPTIONS = [
    name
    for name in inspect.signature(Bedouin).parameters
    if name not in ("d_model", "layer_idx", "device", "dtype")
]
"""The options of a layer, all of which are fields of `BedouinConfig`, or other names of them."""

_OBJECTS = ("mixer", "solver", "adjoint", "max_steps")
"""Those that may be objects, and are dicts in a configuration."""

_OTHERWISE = {
    "d_inner": "give expand, since d_inner = expand * hidden_size",
    "head_dim": "give num_heads, since head_dim = expand * hidden_size / num_heads",
    "headdim": "give num_heads, since headdim = expand * hidden_size / num_heads",
    "d_intermediate": "give intermediate_size, which is None for no MLP",
    "mlp_expand": "give intermediate_size, the hidden width itself",
}
"""Options of other layers and models, and what says the same here."""

_OF_TRANSFORMERS = {
    *GenerationConfig().to_dict(),
    *("attn_implementation", "experts_implementation", "per_layer_config"),
    *("auto_map", "quantization_config", "tokenizer_class"),
}
"""Names that transformers gives to configurations without a field for them."""

_OF_THE_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")


class BedouinCacheLayer(LinearAttentionLayer, CacheLayerMixin):  # type: ignore[misc]
    """The state of one layer in a `Cache`: h as recurrent state, y as convolution state of width 1.

    Of a layer with a short convolution the window (b, channels, w - 1) is a second convolution
    state.
    `DynamicCache(config=model.config)` consists of these layers. Unlike transformers' layers of
    linear attention it counts its tokens, which chunked prefill and continued generation need, and
    gradients flow through it from one call to the next. It is not compiled, and cannot be cropped.
    """

    _layer_type = _LAYER_TYPE
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, **sizes: Any) -> None:
        # sizes: those of a static cache, which a state of constant size does not need
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=2)
        self.num_tokens = 0
        self.is_before_layer = False  # where the convolution is

    @property
    def state(self) -> BedouinState | ConvolvedState | None:
        """The state after the tokens so far; None before the first one."""
        if not self.has_previous_state[0]:
            return None
        window = self.conv_states[1].mT if self.is_conv_states_initialized[1] else None
        parts = StateParts(self.recurrent_states[0], self.conv_states[0].squeeze(-1), window)
        return parts.state(before=self.is_before_layer)

    def write(self, state: BedouinState | ConvolvedState, num_tokens: int) -> None:
        """Keep `state`, that after `num_tokens` more tokens."""
        # assigned, not copied: a graph of autograd may contain the previous tensors
        ssm, y, window = StateParts.of(state)
        self.is_before_layer = isinstance(state, ConvolvedState)
        if window is not None:
            self.conv_states[1], self.conv_kernel_size[1] = window.mT, window.shape[1]
        self.device, self.dtype = y.device, y.dtype
        self.recurrent_states[0], self.conv_states[0] = ssm, y.unsqueeze(-1)
        self.conv_kernel_size[0] = 1
        self.is_conv_states_initialized = {0: True, 1: window is not None}
        self.is_recurrent_states_initialized[0] = True
        # of both, since `Cache` asks whether all have one
        self.has_previous_state = {0: True, 1: True}
        self.is_initialized = True
        self.num_tokens += num_tokens

    def reset(self) -> None:
        self.has_previous_state, self.num_tokens = {0: False, 1: False}, 0

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        raise TypeError("a Bedouin layer has no keys and values: its cache is written by `write`")

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.write(self.state._each(lambda v: v.repeat_interleave(repeats, 0)), 0)

    def batch_select_indices(self, indices: Tensor) -> None:  # indices: (samples kept,)
        if self.state is not None:
            kept: Any = self.state[indices.to(self.device)]
            self.write(kept, 0)


STATIC_LAYER_TYPE_MAPPING[_LAYER_TYPE] = BedouinCacheLayer


@strict
class BedouinConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of `BedouinModel` and `BedouinForCausalLM`.

    Args:
        vocab_size, hidden_size, num_hidden_layers: v, m, and the number of blocks.
        intermediate_size: hidden width of a gated MLP after every mixer; None for no MLP.
        state_size, expand, num_heads, num_householder, beta_max, decay, input_scale, eigenvalues,
            feedback, feedback_norm, feedback_init, delta_from_x_init, rate_scale, output, bias:
            options of `bedouin.Bedouin`, where state_size is called d_state. With num_householder 0
            the mixer is `NoMixing`, and beta_max is 1.
        mixer, solver, adjoint, max_steps, backend, on_unconverged: options of `bedouin.Bedouin`,
            too. Objects of this library's types become dicts such as {"type": "Picard", "rtol":
            1e-4, ...}, which are saved; others raise TypeError. With a mixer, num_householder and
            beta_max are their defaults.
        erase, projection, feedback_scope: options of `bedouin.Bedouin`, too.
        conv_kernel, use_conv_bias: width and bias of a short convolution before each mixer, which
            is then a `bedouin.Convolved`; with projection="input" it is the layer's own, d_conv,
            without bias. None for no convolution.
        rms_norm_eps: epsilon of every norm.
        initializer_range: standard deviation of the initial embedding, MLPs and head; the mixers
            have their own initialization.
        tie_word_embeddings: whether the head shares the embedding's weight.
        use_cache: whether calls in evaluation return a cache unless they say otherwise.

    The names that mamba-ssm, `bedouin.Bedouin` and transformers' Mamba have for these are taken,
    too. What a file contains beyond them are attributes, as in every configuration of transformers;
    another name in a call raises TypeError, and so does one in a file that is an option of other
    layers or resembles one of these. A value of another type raises transformers'
    StrictDataclassError. What the mixers cannot take raises when a model is made.
    """

    # A new option of Bedouin is a field here, whose default is what it means to be absent from a
    # file. Files contain all fields.

    model_type = "bedouin"
    keys_to_ignore_at_inference = [_CACHE]
    attribute_map = {
        "conv_bias": "use_conv_bias",
        "d_conv": "conv_kernel",
        "d_model": "hidden_size",
        "d_state": "state_size",
        "layer_norm_epsilon": "rms_norm_eps",
        "n_layer": "num_hidden_layers",
        "n_layers": "num_hidden_layers",
        "nheads": "num_heads",
        "norm_eps": "rms_norm_eps",
        "num_layers": "num_hidden_layers",
    }

    vocab_size: int = 50280
    hidden_size: int = 768
    num_hidden_layers: int = 12
    intermediate_size: int | None = None
    state_size: int = 16
    expand: int | float = 2
    num_heads: int | None = None
    num_householder: int = 2
    beta_max: int | float = 1.0
    decay: str = "mamba"
    input_scale: str = "bounded_delta"
    eigenvalues: str = "positive"
    feedback: list[str] | tuple[str, ...] = ("delta", "B", "C", "mixer")
    feedback_norm: bool = True
    feedback_init: int | float = 0.1
    delta_from_x_init: int | float = 1.0
    rate_scale: int | float | list[int | float] | tuple[int | float, int | float] = 1.0
    output: str = "norm"
    bias: bool = True
    mixer: ChannelMixer | dict[str, Any] | None = None
    solver: Solver | dict[str, Any] | str = "auto"
    adjoint: Adjoint | dict[str, Any] | None = None
    max_steps: Cap | dict[str, Any] | int = 100
    backend: str = "auto"
    on_unconverged: str = "warn"
    erase: int | float = 0.0
    projection: str = "inner"
    feedback_scope: str = "head"
    conv_kernel: int | None = None
    use_conv_bias: bool = True
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        from_file = self.transformers_version is not None
        defaults = {field.name: field.default for field in fields(self)}
        for name, value in others.items():
            target = self.attribute_map.get(name)
            if target is None:
                self._check_unknown(name, list(defaults), from_file)
            elif getattr(self, target) not in (value, defaults[target]):
                raise ValueError(
                    f"{name} is another name of {target}: give one of them, got {value!r} and "
                    f"{getattr(self, target)!r}"
                )
            else:
                setattr(self, target, value)
        # lists, which tuples become in a file
        self.feedback = list(self.feedback)
        if isinstance(self.rate_scale, tuple):
            self.rate_scale = list(self.rate_scale)
        super().__post_init__(**others)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, describe(name, value) if name in _OBJECTS else value)

    def _check_unknown(self, name: str, options: list[str], from_file: bool) -> None:
        """Raise TypeError for a name that is neither an option nor one that may be ignored."""
        if name in _OTHERWISE:
            raise TypeError(f"BedouinConfig has no option {name!r}: {_OTHERWISE[name]}")
        if name.startswith("_") or hasattr(type(self), name) or name in _OF_TRANSFORMERS:
            return
        resembles = difflib.get_close_matches(name, options, n=1, cutoff=0.85)
        if resembles or not from_file:
            raise TypeError(unknown_option("BedouinConfig", name, options))

    @property
    def layer_types(self) -> list[str]:
        """The type of each layer's cache, from which DynamicCache makes them."""
        return [_LAYER_TYPE] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Nothing: transformers would admit its own types of layers only."""

    def make_mixer(self, layer_idx: int) -> nn.Module:
        """The layer that the options describe. Raises ValueError for options without effect, and
        what `Bedouin` and `Convolved` raise."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        options |= {name: restore(name, options[name]) for name in _OBJECTS}
        rates = self.rate_scale
        options["rate_scale"] = tuple(rates) if isinstance(rates, list) else rates
        reflections = {name: options.pop(name) for name in ("num_householder", "beta_max")}
        if options["mixer"] is not None:
            for name, value in reflections.items():
                if value != getattr(BedouinConfig, name):
                    raise ValueError(
                        f"{name} must be {getattr(BedouinConfig, name)} beside a mixer, got "
                        f"{value}: it is an option of the mixer"
                    )
        elif self.num_householder:
            options |= reflections
        elif self.beta_max != 1:
            raise ValueError(
                f"beta_max must be 1 with num_householder=0, got {self.beta_max}: there are no "
                "reflections"
            )
        else:
            options["mixer"] = NoMixing()
        if self.conv_kernel is None and not self.use_conv_bias:
            raise ValueError(
                "use_conv_bias must be True with conv_kernel=None: there is no convolution"
            )
        options |= {"d_model": self.hidden_size, "layer_idx": layer_idx}
        width = options.pop("d_conv")
        return layer_with_convolution(Bedouin, options, width, self.use_conv_bias)


class BedouinBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """x + mixer(norm(x)), then x + mlp(norm(x)) if there is an MLP."""

    def __init__(self, config: BedouinConfig, layer_idx: int) -> None:
        super().__init__()
        m, eps = config.hidden_size, config.rms_norm_eps
        self.layer_idx = layer_idx
        self.norm = nn.RMSNorm(m, eps=eps)
        self.mixer: Any = config.make_mixer(layer_idx)
        self.mlp: nn.Sequential | None = None
        if config.intermediate_size is not None:
            mlp = GatedMLP(m, config.intermediate_size / m)
            self.mlp = nn.Sequential(nn.RMSNorm(m, eps=eps), mlp)

    def forward(
        self,
        x: Tensor,  # (b, t, m)
        past_key_values: Cache | None = None,
        mask: Tensor | None = None,  # (b, t) bool
        seq_idx: Tensor | None = None,  # (b, t)
    ) -> Tensor:  # (b, t, m)
        x = x + self._mix(self.norm(x), past_key_values, mask, seq_idx)
        if self.mlp is None:
            return x
        update: Tensor = self.mlp(x)
        return x + update

    def _mix(
        self,
        x: Tensor,  # (b, t, m)
        cache: Cache | None,
        mask: Tensor | None,  # (b, t)
        seq_idx: Tensor | None,  # (b, t)
    ) -> Tensor:  # (b, t, m)
        output: Tensor
        if cache is None:
            output = self.mixer(x, mask=mask, seq_idx=seq_idx)
            return output
        kept = _cache_layer(cache, self.layer_idx)
        state = kept.state
        if state is not None and x.shape[1] == 1 and mask is None and seq_idx is None:
            output, state = find_method(self.mixer, "step")(x.squeeze(1), state)
            output = output.unsqueeze(1)
        else:
            packing = {"mask": mask, "seq_idx": seq_idx}
            output, state = self.mixer(x, state=state, return_state=True, **packing)
        kept.write(state, x.shape[1])
        return output


def _cache_layer(cache: Cache, layer_idx: int) -> BedouinCacheLayer:
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if not isinstance(layer, BedouinCacheLayer):
        raise TypeError(
            f"past_key_values must have a BedouinCacheLayer for layer {layer_idx}, got "
            f"{type(cache).__name__} with {type(layer).__name__}: use "
            "DynamicCache(config=model.config)"
        )
    return layer


class BedouinPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What both models share: initialization, checkpointing, names for loading and saving."""

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

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the parameters of `module` that no checkpoint has set."""
        super()._init_weights(module)
        if not isinstance(module, FixedPointLayer | ShortConvolution):
            return
        loaded = [p for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
        values = [p.clone() for p in loaded]
        # after the children, whose projections transformers has filled with its own values
        module.reset_parameters()
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
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,  # (b, t)
        attention_mask: Tensor | None = None,  # (b, t) or (b, tokens before + t)
        inputs_embeds: Tensor | None = None,  # (b, t, m)
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        seq_idx: Tensor | None = None,  # (b, t)
        position_ids: Tensor | None = None,  # (b, t)
        cu_seq_lens_q: Tensor | None = None,  # (documents + 1,)
        cache: Cache | None = None,
        **lengths: Any,
    ) -> Any:
        """`BaseModelOutputWithPast`, or with return_dict=False a tuple.

        attention_mask: True or 1 for real tokens, padding anywhere; with a cache it may also cover
            the tokens before, as generate's does.
        past_key_values, cache: `DynamicCache(config=model.config)` by one of its names, which is
            updated in place; None: a new one if use_cache. In training, use_cache is False unless
            it is given.
        seq_idx, cu_seq_lens_q, position_ids: packed documents, as DataCollatorWithFlattening
            describes them, the first that is given counting. A document starts where seq_idx
            changes or position_ids is 0. The cache holds the state after a row's last document.
            Padding by attention_mask belongs to no document. Beside that mask position_ids do not
            describe documents, as in transformers, whose generate passes both.

        Raises TypeError for unknown names, ValueError for ids and embeddings both or neither, for
        two caches, for attention_mask of another shape, and what the layers raise.
        """
        _check_names(lengths)
        if self._choose(output_attentions, "output_attentions"):
            raise ValueError("output_attentions must be False: a Bedouin layer has no attention")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = row_mask(attention_mask, x)
        seq_idx = _documents(x, mask, seq_idx, cu_seq_lens_q, position_ids)
        cache = self._cache(_one_of(past_key_values, cache), use_cache)
        wants_hidden = self._choose(output_hidden_states, "output_hidden_states")
        hidden: list[Tensor] = []
        for layer in self.layers:
            hidden.append(x)
            x = layer(x, past_key_values=cache, mask=mask, seq_idx=seq_idx)
        x = self.norm(x)
        all_hidden = (*hidden, x) if wants_hidden else None
        found = BaseModelOutputWithPast(x, cache, all_hidden)
        return found if self._choose(return_dict, "return_dict") else found.to_tuple()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def _cache(self, past: Cache | None, use_cache: bool | None) -> Cache | None:
        if use_cache is None:
            use_cache = past is not None or (self.config.use_cache and not self.training)
        if self.gradient_checkpointing and self.training:
            # the recomputation of a block would continue from the state after it
            if past is not None:
                raise ValueError(
                    "past_key_values must be None under gradient checkpointing in training: call "
                    "model.gradient_checkpointing_disable() or model.eval()"
                )
            return None
        return DynamicCache(config=self.config) if use_cache and past is None else past

    def _choose(self, value: bool | None, name: str) -> bool:
        return bool(getattr(self.config, name) if value is None else value)


class BedouinForCausalLM(BedouinPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """`BedouinModel` with a linear head, a loss and `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BedouinConfig) -> None:
        super().__init__(config)
        self.model = BedouinModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,  # (b, t)
        attention_mask: Tensor | None = None,  # (b, t) or (b, tokens before + t)
        inputs_embeds: Tensor | None = None,  # (b, t, m)
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,  # (b, t), -100 where there is no loss
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        seq_idx: Tensor | None = None,  # (b, t)
        position_ids: Tensor | None = None,  # (b, t)
        cu_seq_lens_q: Tensor | None = None,  # (documents + 1,)
        cache: Cache | None = None,
        **others: Any,
    ) -> Any:
        """`CausalLMOutputWithPast`, or with return_dict=False a tuple.

        labels: input_ids themselves; the loss shifts them. logits_to_keep: the number of last
        tokens, or the indices of tokens, whose logits (b, kept, v) are computed; 0 for all. Other
        arguments are those of `BedouinModel.forward` and of transformers' loss. `Trainer` drops the
        columns of a data set that have no name here.
        """
        for_loss = {name: others.pop(name) for name in _OF_THE_LOSS if name in others}
        return_dict = self.model._choose(return_dict, "return_dict")
        found = self.model(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=_one_of(past_key_values, cache),
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            seq_idx=seq_idx,
            position_ids=position_ids,
            cu_seq_lens_q=cu_seq_lens_q,
            **others,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            sizes = {"vocab_size": self.config.vocab_size}
            loss = self.loss_function(logits=logits, labels=labels, **sizes, **for_loss)
        past, hidden = getattr(found, _CACHE), found.hidden_states
        output = CausalLMOutputWithPast(loss, logits, past, hidden)
        return output if return_dict else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,  # (b, t)
        *,
        inputs_embeds: Tensor | None = None,  # (b, t, m)
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The arguments of `forward` for the next call of `generate`, which reads from the names
        here that embeddings and, by `kwargs`, the arguments of `forward` are admitted."""
        given = {"inputs_embeds": inputs_embeds, "is_first_iteration": is_first_iteration}
        inputs = super().prepare_inputs_for_generation(input_ids, **given, **kwargs)
        if kwargs.get(_CACHE) is not None and not is_first_iteration:
            # a token after the prompt is real and in its last document: `step` decodes it
            for name in ("attention_mask", *_OF_DOCUMENTS):
                inputs.pop(name, None)
        return inputs

    def _prepare_position_ids_for_generation(self, *args: Any, **options: Any) -> None:
        """None: positions that a caller does not give would be read as those of a document."""


def _one_of(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache, which has two names."""
    if past_key_values is not None and cache is not None:
        raise ValueError("past_key_values and cache are names of the same: give one of them")
    return cache if past_key_values is None else past_key_values


def _check_names(given: dict[str, Any]) -> None:
    """Raise TypeError for names that `BedouinModel.forward` neither has nor may ignore."""
    for name in given:
        if name not in _LENGTHS:
            own = list(inspect.signature(BedouinModel.forward).parameters)
            raise TypeError(unknown_option("forward", name, [*own[1:-1], *_LENGTHS]))


def _documents(
    x: Tensor,  # (b, t, m)
    mask: Tensor | None,  # (b, t)
    seq_idx: Tensor | None,  # (b, t)
    cu_seq_lens_q: Tensor | None,  # (documents + 1,)
    position_ids: Tensor | None,  # (b, t)
) -> Tensor | None:  # (b, t)
    """The index of each token's document; None for one document a row."""
    if seq_idx is not None:
        return seq_idx
    if cu_seq_lens_q is not None:
        b, t = x.shape[:2]
        if b != 1:
            raise ValueError(
                f"cu_seq_lens_q needs a single row of documents, got {b} rows: use seq_idx"
            )
        ends: list[int] = cu_seq_lens_q.tolist()
        if ends[:1] != [0] or ends[-1] != t or ends != sorted(ends):
            raise ValueError(
                f"cu_seq_lens_q must ascend from 0 to t = {t}, got {ends!s:.60}: it holds the "
                "places where documents begin, and t"
            )
        tokens = torch.arange(t, device=x.device)
        return torch.searchsorted(cu_seq_lens_q[1:].long(), tokens, right=True).unsqueeze(0)
    if position_ids is None or mask is not None:
        return None
    return (position_ids == 0).cumsum(-1).expand(x.shape[:2])


AutoConfig.register(BedouinConfig.model_type, BedouinConfig, exist_ok=True)
AutoModel.register(BedouinConfig, BedouinModel, exist_ok=True)
AutoModelForCausalLM.register(BedouinConfig, BedouinForCausalLM, exist_ok=True)
