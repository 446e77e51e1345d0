"""Options of `ensemble.py`, and the layer that they describe."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import nn

from bedouin import Bedouin, baselines
from common.schedule import Schedule

BASELINES = {
    "lstm": baselines.LSTM,
    "mamba": baselines.Mamba,
    "deltanet": baselines.DeltaNet,
    "deltaproduct": baselines.DeltaProduct,
    "attention": baselines.Attention,
}
TAKES: dict[str, tuple[str, ...]] = {
    "mamba": ("d_state",),
    "deltanet": ("num_heads",),
    "deltaproduct": ("num_heads", "num_householder"),
    "attention": ("num_heads",),
}
"""The options of the grid that a baseline takes."""


@dataclass(frozen=True)
class Config:
    """Options of the study; those with several values span a grid."""

    preset: Literal["small", "paper"] = "small"
    """Determines the other defaults; paper: the width of Fixed-Point RNNs, appendix D.2, with
    another training schedule."""
    task: Literal["word", "copy"] = "word"
    """A word problem, or copying."""
    group: str = "A5"
    """Group of the word problem."""
    length: int = 16
    """Training length of the word problem."""
    min_string: int = 4
    """Shortest string to copy."""
    max_string: int = 8
    """Longest string to copy."""
    context: int = 32
    """Context of the copying task."""
    eval_lengths: tuple[int, ...] = (16, 48, 128)
    """Lengths at which the trained models are evaluated."""
    input_scale: tuple[str, ...] = ("bounded_delta",)
    d_state: tuple[int, ...] = (16,)
    num_heads: tuple[int | None, ...] = (None,)
    """Heads of Bedouin, deltanet, deltaproduct and attention; None: the layer's own default."""
    num_householder: tuple[int, ...] = (4,)
    decay: tuple[str, ...] = ("mamba",)
    rate_scale: tuple[float, ...] = (1.0,)
    """Factor on the initial decay rates -A of "mamba" (1 .. d_state); below 1 memory is longer."""
    beta_max: tuple[float, ...] = (1.0,)
    feedback: tuple[str, ...] = ("delta+B+C+mixer",)
    """What depends on y_{t-1}, joined by "+"; "none" switches feedback off."""
    mixer_layer: Literal["bedouin", "lstm", "mamba", "deltanet", "deltaproduct", "attention"] = (
        "bedouin"
    )
    """The layer: Bedouin, or a baseline, which takes no option of Bedouin but those in
    `TAKES`; the others then keep their defaults."""
    eigenvalues: Literal["positive", "full"] | None = None
    """Of the baselines mamba, deltanet and deltaproduct; None: the layer's own default."""
    num_layers: int = 1
    feedback_init: tuple[float, ...] = (0.1,)
    lr: tuple[float, ...] = (1e-3,)
    schedule: tuple[Schedule, ...] = ("cosine",)
    batch_size: tuple[int, ...] = (256,)
    steps: tuple[int, ...] = (5000,)
    d_model: int = 128
    seeds: int = 5
    """Number of models in the stack."""
    first_seed: int = 0
    """Model i draws parameters and data from seed first_seed + i. Settings are chosen on seeds from
    100 on and reported on 0, 1, 2."""
    eval_rows: int = 2048
    """Test rows of each model and length."""
    warmup: int = 100
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    log_every: int = 50
    graph: bool = True
    """Capture the step as a CUDA graph (GPU only)."""
    stacked: bool = True
    """Whether to vmap over the models; otherwise they run one after the other."""
    autocast: Literal["no", "bf16"] = "no"
    """Precision of the matrix products; the fixed point stays in float32 either way."""
    out: Path = Path("runs/ensemble")
    """Folder for results.json."""
    device: Annotated[str, tyro.conf.arg(help="cpu, cuda, or auto")] = field(default="auto")


PAPER = Config(
    preset="paper",
    d_model=512,
    batch_size=(128,),
    steps=(12000,),
    lr=(5e-4,),
    seeds=1,
    stacked=False,
    autocast="bf16",
)
PRESETS = {"small": Config(), "paper": PAPER}

LAYER_OPTIONS = (
    "input_scale",
    "d_state",
    "num_heads",
    "num_householder",
    "decay",
    "beta_max",
    "feedback",
    "feedback_init",
)
GRID = (*LAYER_OPTIONS, "rate_scale", "lr", "schedule", "batch_size", "steps")


def model_seeds(config: Config) -> range:
    """The seeds of the models of the stack."""
    return range(config.first_seed, config.first_seed + config.seeds)


def layer_options(point: dict[str, Any]) -> dict[str, Any]:
    """The options of the layer at a point of the grid."""
    options = {name: point[name] for name in LAYER_OPTIONS}
    fed = options["feedback"]
    return {**options, "feedback": () if fed == "none" else tuple(fed.split("+"))}


def make_layer(config: Config, point: dict[str, Any]) -> nn.Module:
    """The mixing layer at a point of the grid; ValueError for an option that it does not take."""
    if config.mixer_layer != "bedouin":
        return _baseline(config, point)
    if config.eigenvalues is not None:
        raise ValueError("eigenvalues must be None for mixer_layer 'bedouin'")
    layer = Bedouin(config.d_model, on_unconverged="ignore", **layer_options(point))
    rate_scale = point["rate_scale"]
    if layer.decay == "mamba":
        with torch.no_grad():
            layer.A_log.add_(math.log(rate_scale))
    elif rate_scale != 1:
        raise ValueError(f"rate_scale must be 1 without decay 'mamba', got {rate_scale}")
    return layer


def _baseline(config: Config, point: dict[str, Any]) -> nn.Module:
    name = config.mixer_layer
    if config.stacked:
        raise ValueError(f"stacked must be False for mixer_layer {name!r}: pass --no-stacked")
    takes = TAKES.get(name, ())
    for option in (*LAYER_OPTIONS, "rate_scale"):
        default = getattr(PRESETS[config.preset], option)
        if option not in takes and (point[option],) != default:
            raise ValueError(
                f"{option} must keep its default {default[0]!r} for mixer_layer {name!r}, got "
                f"{point[option]!r}: {name} takes no such option"
            )
    options = {option: point[option] for option in takes if point[option] is not None}
    if config.eigenvalues is not None:
        if name not in ("mamba", "deltanet", "deltaproduct"):
            raise ValueError(f"eigenvalues must be None for mixer_layer {name!r}")
        options["eigenvalues"] = config.eigenvalues
    layer: nn.Module = BASELINES[name](config.d_model, **options)
    return layer
