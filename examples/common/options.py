"""Options of all training scripts: every field of a configuration is a command-line flag, and an
unknown flag is an error that names those with a similar spelling."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro
from torch import nn

from bedouin import Bedouin, Initialization, NoMixing, TrackingDeltaNet, solvers
from bedouin.tasks.streams import MAX_SEED
from flags import Count, Natural, Positive, Range, check_heads, check_types, flag, whole

Schedule = Literal["cosine", "linear", "hold"]
HOLD_SHARE = 0.6  # of the steps, because seeds leave the plateau of the loss at different times
Tolerance = Annotated[float, Range(0, 1e6, "[]")]
_OfGamma = Annotated[float, Range(0, 1e6, "(]")]
_Beta = Annotated[float, Range(0, 1)]
ADJOINTS = {
    "implicit": solvers.ImplicitAdjoint(),
    "one_step": solvers.OneStepAdjoint(),
    "phantom": solvers.PhantomAdjoint(num_steps=4, damping=0.5),
    "unrolled": solvers.UnrolledAdjoint(),
}


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """How the fixed point and its gradient are computed."""

    solver: Literal["auto", "direct", "jacobi", "picard", "anderson", "broyden"] = "auto"
    """How the fixed point is found; auto lets the layer choose, direct is the exact sweep."""
    rtol: Tolerance = 1e-4  # Relative tolerance of the iterative solvers.
    atol: Tolerance = 1e-30  # Absolute tolerance of the iterative solvers.
    solver_steps: Count = 100  # Steps that an iterative solver may take.
    gamma_cap: tuple[_OfGamma, _OfGamma] | None = None  # Shape, scale of random caps; paper: 4 1.
    adjoint: Literal["implicit", "one_step", "phantom", "unrolled"] = "implicit"
    """How the gradient of the fixed point is computed; implicit is exact."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class LayerOptions(SolverOptions):
    """Options of `Bedouin`, of which other layers take few or none."""

    d_state: Count = 16  # States per channel.
    expand: Count = 2  # Inner channels as a multiple of d_model.
    num_householder: Natural = 2  # Reflections in the channel mixer; 0: channels are not mixed.
    num_heads: Count | None = None
    """Heads, a divisor of d_model * expand; None: the layer's own choice; 1: the paper's layer."""
    beta_max: Annotated[float, Range(0, 2, "(]")] = 1.0  # Largest beta of a reflection.
    decay: Literal["mamba", "griffin"] = "mamba"  # Parameterization of the decay.
    input_scale: Literal["delta", "bounded_delta", "one_minus_decay"] = "bounded_delta"
    """What multiplies the input of the scan."""
    feedback: tuple[Literal["delta", "B", "C", "mixer"], ...] = ("delta", "B", "C", "mixer")
    """What depends on the previous output; the flag without values switches feedback off."""
    feedback_init: Annotated[float, Range(0, 1e3, "[]")] = 0.1  # Factor on its initial weights.
    rate_scale: tuple[Positive, Positive] = (1.0, 1.0)
    """Factors on the initial decay rates of the first and the last head, for mamba's decay."""
    d_conv: Count | None = None  # Width of a convolution over x in each layer; None: none.


_SIZES = ("d_state", "expand", "num_householder")
OF_BEDOUIN = {field.name for field in fields(LayerOptions)}
NOT_TAKEN = {"tracking": OF_BEDOUIN, "paper": OF_BEDOUIN - {*_SIZES, "solver_steps", "gamma_cap"}}


@dataclass(frozen=True, kw_only=True)
class RunConfig(LayerOptions):
    """Options of the optimizer, the model and the files, which every training run has."""

    preset: Literal["auto", "cpu", "gpu", "paper"] = "auto"
    """Where the other defaults come from; auto is gpu if torch sees a GPU, else cpu."""
    seed: Annotated[int, whole(0, MAX_SEED // 2)] = 0  # Of the initialization and of the data.
    out: Path | None = None  # Folder of the results; None is runs/TASK-seedSEED.
    resume: bool = False  # Continue from the checkpoint in the folder of the results.
    overwrite: bool = False  # Replace the run in the folder of the results, if there is one.
    device: Literal["auto", "cpu"] = "auto"  # auto: the GPU if there is one.
    threads: Count | None = None  # CPU threads of torch; None leaves torch's choice.
    autocast: Literal["no", "bf16"] = "no"
    """Precision of the matrix products; the fixed point stays in float32 either way."""

    steps: Count = 4000  # Optimizer steps.
    batch_size: Count = 128  # Rows of a training batch, in each process.
    lr: Positive = 1e-3  # Peak learning rate of AdamW.
    schedule: Schedule = "cosine"
    """Decay of the learning rate to zero after the warm-up; hold: only over the last 40 %."""
    warmup_steps: Natural = 100  # Steps of linear warm-up.
    weight_decay: Annotated[float, Range(0)] = 0.01
    """Weight decay; parameters marked `_no_weight_decay` (A_log, omega, D) are not decayed."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.99)  # AdamW's averaging constants.
    clip: Annotated[float, Range(0, brackets="(]")] = 1.0  # Largest norm of the gradient.

    layer: Annotated[
        Literal["bedouin", "tracking", "paper"], tyro.conf.arg(aliases=["--mixer-layer"])
    ] = "bedouin"
    """bedouin: the fixed-point layer; tracking: `TrackingDeltaNet`, which takes no option of it;
    paper: `Bedouin.from_paper`, which takes the sizes and the cap of the steps."""
    d_model: Count = 128  # Width of the model.
    num_layers: Count = 1  # Residual blocks.

    log_every: Count = 20  # Steps between two updates of the progress bar.
    eval_every: Count = 500  # Steps between two evaluations.
    checkpoint_every: Count = 500  # Steps between two checkpoints; there is one at the end, too.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.overwrite:
            raise ValueError("--resume continues a run and --overwrite replaces it: give one")
        for name in sorted(NOT_TAKEN.get(self.layer, ())):
            if getattr(self, name) != getattr(RunConfig, name):
                got = f"--layer {self.layer} takes no {flag(name)}"
                raise ValueError(f"{got}: leave it out or use --layer bedouin")
        check_heads(self.num_heads, self.expand * self.d_model)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Options of a training run whose accuracy is evaluated by length."""

    eval_lengths: tuple[Count, ...] = ()  # Lengths evaluated during training and after it.
    final_lengths: tuple[Count, ...] = ()  # Lengths evaluated after training alone.
    eval_rows: Count = 512  # Test rows of an evaluation during training, per length and process.
    final_rows: Count = 2048  # Test rows of the evaluation after training, per length and process.
    eval_batch_size: Count = 256  # Rows of a test batch.


ConfigT = TypeVar("ConfigT", bound=RunConfig)
MakeLayer = Callable[[RunConfig], nn.Module]


def parse_config(presets: Mapping[str, ConfigT], args: Sequence[str] | None = None) -> ConfigT:
    """Read the command line (or `args`): the preset gives the defaults, the flags override them;
    "auto" is the first preset where this machine's is missing. Exits with status 2 and a message on
    a bad flag or value."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", default="auto")
    early.add_argument("--layer", "--mixer-layer")
    found = early.parse_known_args(args)[0]
    if found.preset not in (listed := ["auto", *presets]):
        early.exit(2, f"error: --preset must be one of {', '.join(listed)}, got {found.preset}\n")
    machine = "gpu" if torch.cuda.is_available() else "cpu"
    auto = presets.get(machine, next(iter(presets.values())))
    default = presets.get(found.preset, auto)
    # another layer does not take the preset's options of Bedouin
    own = {name: getattr(RunConfig, name) for name in NOT_TAKEN.get(found.layer, ())}
    config = tyro.cli(type(default), args=args, default=replace(default, **own))
    return replace(config, preset=auto.preset) if config.preset == "auto" else config


def make_layer(config: RunConfig) -> nn.Module:
    """One mixing layer, (b, t, m) -> (b, t, m)."""
    if config.layer == "tracking":
        return TrackingDeltaNet(config.d_model)
    fixed = fixed_point_options(config)
    if config.layer == "paper":
        sizes = {name: getattr(config, name) for name in _SIZES}
        return Bedouin.from_paper(config.d_model, max_steps=fixed["max_steps"], **sizes)
    named = ("d_state", "expand", "num_heads", "decay", "input_scale", "feedback", "feedback_init")
    options = {name: getattr(config, name) for name in ("d_model", *named, "d_conv")}
    options |= mixer_options(config.num_householder, config.beta_max) | fixed
    return Bedouin(**options, initialization=Initialization(rates=config.rate_scale))


def mixer_options(num_householder: int, beta_max: float) -> dict[str, Any]:
    """The options of Bedouin's mixer: so many reflections, or for 0 no mixing."""
    if num_householder:
        return {"num_householder": num_householder, "beta_max": beta_max}
    return {"mixer": NoMixing()}


def fixed_point_options(options: SolverOptions) -> dict[str, Any]:
    """Solver, adjoint and cap as arguments of the layer."""
    name, steps, gamma = options.solver, options.solver_steps, options.gamma_cap
    solver: solvers.Solver | Literal["auto"] = "auto"
    if name == "direct":
        solver = solvers.Direct()
    elif name != "auto":
        solver = getattr(solvers, name.title())(rtol=options.rtol, atol=options.atol)
    cap = solvers.FixedCap(steps) if gamma is None else solvers.GammaCap(*gamma, limit=steps)
    return {"solver": solver, "adjoint": ADJOINTS[options.adjoint], "max_steps": cap}


def decay(schedule: Schedule, step: int, warmup_steps: int, steps: int) -> float:
    """Factor on the learning rate: linear warm-up, then decay to zero, late for "hold"."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "linear":
        return 1 - done
    if schedule == "hold":
        done = max(0.0, (done - HOLD_SHARE) / (1 - HOLD_SHARE))
    return (1 + math.cos(math.pi * done)) / 2
