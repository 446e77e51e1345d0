"""The memory of a chunk of tokens again, from that before its first token.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import build_coupled, build_decay, input_scale
from bedouin.kernels.device.raw import load_raw
from bedouin.kernels.direct.triton_rows import aligned_row, local_width


@triton.jit(do_not_specialize=["start", "count", "slot", "slots", "per_head"])
def replay_kernel(
    mixed_ptr,  # (b, count, d)
    local_ptr,  # (b, count, WIDTH)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (H, n, d), log2(e) A
    h0_ptr,  # (b, n, d): h before token 0
    kept_ptr,  # (b, slots, n, d): h before the first token of every chunk but the first
    out_ptr,  # (b, ..., n, d), written: h after the chunk
    start,
    count,
    slot,
    slots,
    per_head,  # samples of a head
    d: tl.constexpr,
    n: tl.constexpr,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    out_stride_b,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
):
    """The memory of a chunk, a program for each sample:

    h_t = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T.
    """
    sample = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    A_log2 = tl.load(A_ptr + sample // per_head * (n * d) + state, mask=in_state, other=0.0)
    memory = h0_ptr + sample * h0_stride_b
    if slot > 0:
        memory = kept_ptr + (sample * slots + slot - 1) * (n * d)
    h = tl.load(memory + state, mask=in_state, other=0.0)
    # loads of a token are issued while the one before it is computed
    WIDTH: tl.constexpr = local_width(K, n)
    token = sample * count
    mixed_row = mixed_ptr + token * d + cols
    B_row = local_ptr + token * WIDTH + (WIDTH - 2 * n) + rows
    raw_row = aligned_row(raw_ptr, sample, start, raw_stride_b, raw_stride_t, ALIGNED)
    fed_row = aligned_row(fed_ptr, sample, start, fed_stride_b, fed_stride_t, ALIGNED)
    mixed_next = tl.load(mixed_row, mask=in_d, other=0.0)
    delta_next = load_raw(raw_row, fed_row, cols, in_d, FEEDBACK, ".cg")
    B_next = tl.load(B_row, mask=in_n, other=0.0)
    for i in range(0, count):
        mixed, delta, B = mixed_next, activate(delta_next, ACTIVATION, FAST), B_next
        step = tl.minimum(i + 1, count - 1).to(tl.int64)
        mixed_next = tl.load(mixed_row + step * d, mask=in_d, other=0.0)
        raw = raw_row + tl.multiple_of(step * raw_stride_t, ALIGNED)
        fed = fed_row + tl.multiple_of(step * fed_stride_t, ALIGNED)
        delta_next = load_raw(raw, fed, cols, in_d, FEEDBACK, ".cg")
        B_next = tl.load(B_row + step * WIDTH, mask=in_n, other=0.0)
        if INPUT_SCALE == "one_minus_decay":
            decay, s_rows = build_coupled(A_log2 * delta[None, :], False, FAST)
            h = decay * h + s_rows * mixed[None, :] * B[:, None]
        else:
            decay = build_decay(A_log2 * delta[None, :], False, FAST)
            h = decay * h + (input_scale(delta, INPUT_SCALE, FAST) * mixed)[None, :] * B[:, None]
    tl.store(out_ptr + sample * out_stride_b + state, h, mask=in_state)
