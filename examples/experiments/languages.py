"""Formal languages, as published: trained to length 40, tested from 40 to 256."""

from experiments.models import CHOSEN, WIDTH
from experiments.plan import REPORTED, Experiment, Run, joined

COMMON = f"{WIDTH} --length 40 --eval-lengths 256 --batch-size 256 --lr 1e-3"
TASKS = {
    "parity": f"{COMMON} --task parity --eval-from 40 --steps 20000",
    "arithmetic": f"{COMMON} --task arithmetic --eval-from 40 --steps 30000",
    "brackets": f"{COMMON} --task brackets --eval-from 40 --steps 30000",
    "s5-generators32": f"{COMMON} --group S5 --generators 32 --steps 30000 --curriculum double",
}
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
