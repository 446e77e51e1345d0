"""h before every token of a chunk of heads, from the kept memories.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, H heads.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import fast_activate
from bedouin.kernels.device.discretize import build_coupled, build_decay, fast_scale


@triton.jit(do_not_specialize=["start", "count", "slots", "per_head"])
def replay_head_kernel(
    mixed_ptr,  # (b, count, d): x~
    local_ptr,  # (b, count, 3 P + K K + 5 K + 4 + 2 n)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r or more), added to raw if FED
    A_ptr,  # (H, n, d), log2(e) A
    h0_ptr,  # (b, n, d): h before token 0
    kept_ptr,  # (b, slots, n, d): h before tokens KEEP, 2 KEEP, ...
    replayed_ptr,  # (b, count, n, d): h before the tokens of the chunk, written
    start,  # a multiple of KEEP
    count,
    slots,
    per_head,
    d: tl.constexpr,
    n: tl.constexpr,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
):
    """h before every token of a chunk, from the kept ones: a program for KEEP tokens of a sample.

    h_t = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T.
    """
    sample = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * KEEP
    head = sample // per_head
    SIZE: tl.constexpr = 3 * (K * (K + 1) // 2) + K * K + 5 * K + 4
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    state = rows[:, None] * d + cols[None, :]
    inside = (rows < n)[:, None] & (cols < d)[None, :]
    A = tl.load(A_ptr + head * n * d + state, mask=inside, other=0.0)
    slot = (start + first) // KEEP
    h_ptr = kept_ptr + (sample * slots + slot - 1) * n * d
    if slot == 0:
        h_ptr = h0_ptr + sample * h0_stride_b
    h = tl.load(h_ptr + state, mask=inside, other=0.0)
    for i in range(first, tl.minimum(first + KEEP, count)):
        tl.store(replayed_ptr + (sample * count + i) * n * d + state, h, mask=inside)
        raw_at = raw_ptr + sample * raw_stride_b + (start + i).to(tl.int64) * raw_stride_t
        delta = tl.load(raw_at + cols, mask=cols < d, other=0.0).to(tl.float32)
        if FED:
            fed_at = fed_ptr + sample * fed_stride_b + (start + i).to(tl.int64) * fed_stride_t
            delta += tl.load(fed_at + cols, mask=cols < d, other=0.0).to(tl.float32)
        delta = fast_activate(delta, ACTIVATION, FAST)
        mixed = tl.load(mixed_ptr + (sample * count + i) * d + cols, mask=cols < d, other=0.0)
        at = local_ptr + (sample * count + i) * (SIZE + 2 * n) + SIZE + rows
        B = tl.load(at, mask=rows < n, other=0.0)
        if INPUT_SCALE == "one_minus_decay":
            decay, s_rows = build_coupled(A * delta[None, :], FULL, FAST)
            h = decay * h + s_rows * mixed[None, :] * B[:, None]
        else:
            decay = build_decay(A * delta[None, :], FULL, FAST)
            h = decay * h + (fast_scale(delta, INPUT_SCALE, FAST) * mixed)[None, :] * B[:, None]
