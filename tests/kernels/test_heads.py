"""An iteration of samples of several heads equals iterations of one head each.

`test_operations.py` has the other operations with heads. Letters: b samples of a head, t time,
d channels, n state per channel, H heads.
"""

from typing import Any

import pytest
import torch
from tests.kernels.sweeps import Case, each_head
from tests.kernels.table import BF16, F32

from bedouin.kernels.iteration import IterationRule

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
RULES = {
    "picard": IterationRule("picard", 0.05, 1e-6, damping=0.9),
    "paper": IterationRule("picard", 0.05, 0.0, whole_sequence=True),
}


@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
@pytest.mark.parametrize(
    ("num_heads", "b", "rule", "fed", "low"),
    [
        (2, 2, "picard", True, F32),
        (2, 1, "paper", True, F32),
        (3, 1, "picard", False, F32),
        (2, 1, "picard", True, BF16),
    ],
)
def test_iteration(
    num_heads: int, b: int, rule: str, fed: bool, low: torch.dtype, device: str
) -> None:
    """Every step of a solve: samples of all heads converge by themselves."""
    from bedouin.kernels.iteration.steps import FusedIteration

    coupled: Any = {"input_scale": "one_minus_decay", "feedback": fed, "low": low}
    case = Case(num_heads, b, t=2, p=3, n=2, k=1, **coupled)
    joint, options = case.operands(device), case.options()
    joint.raw[::2] *= 0.1  # some converge early
    start = torch.zeros(num_heads * b, 2, 3, device=device)
    together = FusedIteration(joint, start, options, RULES[rule])
    heads = [FusedIteration(one, start[:b], options, RULES[rule]) for one in each_head(case, joint)]
    tolerance = 2e-5  # a product of other shapes sums in another order
    for _ in range(2):
        for steps in (together, *heads):
            steps.advance()
        for name, ours in together.progress._asdict().items():
            theirs = [getattr(steps.progress, name) for steps in heads]
            if ours is None:
                assert theirs == [None] * num_heads
            else:
                torch.testing.assert_close(ours, torch.cat(theirs), rtol=tolerance, atol=tolerance)
