"""The configuration of Bedouin's models for transformers."""

import inspect
from dataclasses import fields
from typing import Any, get_args

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig

from bedouin.bedouin_layer import Bedouin
from bedouin.checks import one_of
from bedouin.integrations.convolution import convolution_options
from bedouin.integrations.described import describe, restore
from bedouin.integrations.hf.cache import CACHE_NAME, LAYER_TYPE
from bedouin.integrations.linear_cross_entropy import Kernel
from bedouin.mixers import ChannelMixer, NoMixing
from bedouin.parameterization import Initialization
from bedouin.solvers import Adjoint, Cap, Solver
from bedouin.solvers.base import unknown_option

_OPTIONS = [
    name
    for name in inspect.signature(Bedouin).parameters
    if name not in ("d_model", "layer_idx", "device", "dtype")
]
"""The options of a layer, all of which are fields of `BedouinConfig`, or other names of them."""

_OBJECTS = ("mixer", "solver", "adjoint", "max_steps", "initialization")
"""Those that may be objects, and are dicts in a configuration."""

_EARLIER = {"delta_from_x_init": "delta_from_x", "rate_scale": "rates"}
"""Fields of earlier configurations, and those of `Initialization` that have taken their place."""

_FUSED: Any = (False, True, "auto", *get_args(Kernel))

_OF_TRANSFORMERS = {
    *GenerationConfig().to_dict(),
    *("attn_implementation", "experts_implementation", "per_layer_config"),
    *("auto_map", "quantization_config", "tokenizer_class"),
}
"""Names that transformers gives to configurations without a field for them."""


@strict
class BedouinConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of `BedouinModel` and `BedouinForCausalLM`.

    Args:
        vocab_size, hidden_size, num_hidden_layers: v, m, and the number of blocks.
        intermediate_size: hidden width of a gated MLP after every mixer; None for no MLP.
        state_size, expand, num_heads, num_householder, beta_max, decay, input_scale, eigenvalues,
            feedback, feedback_norm, feedback_init, feedback_scope, output, bias, erase, projection:
            options of `bedouin.Bedouin`, where state_size is called d_state. With num_householder 0
            the mixer is `NoMixing`, and beta_max is 1.
        mixer, solver, adjoint, max_steps, initialization, backend, on_unconverged: options of
            `bedouin.Bedouin`, too. Objects of this library's types become dicts such as {"type":
            "Picard", "rtol": 1e-4, ...}, which are saved; others raise TypeError. With a mixer,
            num_householder and beta_max are their defaults.
        conv_kernel: width of the convolution in each mixer, d_conv, which needs projection="input";
            None for no convolution.
        rms_norm_eps: epsilon of every norm.
        initializer_range: standard deviation of the initial embedding, MLPs and head; the mixers
            have their own initialization.
        tie_word_embeddings: whether the head shares the embedding's weight.
        use_cache: whether calls in evaluation return a cache unless they say otherwise.
        fuse_linear_cross_entropy: whether a call with labels in training computes head and loss
            together, without logits, which are then None: "torch" in chunks of tokens, "liger" or
            "fla" by the kernels of Liger Kernel or flash-linear-attention; "auto" or True by the
            first of liger, fla and torch that can run, which a warning names.

    The names that mamba-ssm, `bedouin.Bedouin` and transformers' Mamba have for these are taken,
    too. What a file contains beyond them are attributes, as in every configuration of transformers;
    another name in a call raises TypeError. A value of another type raises transformers'
    StrictDataclassError. What the mixers cannot take raises when a model is made.
    """

    # A new option of Bedouin is a field here, whose default is what it means to be absent from a
    # file. Files contain all fields.

    model_type = "bedouin"
    keys_to_ignore_at_inference = [CACHE_NAME]
    attribute_map = {
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
    output: str = "norm"
    bias: bool = True
    mixer: ChannelMixer | dict[str, Any] | None = None
    solver: Solver | dict[str, Any] | str = "auto"
    adjoint: Adjoint | dict[str, Any] | None = None
    max_steps: Cap | dict[str, Any] | int = 100
    initialization: Initialization | dict[str, Any] | None = None
    backend: str = "auto"
    on_unconverged: str = "warn"
    erase: int | float = 0.0
    projection: str = "inner"
    feedback_scope: str = "head"
    conv_kernel: int | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    fuse_linear_cross_entropy: bool | str = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        earlier = {new: others.pop(old) for old, new in _EARLIER.items() if old in others}
        if earlier:
            self.initialization = Initialization(**earlier)
        from_file = self.transformers_version is not None
        if from_file:
            others.pop("use_conv_bias", None)  # files of version 0.1.0 have it
        defaults = {field.name: field.default for field in fields(self)}
        for name, value in others.items():
            target = self.attribute_map.get(name)
            if target is None:
                known = hasattr(type(self), name) or name in _OF_TRANSFORMERS
                if not (from_file or known or name.startswith("_")):
                    raise TypeError(unknown_option("BedouinConfig", name, list(defaults)))
            elif getattr(self, target) not in (value, defaults[target]):
                raise ValueError(
                    f"{name} is another name of {target}: give one of them, got {value!r} and "
                    f"{getattr(self, target)!r}"
                )
            else:
                setattr(self, target, value)
        fused: Any = self.fuse_linear_cross_entropy
        one_of("fuse_linear_cross_entropy", fused, _FUSED)
        # a list, which a tuple becomes in a file
        self.feedback = list(self.feedback)
        super().__post_init__(**others)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, describe(name, value) if name in _OBJECTS else value)

    @property
    def layer_types(self) -> list[str]:
        """The type of each layer's cache, from which DynamicCache makes them."""
        return [LAYER_TYPE] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Nothing: transformers would admit its own types of layers only."""

    def make_mixer(self, layer_idx: int) -> Bedouin:
        """The layer that the options describe. Raises ValueError for options without effect, and
        what `Bedouin` raises."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        options |= {name: restore(name, options[name]) for name in _OBJECTS}
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
        options |= convolution_options("conv_kernel", options["d_conv"], options)
        return Bedouin(self.hidden_size, layer_idx=layer_idx, **options)
