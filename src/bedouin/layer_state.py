"""A call of a layer, and the layer's state before and after it.

Letters: b batch, t time, d d_inner, n d_state, H num_heads, p = d / H head_dim; b' = H b folded
samples (bedouin.heads).
"""

from typing import NamedTuple

from torch import Tensor

from bedouin.fixed_point_map import FixedPointMap
from bedouin.gated_stage import GatedStage
from bedouin.heads import fold_state
from bedouin.kernels.launch import accumulator
from bedouin.packing import Packing, last_token
from bedouin.state import BedouinState, StateSize, check_state, zero_state


class Call(NamedTuple):
    """The intermediate values of a call, from its projections to its output stage."""

    f: FixedPointMap
    start: Tensor  # (b', t, p), where the solve starts
    stage: GatedStage
    before: BedouinState | None  # of folded samples, before the first token; None: zeros
    window: Tensor | None  # (b, w - 1, c), of the convolution after the last token

    def after(
        self,
        y: Tensor,  # (b', t, p), the fixed point
    ) -> BedouinState:
        """The state of the folded samples after the last token, which may share memory with what
        the call has computed."""
        before, f = self.before, self.f
        if before is not None and y.shape[1] == 0:
            return before.clone()
        last = y[:, -1] if f.lengths is None else last_token(y, f.lengths, f.operands.y0)
        return BedouinState(f.memory(y), last, self.window)


def incoming_state(
    state: BedouinState | None,  # of b samples, or of what the arguments of the call say
    x: Tensor,  # (b, t, any size)
    size: StateSize,
    packing: Packing | None,
    num_heads: int,
) -> BedouinState | None:
    """The state of the folded samples before the first token; None: zeros.

    A call without tokens returns it, so it is then not None. Raises TypeError or ValueError for a
    state that does not fit.
    """
    dtype = accumulator(x.dtype)
    if state is None:
        if x.shape[1]:
            return None
        return fold_state(zero_state(x.shape[0], size, dtype, x.device), num_heads)
    rows = x.shape[0] if packing is None else packing.num_states
    state = check_state(state, rows, size, x.new_empty(0, dtype=dtype))
    if packing is not None:
        state = packing.before(state, zero_state(1, size, dtype, x.device))
    return fold_state(state, num_heads)
