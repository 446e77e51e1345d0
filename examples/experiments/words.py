"""Word problems of A5 and S5: trained at length 16, tested to 512."""

from experiments.models import WIDTH, learning_rate, models, parameters
from experiments.plan import REPORTED, TUNING, Experiment, Run, joined

A5 = f"{WIDTH} --length 16 --eval-lengths 16 48 128 512 --batch-size 128 --steps 12000 --lr 5e-4"
S5 = (
    f"{WIDTH} --group S5 --length 16 --eval-lengths 16 48 128 512 --batch-size 256 --steps 30000 "
    "--lr 1e-3 --schedule hold --curriculum double"
)
TASKS = {"a5": A5, "s5": S5}

WORDS = Experiment(
    "words",
    "Which layers track the state of a group, and how far beyond the training length?",
    tuple(
        Run(f"{task}-{name}", joined(flags, REPORTED, model, learning_rate(task, name)))
        for task, flags in TASKS.items()
        for name, model in models().items()
    ),
)


def equal_parameters() -> Experiment:
    """The models of `words` on A5, all with the number of parameters of `bedouin`."""
    size = f"--match-parameters {parameters(joined(A5, models()['bedouin']))}"
    return Experiment(
        "words-equal",
        "The same on A5 with as many parameters as bedouin",
        tuple(
            Run(f"a5-{name}", joined(A5, REPORTED, model, learning_rate("a5", name), size))
            for name, model in models().items()
        ),
    )


RATES = ("2e-4", "5e-4", "1e-3", "2e-3")
WORDS_TUNING = Experiment(
    "words-tuning",
    "Which learning rate?",
    tuple(
        Run(f"a5-{name}", joined(A5, TUNING, model, f"--lr {' '.join(RATES)}"))
        for name, model in models().items()
    ),
)
