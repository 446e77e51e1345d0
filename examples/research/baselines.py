"""The baselines by name, and a script that trains one as a training script trains its layer.

    python examples/research/baselines.py train_lm --mixer-layer mamba --preset cpu --d-model 50
    python examples/research/baselines.py train_a5 --mixer-layer lstm --seed 1

All other flags are those of the script. Those of Bedouin that a baseline does not take are refused.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from bedouin import baselines
from common.options import OF_BEDOUIN, MakeLayer, RunConfig, parse_config
from common.script import run_script
from flags import flag

Baseline = Literal["lstm", "mamba", "deltanet", "gated_deltanet", "deltaproduct", "attention"]
BASELINES: dict[str, Callable[..., nn.Module]] = {
    "lstm": baselines.LSTM,
    "mamba": baselines.Mamba,
    "deltanet": baselines.DeltaNet,
    "gated_deltanet": partial(baselines.DeltaNet, gated=True),
    "deltaproduct": baselines.DeltaProduct,
    "attention": baselines.Attention,
}
TAKES: dict[str, tuple[str, ...]] = {
    "lstm": (),
    "mamba": ("d_state", "eigenvalues"),
    "deltanet": ("num_heads", "eigenvalues"),
    "gated_deltanet": ("num_heads", "eigenvalues"),
    "deltaproduct": ("num_heads", "num_householder", "eigenvalues"),
    "attention": ("num_heads",),
}
"""The options of Bedouin that a baseline takes as well."""
SCRIPTS = ("train_a5", "train_copy", "train_lm")


def count(module: nn.Module) -> int:
    """The number of parameters; a tensor that two modules share counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def baseline_of(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """The baseline that a command line names, if it names one, and the other flags."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--layer", "--mixer-layer")
    found, others = early.parse_known_args(args)
    return (found.layer if found.layer in BASELINES else None), others


def parse(script: ModuleType, args: Sequence[str]) -> tuple[Any, MakeLayer]:
    """The configuration of a command line of a training script, and the layer that it trains.

    Raises ValueError for an option that a baseline does not take.
    """
    name, others = baseline_of(args)
    if name is None:
        return parse_config(script.PRESETS, args), script.make_layer
    refused = sorted(OF_BEDOUIN - set(TAKES[name]))
    defaults = {option: getattr(RunConfig, option) for option in refused}
    own = {"layer": "bedouin", **defaults}
    presets = {key: replace(preset, **own) for key, preset in script.PRESETS.items()}
    config = parse_config(presets, others)
    for option in refused:
        if getattr(config, option) != defaults[option]:
            raise ValueError(f"--layer {name} takes no {flag(option)}: leave it out")
    return replace(config, layer=name), make_baseline


def make_baseline(config: RunConfig) -> nn.Module:
    """The baseline that a configuration names, with the options that it takes."""
    taken = {option: getattr(config, option, None) for option in TAKES[config.layer]}
    given = {option: value for option, value in taken.items() if value is not None}
    return BASELINES[config.layer](config.d_model, **given)


def main(arguments: Sequence[str]) -> None:
    """Train with the command line of a script, whose name is the first argument."""
    if not arguments or arguments[0] not in SCRIPTS or baseline_of(arguments)[0] is None:
        if {"-h", "--help"} & set(arguments):
            print(__doc__)
            return
        sys.exit(f"error: name a script of {SCRIPTS} and --mixer-layer, one of {(*BASELINES,)}")
    script = importlib.import_module(arguments[0])
    try:
        config, make_layer = parse(script, arguments[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    run_script(lambda options: script.main(options, make_layer), config)


if __name__ == "__main__":
    main(sys.argv[1:])
