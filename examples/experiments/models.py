"""The models that the experiments compare, and their learning rates.

Names end with the number of layers; `bedouin` is the configuration that is used everywhere.
"""

import ensemble
from common.layers import count
from common.study import GRID, make_model

WIDTH = "--d-model 256 --autocast bf16"

CHOSEN = "--input-scale delta --rate-scale 0.1 --d-state 32 --num-householder 2 --num-heads 1"
"""The options of `bedouin`, the best compromise of the tuning runs so far."""

BEDOUIN = {
    "bedouin": CHOSEN,
    "bedouin_k1": f"{CHOSEN} --num-householder 1",
    "bedouin_k4": f"{CHOSEN} --num-householder 4",
}
_FLAGS = {
    "lstm": "--mixer-layer lstm",
    "mamba": "--mixer-layer mamba",
    "mamba_full": "--mixer-layer mamba --eigenvalues full",
    "deltanet": "--mixer-layer deltanet",
    "deltaproduct": "--mixer-layer deltaproduct --num-householder 4",
    "attention": "--mixer-layer attention",
}
BASELINES = {
    f"{name}_l{layers}": f"{flags} --num-layers {layers}"
    for name, flags in _FLAGS.items()
    for layers in (1, 2)
}
"""Every baseline with one and with two layers."""

TUNED: dict[tuple[str, str], str] = {}
"""Learning rates that the tuning runs chose, by task and model; others keep those of the task."""


def models() -> dict[str, str]:
    """The flags of every model."""
    return {**BEDOUIN, **BASELINES}


def learning_rate(task: str, model: str) -> str:
    """The flag of the learning rate that was chosen for a model on a task, if any."""
    rate = TUNED.get((task, model))
    return "" if rate is None else f"--lr {rate}"


def parameters(options: str) -> int:
    """The number of parameters of a model from its command line."""
    config = ensemble.parse(options.split())
    return count(make_model(config, {name: getattr(config, name)[0] for name in GRID}))
