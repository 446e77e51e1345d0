"""What describes an iteration and its outcome; free of Triton.

Letters: b batch, t time, d channels.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class IterationRule:
    """How an iteration moves and when a token has converged; see bedouin.solvers.

    whole_sequence: the paper's stop rule, under which a solve returns its last evaluation and not
        the iterate that was measured. adaptive: damping that depends on the defects of all tokens.
    """

    method: Literal["picard", "jacobi"]
    rtol: float
    atol: float
    damping: float = 1.0
    whole_sequence: bool = False
    adaptive: bool = False


class Progress(NamedTuple):
    """The present iterate, and the norms of the last evaluation."""

    y: Tensor  # (b, t, d)
    frozen: Tensor  # (b, t)
    failed: Tensor  # (b,)
    num_steps: Tensor  # (b,)
    defect: Tensor  # (b, t)
    scale: Tensor  # (b, t), |F(y)_t|
    pivot: Tensor | None  # (b,)
    value: Tensor | None = None  # (b, t, d): the last F(y) where that is returned; None: y is
