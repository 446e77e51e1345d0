"""A call of a layer, and the layer's state before and after it.

Letters: b batch, t time, d d_inner, n d_state, H num_heads, p = d / H head_dim; b' = H b folded
samples (bedouin.heads).
"""

from typing import NamedTuple

from torch import Tensor

from bedouin.fixed_point_map import FixedPointMap
from bedouin.gated_stage import GatedStage
from bedouin.heads import unfold_state
from bedouin.joined_heads import JoinedHeads
from bedouin.kernels.launch import accumulator
from bedouin.packing import Packing, last_token
from bedouin.state import BedouinState, StateSize, check_state, zero_state


class Call(NamedTuple):
    """The intermediate values of a call, from its projections to its output stage."""

    f: FixedPointMap | JoinedHeads
    start: Tensor  # (b', t, p), where the solve starts
    stage: GatedStage
    state: BedouinState | None  # of b samples
    window: Tensor | None  # (b, w - 1, c), of the convolution after the last token


def incoming_state(
    state: BedouinState | None,  # of b samples, or of what the arguments of the call say
    x: Tensor,  # (b, t, any size)
    size: StateSize,
    packing: Packing | None,
) -> BedouinState | None:
    """The state before the first token of each sample; None: zeros.

    A call without tokens returns it, so it is then not None. Raises TypeError or ValueError for a
    state that does not fit.
    """
    dtype = accumulator(x.dtype)
    if state is None:
        return None if x.shape[1] else zero_state(x.shape[0], size, dtype, x.device)
    rows = x.shape[0] if packing is None else packing.num_states
    state = check_state(state, rows, size, x.new_empty(0, dtype=dtype))
    if packing is None:
        return state
    return packing.before(state, zero_state(1, size, dtype, x.device))


def outgoing_state(
    call: Call,
    y: Tensor,  # (b', t, p), the fixed point
    num_heads: int,
) -> BedouinState:
    """The state after the last token of each sample."""
    state, f = call.state, call.f
    f = f.f if isinstance(f, JoinedHeads) else f
    if state is not None and y.shape[1] == 0:
        return state.clone()
    lengths = f.lengths
    last = y[:, -1] if lengths is None else last_token(y, lengths, f.y0)
    # copies, because a view would keep all of y alive and may share what autograd has saved
    after = unfold_state(f.memory(y), last, num_heads)
    return BedouinState(after.ssm, after.y, call.window)
