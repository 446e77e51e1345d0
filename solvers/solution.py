"""What a solve returns: value, statistics and the sentence that the user reads.

Letters: b batch, t tokens of a sample.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bedouin.kernels.backend import is_batched


class ConvergenceError(RuntimeError):
    """A solve with on_unconverged="raise" did not converge."""


class ConvergenceWarning(UserWarning):
    """A solve with on_unconverged="warn" did not converge."""


class Result(enum.Enum):
    """Outcome of a solve over all its samples; `message` is a sentence for the user."""

    converged = "every sample converged"
    max_steps_reached = (
        "not every sample converged in the steps allowed: raise max_steps, loosen rtol, lower the "
        "damping factor of Picard, or use Direct or Jacobi where the map has their structure"
    )
    nonfinite = (
        "a sample became NaN or Inf: check its input, the size of its weights, and "
        "stats.conditioning (0 means a singular token: use beta_max=1 or a bounded input_scale)"
    )
    unknown = (
        "not read from the device (compiled, vmapped, captured, or asynchronous): see "
        "stats.converged"
    )

    @property
    def message(self) -> str:
        return self.value


class BackwardStats:
    """The cell that an adjoint fills when it has run its own solve."""

    def __init__(self) -> None:
        self._stats: SolveStats | None = None
        self._pending: Callable[[], SolveStats] | None = None

    @property
    def stats(self) -> "SolveStats | None":
        if self._pending is not None:
            self.stats = self._pending()
        return self._stats

    @stats.setter
    def stats(self, stats: "SolveStats") -> None:
        self._stats, self._pending = stats, None

    def defer(self, compute: Callable[[], "SolveStats"]) -> None:
        """Statistics that are computed when somebody asks for them."""
        self._pending = compute


@dataclass(frozen=True)
class SolveStats:
    """Statistics of one solve, each of shape (b,) and detached.

    num_steps: evaluations of the map until the sample froze; for Jacobi at most t + 1, the last of
        which only certifies; 1 for Direct.
    residual: max over tokens of defect_t / scale_t at the returned value, where
        defect_t = |F(y)_t - y_t| and scale_t = max_{s <= t} |F(y)_s| (max norms). It bounds the
        defect, not the distance to the fixed point. Under Picard's stop_rule="paper" it is that of
        the last step, whose F(y) is the returned value.
    converged: whether every token of the sample converged.
    conditioning: smallest pivot of the sample's local systems (Direct, Jacobi), else None.
    """

    num_steps: Tensor
    residual: Tensor
    converged: Tensor
    conditioning: Tensor | None = None
    _backward: BackwardStats = field(default_factory=BackwardStats, repr=False, compare=False)

    @property
    def backward(self) -> "SolveStats | None":
        """The adjoint's own statistics once backward has run, else None."""
        return self._backward.stats


@dataclass(frozen=True)
class Solution:
    """`value` (the shape of y0), `stats`, and `result`."""

    value: Tensor
    stats: SolveStats
    result: Result


def relative_residual(
    defect: Tensor,  # (b, t)
    scale: Tensor,  # (b, t), |F(y)_t|
) -> Tensor:  # (b,)
    """max_t defect_t / max_{s <= t} scale_s, with 0 / 0 = 0; NaN where a defect is not finite."""
    if defect.shape[1] == 0:
        return defect.new_zeros(defect.shape[0])
    largest = torch.cummax(scale, dim=1).values
    ratio = torch.where(defect == 0, torch.zeros_like(defect), defect / largest)
    return torch.where(torch.isfinite(ratio), ratio, torch.nan).amax(1)


def can_read_device(tensor: Tensor) -> bool:
    """Whether the host may look at values: not under compile, torch.func transforms or capture, not
    at batched cotangents, and not on the meta device, which has no values."""
    if tensor.is_meta:
        return False
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if is_batched(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def read_result(stats: SolveStats) -> Result:
    """The outcome, from the host (synchronizes on a GPU)."""
    if bool(stats.converged.all()):
        return Result.converged
    failed = ~stats.converged & ~torch.isfinite(stats.residual)
    return Result.nonfinite if bool(failed.any()) else Result.max_steps_reached


def describe(stats: SolveStats, result: Result, subject: str) -> str:
    """One line: how many samples, in how many steps, how far, and what to do."""
    b = stats.converged.numel()
    open_samples = int((~stats.converged).sum())
    finite = stats.residual[torch.isfinite(stats.residual)]
    worst = f"{finite.max().item():.1e}" if finite.numel() else "not finite"
    steps = int(stats.num_steps.max()) if b else 0
    return (
        f"{subject}: {open_samples} of {b} samples did not converge in {steps} steps "
        f"(worst residual {worst}): {result.message}"
    )
