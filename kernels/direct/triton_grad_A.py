"""The cotangent of A: a chunk's part, once the reverse sweep has walked back over the chunk.

It is the sum over tokens of (H_t + w_t C_t^T) * (d h_t / d (A Delta)) * Delta_t, which nothing in
the walk reads. The walk therefore only keeps w, Delta and the cotangent H after the chunk, and
blocks of channels and states are walked back again in parallel.

Letters: b batch, t time, d channels, n state per channel, k reflections.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.sync import load_uncached
from bedouin.kernels.direct.triton_blocks import discretize, reach
from bedouin.kernels.direct.triton_bundles import (
    Chunk,
    Memories,
    Options,
    Prepared,
    Sizes,
    WalkedChunk,
    local_width,
)
from bedouin.kernels.direct.triton_replay import token_memory


@triton.jit
def add_grad_A(
    prepared,  # Prepared
    memories,  # Memories
    walked,  # WalkedChunk
    grad_A_ptr,  # (b, n, d), added to
    chunk,  # Chunk
    sizes,  # Sizes, whose BLOCK_D channels and BLOCK_N states are a block
    options,  # Options
    index,  # of the block among those of all samples
):
    """Add the chunk's part of the cotangent of A for a block of channels and states of a sample."""
    COUPLED: tl.constexpr = options.INPUT_SCALE == "one_minus_decay"
    d: tl.constexpr = sizes.d
    n: tl.constexpr = sizes.n
    of_states: tl.constexpr = (n + sizes.BLOCK_N - 1) // sizes.BLOCK_N
    blocks = tl.cdiv(d, sizes.BLOCK_D) * of_states
    sample = (index // blocks).to(tl.int64)
    block = index % blocks
    rows = block % of_states * sizes.BLOCK_N + tl.arange(0, sizes.BLOCK_N)
    cols = block // of_states * sizes.BLOCK_D + tl.arange(0, sizes.BLOCK_D)
    in_n, in_d = rows < n, cols < d
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    A_log2 = tl.load(prepared.A_ptr + state, mask=in_state, other=0.0)
    behind = sample + chunk.behind
    H = load_uncached(walked.top_ptr + behind * (n * d) + state, in_state)
    WIDTH: tl.constexpr = local_width(options.K, n)
    first = behind * chunk.count
    vectors = walked.vectors_ptr + first * (2 * d) + cols
    B_row = prepared.local_ptr + first * WIDTH + (WIDTH - 2 * n) + rows
    mixed_row = prepared.mixed_ptr + first * d + cols
    # loads of a token are issued while the one after it is taken back
    last = chunk.count - 1
    w_next = load_uncached(vectors + last * (2 * d), in_d)
    delta_next = load_uncached(vectors + last * (2 * d) + d, in_d)
    C_next = load_uncached(B_row + last * WIDTH + n, in_n)
    memory = token_memory(memories, sample, last, chunk, sizes)
    h_next = load_uncached(memory + state, in_state)
    grad_A = tl.zeros([sizes.BLOCK_N, sizes.BLOCK_D], dtype=options.ACC)
    for back in range(0, chunk.count):
        w, delta, C, h = w_next, delta_next, C_next, h_next
        mixed, B = w, C
        if COUPLED:
            mixed = load_uncached(mixed_row + (last - back) * d, in_d)
            B = load_uncached(B_row + (last - back) * WIDTH, in_n)
        before = tl.maximum(last - back - 1, 0)
        w_next = load_uncached(vectors + before * (2 * d), in_d)
        delta_next = load_uncached(vectors + before * (2 * d) + d, in_d)
        C_next = load_uncached(B_row + before * WIDTH + n, in_n)
        memory = token_memory(memories, sample, before, chunk, sizes)
        h_next = load_uncached(memory + state, in_state)
        decay, s_rows = discretize(delta, A_log2, COUPLED, options)
        total = H + C[:, None] * w[None, :]
        along = reach(h, decay, s_rows, mixed, B, COUPLED, options.FULL)
        grad_A += total * along * delta[None, :]
        H = total * decay
    sum_at = grad_A_ptr + sample * (n * d) + state
    tl.store(sum_at, load_uncached(sum_at, in_state) + grad_A, mask=in_state)


@triton.jit(do_not_specialize=["start", "count", "slot", "slots"])
def grad_A_kernel(
    A_ptr,  # (n, d), log2(e) A
    mixed_ptr,  # (b, count, d)
    local_ptr,  # (b, count, WIDTH)
    h0_ptr,  # (b, n, d): h before token 0
    kept_ptr,  # (b, slots, n, d): h before the first token of every chunk but the first
    replayed_ptr,  # (b, count - 1, n, d): h before the other tokens of the chunk; if CROWDED
    # (b, count, n, d)
    vectors_ptr,  # (b, count, 2, d): w and Delta
    top_ptr,  # (b, n, d): cotangent of h after the chunk
    grad_A_ptr,  # (b, n, d), added to
    start,
    count,
    slot,
    slots,
    d: tl.constexpr,
    n: tl.constexpr,
    h0_stride_b,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CROWDED: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """`add_grad_A`, a program for each block of each sample."""
    add_grad_A(
        Prepared(A_ptr, mixed_ptr, local_ptr),
        Memories(h0_ptr, h0_stride_b, kept_ptr, replayed_ptr, slots),
        WalkedChunk(vectors_ptr, top_ptr),
        grad_A_ptr,
        Chunk(slot, start, count),
        Sizes(d, n, BLOCK_D, BLOCK_N, CROWDED=CROWDED),
        Options(K, None, INPUT_SCALE, FULL, True, None, FAST, ACC),
        tl.program_id(0),
    )
