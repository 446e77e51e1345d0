"""Word problems of A5 and S5: trained at length 16, tested to 512."""

from experiments.models import RATES, WIDTH, models, parameters, training
from experiments.plan import REPORTED, TUNING, Experiment, Run, joined

LENGTHS = "--length 16 --eval-lengths 16 48 128 512"
STEPS = {"a5": 12000, "s5": 15000}
_SCHEDULE = "--batch-size 256 --lr 4e-3 --schedule hold --curriculum double --concurrent"
A5 = f"{WIDTH} {LENGTHS} --steps {STEPS['a5']} {_SCHEDULE}"
S5 = f"{WIDTH} {LENGTHS} --group S5 --steps {STEPS['s5']} {_SCHEDULE}"
TASKS = {"a5": A5, "s5": S5}


def trained(task: str, model: str, *options: str) -> str:
    """The command line of a model on a task."""
    return joined(TASKS[task], models()[model], training(task, model), *options)


WORDS = Experiment(
    "words",
    "Which layers track the state of a group, and how far beyond the training length?",
    tuple(
        Run(f"{task}-{name}", trained(task, name, REPORTED)) for task in TASKS for name in models()
    ),
)


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
