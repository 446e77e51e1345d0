"""h before the tokens of a chunk of heads, from h before the first one; loads of a token.

Letters: d channels of a head, n state per channel, s samples of a program, or their parts. `how`:
`head_constants` of launch.py. `row`: pointers (s,) to the row of a token. `cols`: the channels of a
row, (s, d) or (1, d), of which `in_row` exist.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import FAST, activate
from bedouin.kernels.direct.device import (
    discretize,
    load_head_states,
    load_vector,
    spread,
    store_head_states,
)
from bedouin.kernels.direct.parts import columns_of_rows


@triton.jit
def fetch_tokens(row, first, stride, t_end, SIZE: tl.constexpr, KEEP: tl.constexpr, how):
    """Prefetch SIZE values of KEEP tokens from the `first` one on, as far as there are, into the L2
    cache, from the row of token 0 and the stride between two tokens."""
    EACH: tl.constexpr = 1024 // row.dtype.element_ty.primitive_bitwidth  # in 128 bytes
    LINES: tl.constexpr = (SIZE + EACH - 1) // EACH
    COUNT: tl.constexpr = max(how.PARTS, triton.next_power_of_2(KEEP * LINES))
    lines = columns_of_rows(row.shape[0], how.PARTS, COUNT // how.PARTS)
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
def _load_step(rows, strides, t, block, cols, in_row, how):
    """x~, raw Delta and a block of the states of B, of token t."""
    N: tl.constexpr = how.N // how.BLOCKS
    mixed = tl.load((rows[0] + t * strides[0])[:, None] + cols, mask=in_row, other=0.0)
    delta = tl.load((rows[1] + t * strides[1])[:, None] + cols, mask=in_row, other=0.0)
    delta = delta.to(tl.float32)
    if how.FEEDBACK:
        fed = tl.load((rows[2] + t * strides[2])[:, None] + cols, mask=in_row, other=0.0)
        delta += fed.to(tl.float32)
    return mixed, delta, load_vector(rows[3] + t * strides[3] + block * N, how.n - block * N, N)


@triton.jit
def replay_tokens(
    from_row,  # h before the first token
    to_row,  # the place of h before the second one, that of the others behind it
    rows, strides,  # of x~, raw values, feedback and B
    first, tokens,  # of the chunk: the first, and how many
    A_at,  # pointers (s, d) to state 0 of log2(e) A
    cols, in_row, inside,  # `inside`: the channels to be stored
    how,
):  # fmt: skip
    """Store h before all tokens but the first: h_t = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T."""
    for block in range(how.BLOCKS):
        h = load_head_states(from_row[:, None] + cols, in_row, how, block, how.BLOCKS)
        A = load_head_states(A_at, in_row, how, block, how.BLOCKS)
        # loads of a token are issued while the one before it is computed
        loaded = _load_step(rows, strides, first, block, cols, in_row, how)
        for i in range(1, tokens):
            mixed, delta, B = loaded
            t = first + tl.minimum(i, tokens - 2)
            loaded = _load_step(rows, strides, t, block, cols, in_row, how)
            decay, s = discretize(A, activate(delta, how.ACTIVATION), how)
            written = spread(s * mixed, h.shape[2])
            h = decay * h + written * tl.broadcast_to(B[:, None, :], h.shape)
            at = to_row[:, None] + (i - 1) * (how.n * how.d) + cols
            store_head_states(at, h, inside, how, block)


@triton.jit
def load_rows(row, cols, in_row, how):
    """The values of Delta and of u of a token, raw ones or their feedback."""
    rows = ()
    for i in tl.static_range(how.K + 1):
        at = row[:, None] + (0 if i == 0 else how.U_AT + (i - 1) * how.d) + cols
        rows = rows + (tl.load(at, mask=in_row, other=0.0),)
    return rows


@triton.jit
def load_kept_token(rows, strides, t, cols, in_row, how):
    """x, y, grad_y, x~, the raw values of Delta and u, and their feedback, or nothing of it, of
    token t, from the rows of token 0 and the strides between tokens in this order."""
    at = ()
    for i in tl.static_range(len(rows)):
        at = at + (rows[i] + t * strides[i],)
    x = tl.load(at[0][:, None] + cols, mask=in_row, other=0.0)
    y = tl.load(at[1][:, None] + cols, mask=in_row, other=0.0)
    g = tl.load(at[2][:, None] + cols, mask=in_row, other=0.0)
    mixed = tl.load(at[3][:, None] + cols, mask=in_row, other=0.0)
    raw = load_rows(at[4], cols, in_row, how)
    fed = ()
    if how.FEEDBACK:
        fed = load_rows(at[5], cols, in_row, how)
    return x, y, g, mixed, raw, fed
