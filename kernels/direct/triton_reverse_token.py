"""A token of the reverse sweep: the adjoint of `solve_token`.

With H the cotangent of h_t and g that of y_t from the loss and from the token after it, the
cotangent w of F(y)_t solves the transposed local equation:

    w = g + (I - Q)^T (sigma * w + H-part),   H-part = sum over n of s * H B^T
    cotangent of h_{t-1} = lambda * (H + w C^T)
    cotangent of x~ = H-part + sigma * w

and from these follow the cotangents of x_t = x~ - U^T T U (y - x), of Delta, B, C, u and alpha.
The k x k system of w is the transpose of that of y, with the scalars of `prepare_token`.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

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
    symmetric_times,
    upper_transposed_times,
)
from bedouin.kernels.device.sync import announce, load_uncached, wait_for
from bedouin.kernels.direct.triton_blocks import (
    discretize,
    load_block,
    load_block_uncached,
    load_states,
    of_thread,
    reach,
    store_block,
)
from bedouin.kernels.direct.triton_bundles import (
    aligned_row,
    local_padding,
    local_size,
    local_width,
    token_row,
)
from bedouin.kernels.direct.triton_replay import later_memory, token_memory
from bedouin.kernels.direct.triton_reverse_crowded import store_crowded_grads, sums_over_states
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
def reverse_token(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    sweep,  # ReverseSweep
    chunk,  # Chunk
    sample,
    i_token,  # of the token in its chunk
    target,  # finished tiles when (W^y)^T grad_raw_{t+1} is complete
):
    """Store the cotangents of x_t and raw_t, and add that of A, or store w and Delta if LATER_A;
    returns the cotangent of h_{t-1}, as H."""
    K: tl.constexpr = sweep.options.K
    ACC: tl.constexpr = sweep.options.ACC
    FULL: tl.constexpr = sweep.options.FULL
    d: tl.constexpr = sweep.sizes.d
    n: tl.constexpr = sweep.sizes.n
    BLOCK_D: tl.constexpr = sweep.sizes.BLOCK_D
    BLOCK_N: tl.constexpr = sweep.sizes.BLOCK_N
    CROWDED: tl.constexpr = sweep.sizes.CROWDED
    BLOCKS: tl.constexpr = 0 if CROWDED else sweep.sizes.BLOCKS  # that are held
    t = chunk.start + i_token
    COUPLED: tl.constexpr = sweep.options.INPUT_SCALE == "one_minus_decay"
    PAIRS: tl.constexpr = K * (K + 1) // 2
    cols = tl.arange(0, BLOCK_D)
    in_d = cols < d
    u_at = d + (2 * n if sweep.options.SELECTIVE else 0)
    token = sample * sweep.sizes.t_end + t
    raw = aligned_row(sweep.tokens.raw, sample, t, sweep.options.ALIGNED)
    fed = aligned_row(sweep.tokens.fed, sample, t, sweep.options.ALIGNED)

    # first all that does not depend on the cotangents of later tokens, while the program waits
    in_chunk = (sample + chunk.behind) * chunk.count + i_token
    SIZE: tl.constexpr = local_size(K)
    row = sweep.prepared.local_ptr + in_chunk * local_width(K, n) + local_padding(K)
    held = load_in_columns(row, SIZE, sweep.sizes)
    states = ()
    if not CROWDED:
        states = load_states_in_columns(row + SIZE, sweep.sizes)
    memory_ptr = token_memory(sweep.memories, sample, i_token, chunk, sweep.sizes)
    memory_ptr = of_thread(memory_ptr, t, sweep.sizes)
    later_ptr = later_memory(sweep.memories, sample, i_token, chunk, sweep.sizes)
    later_ptr = of_thread(later_ptr, t, sweep.sizes)
    A_ptr = of_thread(sweep.prepared.A_ptr, t, sweep.sizes)
    crowded_sums = ()
    if CROWDED:
        # before other vectors are loaded, which would occupy registers
        mixed = tl.load(sweep.prepared.mixed_ptr + in_chunk * d + cols, mask=in_d, other=0.0)
        raw_delta = load_raw(raw, fed, cols, in_d, True, ACC, ".cg")
        crowded_sums = sums_over_states(
            H, activate(raw_delta, sweep.options.ACTIVATION), mixed, row + SIZE, memory_ptr,
            A_ptr, sweep.sizes, sweep.options,
        )  # fmt: skip
    BC = tl.load(row + SIZE - 3)
    x = tl.load(token_row(sweep.tokens.x, sample, t) + cols, mask=in_d, other=0.0).to(ACC)
    y = tl.load(sweep.buffers.y_ptr + token * d + cols, mask=in_d, other=0.0).to(ACC)
    mixed = tl.load(sweep.prepared.mixed_ptr + in_chunk * d + cols, mask=in_d, other=0.0)
    grad_y = token_row(sweep.tokens.grad_y, sample, t)
    g = tl.load(grad_y + cols, mask=in_d, other=0.0).to(ACC)
    raw_delta = load_raw(raw, fed, cols, in_d, True, ACC, ".cg")
    delta = activate(raw_delta, sweep.options.ACTIVATION)
    u = ()
    for i in tl.static_range(K):
        u = u + (load_raw(raw, fed, u_at + i * d + cols, in_d, True, ACC, ".cg"),)
    if not COUPLED:
        s = input_scale(delta, sweep.options.INPUT_SCALE)
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
        h = load_uncached(memory_ptr + state, in_state)
        decay, s_rows = discretize(delta, A_log2, COUPLED, sweep.options)
        decayed = decayed + (decay * h,)
        if COUPLED:
            sigma += tl.sum(s_rows * (B * C)[:, None], axis=0)
            from_memory += tl.sum(H[block] * s_rows * B[:, None], axis=0)
        else:
            from_memory += tl.sum(H[block] * B[:, None], axis=0)
        exponent = reach(h, decay, s_rows, mixed, B, COUPLED, FULL) * A_log2
        with_H += tl.sum(H[block] * exponent, axis=0)
        with_C += tl.sum(C[:, None] * exponent, axis=0)
    if CROWDED:
        from_memory, with_H, with_C = crowded_sums[0], crowded_sums[1], crowded_sums[2]
        sigma += crowded_sums[3]
    # the cotangent of Delta is linear in w
    grad_delta = LN2 * with_H
    grad_delta_w = LN2 * with_C
    if sweep.options.INPUT_SCALE == "delta":
        grad_delta += mixed * from_memory
        grad_delta_w += mixed * BC
    elif sweep.options.INPUT_SCALE == "bounded_delta":
        slope = mixed / ((1 + delta) * (1 + delta))
        grad_delta += slope * from_memory
        grad_delta_w += slope * BC
    grad_delta = activate_vjp(grad_delta, raw_delta, sweep.options.ACTIVATION)
    grad_delta_w = activate_vjp(grad_delta_w, raw_delta, sweep.options.ACTIVATION)
    if not COUPLED:
        from_memory *= s
    v = y - x
    if sweep.product.PERSISTENT and sweep.options.FAST:
        # or the compiler moves this work behind the waiting loop, and keeps all its operands
        pinned = ()
        for block in tl.static_range(BLOCKS):
            pinned = pinned + (_pin(decayed[block]),)
        decayed = pinned
        from_memory, sigma, v = _pin(from_memory), _pin(sigma), _pin(v)
        grad_delta, grad_delta_w = _pin(grad_delta), _pin(grad_delta_w)
        if not COUPLED:
            written = _pin(written)
    if sweep.product.PERSISTENT:
        wait_for(sweep.counters.tiles, target, sweep.product.COMPILED)
    grad_normed = tl.zeros([BLOCK_D], dtype=ACC)
    for split in tl.static_range(sweep.product.SPLITS):
        at = (tl.cast(sweep.sizes.batch, tl.int64) * split + sample) * d + cols
        grad_normed += load_uncached(sweep.buffers.grad_normed_ptr + at, in_d).to(ACC)
    if sweep.options.NORM:
        rms = some_scalars(row, held, SIZE - 4, 1, sweep.sizes)[0]
        g += over_channels((rms,), sweep.sizes)[0] * grad_normed
    else:
        g += grad_normed
    # w = g + U^T T^T U (from_memory + sigma w), so T^T U (...) = (I - T^T S)^-1 T^T q
    q = rows_times(u, from_memory + sigma * g, K)
    if sweep.options.NORM:
        dots = channel_sums(q + (grad_normed * y,), sweep.sizes)
        # the norm does not depend on the length of y: the part of the cotangent along y vanishes
        along_y = rms * rms * rms * dots[K] / d
        g -= over_channels((along_y,), sweep.sizes)[0] * y
        with_y = some_scalars(row, held, 3 * PAIRS + K * K + 4 * K, K, sweep.sizes)
        q = ()
        for i in tl.static_range(K):
            q = q + (dots[i] - along_y * with_y[i],)
    else:
        q = channel_sums(q, sweep.sizes)
    solver = some_scalars(row, held, 3 * PAIRS, K * K, sweep.sizes)
    T_g = ()
    for i in tl.static_range(K):
        total = solver[i * K] * q[0]
        for j in tl.static_range(K):
            if j > 0:
                total += solver[i * K + j] * q[j]
        T_g = T_g + (total,)
    T_g_rows = over_channels(T_g, sweep.sizes)
    w = g + combine(T_g_rows, u, K)

    # x~ = x + U^T T U v, one reflection after the other
    S = some_scalars(row, held, PAIRS, PAIRS, sweep.sizes)
    U_g = add(q, symmetric_times(S, T_g, K), K)
    grad_mixed = from_memory + sigma * w
    grad_raw = sweep.buffers.grad_raw_ptr + tl.multiple_of(
        token * sweep.sizes.r, sweep.options.ALIGNED
    )
    kind: tl.constexpr = sweep.buffers.grad_raw_ptr.dtype.element_ty
    G = some_scalars(row, held, 2 * PAIRS, PAIRS, sweep.sizes)
    T_v = some_scalars(row, held, 3 * PAIRS + K * K, K, sweep.sizes)
    factors = some_scalars(row, held, 3 * PAIRS + K * K + K, 3 * K, sweep.sizes)
    along, grad_alpha = reflections_vjp_scalars(U_g, T_g, T_v, G, factors, K)
    T_v, along = over_channels(T_v, sweep.sizes), over_channels(along, sweep.sizes)
    grad_mixed = reflections_vjp(
        grad_mixed, v, u, T_g_rows, T_v, along, grad_raw + u_at, cols, d, K
    )
    for i in tl.static_range(K):
        store_one(grad_raw + u_at + K * d + i, grad_alpha[i].to(kind), sweep.sizes)

    tl.store(grad_raw + cols, (grad_delta + w * grad_delta_w).to(kind), mask=in_d)
    if sweep.options.SELECTIVE and CROWDED:
        store_crowded_grads(
            H, w, delta, mixed, written, later_ptr, row + SIZE, grad_raw + d, A_ptr,
            sweep.sizes, sweep.options,
        )  # fmt: skip
    elif sweep.options.SELECTIVE and sweep.sizes.ROWS > 0:
        store_state_grads_in_columns(
            H, decayed, w, delta, mixed, written, states, row + SIZE, grad_raw + d,
            A_ptr, sweep.sizes, sweep.options,
        )  # fmt: skip
    elif sweep.options.SELECTIVE:
        store_state_grads(
            H, decayed, w, delta, mixed, written, row + SIZE, grad_raw + d, A_ptr,
            sweep.sizes, sweep.options,
        )  # fmt: skip
    if sweep.sizes.LATER_A:
        vectors = sweep.walked.vectors_ptr + in_chunk * (2 * d) + cols
        tl.store(vectors, w, mask=in_d)
        tl.store(vectors + d, delta, mask=in_d)
    if sweep.product.PERSISTENT:
        announce(sweep.counters.samples)

    tl.store(
        sweep.buffers.grad_x_ptr + token * d + cols,
        grad_mixed.to(sweep.buffers.grad_x_ptr.dtype.element_ty),
        mask=in_d,
    )
    checks = channel_sums(rows_times(u, from_memory + sigma * w, K), sweep.sizes)
    T = some_scalars(row, held, 0, PAIRS, sweep.sizes)
    T_checks = over_channels(upper_transposed_times(T, checks, K), sweep.sizes)
    applied = g + combine(T_checks, u, K)
    finite = 0 * checks[0]
    defect, size = max_norms_of_two(applied - w, applied)
    cell = sweep.buffers.statistics_ptr + token
    store_one(cell, defect + finite, sweep.sizes)
    cell += tl.cast(sweep.sizes.batch, tl.int64) * sweep.sizes.t_end
    store_one(cell, size + finite, sweep.sizes)
    new_H = ()
    for block in tl.static_range(sweep.sizes.BLOCKS):
        # the decay again: kept over the wait it would cost too many registers
        A_log2 = load_block(A_ptr, block, n, sweep.sizes)
        C = load_states(row + SIZE + n, block, sweep.sizes)
        decay, s_rows = discretize(delta, A_log2, COUPLED, sweep.options)
        total = H[block] + C[:, None] * w[None, :]
        if not sweep.sizes.LATER_A:
            if COUPLED or FULL:
                B = load_states(row + SIZE, block, sweep.sizes)
                h = load_block_uncached(memory_ptr, block, n, sweep.sizes)
                along = reach(h, decay, s_rows, mixed, B, COUPLED, FULL)
            else:
                along = decayed[block]
            sum_A = of_thread(sweep.buffers.grad_A_ptr + sample * n * d, t, sweep.sizes)
            grad_A = load_block_uncached(sum_A, block, n, sweep.sizes)
            grad_A += total * along * delta[None, :]
            store_block(sum_A, grad_A, block, n, sweep.sizes)
        new_H = new_H + (total * decay,)
    return new_H


@triton.jit
def _pin(v):
    """v, computed here and nowhere later; float32."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [v], dtype=tl.float32, is_pure=False, pack=1
    )
