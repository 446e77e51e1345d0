"""The models that the experiments compare, and their learning rates.

Names end with the number of layers; `bedouin` is the configuration that is used everywhere.
"""

from common.layers import count
from research import ensemble
from research.experiments.plan import joined
from research.study import GRID, make_model

WIDTH = "--d-model 512 --autocast bf16"
NARROW = "--d-model 256 --autocast bf16"
"""Of the trials that chose the setting."""

CHOSEN = (
    "--input-scale delta --feedback delta --d-state 64 --num-heads 16 --d-conv 4 "
    "--num-householder 1 --beta-max 1e-3 --rate-scale 8 --rate-scale-last 0.001"
)
"""The options of `bedouin`, chosen by the trials of "both-trials"; it has no reflections."""

WITHOUT_REFLECTIONS = (
    "--input-scale delta --feedback delta --d-conv 4 --num-householder 0 "
    "--rate-scale 8 --rate-scale-last 0.001"
)
"""The options of `bedouin` without its one reflection, which CHOSEN makes almost the identity;
states and heads depend on the width of the model."""

SLOW = {"a5": 0, "s5": 0, "copy": 0.4}
"""The share of a task's steps in which W^y has a hundredth of the learning rate; it is a part of
the training, as are the learning rate and the curriculum. Word problems of other groups and parity
have that of A5."""

BEDOUIN = {
    "bedouin": CHOSEN,
    "bedouin_k1": f"{CHOSEN} --beta-max 1",
    "bedouin_k2": f"{CHOSEN} --beta-max 1 --num-householder 2",
    "bedouin_k4": f"{CHOSEN} --beta-max 1 --num-householder 4",
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

RATES = "1e-3 2e-3 4e-3"
"""The learning rates that were tried for every model, on A5 and on copying."""

TUNED: dict[tuple[str, str], str] = {
    **{("a5", model): "8e-3" for model in BEDOUIN},
    ("a5", "attention_l2"): "1e-3",
    ("a5", "deltanet_l2"): "1e-3",
    ("a5", "mamba_l2"): "1e-3",
    ("a5", "mamba_full_l2"): "2e-3",
    ("copy", "attention_l2"): "1e-3",
    ("copy", "lstm_l1"): "1e-3",
}
"""Learning rates that the tuning runs chose, by task and model; others keep those of the task. The
layer with reflections has the rate of the layer without."""

# Baselines were not tuned on S5 and have the rate of A5. The layer has that of the task, because it
# learns S5 later and generalizes less with that of A5 ("s5-rate-8e-3").
TUNED |= {
    ("s5", model): rate
    for (task, model), rate in TUNED.items()
    if task == "a5" and model in BASELINES
}


def models() -> dict[str, str]:
    """The flags of every model."""
    return {**BEDOUIN, **BASELINES}


def training(task: str, model: str) -> str:
    """How a model is trained on a task: the learning rate that was chosen for it, if any, and how
    long W^y learns slowly."""
    rate = TUNED.get((task, model))
    slow = SLOW[task] if model.startswith("bedouin") else 0
    return joined(
        "" if rate is None else f"--lr {rate}",
        f"--feedback-lr-scale 0.01 --feedback-lr-share {slow}" if slow else "",
    )


def parameters(options: str) -> int:
    """The number of parameters of a model from its command line."""
    config = ensemble.parse(options.split())
    return count(make_model(config, {name: getattr(config, name)[0] for name in GRID}))
