"""Steps with a gradient that is not finite, which change nothing and are counted."""

from torch import Tensor
from torch.optim import Optimizer

FAILED_SHARE = 0.01
"""A run with a larger share of skipped steps has failed."""


def skip_unless(
    finite: Tensor,  # () bool
    optimizer: Optimizer,  # fused
) -> None:
    """Let the next step of `optimizer` keep parameters, moments and step counts unless `finite`.

    torch's fused kernels read the flag on the device, so that nothing synchronizes with the host
    and a CUDA graph can capture the step. Optimizers that are not fused ignore the flag.
    """
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]


def has_failed(skipped: int, steps: int) -> bool:
    """Whether so many skipped steps are too many for the result of a run to count."""
    return skipped > FAILED_SHARE * steps
