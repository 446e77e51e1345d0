"""Learning rate schedules: functions of the step alone, so that a resumed run needs no state."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "hold"]
HELD = 0.6
"""Share of the steps for which "hold" keeps the full rate: seeds leave the plateau at different
times, and a rate that has decayed by then holds the late ones back."""


def decay(schedule: Schedule, step: int, warmup_steps: int, steps: int) -> float:
    """Factor on the learning rate: linear warm-up, then down to zero; "hold" starts down late."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "linear":
        return 1 - done
    if schedule == "hold":
        done = max(0.0, (done - HELD) / (1 - HELD))
    return (1 + math.cos(math.pi * done)) / 2
