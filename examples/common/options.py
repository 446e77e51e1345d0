"""Options of all training scripts, and the solver, layer and model that they describe.

Every field of a configuration is a command-line flag; `--help` lists them with the defaults of the
chosen preset. An unknown flag is an error that names the flags with a similar spelling.
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch
import tyro
from torch import nn

from bedouin import Bedouin, Initialization, TrackingDeltaNet
from bedouin.model import SequenceModel
from bedouin.tasks.streams import MAX_SEED
from common.checks import (
    Count,
    Natural,
    Positive,
    Range,
    Share,
    check_heads,
    flag,
    whole,
)
from common.curriculum import CurriculumOptions
from common.layers import (
    BASELINES,
    TAKES,
    Baseline,
    SolverOptions,
    count,
    fixed_point_options,
    mixer_options,
)
from common.matching import matching_width
from common.schedule import Schedule
from common.trackers import TrackerOptions

_MAX_SEED = MAX_SEED // 2  # a run uses two of the task's seeds: during and after training
_Beta = Annotated[float, Range(0, 1)]
Preset = Literal["auto", "cpu", "gpu", "paper"]
Feedback = Literal["delta", "B", "C", "mixer"]


@dataclass(frozen=True, kw_only=True)
class RunConfig(SolverOptions, TrackerOptions):
    """Options of the optimizer, the model and the files, which every training run has."""

    preset: Preset = "auto"
    """Where the other defaults come from; auto is gpu if torch sees a GPU, else cpu."""
    seed: Annotated[int, whole(0, _MAX_SEED)] = 0
    """Seed of the initialization and of the data."""
    out: Path | None = None
    """Folder of the results; None is runs/TASK-seedSEED."""
    resume: bool = False
    """Continue from the checkpoint in the folder of the results."""
    overwrite: bool = False
    """Replace the run in the folder of the results, if there is one."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the GPU if there is one; cpu: the CPU even then."""
    threads: Count | None = None
    """CPU threads of torch; None leaves torch's choice."""
    autocast: Literal["no", "bf16"] = "no"
    """Precision of the matrix products; the fixed point stays in float32 either way."""

    steps: Count = 4000
    """Optimizer steps."""
    batch_size: Count = 128
    """Rows of a training batch, in each process."""
    lr: Positive = 1e-3
    """Peak learning rate of AdamW."""
    schedule: Schedule = "cosine"
    """Decay of the learning rate to zero after the warm-up; hold: only over the last 40 %."""
    warmup_steps: Natural = 100
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Range(0)] = 0.01
    """Weight decay; parameters marked `_no_weight_decay` (A_log, omega, D) are not decayed."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.99)
    """AdamW's averaging constants."""
    clip: Annotated[float, Range(0, brackets="(]")] = 1.0
    """Largest norm of the gradient; inf: gradients are not clipped."""

    mixer_layer: Literal["bedouin", "tracking", "paper"] | Baseline = "bedouin"
    """bedouin; tracking: `TrackingDeltaNet`, which takes no option of Bedouin; paper:
    `Bedouin.from_paper`, which fixes every one but the sizes; or a baseline, which takes few
    options of Bedouin and refuses the others."""
    d_model: Count = 128
    """Width of the model; see --match-parameters."""
    match_parameters: Count | None = None
    """Replace --d-model by the width, a multiple of 32, with which the model has about this many
    parameters."""
    num_layers: Count = 1
    """Residual blocks."""
    mlp_expand: Positive | None = None
    """Width of a gated MLP after each layer, as a multiple of d_model; None: no MLP."""
    d_state: Count = 16
    """States per channel."""
    expand: Count = 2
    """Inner channels as a multiple of d_model."""
    num_heads: Count | None = None
    """Heads, a divisor of d_model * expand; None: the layer's own choice; 1: the paper's layer."""
    num_householder: Natural = 2
    """Reflections in the channel mixer; 0: channels are not mixed. DeltaProduct has at least 1."""
    beta_max: Annotated[float, Range(0, 2, "(]")] = 1.0
    """Largest beta of a reflection, in (0, 2]."""
    decay: Literal["mamba", "griffin"] = "mamba"
    """Parameterization of the decay."""
    input_scale: Literal["delta", "bounded_delta", "one_minus_decay"] = "bounded_delta"
    """What multiplies the input of the scan."""
    eigenvalues: Literal["positive", "full"] | None = None
    """Range of the decay: [0, 1] or [-1, 1]; None: the layer's own default."""
    feedback: tuple[Feedback, ...] = ("delta", "B", "C", "mixer")
    """What depends on the previous output; the flag without values switches feedback off."""
    feedback_init: Annotated[float, Range(0, 1e3, "[]")] = 0.1
    """Factor on the initial feedback weights."""
    rate_scale: tuple[Positive, Positive] = (1.0, 1.0)
    """Factors on the initial decay rates of the first and the last head, for mamba's decay."""
    d_conv: Count | None = None
    """Width of a convolution over x in each layer; None: no convolution. Other layers have their
    own."""

    log_every: Count = 20
    """Steps between two updates of the progress bar, which read numbers from the device."""
    eval_every: Count = 500
    """Steps between two evaluations."""
    checkpoint_every: Count = 500
    """Steps between two checkpoints; one is also written after the last step."""

    def __post_init__(self) -> None:
        SolverOptions.__post_init__(self)
        TrackerOptions.__post_init__(self)
        if self.resume and self.overwrite:
            raise ValueError("--resume continues a run and --overwrite replaces it: give one")
        self._check_default(_NOT_TAKEN.get(self.mixer_layer, ()))
        if self.mixer_layer not in BASELINES:
            check_heads(self.num_heads, self.expand * self.d_model)
        if self.mixer_layer == "deltaproduct" and not self.num_householder:
            raise ValueError(
                "--num-householder must be at least 1 with --mixer-layer deltaproduct, got 0"
            )

    def _check_default(self, names: Collection[str]) -> None:
        for name, value in _defaults(names).items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"--mixer-layer {self.mixer_layer} takes no {flag(name)}: leave it out or use "
                    "--mixer-layer bedouin"
                )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CurriculumOptions, RunConfig):
    """Options of a training run whose accuracy is evaluated by length."""

    curriculum_every: Count = 50
    """Steps between two decisions on the length, each by the accuracy of one batch."""

    eval_lengths: tuple[Count, ...] = ()
    """Lengths evaluated during training and after it."""
    final_lengths: tuple[Count, ...] = ()
    """Lengths evaluated only after training, for a finer curve."""
    eval_rows: Count = 512
    """Test rows of an evaluation during training, per length and process."""
    final_rows: Count = 2048
    """Test rows of the evaluation after training, per length and process."""
    eval_batch_size: Count = 256
    """Rows of a test batch."""
    stop_at_accuracy: Share | None = None
    """End early once an evaluation reaches this accuracy at the training lengths; None: never."""

    def __post_init__(self) -> None:
        CurriculumOptions.__post_init__(self)
        RunConfig.__post_init__(self)


_OF_BEDOUIN = (
    *("num_heads", "beta_max", "decay", "input_scale", "eigenvalues", "feedback", "feedback_init"),
    *("rate_scale", "d_conv", *SolverOptions.__dataclass_fields__),
)
_SIZES = ("d_state", "expand", "num_householder")
_NOT_TAKEN: dict[str, Collection[str]] = {
    **{name: {*_OF_BEDOUIN, *_SIZES} - set(taken) for name, taken in TAKES.items()},
    "paper": _OF_BEDOUIN,
    "tracking": (*_OF_BEDOUIN, *_SIZES),
}
"""The options of Bedouin that another layer does not take."""


def _defaults(names: Collection[str]) -> dict[str, Any]:
    return {name: getattr(RunConfig, name) for name in sorted(names)}


ConfigT = TypeVar("ConfigT", bound=RunConfig)


def parse_config(presets: Mapping[str, ConfigT], args: Sequence[str] | None = None) -> ConfigT:
    """Read the command line (or `args`): the preset gives the defaults, the flags override them.

    presets: at least one; "auto" is the first of them where this machine's is missing.

    Exits with status 2 and a message on a bad flag or value.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", default="auto")
    early.add_argument("--mixer-layer")
    found = early.parse_known_args(args)[0]
    if found.preset in get_args(Preset)[1:] and found.preset not in presets:
        listed = ", ".join(["auto", *presets])
        early.exit(2, f"error: --preset must be one of {listed}, got {found.preset}\n")
    auto = presets.get(automatic_preset(), next(iter(presets.values())))
    # A wrong name gets any defaults: tyro rejects it below and lists the right ones.
    default = presets.get(found.preset, auto)
    # another layer does not take the preset's options of Bedouin, DeltaProduct not every value
    names = set(_NOT_TAKEN.get(found.mixer_layer, ()))
    if found.mixer_layer == "deltaproduct" and not default.num_householder:
        names.add("num_householder")
    default = replace(default, **_defaults(names))
    config = tyro.cli(type(default), args=args, default=default)
    return replace(config, preset=auto.preset) if config.preset == "auto" else config


def automatic_preset() -> Preset:
    """What "auto" stands for on this machine."""
    return "gpu" if torch.cuda.is_available() else "cpu"


def build_layer(config: RunConfig, layer_idx: int) -> nn.Module:
    """One mixing layer, (b, t, m) -> (b, t, m)."""
    name = config.mixer_layer
    if name in BASELINES:
        options = {option: getattr(config, option) for option in TAKES[name]}
        return BASELINES[name](config.d_model, **_given(options))
    if name == "tracking":
        return TrackingDeltaNet(config.d_model, layer_idx=layer_idx)
    if name == "paper":
        return Bedouin.from_paper(
            config.d_model,
            d_state=config.d_state,
            expand=config.expand,
            num_householder=config.num_householder,
            layer_idx=layer_idx,
        )
    return Bedouin(
        config.d_model,
        d_state=config.d_state,
        expand=config.expand,
        num_heads=config.num_heads,
        **mixer_options(config.num_householder, config.beta_max),
        decay=config.decay,
        input_scale=config.input_scale,
        feedback=config.feedback,
        feedback_init=config.feedback_init,
        initialization=Initialization(rates=config.rate_scale),
        d_conv=config.d_conv,
        **_given({"eigenvalues": config.eigenvalues}),
        **fixed_point_options(config),
        layer_idx=layer_idx,
    )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None, which stands for the layer's own default."""
    return {name: value for name, value in options.items() if value is not None}


def build_model(config: RunConfig, vocab_size: int, output_size: int) -> SequenceModel:
    """The whole model, (b, t) int64 -> (b, t, output_size), initialized from the seed."""
    torch.manual_seed(config.seed)
    layers = [build_layer(config, i) for i in range(config.num_layers)]
    return SequenceModel(
        vocab_size,
        config.d_model,
        layers,
        output_size=output_size,
        mlp_expand=config.mlp_expand,
    )


def matched(config: ConfigT, vocab_size: int, output_size: int) -> ConfigT:
    """The configuration with the width that `match_parameters` asks for.

    Raises ValueError if even the narrowest model has 1.5 times as many parameters.
    """
    if config.match_parameters is None:
        return config

    def size(d_model: int) -> int:
        return num_parameters(replace(config, d_model=d_model), vocab_size, output_size)

    return replace(config, d_model=matching_width(size, config.match_parameters))


def num_parameters(config: RunConfig, vocab_size: int, output_size: int) -> int:
    """The number of parameters of the model, which is not made."""
    with torch.device("meta"):
        return count(build_model(config, vocab_size, output_size))
