"""The reverse sweep as Triton kernels: the exact adjoint of a chunk of tokens in three launches.

`prepare_kernel` computes in parallel what the known y determines, `replay_kernel` the memory before
every token of the chunk from the one kept, and `reverse_kernel` walks back: alone, or as persistent
programs that also multiply with (W^y)^T, ordered by two counters as in triton_forward.py: `pulled`
counts the tiles of (W^y)^T grad_raw_{t+1}, `left` the samples whose grad_raw_t is written.

What a token's `small` holds stands in triton_prepare.py.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate, activate_vjp
from bedouin.kernels.device.discretize import (
    build_coupled,
    build_decay,
    coupled_reach,
    input_scale,
)
from bedouin.kernels.device.elementary import LN2
from bedouin.kernels.device.norms import max_norms_of_two
from bedouin.kernels.device.raw import load_raw
from bedouin.kernels.device.reflections import (
    add,
    combine,
    load_tuple,
    rows_times,
    sums,
    symmetric_times,
    upper_transposed_times,
)
from bedouin.kernels.device.sync import announce, load_stream, wait_for
from bedouin.kernels.direct.triton_prepare import (
    prepare_kernel,
    replay_kernel,
    token_memory,
)
from bedouin.kernels.direct.triton_product import load_tile, tile_product


@triton.jit
def _reverse_token(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    sample,
    i_token,
    t,
    count,  # tokens of the chunk
    grad_y_ptr,
    pulled_ptr,
    x_ptr,
    y_ptr,
    raw_ptr,
    fed_ptr,
    A_ptr,
    mixed_ptr,
    small_ptr,
    memory_ptr,  # (n, d): h before the token
    grad_x_ptr,
    grad_raw_ptr,
    grad_A_ptr,
    statistics_ptr,
    pulled_counter_ptr,
    left_ptr,
    pulled_target,
    batch,
    t_end,
    r,
    d,
    n,
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    FEEDBACK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    COMPILED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Cotangents of x_t and raw_t, and the parts of that of A; returns that of h_{t-1}."""
    COUPLED: tl.constexpr = INPUT_SCALE == "one_minus_decay"
    PAIRS: tl.constexpr = K * (K + 1) // 2
    cols = tl.arange(0, BLOCK_D)
    in_d = cols < d
    u_at = d + (2 * n if SELECTIVE else 0)
    token = sample * t_end + t
    raw = raw_ptr + tl.multiple_of(sample * raw_stride_b + t * raw_stride_t, ALIGNED)
    fed = fed_ptr + tl.multiple_of(sample * fed_stride_b + t * fed_stride_t, ALIGNED)

    # all that the later tokens' cotangents of y do not enter, while the program waits for them
    in_chunk = sample * count + i_token
    SIZE: tl.constexpr = 3 * PAIRS + K * K + 5 * K + 4
    row = small_ptr + in_chunk * (SIZE + 2 * n)
    BC = tl.load(row + SIZE - 3)
    x = tl.load(x_ptr + sample * x_stride_b + t * x_stride_t + cols, mask=in_d, other=0.0).to(ACC)
    y = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0).to(ACC)
    mixed = tl.load(mixed_ptr + in_chunk * d + cols, mask=in_d, other=0.0)
    grad_y = grad_y_ptr + sample * grad_y_stride_b + t * grad_y_stride_t
    g = tl.load(grad_y + cols, mask=in_d, other=0.0).to(ACC)
    raw_delta = load_raw(raw, fed, cols, in_d, FEEDBACK, ACC, ".cg")
    delta = activate(raw_delta, ACTIVATION)
    u = ()
    for i in tl.static_range(K):
        u = u + (load_raw(raw, fed, u_at + i * d + cols, in_d, FEEDBACK, ACC, ".cg"),)
    if not COUPLED:
        s = input_scale(delta, INPUT_SCALE)
        written = s * mixed
        sigma = s * BC
    else:
        sigma = tl.zeros([BLOCK_D], dtype=ACC)
        written = sigma
    # h_t = decayed + written B^T; the cotangent of the exponent is (H + w C^T) * reach
    from_memory = tl.zeros([BLOCK_D], dtype=ACC)
    with_H = from_memory
    with_C = from_memory
    decayed = ()
    for block in tl.static_range(BLOCKS):
        n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        state = n_rows[:, None] * d + cols[None, :]
        in_state = (n_rows < n)[:, None] & in_d[None, :]
        B = tl.load(row + SIZE + n_rows, mask=n_rows < n, other=0.0)
        C = tl.load(row + SIZE + n + n_rows, mask=n_rows < n, other=0.0)
        A_log2 = tl.load(A_ptr + state, mask=in_state, other=0.0)
        h = load_stream(memory_ptr + state, in_state)
        decay, s_rows = _rows(delta, A_log2, COUPLED, FULL, FAST)
        decayed = decayed + (decay * h,)
        if COUPLED:
            sigma += tl.sum(s_rows * (B * C)[:, None], axis=0)
            from_memory += tl.sum(H[block] * s_rows * B[:, None], axis=0)
        else:
            from_memory += tl.sum(H[block] * B[:, None], axis=0)
        exponent = _reach(h, decay, s_rows, mixed, B, COUPLED, FULL) * A_log2
        with_H += tl.sum(H[block] * exponent, axis=0)
        with_C += tl.sum(C[:, None] * exponent, axis=0)
    # the cotangent of Delta is linear in w
    grad_delta = LN2 * with_H
    grad_delta_w = LN2 * with_C
    if INPUT_SCALE == "delta":
        grad_delta += mixed * from_memory
        grad_delta_w += mixed * BC
    elif INPUT_SCALE == "bounded_delta":
        slope = mixed / ((1 + delta) * (1 + delta))
        grad_delta += slope * from_memory
        grad_delta_w += slope * BC
    grad_delta = activate_vjp(grad_delta, raw_delta, ACTIVATION)
    grad_delta_w = activate_vjp(grad_delta_w, raw_delta, ACTIVATION)
    if not COUPLED:
        from_memory *= s
    v = y - x
    if PERSISTENT and FAST:
        # or the compiler moves the work behind the loop that waits, and keeps all operands over it
        pinned = ()
        for block in tl.static_range(BLOCKS):
            pinned = pinned + (_pin(decayed[block]),)
        decayed = pinned
        from_memory, sigma, v = _pin(from_memory), _pin(sigma), _pin(v)
        grad_delta, grad_delta_w = _pin(grad_delta), _pin(grad_delta_w)
        if not COUPLED:
            written = _pin(written)
    if PERSISTENT:
        wait_for(pulled_counter_ptr, pulled_target, COMPILED)
    if FEEDBACK:
        pulled = tl.zeros([BLOCK_D], dtype=ACC)
        for split in tl.static_range(SPLITS):
            at = (tl.cast(batch, tl.int64) * split + sample) * d + cols
            pulled += load_stream(pulled_ptr + at, in_d).to(ACC)
        if NORM:
            rms = tl.load(row + SIZE - 4)
            g += rms * pulled
        else:
            g += pulled
    # w = g + U^T T^T U (from_memory + sigma w), so T^T U (...) = (I - T^T S)^-1 T^T q
    q = rows_times(u, from_memory + sigma * g, K)
    if FEEDBACK and NORM:
        dots = sums(q + (pulled * y,))
        # the part of the cotangent along y that the norm takes out
        along_y = rms * rms * rms * dots[K] / d
        g -= along_y * y
        q = ()
        for i in tl.static_range(K):
            q = q + (dots[i] - along_y * tl.load(row + 3 * PAIRS + K * K + 4 * K + i),)
    else:
        q = sums(q)
    T_g = ()
    for i in tl.static_range(K):
        total = tl.load(row + 3 * PAIRS + i * K) * q[0]
        for j in tl.static_range(K):
            if j > 0:
                total += tl.load(row + 3 * PAIRS + i * K + j) * q[j]
        T_g = T_g + (total,)
    w = g + combine(T_g, u, K)

    # x~ = x + U^T T U v, one reflection after the other
    S = load_tuple(row + PAIRS, PAIRS)
    U_g = add(q, symmetric_times(S, T_g, K), K)
    grad_mixed = from_memory + sigma * w
    grad_raw = grad_raw_ptr + tl.multiple_of(token * r, ALIGNED)
    kind: tl.constexpr = grad_raw_ptr.dtype.element_ty
    G = load_tuple(row + 2 * PAIRS, PAIRS)
    T_v = load_tuple(row + 3 * PAIRS + K * K, K)
    c = load_tuple(row + 3 * PAIRS + K * K + K, K)
    rest = load_tuple(row + 3 * PAIRS + K * K + 2 * K, K)
    squares = load_tuple(row + 3 * PAIRS + K * K + 3 * K, K)
    for i in tl.static_range(K):
        if i > 0:
            v -= T_v[i] * u[i]
    for i in tl.static_range(K):
        if i > 0:
            v += T_v[i] * u[i]
        along = U_g[i]
        for j in tl.static_range(K):
            if j < i:
                along -= T_g[j] * G[i * (i + 1) // 2 + j]
        along = squares[i] * T_v[i] * along + T_g[i] * rest[i]
        # u_i enters through its direction: the part along it falls out
        grad_u = T_v[i] * grad_mixed + T_g[i] * v - along * u[i]
        tl.store(grad_raw + u_at + i * d + cols, grad_u.to(kind), mask=in_d)
        tl.store(grad_raw + u_at + K * d + i, (T_g[i] * c[i]).to(kind))
        grad_mixed -= T_g[i] * u[i]
    # what is left of it is the cotangent of x

    tl.store(grad_raw + cols, (grad_delta + w * grad_delta_w).to(kind), mask=in_d)
    if SELECTIVE:
        inv_B = tl.load(row + SIZE - 2)
        inv_C = tl.load(row + SIZE - 1)
        _store_state_gradients(
            H, decayed, w, delta, mixed, written, inv_B, inv_C, row + SIZE, A_ptr, grad_raw + d, d,
            n, BLOCK_D, BLOCK_N, BLOCKS, COUPLED, FULL, FAST, ACC,
        )  # fmt: skip
    if PERSISTENT:
        announce(left_ptr)

    tl.store(grad_x_ptr + token * d + cols, grad_mixed.to(grad_x_ptr.dtype.element_ty), mask=in_d)
    checks = sums(rows_times(u, from_memory + sigma * w, K))
    T = load_tuple(row, PAIRS)
    applied = g + combine(upper_transposed_times(T, checks, K), u, K)
    finite = 0 * checks[0]
    defect, size = max_norms_of_two(applied - w, applied)
    cell = statistics_ptr + token
    tl.store(cell, defect + finite)
    tl.store(cell + tl.cast(batch, tl.int64) * t_end, size + finite)
    new_H = ()
    for block in tl.static_range(BLOCKS):
        n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        state = n_rows[:, None] * d + cols[None, :]
        in_state = (n_rows < n)[:, None] & in_d[None, :]
        C = tl.load(row + SIZE + n + n_rows, mask=n_rows < n, other=0.0)
        # the decay again, rather than kept over the wait: registers are short
        A_log2 = tl.load(A_ptr + state, mask=in_state, other=0.0)
        decay, s_rows = _rows(delta, A_log2, COUPLED, FULL, FAST)
        total = H[block] + C[:, None] * w[None, :]
        if COUPLED or FULL:
            B = tl.load(row + SIZE + n_rows, mask=n_rows < n, other=0.0)
            h = load_stream(memory_ptr + state, in_state)
            reach = _reach(h, decay, s_rows, mixed, B, COUPLED, FULL)
        else:
            reach = decayed[block]
        sum_A = grad_A_ptr + sample * n * d + state
        grad_A = load_stream(sum_A, in_state) + total * reach * delta[None, :]
        tl.store(sum_A, grad_A, mask=in_state)
        new_H = new_H + (total * decay,)
    return new_H


@triton.jit
def _pin(v):
    """v, computed here and nowhere later; float32."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [v], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def _rows(delta, A_log2, COUPLED: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr):
    """lambda (n, d), and the coupled scale with it; lambda twice where s has no state axis."""
    if COUPLED:
        return build_coupled(A_log2 * delta[None, :], FULL, FAST)
    else:
        decay = build_decay(A_log2 * delta[None, :], FULL, FAST)
        return decay, decay


@triton.jit
def _reach(h, decay, s, mixed, B, COUPLED: tl.constexpr, FULL: tl.constexpr):
    """d h_t / d (A Delta), rows of states: through the decay, and through the coupled scale s."""
    if COUPLED:
        if FULL:
            sign = tl.where(decay > 0, 1.0, tl.where(decay < 0, -1.0, 0.0)).to(h.dtype)
            h -= sign * mixed[None, :] * B[:, None]
        else:
            h -= mixed[None, :] * B[:, None]
        return h * coupled_reach(decay, s, FULL)
    elif FULL:
        return h * (decay + 1)
    else:
        return h * decay


@triton.jit
def _store_state_gradients(
    H,
    decayed,
    w,
    delta,
    mixed,
    written,
    inv_B,
    inv_C,
    BC_ptr,
    A_ptr,
    grad_ptr,
    d,
    n,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUPLED: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """Cotangents of the raw B and C, of which the scan sees the directions."""
    cols = tl.arange(0, BLOCK_D)
    grads = ()
    for block in tl.static_range(BLOCKS):
        n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        B = tl.load(BC_ptr + n_rows, mask=n_rows < n, other=0.0)
        C = tl.load(BC_ptr + n + n_rows, mask=n_rows < n, other=0.0)
        total = H[block] + C[:, None] * w[None, :]
        if COUPLED:
            state = n_rows[:, None] * d + cols[None, :]
            in_state = (n_rows < n)[:, None] & (cols < d)[None, :]
            A_log2 = tl.load(A_ptr + state, mask=in_state, other=0.0)
            _, s_rows = build_coupled(A_log2 * delta[None, :], FULL, FAST)
            tile = s_rows * mixed[None, :]
        else:
            tile = written[None, :]
        h = decayed[block] + tile * B[:, None]
        grads = grads + (total * tile, h * w[None, :])
    grads = sums(grads, 1)
    along_B = tl.zeros([], dtype=ACC)
    along_C = tl.zeros([], dtype=ACC)
    for block in tl.static_range(BLOCKS):
        n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        B = tl.load(BC_ptr + n_rows, mask=n_rows < n, other=0.0)
        C = tl.load(BC_ptr + n + n_rows, mask=n_rows < n, other=0.0)
        along_B += tl.sum(grads[2 * block] * B, axis=0)
        along_C += tl.sum(grads[2 * block + 1] * C, axis=0)
    kind: tl.constexpr = grad_ptr.dtype.element_ty
    for block in tl.static_range(BLOCKS):
        n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        B = tl.load(BC_ptr + n_rows, mask=n_rows < n, other=0.0)
        C = tl.load(BC_ptr + n + n_rows, mask=n_rows < n, other=0.0)
        grad_B = inv_B * (grads[2 * block] - B * along_B)
        grad_C = inv_C * (grads[2 * block + 1] - C * along_C)
        tl.store(grad_ptr + n_rows, grad_B.to(kind), mask=n_rows < n)
        tl.store(grad_ptr + n + n_rows, grad_C.to(kind), mask=n_rows < n)


@triton.jit
def _load_blocks(ptr, d, n, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr):
    """(n, d) in blocks of states."""
    cols = tl.arange(0, BLOCK_D)
    out = ()
    for block in tl.static_range(BLOCKS):
        rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < n)[:, None] & (cols < d)[None, :]
        out = out + (tl.load(ptr + rows[:, None] * d + cols[None, :], mask=mask, other=0.0),)
    return out


@triton.jit
def _store_blocks(
    ptr, tiles, d, n, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr
):
    """(n, d) in blocks of states."""
    cols = tl.arange(0, BLOCK_D)
    for block in tl.static_range(BLOCKS):
        rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < n)[:, None] & (cols < d)[None, :]
        tl.store(ptr + rows[:, None] * d + cols[None, :], tiles[block], mask=mask)


@triton.jit(do_not_specialize=["i_token", "start", "count", "slot", "slots", "t_end", "batch"])
def step_kernel(
    grad_y_ptr,  # (b, t, d)
    pulled_ptr,  # (splits, b, d): parts of (W^y)^T grad_raw of the next token, of norm(y_t)
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (n, d), log2(e) A
    mixed_ptr,  # (b, count, d)
    small_ptr,  # (b, count, 3 P + K K + 5 K + 4 + 2 n)
    h0_ptr,  # (b, n, d)
    kept_ptr,  # (b, slots, n, d)
    before_ptr,  # (b, count - 1, n, d)
    H_ptr,  # (b, n, d): cotangent of h_t, in place that of h_{t-1}
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, r), may be the memory of `fed`
    grad_A_ptr,  # (b, n, d), added to
    statistics_ptr,  # (2, b, t): defect and scale of the adjoint equation
    i_token,
    start,
    count,
    slot,
    slots,
    batch,
    t_end,
    r: tl.constexpr,
    d: tl.constexpr,
    n: tl.constexpr,
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # states at a time
    BLOCKS: tl.constexpr,  # how many times
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """The adjoint of token start + i_token alone, of all samples: the products are made outside."""
    own = tl.program_id(0).to(tl.int64)
    H = _load_blocks(H_ptr + own * n * d, d, n, BLOCK_D, BLOCK_N, BLOCKS)
    t = start + i_token
    memory = token_memory(
        h0_ptr, h0_stride_b, kept_ptr, before_ptr, own, i_token, count, slot, slots, d, n
    )
    H = _reverse_token(
        H, own, i_token, t, count, grad_y_ptr, pulled_ptr, x_ptr, y_ptr, raw_ptr, fed_ptr, A_ptr,
        mixed_ptr, small_ptr, memory, grad_x_ptr, grad_raw_ptr, grad_A_ptr, statistics_ptr,
        statistics_ptr, statistics_ptr, 0, batch, t_end, r, d, n, grad_y_stride_b, grad_y_stride_t,
        x_stride_b, x_stride_t, raw_stride_b, raw_stride_t, fed_stride_b, fed_stride_t, K, BLOCK_D,
        BLOCK_N, BLOCKS, True, False, 1, NORM, NORM_EPS, ACTIVATION, SELECTIVE, BETA_MAX,
        INPUT_SCALE, FULL, EPS, ALIGNED, FAST, False, ACC,
    )  # fmt: skip
    tl.debug_barrier()
    _store_blocks(H_ptr + own * n * d, H, d, n, BLOCK_D, BLOCK_N, BLOCKS)


@triton.jit
def _walk_back(
    H,  # of the program's own sample, if RESIDENT
    W,
    program,
    first_tile,
    tiles,
    stride,  # from one of the program's samples to its next
    start,
    count,
    slot,
    slots,
    done,  # tokens before this chunk, in the order of the walk
    pulled_counter_ptr,
    left_ptr,
    WITH_TILES: tl.constexpr,
    WITH_SAMPLES: tl.constexpr,
    grad_y_ptr,  # (b, t, d)
    pulled_ptr,  # (splits, b, d): parts of (W^y)^T grad_raw of the next token, of norm(y_t)
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    W_ptr,  # (R, d), W^y; of r columns of grad_raw the last r - R are 0
    A_ptr,  # (n, d), log2(e) A
    mixed_ptr,  # (b, KEEP, d): x~ of a chunk
    small_ptr,  # (b, KEEP, 3 P + K K + 5 K + 4 + 2 n)
    h0_ptr,  # (b, n, d): h before token 0
    kept_ptr,  # (b, ceil(t / KEEP) - 1, n, d): h before tokens KEEP, 2 KEEP, ...
    before_ptr,  # (b, KEEP - 1, n, d): h before the tokens of a chunk but the first
    H_ptr,  # (b, n, d): cotangent of the last h, in place that of the first
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, r), may be the memory of `fed`
    grad_A_ptr,  # (b, n, d), added to
    statistics_ptr,  # (2, b, t): defect and scale of the adjoint equation
    batch,
    t_end,
    r: tl.constexpr,
    d: tl.constexpr,
    n: tl.constexpr,
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # states at a time
    BLOCKS: tl.constexpr,  # how many times
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLITS: tl.constexpr,  # tiles that share a row of (W^y)^T
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    RESIDENT: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    COMPILED: tl.constexpr,
    ACC: tl.constexpr,
):
    """The tokens of a chunk, the last first: the program's tile, its samples, or both."""
    R: tl.constexpr = d + (2 * n if SELECTIVE else 0) + K * (d + 1)
    own = program.to(tl.int64)
    for back in range(0, count):
        i_token = count - 1 - back
        t = start + i_token
        if WITH_SAMPLES and RESIDENT:
            if program < batch:
                memory = token_memory(
                    h0_ptr, h0_stride_b, kept_ptr, before_ptr, own, i_token, count, slot, slots, d,
                    n,
                )  # fmt: skip
                H = _reverse_token(
                    H, own, i_token, t, count, grad_y_ptr, pulled_ptr, x_ptr, y_ptr, raw_ptr,
                    fed_ptr, A_ptr, mixed_ptr, small_ptr, memory, grad_x_ptr, grad_raw_ptr,
                    grad_A_ptr, statistics_ptr, pulled_counter_ptr, left_ptr, (done + back) * tiles,
                    batch, t_end, r, d, n, grad_y_stride_b, grad_y_stride_t, x_stride_b, x_stride_t,
                    raw_stride_b, raw_stride_t, fed_stride_b, fed_stride_t, K, BLOCK_D, BLOCK_N,
                    BLOCKS, FEEDBACK, PERSISTENT, SPLITS, NORM, NORM_EPS, ACTIVATION, SELECTIVE,
                    BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED, FAST, COMPILED, ACC,
                )  # fmt: skip
        if WITH_SAMPLES and not RESIDENT:
            for index in range(program, batch, stride):
                sample = tl.cast(index, tl.int64)
                cotangent = H_ptr + sample * n * d
                later = _load_blocks(cotangent, d, n, BLOCK_D, BLOCK_N, BLOCKS)
                memory = token_memory(
                    h0_ptr, h0_stride_b, kept_ptr, before_ptr, sample, i_token, count, slot, slots,
                    d, n,
                )  # fmt: skip
                later = _reverse_token(
                    later, sample, i_token, t, count, grad_y_ptr, pulled_ptr, x_ptr, y_ptr, raw_ptr,
                    fed_ptr, A_ptr, mixed_ptr, small_ptr, memory, grad_x_ptr, grad_raw_ptr,
                    grad_A_ptr, statistics_ptr, pulled_counter_ptr, left_ptr, (done + back) * tiles,
                    batch, t_end, r, d, n, grad_y_stride_b, grad_y_stride_t, x_stride_b, x_stride_t,
                    raw_stride_b, raw_stride_t, fed_stride_b, fed_stride_t, K, BLOCK_D, BLOCK_N,
                    BLOCKS, FEEDBACK, PERSISTENT, SPLITS, NORM, NORM_EPS, ACTIVATION, SELECTIVE,
                    BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED, FAST, COMPILED, ACC,
                )  # fmt: skip
                _store_blocks(cotangent, later, d, n, BLOCK_D, BLOCK_N, BLOCKS)
                # the next token reads H, perhaps with other threads than those that wrote it
                tl.debug_barrier()
        if WITH_TILES:
            grad_rows = grad_raw_ptr + tl.cast(t, tl.int64) * r
            if first_tile < tiles:
                wait_for(left_ptr, (done + back + 1) * batch, COMPILED)
            if ONE_TILE:
                if first_tile < tiles:
                    tile_product(
                        W, first_tile, grad_rows, pulled_ptr, t >> 30, batch, d, r, t_end * r, d,
                        PRECISION, DOT, BLOCK_M, BLOCK_K, CHUNKS, BLOCK_B, COMPILED,
                    )  # fmt: skip
                    announce(pulled_counter_ptr)
            else:
                for tile in range(first_tile, tiles, tl.num_programs(0)):
                    part = load_tile(W_ptr, tile, d, R, 1, d, DOT, BLOCK_M, BLOCK_K, CHUNKS)
                    tile_product(
                        part, tile, grad_rows, pulled_ptr, t >> 30, batch, d, r, t_end * r, d,
                        PRECISION, DOT, BLOCK_M, BLOCK_K, CHUNKS, BLOCK_B, COMPILED,
                    )  # fmt: skip
                    announce(pulled_counter_ptr)
    return H


@triton.jit(do_not_specialize=["first_slot", "last_slot", "t_end", "batch"])
def reverse_kernel(
    grad_y_ptr,  # (b, t, d)
    pulled_ptr,  # (splits, b, d): parts of (W^y)^T grad_raw of the next token, of norm(y_t)
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    W_ptr,  # (R, d), W^y; of r columns of grad_raw the last r - R are 0
    A_ptr,  # (n, d), log2(e) A
    mixed_ptr,  # (b, KEEP, d): x~ of a chunk
    small_ptr,  # (b, KEEP, 3 P + K K + 5 K + 4 + 2 n)
    h0_ptr,  # (b, n, d): h before token 0
    kept_ptr,  # (b, ceil(t / KEEP) - 1, n, d): h before tokens KEEP, 2 KEEP, ...
    before_ptr,  # (b, KEEP - 1, n, d): h before the tokens of a chunk but the first
    H_ptr,  # (b, n, d): cotangent of the last h, in place that of the first
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, r), may be the memory of `fed`
    grad_A_ptr,  # (b, n, d), added to
    statistics_ptr,  # (2, b, t): defect and scale of the adjoint equation
    counters_ptr,  # (3,), zeros: pulled, left, programs that have come to the end of a phase
    first_slot,
    last_slot,  # chunks from here back to the first one, in one launch
    batch,
    t_end,
    r: tl.constexpr,
    d: tl.constexpr,
    n: tl.constexpr,
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    PREPARE: tl.constexpr,  # all that the chunks need is made here, too
    BLOCK_D: tl.constexpr,
    REPLAY_D: tl.constexpr,  # channels of a block whose memory is replayed
    BLOCK_N: tl.constexpr,  # states at a time
    BLOCKS: tl.constexpr,  # how many times
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLITS: tl.constexpr,  # tiles that share a row of (W^y)^T
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    APART: tl.constexpr,  # no program has a tile and samples: their loops share no registers
    RESIDENT: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    COMPILED: tl.constexpr,
    ACC: tl.constexpr,
):
    """The adjoint of all tokens, the last first, a chunk of KEEP at a time."""
    R: tl.constexpr = d + (2 * n if SELECTIVE else 0) + K * (d + 1)
    program, programs = tl.program_id(0), tl.num_programs(0)
    pulled_counter_ptr, left_ptr, phase_ptr = counters_ptr, counters_ptr + 1, counters_ptr + 2
    own = program.to(tl.int64)
    tiles = tl.cdiv(d, BLOCK_M) * SPLITS if PERSISTENT else 0
    stride = programs - tiles if APART else programs
    first_tile = programs - 1 - program
    W = ()
    if PERSISTENT and ONE_TILE:
        W = load_tile(W_ptr, first_tile, d, R, 1, d, DOT, BLOCK_M, BLOCK_K, CHUNKS)
    # in blocks of states, so that few registers are in use at a time
    own_n = tl.where(program < batch, n, 0)
    H = ()
    if RESIDENT and not APART:
        H = _load_blocks(H_ptr + own * n * d, d, own_n, BLOCK_D, BLOCK_N, BLOCKS)
    slots = tl.cdiv(t_end, KEEP) - 1
    top = tl.minimum(last_slot * KEEP + KEEP, t_end)
    for done_slots in range(0, last_slot - first_slot + 1):
        slot = last_slot - done_slots
        start = slot * KEEP
        count = tl.minimum(KEEP, t_end - start)
        if PREPARE:
            # every program has left the last chunk, whose memory is used again
            _end_phase(phase_ptr, programs * (3 * done_slots + 1), COMPILED)
            for index in range(program, batch * count, programs):
                prepare_kernel(
                    x_ptr, y_ptr, raw_ptr, fed_ptr, A_ptr, mixed_ptr, small_ptr, index - program,
                    start, count, t_end, d, n, x_stride_b, x_stride_t, raw_stride_b, raw_stride_t,
                    fed_stride_b, fed_stride_t, K, BLOCK_D, BLOCK_N * BLOCKS, FEEDBACK, ACTIVATION,
                    SELECTIVE, BETA_MAX, INPUT_SCALE, FULL, NORM_EPS, EPS, ALIGNED, FAST, ACC,
                )  # fmt: skip
            _end_phase(phase_ptr, programs * (3 * done_slots + 2), COMPILED)
            for index in range(program, batch * tl.cdiv(d, REPLAY_D), programs):
                replay_kernel(
                    mixed_ptr, small_ptr, raw_ptr, fed_ptr, A_ptr, h0_ptr, kept_ptr, before_ptr,
                    before_ptr, index - program, start, count, slot, slots, d, n, raw_stride_b,
                    raw_stride_t, fed_stride_b, fed_stride_t, h0_stride_b, 0, K, True, False,
                    REPLAY_D, BLOCK_N * BLOCKS, FEEDBACK, ACTIVATION, INPUT_SCALE, FULL, ALIGNED,
                    FAST, ACC,
                )  # fmt: skip
            _end_phase(phase_ptr, programs * (3 * done_slots + 3), COMPILED)
        if APART:
            if first_tile < tiles:
                _walk_back(
                    (), W, program, first_tile, tiles, stride, start, count, slot, slots, top -
                    start - count, pulled_counter_ptr, left_ptr, True, False, grad_y_ptr,
                    pulled_ptr, x_ptr, y_ptr, raw_ptr, fed_ptr, W_ptr, A_ptr, mixed_ptr, small_ptr,
                    h0_ptr, kept_ptr, before_ptr, H_ptr, grad_x_ptr, grad_raw_ptr, grad_A_ptr,
                    statistics_ptr, batch, t_end, r, d, n, grad_y_stride_b, grad_y_stride_t,
                    x_stride_b, x_stride_t, raw_stride_b, raw_stride_t, fed_stride_b, fed_stride_t,
                    h0_stride_b, K, BLOCK_D, BLOCK_N, BLOCKS, BLOCK_M, BLOCK_K, CHUNKS, BLOCK_B,
                    SPLITS, PRECISION, DOT, FEEDBACK, PERSISTENT, ONE_TILE, RESIDENT, NORM,
                    NORM_EPS, ACTIVATION, SELECTIVE, BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED,
                    FAST, COMPILED, ACC,
                )  # fmt: skip
            else:
                held = ()
                if RESIDENT:
                    held = _load_blocks(H_ptr + own * n * d, d, own_n, BLOCK_D, BLOCK_N, BLOCKS)
                held = _walk_back(
                    held, (), program, first_tile, tiles, stride, start, count, slot, slots, top -
                    start - count, pulled_counter_ptr, left_ptr, False, True, grad_y_ptr,
                    pulled_ptr, x_ptr, y_ptr, raw_ptr, fed_ptr, W_ptr, A_ptr, mixed_ptr, small_ptr,
                    h0_ptr, kept_ptr, before_ptr, H_ptr, grad_x_ptr, grad_raw_ptr, grad_A_ptr,
                    statistics_ptr, batch, t_end, r, d, n, grad_y_stride_b, grad_y_stride_t,
                    x_stride_b, x_stride_t, raw_stride_b, raw_stride_t, fed_stride_b, fed_stride_t,
                    h0_stride_b, K, BLOCK_D, BLOCK_N, BLOCKS, BLOCK_M, BLOCK_K, CHUNKS, BLOCK_B,
                    SPLITS, PRECISION, DOT, FEEDBACK, PERSISTENT, ONE_TILE, RESIDENT, NORM,
                    NORM_EPS, ACTIVATION, SELECTIVE, BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED,
                    FAST, COMPILED, ACC,
                )  # fmt: skip
                if RESIDENT:
                    _store_blocks(H_ptr + own * n * d, held, d, own_n, BLOCK_D, BLOCK_N, BLOCKS)
        else:
            H = _walk_back(
                H, W, program, first_tile, tiles, stride, start, count, slot, slots, top - start -
                count, pulled_counter_ptr, left_ptr, PERSISTENT, True, grad_y_ptr, pulled_ptr,
                x_ptr, y_ptr, raw_ptr, fed_ptr, W_ptr, A_ptr, mixed_ptr, small_ptr, h0_ptr,
                kept_ptr, before_ptr, H_ptr, grad_x_ptr, grad_raw_ptr, grad_A_ptr, statistics_ptr,
                batch, t_end, r, d, n, grad_y_stride_b, grad_y_stride_t, x_stride_b, x_stride_t,
                raw_stride_b, raw_stride_t, fed_stride_b, fed_stride_t, h0_stride_b, K, BLOCK_D,
                BLOCK_N, BLOCKS, BLOCK_M, BLOCK_K, CHUNKS, BLOCK_B, SPLITS, PRECISION, DOT,
                FEEDBACK, PERSISTENT, ONE_TILE, RESIDENT, NORM, NORM_EPS, ACTIVATION, SELECTIVE,
                BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED, FAST, COMPILED, ACC,
            )  # fmt: skip
    if RESIDENT and not APART:
        _store_blocks(H_ptr + own * n * d, H, d, own_n, BLOCK_D, BLOCK_N, BLOCKS)


@triton.jit
def _end_phase(counter, target, COMPILED: tl.constexpr):
    """Wait until all programs have come here."""
    announce(counter)
    wait_for(counter, target, COMPILED)
