"""Rows of several lengths in one batch, padded on the right.

Letters: b batch, t time.
"""

import torch
from torch import Tensor


def draw_lengths(batch_size: int, allowed: range, generator: torch.Generator) -> Tensor:
    """Lengths (b,) int64 on the generator's device, uniform over `allowed`, which is not empty.

    A single allowed length draws no random number.
    """
    if len(allowed) == 1:
        return torch.full((batch_size,), allowed[0], device=generator.device)
    shape = (batch_size,)
    which = torch.randint(len(allowed), shape, generator=generator, device=generator.device)
    return allowed.start + allowed.step * which
