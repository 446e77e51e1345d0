"""The scan of a step: the next iterate and its norms.

Memory and A are (n, d): a warp's threads are channels (and groups of states, where there are many).
Memory, decay and read-out are tuples with one entry for each state of the thread, so that a sum
over states stays inside a thread.
Letters: b batch, t time, d channels, n state per channel, r raw values, g groups of states, H heads
of b/H samples each (kernels/heads.py).
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import build_coupled, build_decay, input_scale
from bedouin.kernels.device.elementary import LOG2E
from bedouin.kernels.device.norms import max_norm
from bedouin.kernels.device.reflections import combine


@triton.jit
def _load_cells(pointer, groups, channels, n, d, S: tl.constexpr):
    """The states of a thread from (n, d): S tiles (g, channels)."""
    tiles = ()
    for i in tl.static_range(S):
        state = groups * S + i
        mask = channels[None, :] < tl.where(state < n, d, 0)[:, None]
        tiles = tiles + (tl.load(pointer + state[:, None] * d + channels[None, :], mask, 0.0),)
    return tiles


@triton.jit
def _load_tokens(
    pointers,
    left,
    stride: tl.constexpr,
    mask,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """AHEAD rows, the last one repeated where fewer are left.

    Not converted here, which would wait for the loads.
    """
    rows = ()
    for i in tl.static_range(AHEAD):
        row = pointers + (i * stride if EVEN else tl.minimum(i, left).to(tl.int64) * stride)
        if WIDE:
            rows = rows + (tl.load(row),)
        else:
            rows = rows + (tl.load(row, mask=mask, other=0.0),)
    return rows


@triton.jit
def _load_vector(
    pointer,
    n,
    S: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SELECTIVE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """B or C of a token as S tiles (g, channels), the same for all channels; 0 from n on.

    A thread loads four neighbours at once.
    """
    WIDTH: tl.constexpr = S if S < 4 else 4
    SHAPE: tl.constexpr = (GROUPS, BLOCK_D, WIDTH)
    first = tl.arange(0, GROUPS)[:, None, None] * S + tl.arange(0, WIDTH)[None, None, :]
    out = ()
    for i in tl.static_range(S // WIDTH):
        state = tl.broadcast_to(first + i * WIDTH, SHAPE)
        if not SELECTIVE:
            tile = tl.where(state < n, 1.0, 0.0).to(tl.float32)
        elif EXACT:
            tile = tl.load(pointer + state)
        else:
            tile = tl.load(pointer + state, mask=state < n, other=0.0)
        if WIDTH == 1:
            out = out + (tl.reshape(tile, (GROUPS, BLOCK_D)),)
        elif WIDTH == 2:
            out = out + tl.split(tile)
        else:
            even, odd = tl.split(tl.reshape(tile, (GROUPS, BLOCK_D, 2, 2)))
            first_pair, second_pair = tl.split(even), tl.split(odd)
            out = out + (first_pair[0], second_pair[0], first_pair[1], second_pair[1])
    return out


@triton.jit
def _dot(a, b, S: tl.constexpr):
    """sum over the states of a_i b_i, for each channel."""
    return tl.sum(combine(a, b, S), axis=0)


@triton.jit(do_not_specialize=["batch", "T", "head_samples"])
def scan_kernel(
    mixed_ptr,  # (b t, d)
    raw_ptr,  # (b t, r), rows `raw_stride` apart
    fed_back_ptr,  # (b t, r), rows `fed_stride` apart
    BC_ptr,  # (b t + AHEAD, 2, n)
    A_ptr,  # (H, n, d)
    h0_ptr,  # (b, n, d)
    y_ptr,  # (b t, d)
    kept_ptr,  # (b,)
    out_ptr,  # (b t, d): the next iterate
    value_ptr,  # (b t, d): with STORE_VALUE the last evaluation of each token
    parts_ptr,  # (2, b, blocks, t)
    batch,
    T,
    head_samples,  # b/H
    raw_stride: tl.constexpr,
    fed_stride: tl.constexpr,
    d: tl.constexpr,
    n: tl.constexpr,
    S: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    STORE_VALUE: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SELECTIVE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    DAMPING: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    blocks = tl.cdiv(d, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    sample, block = program // blocks, program % blocks
    channels = block.to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    groups = tl.arange(0, GROUPS)
    in_d = channels < d
    lanes = tl.broadcast_to(channels[None, :], (GROUPS, BLOCK_D))
    in_lanes = lanes < d
    if HEADS:
        A_ptr += sample // head_samples * n * d
    A = _load_cells(A_ptr, groups, channels, n, d, S)
    h = _load_cells(h0_ptr + sample * n * d, groups, channels, n, d, S)
    A_log2 = ()
    for i in tl.static_range(S):
        A_log2 = A_log2 + (A[i] * LOG2E,)
    kept = tl.load(kept_ptr + sample)
    token = sample * T
    mixed_ptr += token * d + lanes
    raw_ptr += token * raw_stride + lanes
    fed_back_ptr += token * fed_stride + lanes
    y_ptr += token * d + channels
    out_ptr += token * d + channels
    value_ptr += token * d + channels
    BC_ptr += token * 2 * n
    parts_ptr += program * T
    scale_ptr = parts_ptr + tl.cast(batch, tl.int64) * blocks * T

    last = T - 1
    xs = _load_tokens(mixed_ptr, last, d, in_lanes, AHEAD, EVEN, WIDE)
    raws = _load_tokens(raw_ptr, last, raw_stride, in_lanes, AHEAD, EVEN, WIDE)
    feds = raws
    if FEEDBACK:
        feds = _load_tokens(fed_back_ptr, last, fed_stride, in_lanes, AHEAD, EVEN, WIDE)
    ys = _load_tokens(y_ptr, last, d, in_d, AHEAD, EVEN, WIDE)
    B = _load_vector(BC_ptr, n, S, GROUPS, BLOCK_D, SELECTIVE, EXACT)
    C = _load_vector(BC_ptr + n, n, S, GROUPS, BLOCK_D, SELECTIVE, EXACT)
    for start in range(0, T, AHEAD):
        x_now, raw_now, fed_now, y_now = xs, raws, feds, ys
        # all loads together: a warp has few scoreboards, and a shared one waits for the last load
        more = tl.minimum(AHEAD, tl.maximum(last - start, 0) // AHEAD * AHEAD)
        left = last - start - more
        more = more.to(tl.int64)
        mixed_ptr += more * d
        raw_ptr += more * raw_stride
        xs = _load_tokens(mixed_ptr, left, d, in_lanes, AHEAD, EVEN, WIDE)
        raws = _load_tokens(raw_ptr, left, raw_stride, in_lanes, AHEAD, EVEN, WIDE)
        feds = raws
        if FEEDBACK:
            fed_back_ptr += more * fed_stride
            feds = _load_tokens(fed_back_ptr, left, fed_stride, in_lanes, AHEAD, EVEN, WIDE)
        y_ptr += more * d
        ys = _load_tokens(y_ptr, left, d, in_d, AHEAD, EVEN, WIDE)
        for j in tl.static_range(AHEAD):
            t = start + j
            B_now, C_now = B, C
            # past the last token this reads the padding of BC: a mask would cost 15 % of the time
            BC_ptr += 2 * n
            B = _load_vector(BC_ptr, n, S, GROUPS, BLOCK_D, SELECTIVE, EXACT)
            C = _load_vector(BC_ptr + n, n, S, GROUPS, BLOCK_D, SELECTIVE, EXACT)
            raw = raw_now[j].to(tl.float32)
            if FEEDBACK:
                raw += fed_now[j].to(tl.float32)
            delta = activate(raw, ACTIVATION, FAST)
            x = x_now[j]
            if INPUT_SCALE != "one_minus_decay":
                x = input_scale(delta, INPUT_SCALE, FAST) * x
            after = ()
            for i in tl.static_range(S):
                if INPUT_SCALE == "one_minus_decay":
                    decay, s = build_coupled(A_log2[i] * delta, FULL, FAST)
                    after = after + (h[i] * decay + s * (x * B_now[i]),)
                else:
                    decay = build_decay(A_log2[i] * delta, FULL, FAST)
                    after = after + (h[i] * decay + x * B_now[i],)
            h = after
            moves = channels < tl.where((t >= kept) & (t < T), d, 0)
            F, y = _dot(h, C_now, S), y_now[j]
            if DAMPING == 1:
                tl.store(out_ptr + j * d, F, mask=moves)
            else:
                tl.store(out_ptr + j * d, y + DAMPING * (F - y), mask=moves)
            if STORE_VALUE:
                tl.store(value_ptr + j * d, F, mask=moves)
            tl.store(parts_ptr + t, max_norm(F - y, 0), mask=t < T)
            tl.store(scale_ptr + t, max_norm(F, 0), mask=t < T)
        out_ptr += AHEAD * d
        value_ptr += AHEAD * d
