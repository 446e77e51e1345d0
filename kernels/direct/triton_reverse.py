"""A token of the reverse sweep of one head: the adjoint of `sweep_kernel`.

One launch a token, one program a sample, the last token first. What follows from y alone is
computed before for all tokens of a chunk (triton_prepare.py), and so is the memory before each
(triton_replay.py). The product (W^y)^T grad_raw_{t+1}, the cotangent of norm(y_t), is a launch
between two of these (triton_product.py). Without feedback one launch has all tokens of a chunk.

With H the cotangent of h_t and g that of y_t from the loss and from the token after it, the
cotangent w of F(y)_t solves the transposed local equation:

    w = g + (I - Q)^T (sigma * w + H-part),   H-part = sum over n of s * H B^T
    cotangent of h_{t-1} = lambda * (H + w C^T)
    cotangent of x~ = H-part + sigma * w

and from these follow the cotangents of x_t = x~ - U^T T U (y - x), of Delta, B, C, u and alpha.
The k x k system of w is the transpose of that of y, with the scalars of `prepare_kernel`.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate, activate_vjp
from bedouin.kernels.device.discretize import input_scale
from bedouin.kernels.device.elementary import LN2
from bedouin.kernels.device.norms import max_norms_of_two
from bedouin.kernels.device.raw import load_raw
from bedouin.kernels.device.reflections import (
    add,
    combine,
    reflections_vjp,
    reflections_vjp_scalars,
    rows_times,
    square_times,
    symmetric_times,
    upper_transposed_times,
)
from bedouin.kernels.device.sync import await_launch
from bedouin.kernels.direct.triton_blocks import (
    discretize_block,
    load_block,
    load_block_states,
    load_blocks,
    load_states_of_both,
    reach,
    store_block,
    unaligned,
)
from bedouin.kernels.direct.triton_bundles import (
    BundleSizes,
    Chunk,
    Options,
    ReverseBuffers,
    TokenRows,
    Tokens,
    local_padding,
    local_size,
    local_width,
    token_memory,
    token_row,
)
from bedouin.kernels.direct.triton_state_grads import (
    load_states_in_columns,
    store_state_grads,
    store_state_grads_in_columns,
)
from bedouin.kernels.direct.triton_sums import (
    channel_sums,
    load_in_columns,
    over_channels,
    some_scalars,
    store_one,
)


@triton.jit
def _reverse_token(
    tokens,  # Tokens
    buffers,  # ReverseBuffers
    chunk,  # Chunk
    sizes,  # BundleSizes
    options,  # Options
    i_token,  # of the token in its chunk
):
    """Store the cotangents of x_t, raw_t and h_{t-1} of the program's sample, and add that of A."""
    K: tl.constexpr = options.K
    FULL: tl.constexpr = options.FULL
    d: tl.constexpr = sizes.d
    n: tl.constexpr = sizes.n
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    BLOCKS: tl.constexpr = sizes.BLOCKS
    sample = tl.program_id(0).to(tl.int64)
    t = chunk.start + i_token
    COUPLED: tl.constexpr = options.INPUT_SCALE == "one_minus_decay"
    FEEDBACK: tl.constexpr = buffers.SPLITS > 0
    PAIRS: tl.constexpr = K * (K + 1) // 2
    cols = tl.arange(0, BLOCK_D)
    in_d = cols < d
    u_at = d + (2 * n if options.SELECTIVE else 0)
    token = sample * sizes.t_end + t
    raw = token_row(tokens.raw, sample, t, options.ALIGNED)
    fed = token_row(tokens.fed, sample, t, options.ALIGNED)

    # first all that does not depend on the cotangents of later tokens
    in_chunk = sample * chunk.count + i_token
    SIZE: tl.constexpr = local_size(K)
    row = chunk.local_ptr + in_chunk * local_width(K, n) + local_padding(K)
    held = load_in_columns(row, SIZE, sizes)
    states = load_states_in_columns(row + SIZE, sizes)
    memory_ptr = unaligned(token_memory(chunk, sample, i_token, sizes), t, sizes)
    A_ptr = unaligned(buffers.A_ptr, t, sizes)
    H_ptr = unaligned(buffers.H_ptr + sample * n * d, t, sizes)
    H = load_blocks(H_ptr, n, sizes)
    BC = tl.load(row + SIZE - 3)
    x = tl.load(token_row(tokens.x, sample, t) + cols, mask=in_d, other=0.0).to(tl.float32)
    y = tl.load(buffers.y_ptr + token * d + cols, mask=in_d, other=0.0).to(tl.float32)
    mixed = tl.load(chunk.mixed_ptr + in_chunk * d + cols, mask=in_d, other=0.0)
    grad_y = token_row(tokens.grad_y, sample, t)
    g = tl.load(grad_y + cols, mask=in_d, other=0.0).to(tl.float32)
    raw_delta = load_raw(raw, fed, cols, in_d, FEEDBACK, ".cg")
    delta = activate(raw_delta, options.ACTIVATION, options.FAST)
    u = ()
    for i in tl.static_range(K):
        u = u + (load_raw(raw, fed, u_at + i * d + cols, in_d, FEEDBACK, ".cg"),)
    if not COUPLED:
        s = input_scale(delta, options.INPUT_SCALE, options.FAST)
        written = s * mixed
        sigma = s * BC
    else:
        sigma = tl.zeros([BLOCK_D], dtype=tl.float32)
        written = sigma
    # h_t = decayed + written B^T; the cotangent of the exponent is (H + w C^T) * reach
    from_memory = tl.zeros([BLOCK_D], dtype=tl.float32)
    with_H = from_memory
    with_C = from_memory
    decayed = ()
    for block in tl.static_range(BLOCKS):
        B, C = load_states_of_both(row + SIZE, block, sizes)
        A_log2 = load_block(A_ptr, block, n, sizes)
        h = load_block(memory_ptr, block, n, sizes)
        decay, s_rows = discretize_block(delta, A_log2, COUPLED, options)
        decayed = decayed + (decay * h,)
        if COUPLED:
            sigma += tl.sum(s_rows * (B * C)[:, None], axis=0)
            from_memory += tl.sum(H[block] * s_rows * B[:, None], axis=0)
        else:
            from_memory += tl.sum(H[block] * B[:, None], axis=0)
        exponent = reach(h, decay, s_rows, mixed, B, COUPLED, FULL) * A_log2
        with_H += tl.sum(H[block] * exponent, axis=0)
        with_C += tl.sum(C[:, None] * exponent, axis=0)
    # the cotangent of Delta is linear in w
    grad_delta = LN2 * with_H
    grad_delta_w = LN2 * with_C
    if options.INPUT_SCALE == "delta":
        grad_delta += mixed * from_memory
        grad_delta_w += mixed * BC
    elif options.INPUT_SCALE == "bounded_delta":
        slope = mixed / ((1 + delta) * (1 + delta))
        grad_delta += slope * from_memory
        grad_delta_w += slope * BC
    grad_delta = activate_vjp(grad_delta, raw_delta, options.ACTIVATION)
    grad_delta_w = activate_vjp(grad_delta_w, raw_delta, options.ACTIVATION)
    if not COUPLED:
        from_memory *= s
    v = y - x
    await_launch(options.OVERLAP)
    grad_normed = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i in tl.static_range(buffers.SPLITS):
        part = buffers.grad_normed_ptr + (i * sizes.batch + sample) * d
        grad_normed += tl.load(part + cols, mask=in_d, other=0.0)
    if options.NORM:
        rms = some_scalars(row, held, SIZE - 4, 1, sizes)[0]
        g += over_channels((rms,), sizes)[0] * grad_normed
    else:
        g += grad_normed
    # w = g + U^T T^T U (from_memory + sigma w), so T^T U (...) = (I - T^T S)^-1 T^T q
    q = rows_times(u, from_memory + sigma * g, K)
    if options.NORM:
        dots = channel_sums(q + (grad_normed * y,), sizes)
        # the norm does not depend on the length of y: the part of the cotangent along y vanishes
        along_y = rms * rms * rms * dots[K] / d
        g -= over_channels((along_y,), sizes)[0] * y
        with_y = some_scalars(row, held, 3 * PAIRS + K * K + 4 * K, K, sizes)
        q = ()
        for i in tl.static_range(K):
            q = q + (dots[i] - along_y * with_y[i],)
    else:
        q = channel_sums(q, sizes)
    T_g = square_times(some_scalars(row, held, 3 * PAIRS, K * K, sizes), q, K)
    T_g_rows = over_channels(T_g, sizes)
    w = g + combine(T_g_rows, u, K)

    # x~ = x + U^T T U v, one reflection after the other
    S = some_scalars(row, held, PAIRS, PAIRS, sizes)
    U_g = add(q, symmetric_times(S, T_g, K), K)
    grad_mixed = from_memory + sigma * w
    grad_raw = buffers.grad_raw_ptr + tl.multiple_of(token * buffers.width, options.ALIGNED)
    kind: tl.constexpr = buffers.grad_raw_ptr.dtype.element_ty
    G = some_scalars(row, held, 2 * PAIRS, PAIRS, sizes)
    T_v = some_scalars(row, held, 3 * PAIRS + K * K, K, sizes)
    factors = some_scalars(row, held, 3 * PAIRS + K * K + K, 3 * K, sizes)
    along, grad_alpha = reflections_vjp_scalars(U_g, T_g, T_v, G, factors, K)
    T_v, along = over_channels(T_v, sizes), over_channels(along, sizes)
    grad_mixed = reflections_vjp(
        grad_mixed, v, u, T_g_rows, T_v, along, grad_raw + u_at, cols, d, K
    )
    for i in tl.static_range(K):
        store_one(grad_raw + u_at + K * d + i, grad_alpha[i].to(kind), sizes)

    tl.store(grad_raw + cols, (grad_delta + w * grad_delta_w).to(kind), mask=in_d)
    if options.SELECTIVE and sizes.ROWS > 0:
        store_state_grads_in_columns(
            H, decayed, w, delta, mixed, written, states, row + SIZE, grad_raw + d, A_ptr,
            sizes, options,
        )  # fmt: skip
    elif options.SELECTIVE:
        store_state_grads(
            H, decayed, w, delta, mixed, written, row + SIZE, grad_raw + d, A_ptr, sizes, options
        )
    tl.store(
        buffers.grad_x_ptr + token * d + cols,
        grad_mixed.to(buffers.grad_x_ptr.dtype.element_ty),
        mask=in_d,
    )
    checks = channel_sums(rows_times(u, from_memory + sigma * w, K), sizes)
    T = some_scalars(row, held, 0, PAIRS, sizes)
    T_checks = over_channels(upper_transposed_times(T, checks, K), sizes)
    applied = g + combine(T_checks, u, K)
    finite = 0 * checks[0]
    defect, size = max_norms_of_two(applied - w, applied)
    cell = buffers.statistics_ptr + token
    store_one(cell, defect + finite, sizes)
    cell += tl.cast(sizes.batch, tl.int64) * sizes.t_end
    store_one(cell, size + finite, sizes)
    sum_ptr = unaligned(buffers.grad_A_ptr + sample * n * d, t, sizes)
    # H is perhaps replaced by other threads than those that have read it
    tl.debug_barrier()
    for block in tl.static_range(BLOCKS):
        # the decay again: held over the local equation it would cost too many registers
        A_log2 = load_block(A_ptr, block, n, sizes)
        C = load_block_states(row + SIZE + n, block, sizes)
        decay, s_rows = discretize_block(delta, A_log2, COUPLED, options)
        total = H[block] + C[:, None] * w[None, :]
        if COUPLED or FULL:
            B = load_block_states(row + SIZE, block, sizes)
            h = load_block(memory_ptr, block, n, sizes)
            along = reach(h, decay, s_rows, mixed, B, COUPLED, FULL)
        else:
            along = decayed[block]
        grad_A = load_block(sum_ptr, block, n, sizes) + total * along * delta[None, :]
        store_block(sum_ptr, grad_A, block, n, sizes)
        store_block(H_ptr, total * decay, block, n, sizes)


@triton.jit
def _reverse(
    tokens,  # Tokens
    buffers,  # ReverseBuffers
    chunk,  # Chunk
    sizes,  # BundleSizes
    options,  # Options
    i_token,
):
    """A token of the program's sample, or without feedback all from the chunk's last one to it."""
    if buffers.SPLITS > 0:
        _reverse_token(tokens, buffers, chunk, sizes, options, i_token)
    else:
        for passed in range(chunk.count - i_token):
            _reverse_token(tokens, buffers, chunk, sizes, options, chunk.count - 1 - passed)
            # H is perhaps read by other threads than those that have stored it
            tl.debug_barrier()


@triton.jit(do_not_specialize=["i_token", "start", "count", "slot", "slots", "batch", "t_end"])
def reverse_kernel(
    x_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r), raw^x
    fed_ptr,  # (b, t, r), W^y norm(y_{t-1}), if there is feedback
    grad_y_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    grad_normed_ptr,  # (SPLITS, b, d): (W^y)^T grad_raw_{t+1}, the cotangent of norm(y_t), as a sum
    A_ptr,  # (n, d), log2(e) A
    mixed_ptr,  # (b, count, d)
    local_ptr,  # (b, count, WIDTH)
    h0_ptr,  # (b, n, d)
    kept_ptr,  # (b, slots, n, d)
    replayed_ptr,  # (b, count - 1, n, d)
    H_ptr,  # (b, n, d): cotangent of h_t, in place that of h_{t-1}
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, width), may be the memory of `fed`
    grad_A_ptr,  # (b, n, d), added to
    statistics_ptr,  # (2, b, t): defect and scale of the adjoint equation
    i_token,
    start,
    count,
    slot,
    slots,
    batch,
    t_end,
    width: tl.constexpr,
    d: tl.constexpr,
    n: tl.constexpr,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    grad_y_stride_b,
    grad_y_stride_t,
    h0_stride_b,
    SPLITS: tl.constexpr,  # 0: no feedback
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # states at a time
    BLOCKS: tl.constexpr,  # how many times
    ROWS: tl.constexpr,  # warps that hold equal numbers of channels; 0: spread in another way
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    NORM: tl.constexpr,
    ALIGNED: tl.constexpr,  # a power of two that divides all offsets of rows of raw values
    OVERLAP: tl.constexpr,
    FAST: tl.constexpr,
):
    """The adjoint of token start + i_token of all samples, or without feedback of the tokens from
    the chunk's last one to it, a program a sample, as the module's docstring says."""
    _reverse(
        Tokens(
            TokenRows(x_ptr, x_stride_b, x_stride_t),
            TokenRows(raw_ptr, raw_stride_b, raw_stride_t),
            TokenRows(fed_ptr, fed_stride_b, fed_stride_t),
            TokenRows(grad_y_ptr, grad_y_stride_b, grad_y_stride_t),
        ),
        ReverseBuffers(
            y_ptr,
            grad_normed_ptr,
            SPLITS,
            A_ptr,
            H_ptr,
            grad_x_ptr,
            grad_raw_ptr,
            width,
            grad_A_ptr,
            statistics_ptr,
        ),
        Chunk(
            slot,
            start,
            count,
            mixed_ptr,
            local_ptr,
            h0_ptr,
            h0_stride_b,
            kept_ptr,
            replayed_ptr,
            slots,
        ),
        BundleSizes(d, n, BLOCK_D, BLOCK_N, BLOCKS, ROWS, batch, t_end),
        Options(K, ACTIVATION, SELECTIVE, INPUT_SCALE, FULL, NORM, ALIGNED, OVERLAP, FAST),
        i_token,
    )
