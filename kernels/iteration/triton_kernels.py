"""The kernels of a step of Picard: the mixing, the scan, and what judges and settles them.

A token is one row of (b t, ...); the first `kept` tokens of each sample are frozen and skipped. In
the scan memory and A are (n, d): a warp's threads are channels (and groups of states, where there
are many). Memory, decay and read-out are tuples with one entry for each state of the thread, so
that a sum over states stays inside a thread.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values, g groups of
states, H heads of b/H samples each (kernels/heads.py).
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import build_coupled, build_decay, input_scale
from bedouin.kernels.device.elementary import LOG2E
from bedouin.kernels.device.norms import inverse_norm, larger_or_nan, max_norm
from bedouin.kernels.device.raw import load_beta, load_unit
from bedouin.kernels.device.reflections import combine, sums


@triton.jit
def _load_reflections(
    raw_ptr,
    fed_back_ptr,
    u_at,
    cols,
    d,
    K: tl.constexpr,
    FEEDBACK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """u_1 .. u_k, not yet normalized.

    Read once a launch, so evicted first: the cache keeps what the next launch reads.
    """
    u = ()
    for i in tl.static_range(K):
        at = tl.multiple_of(u_at + i * d + cols, ALIGN)
        value = tl.load(raw_ptr + at, cols < d, 0.0, eviction_policy="evict_first").to(tl.float32)
        if FEEDBACK:
            fed_back = tl.load(fed_back_ptr + at, cols < d, 0.0, eviction_policy="evict_first")
            value += fed_back.to(tl.float32)
        u = u + (value,)
    return u


@triton.jit
def _token_of(program, batch, T):
    """Sample and time of a program, last tokens first.

    The scan goes forward in time. What it wrote last is still in the cache for the launch that
    follows, and what that launch wrote last is still there for the next scan.
    """
    return program % batch, T - 1 - (program // batch).to(tl.int32)


@triton.jit
def _load_x(row, cols, d, zero, ALIGN: tl.constexpr):
    """x of a token.

    `zero`, which is no constant for the compiler, keeps a thread's part of x as wide as that of u:
    otherwise the two have different layouts, and x is exchanged between threads.
    """
    return tl.load(row + ALIGN * zero + cols, mask=cols < d, other=0.0).to(tl.float32)


@triton.jit
def _reflect(u, beta, v, d, K: tl.constexpr, EPS: tl.constexpr):
    """(I - H_1 ... H_k) v, the last reflection first: k products fewer than with T."""
    squares = ()
    for i in tl.static_range(K):
        squares = squares + (u[i] * u[i],)
    sizes = sums(squares)
    total = tl.zeros_like(v)
    for i in tl.static_range(K):
        dot = tl.sum(u[K - 1 - i] * v, axis=0)
        step = (beta[K - 1 - i] * dot / (sizes[K - 1 - i] + d * EPS)) * u[K - 1 - i]
        total += step
        v -= step
    return total


@triton.jit(do_not_specialize=["batch", "T", "zero"])
def mix_kernel(
    x_ptr,  # (b t, d)
    raw_ptr,  # (b t, r), rows `raw_stride` apart
    fed_back_ptr,  # (b t, r), rows `fed_stride` apart
    y_ptr,  # (b t, d)
    kept_ptr,  # (b,)
    mixed_ptr,  # (b t, d)
    BC_ptr,  # (b t, 2, n)
    batch,
    T,
    x_stride,
    raw_stride,
    fed_stride,
    d,
    n,
    zero,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    EPS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    sample, t = _token_of(tl.program_id(0), batch, T)
    if t >= tl.load(kept_ptr + sample):
        token = sample.to(tl.int64) * T + t
        cols, states = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        in_d, in_n = cols < d, states < n
        raw_row = raw_ptr + tl.multiple_of(token * raw_stride, ALIGN)
        fed_row = fed_back_ptr + tl.multiple_of(token * fed_stride, ALIGN)
        x = _load_x(x_ptr + token * x_stride, cols, d, zero, ALIGN)
        v = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0) - x
        u_at = d + (2 * n if SELECTIVE else 0)
        u = _load_reflections(raw_row, fed_row, u_at, cols, d, K, FEEDBACK, ALIGN)
        alpha_at = u_at + K * d
        beta = load_beta(raw_row + alpha_at, fed_row + alpha_at, K, FEEDBACK, BETA_MAX)
        mixed = x
        if K > 0:
            mixed += _reflect(u, beta, v, d, K, EPS)
        tl.store(mixed_ptr + token * d + cols, mixed, mask=in_d)
        if SELECTIVE:
            B, inv_B = load_unit(raw_row, fed_row, d + states, in_n, n, FEEDBACK, EPS)
            C, inv_C = load_unit(raw_row, fed_row, d + n + states, in_n, n, FEEDBACK, EPS)
            out = BC_ptr + token * 2 * n + states
            tl.store(out, B * inv_B, mask=in_n)
            tl.store(out + n, C * inv_C, mask=in_n)


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


@triton.jit(do_not_specialize=["batch", "T"])
def decide_kernel(
    parts_ptr,  # (2, b, parts, t)
    norms_ptr,  # (2, b, t)
    counters_ptr,  # (5, b): kept before, kept, frozen, failed, steps
    lengths_ptr,  # (b,), where PADDED: tokens before the padding, which counts as converged
    batch,
    T,
    parts,
    ATOL: tl.constexpr,
    RTOL: tl.constexpr,
    WHOLE: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    counters_ptr += sample
    kept = tl.load(counters_ptr + batch)
    frozen = tl.load(counters_ptr + 2 * batch)
    failed = tl.load(counters_ptr + 3 * batch)
    rows, cols = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_T)
    tokens = tl.cast(T, tl.int64)
    all_norms = tl.cast(batch, tl.int64) * tokens
    all_parts = all_norms * parts
    parts_ptr += sample * parts * tokens
    norms_ptr += sample * tokens
    judged = T
    if PADDED:
        judged = tl.load(lengths_ptr + sample)
    # the first token that has not converged, or is not finite
    end = T
    largest = tl.full([], 0.0, norms_ptr.dtype.element_ty)
    worst = largest
    for start in range(0, T, BLOCK_T):
        t = start + cols
        at = rows[:, None] * tokens + t[None, :]
        mask = (rows < parts)[:, None] & (t < judged)[None, :]
        defect = max_norm(tl.load(parts_ptr + at, mask=mask, other=0.0), 0)
        scale = max_norm(tl.load(parts_ptr + all_parts + at, mask=mask, other=0.0), 0)
        tl.store(norms_ptr + t, defect, mask=t < T)
        tl.store(norms_ptr + all_norms + t, scale, mask=t < T)
        if WHOLE:
            # tokens from the first one that is not finite on must not prevent convergence before it
            finite = (scale < float("inf")) | (t >= judged)
            end = tl.minimum(end, tl.min(tl.where(finite, T, t), axis=0))
            worst = larger_or_nan(worst, max_norm(tl.where(t < end, defect, 0.0), 0))
            largest = larger_or_nan(largest, max_norm(tl.where(t < end, scale, 0.0), 0))
        else:
            running = larger_or_nan(tl.associative_scan(scale, 0, larger_or_nan), largest)
            largest = larger_or_nan(largest, max_norm(scale, 0))
            small = (defect < ATOL + RTOL * running) | (t < frozen) | (t >= judged)
            end = tl.minimum(end, tl.min(tl.where(small, T, t), axis=0))
    if WHOLE:
        converges = (worst < ATOL + RTOL * largest) | (judged == 0)
        end = tl.where(converges, tl.maximum(end, frozen), frozen)
    at = all_parts + rows * tokens + tl.minimum(end, T - 1)
    scale = max_norm(tl.load(parts_ptr + at, mask=rows < parts, other=0.0), 0)
    fails = (failed != 0) | ((end < T) & ((scale < float("inf")) == 0))
    tl.store(counters_ptr, kept)
    tl.store(counters_ptr + batch, tl.where(fails, T, end))
    tl.store(counters_ptr + 2 * batch, end)
    tl.store(counters_ptr + 3 * batch, fails.to(tl.int32))
    if COUNT:
        active = (frozen < T) & (failed == 0)
        steps = tl.load(counters_ptr + 4 * batch)
        tl.store(counters_ptr + 4 * batch, steps + active.to(tl.int32))


@triton.jit(do_not_specialize=["batch", "T"])
def settle_kernel(
    y_ptr,  # (b t, d)
    next_ptr,  # (b t, d)
    normed_ptr,  # (b t, d), in the dtype of W^y
    counters_ptr,  # (5, b): kept before, kept, ...
    batch,
    T,
    d,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    t, sample = token % T, token // T
    cols = tl.arange(0, BLOCK_D)
    before = tl.load(counters_ptr + sample)
    kept = tl.load(counters_ptr + batch + sample)
    if (t >= before) & (t < kept):
        in_d = cols < d
        y = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0)
        tl.store(next_ptr + token * d + cols, y, mask=in_d)
    if (t >= kept) & (t + 1 < T):
        in_d = cols < d
        y = tl.load(next_ptr + token * d + cols, mask=in_d, other=0.0)
        if NORM:
            y *= inverse_norm(tl.sum(y * y, axis=0) / d, NORM_EPS)
        normed = y.to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + (token + 1) * d + cols, normed, mask=in_d)


@triton.jit(do_not_specialize=["batch", "T", "programs"])
def restore_kernel(
    y_ptr,  # (b t, d)
    next_ptr,  # (b t, d)
    counters_ptr,  # (5, b): kept before, kept, ...
    batch,
    T,
    programs,
    d,
    BLOCK_D: tl.constexpr,
):
    """`settle_kernel` without feedback, in few programs: few tokens freeze in a step."""
    sample = tl.program_id(0) // programs
    cols = tl.arange(0, BLOCK_D)
    before = tl.load(counters_ptr + sample)
    kept = tl.load(counters_ptr + batch + sample)
    for t in range(before + tl.program_id(0) % programs, kept, programs):
        at = (tl.cast(sample, tl.int64) * T + t) * d + cols
        y = tl.load(y_ptr + at, mask=cols < d, other=0.0)
        tl.store(next_ptr + at, y, mask=cols < d)
