"""Formal languages, trained to length 40 and tested from 40 to 256 as published."""

from research.experiments.controls import SMALL, SMALL_LAYER, SMALL_REFLECTIONS
from research.experiments.models import CHOSEN, WIDTH
from research.experiments.plan import REPORTED, Experiment, Run, joined

COMMON = f"{WIDTH} --length 40 --batch-size 256 --steps 6000 --lr 4e-3 --schedule hold --concurrent"
_DOUBLE = "--curriculum double"
_DRAWN = "--eval-from 40 --eval-lengths 40 256"
TASKS = {
    "parity": f"{COMMON} --task parity {_DRAWN} {_DOUBLE}",
    "arithmetic": f"{COMMON} --task arithmetic {_DRAWN} {_DOUBLE}",
    "brackets": f"{COMMON} --task brackets {_DRAWN}",
    "s5-generators32": (
        f"{COMMON} --group S5 --generators 32 --eval-lengths 40 64 128 256 {_DOUBLE}"
    ),
}
"""Expressions with brackets are drawn from all lengths at once: the threshold of "double" may be
out of reach at a short length, after which no longer one would be trained on. `--eval-lengths 256`
means lengths from 40 to 256 with `--eval-from 40`, and 256 alone for products."""
MODELS = {"bedouin": CHOSEN, "lstm_l1": "--mixer-layer lstm"}

LANGUAGES = Experiment(
    "languages",
    "Parity, modular arithmetic, and S5 with 32 generators",
    tuple(
        Run(f"{task}-{name}", joined(flags, REPORTED, model))
        for task, flags in TASKS.items()
        for name, model in MODELS.items()
    ),
)

_SMALL_MODELS = {
    "bedouin": SMALL_LAYER,
    "reflections": joined(SMALL_LAYER, SMALL_REFLECTIONS),
    "lstm": "--mixer-layer lstm",
}

LANGUAGES_SMALL = Experiment(
    "languages-small",
    "Modular arithmetic, in a small layer on a CPU",
    tuple(
        Run(
            f"arithmetic-{name}",
            joined(SMALL, "--task arithmetic --length 40 --steps 2000", _DRAWN, REPORTED, model),
        )
        for name, model in _SMALL_MODELS.items()
    ),
)
