"""Copying: trained on 5 to 50 letters, tested to 200."""

from experiments.models import CHOSEN, WIDTH, learning_rate, models
from experiments.plan import REPORTED, TUNING, Experiment, Run, joined

COPY = (
    f"{WIDTH} --task copy --min-string 5 --max-string 50 --context 256 "
    "--eval-lengths 50 75 100 200 --batch-size 64 --steps 5000 --lr 1e-3"
)
FEEDBACK = {
    "none": "none",
    "mixer": "mixer",
    "bc": "B+C",
    "bcm": "B+C+mixer",
    "all": "delta+B+C+mixer",
}

COPYING = Experiment(
    "copying",
    "Which layers copy strings of twice the training length?",
    tuple(
        Run(f"copy-{name}", joined(COPY, REPORTED, model, learning_rate("copy", name)))
        for name, model in models().items()
    ),
)
COPYING_TUNING = Experiment(
    "copying-tuning",
    "Which learning rate?",
    tuple(
        Run(f"copy-{name}", joined(COPY, TUNING, model, "--lr 5e-4 1e-3 2e-3 4e-3"))
        for name, model in models().items()
    ),
)
SETTINGS = {
    "delta-from-x0": "--delta-from-x-init 0",
    "rate1": "--rate-scale 1",
    "griffin": "--decay griffin --rate-scale 1",
    "wide": "--d-model 512",
    "long": "--steps 20000",
    "two-layers": "--num-layers 2",
    **{f"heads{number}": f"--num-heads {number}" for number in (4, 8, 16)},
}
COPYING_SETTINGS = Experiment(
    "copying-settings",
    "Which single change of bedouin improves copying?",
    tuple(Run(name, joined(COPY, TUNING, CHOSEN, change)) for name, change in SETTINGS.items()),
)
COPYING_FEEDBACK = Experiment(
    "copying-feedback",
    "What must depend on the last output (table 1 of Fixed-Point RNNs)?",
    tuple(
        Run(name, joined(COPY, REPORTED, CHOSEN, f"--feedback {fed}"))
        for name, fed in FEEDBACK.items()
    ),
)
