"""h before the tokens of a chunk of heads, from h before the first one; loads of a token.

Blocks of states are replayed one after the other, so that the values of all states need no
registers beside what the reverse sweep holds.
Letters: d channels of a head, n state per channel, s samples of a program, or their parts.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import input_scale
from bedouin.kernels.direct.device import load_head_states, spread, store_head_states
from bedouin.kernels.direct.parts import columns_of_rows
from bedouin.kernels.direct.triton_blocks import discretize_block


@triton.jit
def fetch_tokens(
    row,  # pointers (s,) to the row of token 0
    first, stride,  # of the tokens that are prefetched, and between two of them
    t_end, SIZE: tl.constexpr, KEEP: tl.constexpr, PARTS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Prefetch SIZE values of KEEP tokens, as far as there are, into the L2 cache."""
    EACH: tl.constexpr = 1024 // row.dtype.element_ty.primitive_bitwidth  # in 128 bytes
    LINES: tl.constexpr = (SIZE + EACH - 1) // EACH
    COUNT: tl.constexpr = max(PARTS, triton.next_power_of_2(KEEP * LINES))
    lines = columns_of_rows(row.shape[0], PARTS, COUNT // PARTS)
    token = tl.minimum(first + lines // LINES, t_end - 1).to(tl.int64)
    at = row[:, None] + (token * stride + tl.minimum(lines % LINES * EACH, SIZE - 1))
    if FAST:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [at.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _load_step(
    mixed_row, raw_row, fed_row, B_row,  # pointers (s,)
    count, cols, in_row,  # the channels of a row, (s, d) or (1, d)
    N: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """x~, raw Delta and B of a block of states of a token."""
    mixed = tl.load(mixed_row[:, None] + cols, mask=in_row, other=0.0)
    delta = tl.load(raw_row[:, None] + cols, mask=in_row, other=0.0).to(tl.float32)
    if FEEDBACK:
        delta += tl.load(fed_row[:, None] + cols, mask=in_row, other=0.0).to(tl.float32)
    at = tl.arange(0, N)[None, :]
    if count is None:
        B = tl.load(B_row[:, None] + at)
    else:
        B = tl.load(B_row[:, None] + at, mask=at < count, other=0.0)
    return mixed, delta, B


@triton.jit
def replay_tokens(
    from_row,  # pointers (s,) to h before the first token
    to_row,  # pointers (s,) to the place of h before the second one, that of the others behind it
    tokens,
    mixed_row, raw_row, fed_row, B_row,  # pointers (s,) to rows of the first token
    raw_stride, fed_stride, B_stride,  # between tokens
    A_at,  # pointers (s, d) to state 0 of log2(e) A
    cols, in_row, inside,  # the channels of a row, (s, d) or (1, d); `inside`: those to be stored
    d: tl.constexpr, n: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    ACTIVATION: tl.constexpr, INPUT_SCALE: tl.constexpr,
    FEEDBACK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Store h before all tokens but the first: h_t = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T.

    The loop over blocks remains one, because the compiler takes long for every load and store.
    """
    COUPLED: tl.constexpr = INPUT_SCALE == "one_minus_decay"
    for block in tl.range(0, (n + N - 1) // N):
        state = block * N * d
        # no part of a block is left over if they have the same size
        count = None if n % N == 0 else n - block * N
        h = load_head_states(from_row[:, None] + state + cols, in_row, count, d, N)
        A = load_head_states(A_at + state, in_row, count, d, N)
        B_at = B_row + block * N
        # loads of a token are issued while the one before it is computed
        loaded = _load_step(mixed_row, raw_row, fed_row, B_at, count, cols, in_row, N, FEEDBACK)
        for i in range(1, tokens):
            mixed, delta, B = loaded
            step = tl.minimum(i, tokens - 2)
            far = step.to(tl.int64)
            loaded = _load_step(
                mixed_row + step * d, raw_row + far * raw_stride, fed_row + far * fed_stride,
                B_at + step * B_stride, count, cols, in_row, N, FEEDBACK,
            )  # fmt: skip
            delta = activate(delta, ACTIVATION, FAST)
            s = input_scale(delta, INPUT_SCALE, FAST)
            decay, s = discretize_block(A, delta, s, ROWS, D, N, COUPLED, FAST)
            written = spread(s * mixed, ROWS, D, N)
            h = decay * h + written * tl.broadcast_to(B[:, None, :], [ROWS, D, N])
            at = to_row[:, None] + ((i - 1) * (n * d) + state) + cols
            store_head_states(at, h, inside, count, d, N)


@triton.jit
def load_kept_token(
    x_row, y_row, grad_y_row, mixed_row, raw_row, fed_row,  # pointers (s,)
    cols, in_row,  # the channels of a row, (s, d) or (1, d)
    d: tl.constexpr, u_at: tl.constexpr, K: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """x, y, grad_y, x~, the raw values of Delta and u, and their feedback, or nothing of it."""
    x = tl.load(x_row[:, None] + cols, mask=in_row, other=0.0)
    y = tl.load(y_row[:, None] + cols, mask=in_row, other=0.0)
    g = tl.load(grad_y_row[:, None] + cols, mask=in_row, other=0.0)
    mixed = tl.load(mixed_row[:, None] + cols, mask=in_row, other=0.0)
    raw = ()
    fed = ()
    for i in tl.static_range(K + 1):
        at = (0 if i == 0 else u_at + (i - 1) * d) + cols
        raw = raw + (tl.load(raw_row[:, None] + at, mask=in_row, other=0.0),)
        if FEEDBACK:
            fed = fed + (tl.load(fed_row[:, None] + at, mask=in_row, other=0.0),)
    return x, y, g, mixed, raw, fed
