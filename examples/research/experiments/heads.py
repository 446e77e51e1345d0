"""One layer with 1, 4, 8 and 16 heads, at equal width and at equal parameters."""

from research.experiments.plan import NARROW, STRINGS, THREE_TUNING, Experiment, Run, joined

TASKS = {
    "a5": (
        f"{NARROW} --length 16 --eval-lengths 16 48 128 512 --batch-size 128 --steps 12000 "
        "--lr 5e-4 --d-model 512 --num-householder 4"
    ),
    "copy": (
        f"{NARROW} {STRINGS} --steps 5000 --d-state 16 --num-householder 2 --input-scale delta "
        "--rate-scale 0.01 "
        "--lr 1e-3 2e-3"
    ),
}
HEADS = (1, 4, 8, 16)
CHANGES = {
    ("copy", 1): "--lr 1e-3",
    ("copy", 4): "--lr 2e-3",
    ("a5", 1): "--no-concurrent",
    ("a5", 4): "--no-concurrent",
}
"""Runs with fewer learning rates, to save time, and with one model after the other, because the
kernels of one head and of large ones fill the GPU by themselves."""


EQUAL = {("a5", 1): 256, ("a5", 4): 416, ("a5", 16): 576}
EQUAL |= {("copy", 1): 128, ("copy", 4): 224, ("copy", 16): 288}
"""Values of d_model with about as many parameters as eight heads have at the task's width."""


def heads() -> Experiment:
    """The grid of heads."""
    runs = []
    for task, flags in TASKS.items():
        for number in HEADS:
            change = CHANGES.get((task, number), "")
            options = joined(flags, THREE_TUNING, f"--num-heads {number} --concurrent", change)
            runs.append(Run(f"{task}-heads{number}", options))
            if number != 8:
                rate = "--lr 2e-3" if (task, number) == ("copy", 16) else ""
                width = f"--d-model {EQUAL[task, number]}"
                runs.append(Run(f"{task}-heads{number}-equal", joined(options, width, rate)))
    return Experiment("heads", "How many heads, at equal width and parameters?", tuple(runs))
