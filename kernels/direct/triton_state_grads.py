"""Cotangents of the raw B and C of a token.

Letters: d channels, n state per channel.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_coupled
from bedouin.kernels.device.reflections import sums
from bedouin.kernels.direct.heads.device import exchange, lanes_of, unstack_states
from bedouin.kernels.direct.triton_blocks import load_block, load_states_of_both
from bedouin.kernels.direct.triton_sums import LANES, places, sum_between_warps, sums_of_rows


@triton.jit
def load_states_in_columns(BC_ptr, sizes):
    """What the cotangents of the raw B and C need: unit vectors, those of the other, 1 / norm.

    For every 32 of a list, B's states and then C's, three tensors (ROWS, 32). Nothing if ROWS is 0.
    """
    out = ()
    if sizes.ROWS > 0:
        for first in tl.static_range(0, 2 * sizes.BLOCKS * sizes.BLOCK_N, LANES):
            part, state, in_n = _columns_of_states(first, sizes)
            own = tl.load(BC_ptr + part * sizes.n + state, mask=in_n, other=0.0)
            other = tl.load(BC_ptr + (1 - part) * sizes.n + state, mask=in_n, other=0.0)
            out = out + (own, other, tl.load(BC_ptr - 2 + part))
    return out


@triton.jit
def _columns_of_states(FIRST: tl.constexpr, sizes):
    """Of each column, the first of which is number FIRST of the list: 0 for B and 1 for C, the
    state, and whether there is such a state."""
    STATES: tl.constexpr = sizes.BLOCKS * sizes.BLOCK_N
    _, columns = places(sizes.ROWS)
    if FIRST > 0:
        columns += FIRST
    state = columns % STATES
    return columns // STATES % 2, state, (columns < 2 * STATES) & (state < sizes.n)


@triton.jit
def store_state_grads_in_columns(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    decayed,  # BLOCKS times (BLOCK_N, BLOCK_D), lambda * h_{t-1}
    w,  # (BLOCK_D,), cotangent of F(y)_t
    delta,  # (BLOCK_D,)
    mixed,  # (BLOCK_D,), x~
    written,  # (BLOCK_D,), s * x~, unless the scale is coupled
    states,  # those of `load_states_in_columns`
    BC_ptr,  # (2 n,): B and C
    grad_ptr,  # (2 n,), written: that of B, that of C
    A_ptr,  # (n, d), log2(e) A
    sizes,  # Sizes
    options,  # Options
):
    """`store_state_grads` with ROWS, every sum in one thread of a warp."""
    COUPLED: tl.constexpr = options.INPUT_SCALE == "one_minus_decay"
    STATES: tl.constexpr = sizes.BLOCKS * sizes.BLOCK_N
    GROUPS: tl.constexpr = (2 * STATES + LANES - 1) // LANES
    of_B = ()
    of_C = ()
    for block in tl.static_range(sizes.BLOCKS):
        if COUPLED:
            B, C = load_states_of_both(BC_ptr, block, sizes)
            A_log2 = load_block(A_ptr, block, sizes.n, sizes)
            _, s_rows = build_coupled(A_log2 * delta[None, :], options.FULL, options.FAST)
            tile = s_rows * mixed[None, :]
            with_tile = (H[block] + C[:, None] * w[None, :]) * tile
            with_w = (decayed[block] + tile * B[:, None]) * w[None, :]
        else:
            # without w * written, which is the same for all states but for a factor B or C
            with_tile = H[block] * written[None, :]
            with_w = decayed[block] * w[None, :]
        of_B = of_B + _lanes_of_states(with_tile, sizes)
        of_C = of_C + _lanes_of_states(with_w, sizes)
    lanes = of_B + of_C
    grads = ()
    for group in tl.static_range(GROUPS):
        part = lanes[group * LANES : min((group + 1) * LANES, 2 * STATES)]
        grads = grads + (sums_of_rows(part, sizes.ROWS),)
    if not COUPLED:
        grads = _add_product(grads, w, written, states, sizes)
    _store_columns(grads, states, grad_ptr, sizes)


@triton.jit
def _add_product(grads, w, written, states, sizes):
    """All groups of columns with the sum of w * written times the other unit vector."""
    row = tl.reshape(w * written, [sizes.ROWS, sizes.BLOCK_D // sizes.ROWS])
    lanes = lanes_of(row, sizes.ROWS, sizes.BLOCK_D // sizes.ROWS)
    total = sums_of_rows((lanes,), sizes.ROWS)
    out = ()
    for group in tl.static_range(len(grads)):
        out = out + (grads[group] + states[3 * group + 1] * total,)
    return out


@triton.jit
def _store_columns(grads, states, grad_ptr, sizes):
    """Store the cotangents of the raw B and C from those of the unit vectors, of each warp's
    channels: less their parts along B and C."""
    STATES: tl.constexpr = sizes.BLOCKS * sizes.BLOCK_N
    GROUPS: tl.constexpr = len(grads)
    totals = ()
    for group in tl.static_range(GROUPS):
        totals = totals + (sum_between_warps(grads[group], sizes),)
    grads = totals
    rows, _ = places(sizes.ROWS)
    along = ()
    for group in tl.static_range(GROUPS):
        total = grads[group] * states[3 * group]
        for bit in tl.static_range(5):
            if 2**bit < STATES:
                total += exchange(total, tl.arange(0, LANES), 2**bit, sizes.ROWS, LANES)
        along = along + (total,)
    # groups of one vector
    OF_ONE: tl.constexpr = max(1, GROUPS // 2)
    for group in tl.static_range(GROUPS):
        total = along[group // OF_ONE * OF_ONE]
        for other in tl.static_range(1, OF_ONE):
            total += along[group // OF_ONE * OF_ONE + other]
        own, inv = states[3 * group], states[3 * group + 2]
        part, state, in_n = _columns_of_states(group * LANES, sizes)
        grad = inv * (grads[group] - own * total)
        at = grad_ptr + part * sizes.n + state
        tl.store(at, grad.to(grad_ptr.dtype.element_ty), mask=in_n & (rows == 0))


@triton.jit
def _lanes_of_states(tile, sizes):
    """BLOCK_N tensors (ROWS, 32): of every state of (BLOCK_N, BLOCK_D) the sums within threads."""
    BLOCK_N: tl.constexpr = sizes.BLOCK_N
    ROWS: tl.constexpr = sizes.ROWS
    row = tl.reshape(tile, [BLOCK_N * ROWS, sizes.BLOCK_D // ROWS])
    lanes = lanes_of(row, BLOCK_N * ROWS, sizes.BLOCK_D // ROWS)
    lanes = tl.permute(tl.reshape(lanes, [BLOCK_N, ROWS, LANES]), (1, 2, 0))
    return unstack_states(lanes, ROWS, LANES, BLOCK_N)


@triton.jit
def store_state_grads(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    decayed,  # BLOCKS times (BLOCK_N, BLOCK_D), lambda * h_{t-1}
    w,  # (BLOCK_D,), cotangent of F(y)_t
    delta,  # (BLOCK_D,)
    mixed,  # (BLOCK_D,), x~
    written,  # (BLOCK_D,), s * x~, unless the scale is coupled
    BC_ptr,  # (2 n,): B and C, after 1 / |B| and 1 / |C|
    grad_ptr,  # (2 n,), written: that of B, that of C
    A_ptr,  # (n, d), log2(e) A
    sizes,  # Sizes
    options,  # Options
):
    """Cotangents of the raw B and C: of the unit B and C, less their parts along B and C.

    With h_t = decayed + (s * x~) B^T those of the unit vectors are the sums over d of
    (H + w C^T) (s * x~) and of h_t w.
    """
    d: tl.constexpr = sizes.d
    n: tl.constexpr = sizes.n
    BLOCK_N: tl.constexpr = sizes.BLOCK_N
    BLOCKS: tl.constexpr = sizes.BLOCKS
    inv_B = tl.load(BC_ptr - 2)
    inv_C = tl.load(BC_ptr - 1)
    cols = tl.arange(0, sizes.BLOCK_D)
    grads = ()
    for block in tl.static_range(BLOCKS):
        B, C = load_states_of_both(BC_ptr, block, sizes)
        total = H[block] + C[:, None] * w[None, :]
        if options.INPUT_SCALE == "one_minus_decay":
            n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
            state = n_rows[:, None] * d + cols[None, :]
            in_state = (n_rows < n)[:, None] & (cols < d)[None, :]
            A_log2 = tl.load(A_ptr + state, mask=in_state, other=0.0)
            _, s_rows = build_coupled(A_log2 * delta[None, :], options.FULL, options.FAST)
            tile = s_rows * mixed[None, :]
        else:
            tile = written[None, :]
        h = decayed[block] + tile * B[:, None]
        grads = grads + (total * tile, h * w[None, :])
    grads = sums(grads, 1)
    along_B = tl.zeros([], dtype=tl.float32)
    along_C = tl.zeros([], dtype=tl.float32)
    for block in tl.static_range(BLOCKS):
        B, C = load_states_of_both(BC_ptr, block, sizes)
        along_B += tl.sum(grads[2 * block] * B, axis=0)
        along_C += tl.sum(grads[2 * block + 1] * C, axis=0)
    kind: tl.constexpr = grad_ptr.dtype.element_ty
    for block in tl.static_range(BLOCKS):
        n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        B, C = load_states_of_both(BC_ptr, block, sizes)
        grad_B = inv_B * (grads[2 * block] - B * along_B)
        grad_C = inv_C * (grads[2 * block + 1] - C * along_C)
        tl.store(grad_ptr + n_rows, grad_B.to(kind), mask=n_rows < n)
        tl.store(grad_ptr + n + n_rows, grad_C.to(kind), mask=n_rows < n)
