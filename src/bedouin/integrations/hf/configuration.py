"""The configuration of Bedouin's models for transformers.

Solvers, adjoints, caps, mixers and initializations are entries of a file of JSON, such as
{"type": "Picard", "rtol": 1e-4}. A class of a user is saved by its module's name.
"""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, get_args

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig

from bedouin.checks import one_of
from bedouin.integrations.hf.cache import CACHE_NAME, LAYER_TYPE
from bedouin.integrations.layers import layer_name, layer_options, make_layer
from bedouin.integrations.linear_cross_entropy import Kernel
from bedouin.kernels.checks import check_count, check_number, unknown_option
from bedouin.layers.bedouin import Bedouin
from bedouin.layers.common import REMOVED
from bedouin.layers.mixers import ChannelMixer
from bedouin.layers.options import Initialization, choose_num_heads
from bedouin.solvers import Adjoint, Cap, Solver

# The options of a layer, all of which are fields of `BedouinConfig`, or other names of them.
_OPTIONS = [
    name
    for name in inspect.signature(Bedouin).parameters
    if name not in ("d_model", "layer_idx", "device", "dtype")
]
# The options of a layer that are no entries of `layer`.
_OF_ALL = ("d_model", "layer_idx", "norm_eps", "device", "dtype", "read_size")
# Those that may be objects, and are dicts in a configuration.
_OBJECTS = ("mixer", "solver", "adjoint", "max_steps", "initialization")
# Fields of configurations of version 0.2.0, and entries of their `initialization`, that have been
# removed. Every file of that version has them; only with these values is there still such a layer.
_REMOVED: dict[str, Any] = {
    **{"erase": 0.0, "projection": "inner", "output": "norm", "bias": True},
    **{"feedback_scope": "head", "feedback_heads": None, "num_groups": None},
    **{"bounded_x": False, "feedback_noise": 0.0},
}
_REMOVED_INITIALIZATION = {"memory_heads": 0, "memory_rates": None, "memory_delta": 1.0}
_FUSED: Any = (False, True, "auto", *get_args(Kernel))
# Names that transformers gives to configurations without a field for them.
_OF_TRANSFORMERS = {
    *GenerationConfig().to_dict(),
    *("attn_implementation", "experts_implementation", "per_layer_config"),
    *("auto_map", "quantization_config", "tokenizer_class"),
}
# hidden_size, num_hidden_layers and intermediate_size of the presets.
_SIZES = {"60m": (512, 6, 1984), "130m": (768, 8, 2624), "370m": (1024, 16, 3456)}
# The options of attention that need not be given, and their defaults.
_ATTENTION = {"num_kv_heads": None, "window": None, "rope_theta": 1e4}
_REMOTE = "modeling_bedouin"
_REMOTE_CODE = """# transformers runs this with trust_remote_code=True; the import registers models.
from bedouin.integrations.hf import BedouinConfig  # noqa: F401
"""

# What is described by its type and the arguments of its constructor, which are all attributes.
Described = Adjoint | Cap | ChannelMixer | Initialization | Solver


def describe(name: str, value: Any) -> Any:
    """An object as {"type": ..., and all options}, a tuple as a list; any other value as it is. A
    dict is checked and completed. Raises TypeError for a type that a file cannot name or an option
    that is no attribute, and what the type raises for its options."""
    value = restore(name, value)
    if not isinstance(value, Described):
        return list(value) if isinstance(value, tuple) else value
    kind, options = type(value), inspect.signature(type(value)).parameters
    if _types().get(_name(kind)) is not kind:
        raise TypeError(
            f"{name} must be one of {', '.join(_types())} to be saved, got {kind.__qualname__}: "
            f"define that class at the top level of a module, or set {name} of the layers once the "
            "model is made"
        )
    for option in options:
        if not hasattr(value, option):
            raise TypeError(
                f"{name} must have its options as attributes to be saved, got {kind.__qualname__} "
                f"without {option}: write self.{option} = {option} in its __init__"
            )
    found = {option: describe(f"{name}.{option}", getattr(value, option)) for option in options}
    return {"type": _name(kind), **found}


def restore(name: str, value: Any) -> Any:
    """The inverse of `describe`. Raises TypeError for an unknown type, and what the type raises."""
    if not isinstance(value, dict):
        return value
    options = {option: restore(f"{name}.{option}", v) for option, v in value.items()}
    kind, types = options.pop("type", None), _types()
    if not isinstance(kind, str) or kind not in types:
        raise TypeError(
            f"{name} must be an object or a dict whose 'type' is one of {', '.join(types)}, got "
            f"{value!r}: import the module of another class before its file is read"
        )
    return types[kind](**options)


def _types() -> dict[str, type]:
    """The classes that a file can name: those at the top level of the modules imported so far."""
    found, kinds = {}, list(get_args(Described))
    for kind in kinds:
        kinds += kind.__subclasses__()
        if not inspect.isabstract(kind) and "<locals>" not in kind.__qualname__:
            found[_name(kind)] = kind
    return found


def _name(kind: type) -> str:
    """The name of a class in a file: alone for this library's, else behind its module's."""
    own = kind.__module__.partition(".")[0] == "bedouin"
    return kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"


@strict
class BedouinConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of `BedouinModel` and `BedouinForCausalLM`.

    For language begin with `preset`, whose mixers need fewer bits (examples/results/language).

    Args:
        vocab_size, hidden_size, num_hidden_layers: v, m, and the number of blocks.
        intermediate_size: hidden width of a gated MLP after every mixer; None for no MLP.
        layer: the layer that the mixers are: "bedouin", whose options are the fields here, or
            "paper" (`Bedouin.from_paper`), "rnn" (`FixedPointRNN`), "tracking"
            (`TrackingDeltaNet`), "GatedDeltaNet" or "Tracker", by itself or with options as
            {"type": "tracking", "num_trackers": 2}. It becomes such a dict with the layer's own
            name and all options, which is saved; the fields of `Bedouin` must then have their
            defaults. "bedouin" becomes "Bedouin".
        state_size, expand, num_heads, num_householder, beta_max, decay, input_scale, eigenvalues,
            feedback, feedback_norm, feedback_init, mixer, solver, adjoint, max_steps,
            initialization, backend, on_unconverged: options of `bedouin.Bedouin`, where state_size
            is called d_state. With num_householder 0 the mixer is `NoMixing`, and beta_max is 1;
            with a mixer both are their defaults. Objects become dicts such as {"type": "Picard",
            "rtol": 1e-4, ...}, which are saved; a class of your own must be at the top level of a
            module, which is imported before a file is read, and keep its options as attributes.
        conv_kernel: width of the convolution in each mixer, d_conv; None for no convolution.
        attn_layers: indices of the layers whose mixer is causal attention, at most all but one.
        attn: their options, {"num_heads": 8, "num_kv_heads": 2, "window": None, "rope_theta": 1e4}:
            query heads, heads of keys and values (by default as many), how many tokens a token
            sees, itself and padding between tokens among them (None: all), and the base of the
            rotary positions. `attn_implementation`, "sdpa" or "eager", computes it.
        rms_norm_eps: epsilon of every norm.
        initializer_range: standard deviation of the initial embedding, MLPs and head.
        rescale_prenorm_residual: whether the initial output projections of mixers and MLPs are
            divided by the root of their number, as in GPT-2 and Mamba.
        tie_word_embeddings: whether the head shares the embedding's weight.
        use_cache: whether calls in evaluation return a cache unless they say otherwise.
        fuse_linear_cross_entropy: whether a call with labels in training computes head and loss
            together, without logits, which are then None: "torch" in chunks of tokens, "liger" or
            "fla" by the kernels of Liger Kernel or flash-linear-attention; "auto" or True by the
            first of liger, fla and torch that can run, which a warning names.

    The names that mamba-ssm, `bedouin.Bedouin` and transformers' Mamba have for these are taken,
    too. Other names in a file are attributes, as in every configuration of transformers; in a call
    they raise TypeError, a value of another type transformers' StrictDataclassError. A layer with
    another name or unknown options, and attn_layers and attn that do not fit, raise ValueError or
    TypeError at once, what the mixers cannot take when a model is made.
    """

    # A new option of Bedouin is a field here, whose default is what it means to be absent from a
    # file. Files contain all fields.

    model_type = "bedouin"
    keys_to_ignore_at_inference = [CACHE_NAME]
    base_model_tp_plan = {
        "layers.*.mixer.q_proj": "colwise",
        "layers.*.mixer.k_proj": "colwise",
        "layers.*.mixer.v_proj": "colwise",
        "layers.*.mixer.o_proj": "rowwise",
        "layers.*.mlp.*.in_proj": "packed_colwise",
        "layers.*.mlp.*.out_proj": "rowwise",
    }
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
    layer: str | dict[str, Any] = "Bedouin"
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
    mixer: ChannelMixer | dict[str, Any] | None = None
    solver: Solver | dict[str, Any] | str = "auto"
    adjoint: Adjoint | dict[str, Any] | None = None
    max_steps: Cap | dict[str, Any] | int = 100
    initialization: Initialization | dict[str, Any] | None = None
    backend: str = "auto"
    on_unconverged: str = "warn"
    conv_kernel: int | None = None
    attn_layers: list[int] | tuple[int, ...] = ()
    attn: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    rescale_prenorm_residual: bool = False
    use_cache: bool = True
    fuse_linear_cross_entropy: bool | str = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        from_file = self.transformers_version is not None
        others = _without_removed("", others, _REMOVED)
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
        # lists, which tuples become in a file
        self.feedback, self.attn_layers = list(self.feedback), list(self.attn_layers)
        if self.attn_layers or self.attn is not None:
            self.attn = _check_attention(self)
        if from_file and self.layer == "Bedouin" and self.num_heads is None:
            # files of versions up to 0.2.0 leave the number out where it was that of their rule
            d = self._inner_size
            self.num_heads = d // 128 if d >= 512 and d % 128 == 0 else 1
        super().__post_init__(**others)

    @property
    def _inner_size(self) -> int:
        return max(1, round(self.expand * self.hidden_size))

    def to_dict(self) -> dict[str, Any]:
        """All options, as files contain them; num_heads as the number that it stands for."""
        found: dict[str, Any] = super().to_dict()
        if self.layer == "Bedouin" and self.num_heads is None:
            found["num_heads"] = choose_num_heads(None, self._inner_size)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "layer":
            # the name of Bedouin, whose options are fields, or another type and all of its options
            given: dict[str, Any] = dict(value) if isinstance(value, dict) else {"type": value}
            kind, valid = layer_name(given.pop("type", None)), {}
            if kind != "Bedouin":
                valid = {n: v for n, v in layer_options(kind).items() if n not in _OF_ALL}
            for option in given:
                if option not in valid:
                    raise TypeError(unknown_option(f"layer {kind}", option, list(valid)))
            valid |= given
            of_kind = {option: describe(f"layer.{option}", v) for option, v in valid.items()}
            value = {"type": kind, **of_kind} if valid else kind
        if name == "initialization" and isinstance(value, dict):
            value = _without_removed("initialization.", value, _REMOVED_INITIALIZATION)
        super().__setattr__(name, describe(name, value) if name in _OBJECTS else value)

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """A configuration of a usual size of the kind `layer`, by default "tracking".

        Every mixer is followed by a gated MLP; the embedding is tied, and
        rescale_prenorm_residual is True. Parameters in millions, with the default vocabulary of
        50,280, for each layer:

        | name | hidden_size | layers | intermediate_size | tracking | bedouin | paper | rnn |
        |---|---|---|---|---|---|---|---|
        | "60m" | 512 | 6 | 1984 | 59.2 | 60.3 | 82.3 | 59.8 |
        | "130m" | 768 | 8 | 2624 | 129.8 | 129.0 | 201.3 | 128.0 |
        | "370m" | 1024 | 16 | 3456 | 369.1 | 358.6 | 626.8 | 355.9 |

        options: fields, which replace those of the preset. Raises ValueError for another name.
        """
        if name not in _SIZES:
            raise ValueError(f"name must be one of {', '.join(_SIZES)}, got {name!r}")
        sizes = "hidden_size", "num_hidden_layers", "intermediate_size"
        chosen: dict[str, Any] = dict(zip(sizes, _SIZES[name], strict=True))
        chosen |= {"layer": "TrackingDeltaNet", "rescale_prenorm_residual": True}
        chosen |= {cls.attribute_map.get(option, option): v for option, v in options.items()}
        return cls(**chosen)

    @property
    def layer_types(self) -> list[str]:
        """The type of each layer's cache, from which DynamicCache makes them."""
        attention = "full_attention" if self.sliding_window is None else "sliding_attention"
        layers = range(self.num_hidden_layers)
        return [attention if i in self.attn_layers else LAYER_TYPE for i in layers]

    @property
    def sliding_window(self) -> int | None:
        """The window of the attention layers, under the name that transformers reads."""
        return None if self.attn is None else self.attn["window"]

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        self.auto_map = {"AutoConfig": f"{_REMOTE}.{type(self).__name__}"}
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{_REMOTE}.py").write_text(_REMOTE_CODE)
        super().save_pretrained(save_directory, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: transformers would copy this file into folders in the place of the import."""

    def validate_layer_type(self) -> None:
        """Nothing: transformers would admit its own types of layers only."""

    def make_mixer(self, layer_idx: int) -> Any:
        """The layer that the options describe; ValueError for options without effect."""
        if isinstance(self.layer, dict):
            layer = {n: restore(f"layer.{n}", v) for n, v in self.layer.items()}
            kind, usual = layer.pop("type"), BedouinConfig()
            for name in (self.attribute_map.get(n, n) for n in _OPTIONS if n not in _OF_ALL):
                value, default = getattr(self, name), getattr(usual, name)
                if value != default:
                    raise ValueError(
                        f"{name} must be {default!r} beside layer={kind!r}, got {value!r}: options "
                        f"of that layer are entries of layer={{'type': {kind!r}, ...}}"
                    )
            layer |= {"norm_eps": self.rms_norm_eps, "layer_idx": layer_idx}
            return make_layer(kind, self.hidden_size, **layer)
        options = {name: restore(name, getattr(self, name)) for name in _OPTIONS}
        unread, beside = [], ""
        if self.mixer is not None:
            unread, beside = ["num_householder", "beta_max"], "beside a mixer"
        elif self.num_householder == 0:
            unread, beside = ["beta_max"], "with num_householder=0"
        for name in unread:
            usual, value = getattr(BedouinConfig, name), options.pop(name)
            if value != usual:
                raise ValueError(
                    f"{name} must be {usual} {beside}, got {value}: it is an option of reflections"
                )
        return make_layer("Bedouin", self.hidden_size, layer_idx=layer_idx, **options)


def _without_removed(
    prefix: str, options: dict[str, Any], removed: dict[str, Any]
) -> dict[str, Any]:
    """The options that are not `removed`. Raises ValueError for one whose value no layer has."""
    for name, value in options.items():
        if name in removed and value != removed[name]:
            raise ValueError(f"{prefix}{name} must be {removed[name]!r}, got {value!r}: {REMOVED}")
    return {name: value for name, value in options.items() if name not in removed}


def _check_attention(config: BedouinConfig) -> dict[str, Any]:
    """The options of the attention layers, completed; ValueError for those that do not fit."""
    layers, n, m = config.attn_layers, config.num_hidden_layers, config.hidden_size
    if not set() < set(layers) < set(range(n)) or len(set(layers)) != len(layers):
        raise ValueError(
            f"attn_layers must be different indices from 0 to num_hidden_layers - 1 = {n - 1}, "
            f"some but not all of them, got {layers} beside attn={config.attn}"
        )
    options: dict[str, Any] = {"num_heads": None, **_ATTENTION, **(config.attn or {})}
    for name in options:
        if name not in ("num_heads", *_ATTENTION):
            raise ValueError(unknown_option("attn", name, ["num_heads", *_ATTENTION]))
    heads = options["num_heads"]
    check_count("attn['num_heads']", heads)
    if options["num_kv_heads"] is None:
        options["num_kv_heads"] = heads
    check_count("attn['num_kv_heads']", options["num_kv_heads"])
    check_count("attn['window']", options["window"], 2, optional=True)
    check_number("attn['rope_theta']", options["rope_theta"], 1, 1e12, open_low=True)
    if m % (2 * heads) or heads % options["num_kv_heads"]:
        raise ValueError(
            f"attn['num_heads'] must divide hidden_size / 2 = {m / 2:g}, and attn['num_kv_heads'] "
            f"must divide attn['num_heads'], got {heads} and {options['num_kv_heads']}"
        )
    return options
