"""Word problems of A5 and S5: trained at length 16, tested to 512."""

from research.experiments.models import RATES, WIDTH, models, parameters, training
from research.experiments.plan import REPORTED, THREE_TUNING, TUNING, Experiment, Run, joined

LENGTHS = "--length 16 --eval-lengths 16 48 128 512"
STEPS = {"a5": 12000, "s5": 15000}
_SCHEDULE = "--batch-size 256 --lr 4e-3 --schedule hold --curriculum double --concurrent"
A5 = f"{WIDTH} {LENGTHS} --steps {STEPS['a5']} {_SCHEDULE}"
S5 = f"{WIDTH} {LENGTHS} --group S5 --steps {STEPS['s5']} {_SCHEDULE}"
TASKS = {"a5": A5, "s5": S5}
_SLOW = "--feedback-lr-scale 0.01 --feedback-lr-share 0.0416667"


def trained(task: str, model: str, *options: str) -> str:
    """The command line of a model on a task."""
    return joined(TASKS[task], models()[model], training(task, model), *options)


WORDS = Experiment(
    "words",
    "Which layers track the state of a group, and how far beyond the training length?",
    (
        *(
            Run(f"{task}-{name}", trained(task, name, REPORTED))
            for task in TASKS
            for name in models()
        ),
        Run("a5-bedouin_slow", joined(A5, models()["bedouin"], _SLOW, REPORTED)),
    ),
)
"""The last run is the first one of bedouin on A5; the learning rate was then chosen anew."""


def equal_parameters() -> Experiment:
    """The models of `words` on A5, all with the number of parameters of `bedouin`."""
    size = f"--match-parameters {parameters(joined(A5, models()['bedouin']))}"
    return Experiment(
        "words-equal",
        "The same on A5 with as many parameters as bedouin",
        tuple(Run(f"a5-{name}", trained("a5", name, REPORTED, size)) for name in models()),
    )


WORDS_TUNING = Experiment(
    "words-tuning",
    "Which learning rate?",
    tuple(Run(f"a5-{name}", trained("a5", name, TUNING, f"--lr {RATES}")) for name in models()),
)

_LARGE = "--lr 8e-3"
_DECAY = "--weight-decay 0.1"
_SMALL_BATCH = "--batch-size 128"
_CHANGES = {
    "a5-rate": "--lr 4e-3",
    "a5-rate-last": "--lr 4e-3 --rate-scale-last 0.01",
    "a5-rate-8e-3": _LARGE,
    "a5-rate-1.2e-2": "--lr 1.2e-2",
    "a5-decay": f"--lr 4e-3 {_DECAY}",
    "a5-decay-8e-3": f"{_LARGE} {_DECAY}",
    "a5-batch128-8e-3": f"{_LARGE} {_SMALL_BATCH} --steps 24000",
    "s5-rate-8e-3": _LARGE,
    "s5-decay": _DECAY,
    "s5-batch128": f"{_SMALL_BATCH} --steps 30000",
}

WORDS_TRIALS = Experiment(
    "words-trials",
    "Which learning rate, weight decay and batch track furthest, on three seeds?",
    (
        *(
            Run(name, trained(name.partition("-")[0], "bedouin", THREE_TUNING, change))
            for name, change in _CHANGES.items()
        ),
        Run("a5-lstm", trained("a5", "lstm_l1", THREE_TUNING, "--lr 4e-3 8e-3")),
    ),
)
