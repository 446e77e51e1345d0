"""The memory of a chunk of tokens again, from that before its first token.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import build_coupled, build_decay, input_scale
from bedouin.kernels.device.raw import load_raw
from bedouin.kernels.direct.triton_bundles import (
    Chunk,
    Memories,
    Options,
    Prepared,
    Rows,
    Sizes,
    Tokens,
    aligned_row,
    head_matrix,
    local_width,
)


@triton.jit
def _chunk_memory(memories, sample, slot, sizes):
    """Pointer to h (n, d) before the first token of a chunk: given, or kept."""
    memory = memories.h0_ptr + sample * memories.h0_stride_b
    if slot > 0:
        memory = memories.kept_ptr + (sample * memories.slots + slot - 1) * sizes.n * sizes.d
    return memory


@triton.jit
def replayed_tokens(chunk, sizes):
    """Number of tokens of a chunk after which h is stored; of the last one only if CROWDED."""
    return chunk.count if sizes.CROWDED else chunk.count - 1


@triton.jit
def token_memory(memories, sample, i_token, chunk, sizes):
    """Pointer to h (n, d) before token i_token of a chunk: given, kept, or replayed."""
    token = (sample + chunk.behind) * replayed_tokens(chunk, sizes) + i_token - 1
    memory = memories.replayed_ptr + token * sizes.n * sizes.d
    if i_token == 0:
        memory = _chunk_memory(memories, sample, chunk.slot, sizes)
    return memory


@triton.jit
def later_memory(memories, sample, i_token, chunk, sizes):
    """Pointer to h (n, d) after token i_token of a chunk, if CROWDED."""
    token = sample * chunk.count + i_token
    return memories.replayed_ptr + token * sizes.n * sizes.d


@triton.jit
def replay_block(
    tokens,  # Tokens
    prepared,  # Prepared
    memories,  # Memories
    last,  # Rows, without a time axis, (b, n, d): h after the chunk, if KEEP_LAST
    chunk,  # Chunk
    sizes,  # Sizes, whose BLOCK_D channels are replayed
    options,  # Options
    index,  # of the block among those of all samples
    KEEP_ALL: tl.constexpr,
    KEEP_LAST: tl.constexpr,
):
    """Store h before the tokens of a chunk (KEEP_ALL) and after it (KEEP_LAST)."""
    K: tl.constexpr = options.K
    ACC: tl.constexpr = options.ACC
    d: tl.constexpr = sizes.d
    n: tl.constexpr = sizes.n
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    blocks = tl.cdiv(d, BLOCK_D)
    sample = (index // blocks).to(tl.int64)
    rows = tl.arange(0, sizes.BLOCK_N * sizes.BLOCKS)
    cols = index % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    A_log2 = tl.load(head_matrix(prepared, sample, sizes) + state, mask=in_state, other=0.0)
    memory = _chunk_memory(memories, sample, chunk.slot, sizes)
    h = tl.load(memory + state, mask=in_state, other=0.0)
    # loads of a token are issued while the one before it is computed
    WIDTH: tl.constexpr = local_width(K, n)
    token = (sample + chunk.behind) * chunk.count
    mixed_row = prepared.mixed_ptr + token * d + cols
    B_row = prepared.local_ptr + token * WIDTH + (WIDTH - 2 * n) + rows
    raw_row = aligned_row(tokens.raw, sample, chunk.start, options.ALIGNED)
    fed_row = aligned_row(tokens.fed, sample, chunk.start, options.ALIGNED)
    mixed_next = tl.load(mixed_row, mask=in_d, other=0.0)
    delta_next = load_raw(raw_row, fed_row, cols, in_d, options.FEEDBACK, ACC, ".cg")
    B_next = tl.load(B_row, mask=in_n, other=0.0)
    for i in range(0, chunk.count):
        mixed, delta, B = mixed_next, activate(delta_next, options.ACTIVATION), B_next
        step = tl.minimum(i + 1, chunk.count - 1).to(tl.int64)
        mixed_next = tl.load(mixed_row + step * d, mask=in_d, other=0.0)
        raw = raw_row + tl.multiple_of(step * tokens.raw.stride_t, options.ALIGNED)
        fed = fed_row + tl.multiple_of(step * tokens.fed.stride_t, options.ALIGNED)
        delta_next = load_raw(raw, fed, cols, in_d, options.FEEDBACK, ACC, ".cg")
        B_next = tl.load(B_row + step * WIDTH, mask=in_n, other=0.0)
        if KEEP_ALL:
            first = (sample + chunk.behind) * replayed_tokens(chunk, sizes)
            at = (first + i - 1) * n * d + state
            tl.store(memories.replayed_ptr + at, h, mask=in_state & (i > 0))
        if options.INPUT_SCALE == "one_minus_decay":
            decay, s_rows = build_coupled(A_log2 * delta[None, :], options.FULL, options.FAST)
            h = decay * h + s_rows * mixed[None, :] * B[:, None]
        else:
            decay = build_decay(A_log2 * delta[None, :], options.FULL, options.FAST)
            h = decay * h + (input_scale(delta, options.INPUT_SCALE) * mixed)[None, :] * B[:, None]
    if KEEP_LAST:
        tl.store(last.ptr + sample * last.stride_b + state, h, mask=in_state)


@triton.jit(do_not_specialize=["start", "count", "slot", "slots", "per_head"])
def replay_kernel(
    mixed_ptr,  # (b, count, d)
    local_ptr,  # (b, count, WIDTH)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (n, d) or (H, n, d), log2(e) A
    h0_ptr,  # (b, n, d): h before token 0
    kept_ptr,  # (b, slots, n, d): h before the first token of every chunk but the first
    replayed_ptr,  # (b, count - 1, n, d): h before the other tokens of the chunk, if KEEP_ALL; if
    # CROWDED (b, count, n, d)
    last_ptr,  # (b, ..., n, d): h after the chunk, if KEEP_LAST
    start,
    count,
    slot,
    slots,
    per_head,  # samples of a head; None: one head
    d: tl.constexpr,
    n: tl.constexpr,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    last_stride_b,
    K: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    KEEP_LAST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CROWDED: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """The memory of a chunk, a program for each sample and block of channels:

    h_t = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T.
    """
    replay_block(
        Tokens(
            Rows(raw_ptr, raw_stride_b, raw_stride_t),
            Rows(raw_ptr, raw_stride_b, raw_stride_t),  # x is not read
            Rows(fed_ptr, fed_stride_b, fed_stride_t),
        ),
        Prepared(A_ptr, mixed_ptr, local_ptr, per_head),
        Memories(h0_ptr, h0_stride_b, kept_ptr, replayed_ptr, slots),
        Rows(last_ptr, last_stride_b, None),
        Chunk(slot, start, count),
        Sizes(d, n, BLOCK_D, BLOCK_N, CROWDED=CROWDED),
        Options(K, ACTIVATION, INPUT_SCALE, FULL, FEEDBACK, ALIGNED, FAST, ACC),
        tl.program_id(0),
        KEEP_ALL,
        KEEP_LAST,
    )
