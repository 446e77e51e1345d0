"""Copying: trained on 5 to 50 letters, tested to 200."""

from experiments.models import RATES, WIDTH, models, training
from experiments.plan import REPORTED, TUNING, Experiment, Run, joined

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
