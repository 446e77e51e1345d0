"""Learning rate schedules: functions of the step alone, so that a resumed run needs no state."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "hold"]
HOLD_SHARE = 0.6
"""Share of the steps for which "hold" keeps the full rate, because seeds leave the plateau of the
loss at different times."""


def decay(schedule: Schedule, step: int, warmup_steps: int, steps: int) -> float:
    """Factor on the learning rate: linear warm-up, then decay to zero, late for "hold"."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "linear":
        return 1 - done
    if schedule == "hold":
        done = max(0.0, (done - HOLD_SHARE) / (1 - HOLD_SHARE))
    return (1 + math.cos(math.pi * done)) / 2
