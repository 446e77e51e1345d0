"""One layer with 1, 4, 8 and 16 heads, at equal width and at equal parameters."""

from experiments.copying import COPY
from experiments.models import CHOSEN, parameters
from experiments.plan import REPORTED, Experiment, Run, joined
from experiments.words import A5

TASKS = {"a5": f"{A5} --d-model 512 --num-householder 4", "copy": f"{COPY} {CHOSEN}"}
HEADS = (1, 4, 8, 16)


def heads() -> Experiment:
    """The grid of heads; equal parameters are those of eight heads at the task's width."""
    runs = []
    for task, flags in TASKS.items():
        size = f"--match-parameters {parameters(f'{flags} --num-heads 8')}"
        for number in HEADS:
            options = joined(flags, REPORTED, f"--num-heads {number}")
            runs.append(Run(f"{task}-heads{number}", options))
            runs.append(Run(f"{task}-heads{number}-equal", joined(options, size)))
    return Experiment("heads", "How many heads, at equal width and parameters?", tuple(runs))
