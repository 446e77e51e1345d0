"""h before the tokens of a chunk of heads, from h before the first one; loads of a token.

Letters: d channels of a head, n state per channel, s samples of a program, or their parts.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import activate
from bedouin.kernels.direct.device import (
    discretize,
    load_head_states,
    load_vector,
    spread,
    store_head_states,
)
from bedouin.kernels.direct.parts import columns_of_rows


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
    cols, in_row,  # the channels of a row, (s, d) or (1, d)
    n: tl.constexpr, N: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """x~, raw Delta and B of a token."""
    mixed = tl.load(mixed_row[:, None] + cols, mask=in_row, other=0.0)
    delta = tl.load(raw_row[:, None] + cols, mask=in_row, other=0.0).to(tl.float32)
    if FEEDBACK:
        delta += tl.load(fed_row[:, None] + cols, mask=in_row, other=0.0).to(tl.float32)
    B = load_vector(B_row, n, B_row.shape[0], N)
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
    """Store h before all tokens but the first: h_t = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T."""
    h = load_head_states(from_row[:, None] + cols, in_row, d, n, N)
    A = load_head_states(A_at, in_row, d, n, N)
    # loads of a token are issued while the one before it is computed
    loaded = _load_step(mixed_row, raw_row, fed_row, B_row, cols, in_row, n, N, FEEDBACK)
    for i in range(1, tokens):
        mixed, delta, B = loaded
        step = tl.minimum(i, tokens - 2)
        far = step.to(tl.int64)
        loaded = _load_step(
            mixed_row + step * d, raw_row + far * raw_stride, fed_row + far * fed_stride,
            B_row + step * B_stride, cols, in_row, n, N, FEEDBACK,
        )  # fmt: skip
        delta = activate(delta, ACTIVATION, FAST)
        decay, s = discretize(A, delta, N, INPUT_SCALE, FAST)
        written = spread(s * mixed, ROWS, D, N)
        h = decay * h + written * tl.broadcast_to(B[:, None, :], [ROWS, D, N])
        at = to_row[:, None] + (i - 1) * (n * d) + cols
        store_head_states(at, h, inside, d, n, N)


@triton.jit
def load_rows(
    row,  # pointers (s,)
    cols, in_row,  # the channels of a row, (s, d) or (1, d)
    d: tl.constexpr, u_at: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The values of Delta and of u of a token, raw ones or their feedback."""
    rows = ()
    for i in tl.static_range(K + 1):
        at = row[:, None] + (0 if i == 0 else u_at + (i - 1) * d) + cols
        rows = rows + (tl.load(at, mask=in_row, other=0.0),)
    return rows


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
    raw = load_rows(raw_row, cols, in_row, d, u_at, K)
    fed = ()
    if FEEDBACK:
        fed = load_rows(fed_row, cols, in_row, d, u_at, K)
    return x, y, g, mixed, raw, fed
