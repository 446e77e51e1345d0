"""The search for one setting that tracks and copies: feedback of Delta, spread decay rates."""

from research.experiments.copying import STRINGS
from research.experiments.models import NARROW
from research.experiments.plan import TUNING, Experiment, Run, joined
from research.experiments.words import LENGTHS

_LAYER = (
    "--d-state 64 --num-heads 8 --input-scale delta --d-conv 4 --num-householder 1 --beta-max 1e-3 "
    "--feedback delta"
)
_A5 = f"{LENGTHS} --batch-size 128 --steps 8000 --lr 1e-3 --concurrent"
_S5 = f"{_A5} --group S5 --batch-size 256 --steps 15000 --schedule hold --curriculum double"
_COPY = f"{STRINGS} --steps 5000 --lr 2e-3 --concurrent"
TASKS = {"a5": _A5, "s5": _S5, "copy": _COPY}
_ALL = "--feedback delta+B+C"
_SPREAD = "--rate-scale 1 --rate-scale-last 0.001"
_FAST = "--rate-scale 8 --rate-scale-last 0.001"
_SLOW = "--feedback-lr-scale 0.01"
_COPY_SLOW = f"{_SPREAD} {_SLOW} --feedback-lr-share 0.4"
_DOUBLE = "--steps 12000 --schedule hold --curriculum double"
_WIDE = "--d-model 512 --num-heads 16"
_LONG = f"{_SLOW} --feedback-lr-share 0.05 --steps 10000"
_LONG_SHARE = f"{_FAST} {_SLOW} --feedback-lr-share 0.4 --steps 10000"
_A5_SLOW = f"{_FAST} {_DOUBLE} {_SLOW} --feedback-lr-share 0.0416667"
_REFLECTIONS = "--num-householder 2 --beta-max 1"
_CHANGES = {
    "a5-one-rate": "--rate-scale 1 --rate-scale-last None 0.01",
    "a5-all": f"{_ALL} --rate-scale 1 --rate-scale-last None 0.01",
    "a5-slow": f"{_SPREAD} --feedback-lr-scale 1 0.01 --feedback-lr-share 0.4",
    "a5-slow-tenth": f"{_SPREAD} --schedule hold {_SLOW} --feedback-lr-share 0.1 0.2",
    "a5-reflections": f"{_SPREAD} {_REFLECTIONS} --feedback delta delta+mixer",
    "a5-fast": "--rate-scale 8 --rate-scale-last 0.001 0.01",
    "a5-double": f"{_FAST} {_DOUBLE} --feedback-lr-scale 1 0.01 --feedback-lr-share 0.041667",
    "a5-double-batch256": f"--rate-scale 1 --rate-scale-last 0.01 {_DOUBLE} --batch-size 256",
    "a5-wide": f"{_A5_SLOW} {_WIDE} --lr 5e-4 1e-3",
    "a5-rates": f"--rate-scale 1 --rate-scale-last 0.001 0.01 {_DOUBLE} --lr 2e-3",
    "a5-rate": f"{_FAST} {_DOUBLE} --lr 2e-3 4e-3",
    "a5-rate-slow": f"{_A5_SLOW} --lr 2e-3 4e-3",
    "a5-rate-batch256": f"{_A5_SLOW} --batch-size 256 --lr 4e-3 --feedback-lr-scale 1 0.01",
    "a5-rate-wide": f"{_A5_SLOW} {_WIDE} --lr 2e-3 4e-3",
    "a5-rate-wide-batch256": (
        f"{_A5_SLOW} {_WIDE} --batch-size 256 --lr 4e-3 --feedback-lr-scale 1 0.01"
    ),
    "a5-rate-wide-always-slow": (
        f"{_FAST} {_DOUBLE} {_WIDE} --batch-size 256 --lr 4e-3 --feedback-lr-scale 0.1 0.03"
    ),
    "s5-spread": _SPREAD,
    "s5-fast": _FAST,
    "s5-slow-long": f"{_FAST} --steps 30000 {_SLOW} --feedback-lr-share 0.0166667",
    "s5-rate": f"{_FAST} --lr 2e-3 --feedback-lr-scale 1 0.01 --feedback-lr-share 0.0333333",
    "s5-rate-wide": f"{_FAST} {_WIDE} --lr 2e-3 4e-3",
    "s5-rate-wide-always-slow": f"{_FAST} {_WIDE} --lr 4e-3 --feedback-lr-scale 0.1",
    "copy-one-rate": "--rate-scale 0.01",
    "copy-spread": _SPREAD,
    "copy-slow": _COPY_SLOW,
    "copy-slow-tenth": f"{_SPREAD} {_SLOW} --feedback-lr-share 0.1",
    "copy-slow-one-rate": f"--rate-scale 0.01 {_SLOW} --feedback-lr-share 0.5",
    "copy-slow-fast": f"{_FAST} {_SLOW} --feedback-lr-share 0.4",
    "copy-slow-long": f"{_FAST} {_LONG}",
    "copy-slow-wide": f"{_FAST} {_LONG} {_WIDE}",
    "copy-slow-wide-seed101": f"{_FAST} {_LONG} {_WIDE} --first-seed 101",
    "copy-slow-wide-rate": f"{_FAST} {_LONG} {_WIDE} --lr 4e-3",
    "copy-slow-share": _LONG_SHARE,
    "copy-slow-share-same": f"{_LONG_SHARE} --key-init same",
    "copy-slow-share-wide": f"{_LONG_SHARE} {_WIDE} --first-seed 101",
    "copy-always-slow": f"{_FAST} --steps 10000 --feedback-lr-scale 0.1 0.03",
    "copy-always-slow-wide": (
        f"{_FAST} --steps 10000 --feedback-lr-scale 0.03 {_WIDE} --first-seed 101"
    ),
    "copy-no-feedback": f"{_FAST} --steps 10000 --feedback none",
    "copy-slow-conv8": f"{_COPY_SLOW} --d-conv 8",
    "copy-slow-heads16": f"{_COPY_SLOW} --num-heads 16",
    "copy-slow-reflections": f"{_COPY_SLOW} {_REFLECTIONS}",
    "copy-slow-all-rate0.001": f"{_ALL} --rate-scale 0.001 {_SLOW} --feedback-lr-share 0.5",
    "copy-slow-all-heads16-n32": (
        f"{_ALL} --rate-scale 0.01 {_SLOW} --feedback-lr-share 0.5 --num-heads 16 --d-state 32"
    ),
}
_BASELINES = {
    "a5-lstm-l1": f"{_A5} {_DOUBLE} --mixer-layer lstm --lr 5e-4 1e-3 2e-3",
    "a5-lstm-l1-wide": (
        f"{_A5} {_DOUBLE} --mixer-layer lstm --d-model 512 --batch-size 256 --lr 1e-3 2e-3 4e-3"
    ),
    "copy-attention-l2": (
        f"{_COPY} --mixer-layer attention --num-layers 2 --steps 10000 --lr 5e-4 1e-3 2e-3"
    ),
    "copy-deltanet-l1": f"{_COPY} --mixer-layer deltanet --lr 1e-3",
}

BOTH_TRIALS = Experiment(
    "both-trials",
    "Which setting of one layer both tracks and copies?",
    (
        *(
            Run(name, joined(NARROW, TASKS[name.partition("-")[0]], TUNING, _LAYER, change))
            for name, change in _CHANGES.items()
        ),
        *(Run(name, joined(NARROW, TUNING, options)) for name, options in _BASELINES.items()),
    ),
)
