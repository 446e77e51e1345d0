"""Copying: trained on 5 to 50 letters, tested to 200."""

from research.experiments.models import RATES, WIDTH, WITHOUT_REFLECTIONS, models, training
from research.experiments.plan import REPORTED, THREE_TUNING, TUNING, Experiment, Run, joined

STRINGS = (
    "--task copy --min-string 5 --max-string 50 --context 256 --eval-lengths 50 75 100 200 "
    "--batch-size 64"
)
STEPS = 10000
COPY = f"{WIDTH} {STRINGS} --steps {STEPS} --lr 2e-3 --concurrent"
FEEDBACK = {
    "none": "none",
    "delta": "delta",
    "bc": "B+C",
    "all": "delta+B+C",
}


def trained(model: str, *options: str) -> str:
    """The command line of a model."""
    return joined(COPY, models()[model], training("copy", model), *options)


COPYING = Experiment(
    "copying",
    "Which layers copy strings of twice the training length?",
    tuple(Run(f"copy-{name}", trained(name, REPORTED)) for name in models()),
)
COPYING_TUNING = Experiment(
    "copying-tuning",
    "Which learning rate?",
    tuple(Run(f"copy-{name}", trained(name, TUNING, f"--lr {RATES}")) for name in models()),
)
COPYING_FEEDBACK = Experiment(
    "copying-feedback",
    "What must depend on the last output (table 1 of Fixed-Point RNNs)?",
    tuple(
        Run(name, trained("bedouin", REPORTED, f"--feedback {fed}"))
        for name, fed in FEEDBACK.items()
    ),
)

_SMALL = (
    "--task copy --min-string 4 --max-string 8 --eval-lengths 8 12 16 --batch-size 64 "
    "--d-model 128 --steps 1250 --lr 2e-3 4e-3 --concurrent"
)
"""The task of `make copy`; in a context of 64 tokens strings begin at more positions than in 32."""
_LAYER = f"{WITHOUT_REFLECTIONS} --d-state 32 --num-heads 4"
_SLOW = "--feedback-lr-scale 0.01 --feedback-lr-share"
_CONTEXTS = {"": "--context 32", "-context64": "--context 64"}
_SMALL_LAYERS = {
    "bedouin": (_LAYER, ("", "-context64")),
    "bedouin_slow": (f"{_LAYER} {_SLOW} 0.4", ("", "-context64")),
    "bedouin_always_slow": (f"{_LAYER} {_SLOW} 1", ("-context64",)),
    "bedouin_slow_long": (f"{_LAYER} {_SLOW} 0.4 --steps 5000", ("-context64",)),
    "no_feedback": (f"{_LAYER} --feedback none", ("-context64",)),
    "attention_l2": (models()["attention_l2"], ("", "-context64")),
    "deltanet_l1": (models()["deltanet_l1"], ("-context64",)),
    "deltanet_l2": (models()["deltanet_l2"], ("-context64",)),
    # one rate, that of A5, because a run takes more than an hour on a CPU
    "deltaproduct_l1": (f"{models()['deltaproduct_l1']} --lr 4e-3", ("-context64",)),
    "mamba_l2": (models()["mamba_l2"], ("-context64",)),
}

COPYING_SMALL = Experiment(
    "copying-small",
    "Which layers copy strings of 16 letters after 4 to 8?",
    tuple(
        Run(f"{name}{context}", joined(_SMALL, THREE_TUNING, _CONTEXTS[context], flags))
        for name, (flags, contexts) in _SMALL_LAYERS.items()
        for context in contexts
    ),
)
"""The layer of `bedouin` at the size of `make copy`, and baselines."""
