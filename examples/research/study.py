"""Options of `ensemble.py`, and the layer and the model that they describe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from bedouin import Bedouin, Initialization, SequenceModel
from common.options import Schedule, SolverOptions, fixed_point_options, mixer_options
from flags import Count, Device, Natural, Positive, Range
from research.data import TaskOptions, make_task
from research.models import MODELS

Start = Literal["zero", "carried", "noise"]


@dataclass(frozen=True, kw_only=True)
class Config(TaskOptions, SolverOptions):
    """Options of the study; those with several values span a grid."""

    preset: Literal["small", "paper"] = "small"
    """Determines the other defaults; paper: the width of Fixed-Point RNNs, appendix D.2, with
    another training schedule."""
    eval_lengths: tuple[Count, ...] = (16, 48, 128)
    """Lengths at which the trained models are evaluated."""
    input_scale: tuple[str, ...] = ("bounded_delta",)
    d_state: tuple[int, ...] = (16,)
    num_heads: tuple[int | None, ...] = (None,)
    """None: the layer's own default."""
    num_householder: tuple[int, ...] = (4,)
    decay: tuple[str, ...] = ("mamba",)
    rate_scale: tuple[float, ...] = (1.0,)
    """Factor on the initial decay rates -A of "mamba" (1 .. d_state); below 1 memory is longer."""
    beta_max: tuple[float, ...] = (1.0,)
    feedback: tuple[str, ...] = ("delta+B+C+mixer",)
    """What depends on y_{t-1}, joined by "+"; "none" switches feedback off."""
    model: str | None = None
    """One of the layers of `models.py`, which has its own options: those of a layer must keep their
    defaults, and say nothing about it where results list them."""
    eigenvalues: Literal["positive", "full"] = "positive"  # Of the decays of Bedouin.
    feedback_init: tuple[float, ...] = (0.1,)
    delta_from_x_init: tuple[float, ...] = (1.0,)
    """Factor on the initial weights from x to Delta; 0 in the paper's copying task."""
    expand: tuple[int, ...] = (2,)  # Channels of a layer of Bedouin for each one of the model.
    lr: tuple[Positive, ...] = (1e-3,)
    schedule: tuple[Schedule, ...] = ("cosine",)
    batch_size: tuple[Count, ...] = (256,)
    steps: tuple[Count, ...] = (5000,)
    d_model: Count = 128  # Width of the model.
    seeds: Count = 5  # Number of models in the stack.
    first_seed: Natural = 0
    """Model i draws parameters and data from seed first_seed + i. Settings are chosen on seeds from
    100 on and reported on 0, 1, 2."""
    eval_rows: Count = 2048  # Test rows of each model and length.
    warmup: Natural = 100
    weight_decay: Annotated[float, Range(0)] = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    log_every: Count = 50
    graph: bool = True  # Capture the step as a CUDA graph (GPU only).
    compile: bool = False
    """Train through torch.compile, which fuses what a baseline computes element by element;
    evaluation does not."""
    concurrent: bool = False
    """Train all points of the grid and all seeds at the same time, each on a CUDA stream of its own
    (GPU only). The seconds of a point are then those of all."""
    autocast: Literal["no", "bf16"] = "no"
    """Precision of the matrix products; the fixed point stays in float32 either way."""
    out: Path = Path("runs/ensemble")  # Folder for results.json.
    overwrite: bool = False  # Replace the results in that folder, if there are any.
    states: tuple[Start, ...] = ()
    """Continue every trained model in further steps whose rows begin with zeros, with the state
    after another row, or with such a state and noise (`length.py`); each gives a row of results."""
    device: Device = "auto"  # auto: the GPU if there is one.

    def __post_init__(self) -> None:
        TaskOptions.__post_init__(self)
        SolverOptions.__post_init__(self)
        if self.model is not None and self.model not in MODELS:
            raise ValueError(f"--model must be among {tuple(MODELS)}, got {self.model!r}")
        if self.graph and self.gamma_cap is not None:
            raise ValueError("--gamma-cap needs --no-graph: a captured step repeats its first draw")


PAPER = Config(
    preset="paper",
    d_model=512,
    batch_size=(128,),
    steps=(12000,),
    lr=(5e-4,),
    seeds=1,
    autocast="bf16",
)
PRESETS = {"small": Config(), "paper": PAPER}

LAYER_OPTIONS = (
    "input_scale",
    "d_state",
    "num_heads",
    "num_householder",
    "decay",
    "expand",
    "beta_max",
    "feedback",
    "feedback_init",
)
MODEL_OPTIONS = ("delta_from_x_init", "rate_scale")
"""Options of the layer's initial weights."""
GRID = (
    *LAYER_OPTIONS,
    *MODEL_OPTIONS,
    "lr",
    "schedule",
    "batch_size",
    "steps",
)


def model_seeds(config: Config) -> range:
    """The seeds of the models of the stack."""
    return range(config.first_seed, config.first_seed + config.seeds)


def layer_options(point: dict[str, Any]) -> dict[str, Any]:
    """The options of the layer at a point of the grid."""
    options = {name: point[name] for name in LAYER_OPTIONS}
    fed = options["feedback"]
    options["initialization"] = Initialization(point["delta_from_x_init"], point["rate_scale"])
    return {**options, "feedback": () if fed == "none" else tuple(fed.split("+"))}


def make_layers(config: Config, point: dict[str, Any]) -> list[nn.Module]:
    """The mixing layers from the input on; ValueError for an option that they do not take."""
    if config.model is not None:
        _refuse_options(config, point)
        return [layer(config.d_model) for layer in MODELS[config.model]]
    options = {**layer_options(point), **fixed_point_options(config)}
    reflections = options.pop("num_householder"), options.pop("beta_max")
    options |= {**mixer_options(*reflections), "eigenvalues": config.eigenvalues}
    return [Bedouin(config.d_model, on_unconverged="ignore", **options)]


def make_model(config: Config, point: dict[str, Any]) -> SequenceModel:
    """The whole model at a point of the grid: embedding, layers and head."""
    task = make_task(config)
    return SequenceModel(
        task.vocab_size,
        config.d_model,
        make_layers(config, point),
        output_size=task.output_size,
    )


def _refuse_options(config: Config, point: dict[str, Any]) -> None:
    """ValueError for an option of Bedouin beside --model."""
    for option in (*LAYER_OPTIONS, *MODEL_OPTIONS):
        default = getattr(PRESETS[config.preset], option)
        if (point[option],) != default:
            raise ValueError(
                f"{option} must keep its default {default[0]!r} for model {config.model!r}, got "
                f"{point[option]!r}: it takes no such option"
            )
    for option in (*SolverOptions.__dataclass_fields__, "eigenvalues"):
        if getattr(config, option) != getattr(PRESETS["small"], option):
            raise ValueError(f"{option} must keep its default for model {config.model!r}")
