"""The reverse sweep of heads that fit a multiprocessor: one program a head and a few samples.

It takes tokens back, the last first, from what `prepare_kernel` computed for all of them at once.
A program first computes the memories in a chunk of them and stores them where they remain in the
second-level cache. The equations are those of cpu.py, the scalars those of triton_prepare.py.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, s samples of a program, or their parts. `how`: `head_constants`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import LN2, activate, activate_vjp, max_norm, reciprocal
from bedouin.kernels.device.reflections import (
    add,
    combine,
    reflections_vjp,
    rows_times,
    square_times,
    symmetric_times,
    upper_transposed_times,
)
from bedouin.kernels.direct import device, parts, triton_replay, triton_weights
from bedouin.kernels.direct.triton_prepare import local_place, local_width


@triton.jit(do_not_specialize=["t_end", "per_head", "token"])
def reverse_kernel(
    grad_y_ptr,  # (b, t, d)
    x_ptr,  # (H, b / H, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r or more), W^y norm(y_{t-1}); without FEEDBACK, as `W_ptr`, any tensor
    W_ptr,  # (H, r, d), W^y; if SINGLE (b, d), (W^y)^T grad_raw_{t+1}
    A_ptr,  # (H, n, d), log2(e) A
    mixed_ptr,  # (b, t, d): x~
    local_ptr,  # (b, t, WIDTH)
    kept_ptr,  # (b, ceil(t / KEEP), n, d): h before tokens 0, KEEP, 2 KEEP, ...
    replayed_ptr,  # (b, KEEP - 1, n, d): h before the other tokens of a chunk of KEEP, in turn
    H_ptr,  # (b, n, d): cotangent of h after the last token, in place that before the first one
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, r or more), may be the memory of `fed`
    grad_A_ptr,  # (b, n, d), to which the launch adds
    statistics_ptr,  # (PARTS, 2, b, t): defect and scale of the adjoint equation, of each part
    scratch_ptr,  # (programs, S, 2, BLOCK_L): the scalars of a token, in turn in two places
    t_end,
    token,  # of a launch if SINGLE
    per_head,  # samples of a head, b / H
    r,  # of a row of grad_raw
    grad_y_strides,  # of samples and tokens
    x_strides,  # of heads, samples and tokens
    raw_strides,  # of samples and tokens
    fed_strides,  # likewise
    W_stride,  # of heads, if SINGLE of samples
    how: tl.constexpr,
):
    """The adjoint of S samples of one head."""
    d: tl.constexpr = how.d
    n: tl.constexpr = how.n
    K: tl.constexpr = how.K
    N: tl.constexpr = how.N
    ROWS: tl.constexpr = how.ROWS
    D: tl.constexpr = how.D
    PARTS: tl.constexpr = how.PARTS
    KEEP: tl.constexpr = how.KEEP
    count, stop = t_end, t_end
    if how.SINGLE:
        count, stop = 1, token + 1
    head, here, local, sample = device.samples_of(per_head, how)
    is_first_part = here & (tl.arange(0, ROWS) % PARTS == 0)
    row_of = device.rows_of_statistics(per_head, t_end, how)
    part_at = statistics_ptr + tl.arange(0, ROWS) % PARTS * (2 * row_of)
    program = tl.program_id(0).to(tl.int64)
    cols = parts.columns_of_rows(ROWS, PARTS, D)
    in_row = cols < d
    inside = here[:, None] & in_row
    PAIRS: tl.constexpr = K * (K + 1) // 2
    AT_N: tl.constexpr = local_place(K, 3)
    AT_KNOWN: tl.constexpr = local_place(K, 4)
    AT_LAST: tl.constexpr = local_place(K, 5)
    AT_B: tl.constexpr = local_place(K, 6)
    WIDTH: tl.constexpr = local_width(K, n)
    kind: tl.constexpr = grad_raw_ptr.dtype.element_ty
    SMALL: tl.constexpr = triton_weights.small_width(N, D)
    BLOCKS: tl.constexpr = how.BLOCKS
    # whether a thread holds A and what a token needs of states; else they are read for each block
    HOLD: tl.constexpr = BLOCKS == 1
    alphas = tl.arange(0, SMALL)
    in_alpha = is_first_part[:, None] & (alphas < K)[None, :]
    # (s, d), because a load of (d,) would be followed by a change of its layout
    A_at = A_ptr + head * n * d + cols + 0 * local[:, None]
    if HOLD:
        A = device.load_head_states(A_at, in_row, how)
    no_small = tl.zeros([ROWS, SMALL], how.ROUND)
    if how.FEEDBACK and not how.SINGLE:
        W_at = W_ptr + head * W_stride
        if not how.STREAMED:
            W = triton_weights.load_transposed_weights(W_at, how)
        # no token after the last one
        no_rows = tl.zeros([ROWS, D], how.ROUND)
        grads = triton_weights.in_tiles(no_rows, (no_rows,) * K, no_small, no_small, how)
    slots = tl.cdiv(t_end, KEEP)
    kept_row = kept_ptr + sample * slots * (n * d)
    triton_replay.fetch_tokens(kept_row, slots - 1, n * d, slots, n * d, 1, how)
    at = sample[:, None] * (n * d) + cols
    H, grad_A = (), ()
    for i in tl.static_range(BLOCKS):
        H = H + (device.load_head_states(H_ptr + at, in_row, how, i, BLOCKS),)
        grad_A = grad_A + (device.load_head_states(grad_A_ptr + at, in_row, how, i, BLOCKS),)
    x_row = x_ptr + head * x_strides[0] + local.to(tl.int64) * x_strides[1]
    y_row = y_ptr + sample * t_end * d
    grad_y_row = grad_y_ptr + sample * grad_y_strides[0]
    raw_row = raw_ptr + sample * raw_strides[0]
    fed_row = fed_ptr + sample * fed_strides[0]
    mixed_row = mixed_ptr + sample * t_end * d
    rows_of_tokens = x_row, y_row, grad_y_row, mixed_row, raw_row, fed_row
    by_token = x_strides[2], d, grad_y_strides[1], d, raw_strides[1], fed_strides[1]
    local_row = local_ptr + sample * t_end * WIDTH
    replayed_row = replayed_ptr + sample * ((KEEP - 1) * n * d)
    last = (stop - 1).to(tl.int64)
    rows_of_steps = mixed_row, raw_row, fed_row, local_row + AT_B
    by_step = d, raw_strides[1], fed_strides[1], WIDTH
    # loads of a token are issued while the one after it is taken back
    loaded = triton_replay.load_kept_token(rows_of_tokens, by_token, last, cols, in_row, how)
    # the scalars of a token are read one by one from near memory, in which they are stored a token
    # before they are read
    entries = parts.columns_of_rows(ROWS, PARTS, how.BLOCK_L // PARTS)
    in_local = entries < WIDTH
    scalars_at = local_row + last * WIDTH
    scalars = tl.load(scalars_at[:, None] + entries, mask=in_local, other=0.0)
    near = scratch_ptr + (program * how.S + tl.arange(0, ROWS) // PARTS) * 2 * how.BLOCK_L
    tl.store(near[:, None] + entries, scalars, mask=in_local)
    scalars_at = local_row + tl.maximum(last - 1, 0) * WIDTH
    scalars = tl.load(scalars_at[:, None] + entries, mask=in_local, other=0.0)
    for back in range(0, count):
        t = (stop - 1 - back).to(tl.int64)
        in_chunk = (t % KEEP).to(tl.int32)
        chunk = t // KEEP
        if (t == t_end - 1) | (in_chunk == KEEP - 1):
            # other threads have read what is overwritten, and read what is written
            tl.debug_barrier()
            first = t - in_chunk
            triton_replay.replay_tokens(
                kept_row + chunk * (n * d), replayed_row, rows_of_steps, by_step, first,
                in_chunk + 1, A_at, cols, in_row, inside, how,
            )  # fmt: skip
            # the replay would otherwise wait for device memory in every block of states
            first = tl.maximum(first - KEEP, 0)
            triton_replay.fetch_tokens(kept_row, first // KEEP, n * d, slots, n * d, 1, how)
            triton_replay.fetch_tokens(mixed_row, first, d, t_end, d, KEEP, how)
            triton_replay.fetch_tokens(local_row, first, WIDTH, t_end, WIDTH, KEEP, how)
            triton_replay.fetch_tokens(raw_row, first, raw_strides[1], t_end, d, KEEP, how)
            if how.FEEDBACK:
                triton_replay.fetch_tokens(fed_row, first, fed_strides[1], t_end, d, KEEP, how)
        place = sample * t_end + t
        tl.debug_barrier()
        row = near + back % 2 * how.BLOCK_L
        stored = near + (back + 1) % 2 * how.BLOCK_L
        tl.store(stored[:, None] + entries, scalars, mask=in_local)
        scalars_at = local_row + tl.maximum(t - 2, 0) * WIDTH
        scalars = tl.load(scalars_at[:, None] + entries, mask=in_local, other=0.0)
        h_row = replayed_row + (in_chunk - 1) * (n * d)
        if in_chunk == 0:
            h_row = kept_row + chunk * (n * d)
        h_at = h_row[:, None] + cols
        next_h = device.load_head_states(h_at, in_row, how, 0, BLOCKS)
        # (W^y)^T grad_raw_{t+1}, the cotangent of norm(y_t)
        if how.FEEDBACK and not how.SINGLE:
            if how.STREAMED:
                product = triton_weights.streamed_product(W_at, grads, how)
            else:
                product = triton_weights.transposed_product(W, grads, how)
        x, y, g, mixed, raw, fed = loaded
        x = x.to(tl.float32)
        y = y.to(tl.float32)
        g = g.to(tl.float32)
        raw_delta = raw[0].to(tl.float32)
        if how.FEEDBACK:
            raw_delta += fed[0].to(tl.float32)
        delta = activate(raw_delta, how.ACTIVATION)
        u = ()
        for i in tl.static_range(K):
            one = raw[i + 1].to(tl.float32)
            if how.FEEDBACK:
                one += fed[i + 1].to(tl.float32)
            u = u + (one,)
        # h_t = decayed + written B^T; the cotangent of the exponent is (H + w C^T) * reach
        rms, BC, _, _ = device.load_scalars(row + AT_LAST, 4, D)
        A_t = A if HOLD else device.load_head_states(A_at, in_row, how, 0, BLOCKS)
        decay, s = device.discretize(A_t, delta, how)
        # the cotangent of s x~, without w
        to_written = tl.zeros([ROWS, D], tl.float32)
        for i in tl.static_range(BLOCKS):
            B = device.load_block(row + AT_B, i, BLOCKS, how)
            C = device.load_block(row + AT_B + n, i, BLOCKS, how)
            to_written += device.sum_states(H[i] * B)
        from_memory = s * to_written
        sigma = s * BC
        # w = g + U^T T^T U (from_memory + sigma w), so T^T U (...) = (I - T^T S)^-1 T^T q
        if how.FEEDBACK:
            if how.SINGLE:
                grad_at = W_ptr + sample[:, None] * W_stride + cols
                grad_normed = tl.load(grad_at, mask=in_row, other=0.0).to(tl.float32)
            else:
                grad_normed = device.rows_of(product, how)
            if how.NORM:
                g += rms * grad_normed
            else:
                g += grad_normed
        q = rows_times(u, from_memory + sigma * g, K)
        if how.FEEDBACK and (how.NORM or K == 0):
            q = q + (grad_normed * y,)
        dots = ()
        if len(q) > 0:
            dots = device.as_columns(parts.over_channels_of_parts(q, how))
        if how.NORM:
            # the norm does not depend on the length of y: the part along y vanishes
            along_y = rms * rms * rms * dots[K] / d
            g -= along_y * y
            q = ()
            if K > 0:
                u_y = device.load_scalars(row + AT_KNOWN + 4 * K, K, D)
            for i in tl.static_range(K):
                q = q + (dots[i] - along_y * u_y[i],)
        else:
            q = dots[0:K]
        before = tl.maximum(t - 1, 0)
        loaded = triton_replay.load_kept_token(rows_of_tokens, by_token, before, cols, in_row, how)
        w, applied = g, g
        if K > 0:
            T_g = square_times(device.load_scalars(row + AT_N, K * K, D), q, K)
            w += combine(T_g, u, K)
            # x~ = x + U^T T U v, one reflection after the other
            S = device.load_scalars(row + local_place(K, 1), PAIRS, D)
            U_g = add(q, symmetric_times(S, T_g, K), K)
            # defect and scale of the adjoint equation
            T = device.load_scalars(row, PAIRS, D)
            applied += combine(upper_transposed_times(T, U_g, K), u, K)
        defect, size = max_norm(applied - w, 1)[:, None], max_norm(applied, 1)[:, None]
        device.store_statistics(part_at + place, (defect, size), row_of, here)
        grad_mixed = from_memory + sigma * w
        if K > 0:
            G = device.load_scalars(row + local_place(K, 2), PAIRS, D)
            own = device.load_scalars(row + AT_KNOWN, 4 * K, D)
            T_v = own[:K]
            along_u, grad_alpha = reflections_vjp(U_g, T_g, T_v, G, own[K:], K)
        # before the exchange that they follow
        states_at, given = triton_weights.state_columns(alphas, AT_B, how)
        unit = tl.load(row[:, None] + states_at[None, :], mask=given[None, :], other=0.0)
        _, _, inv_B, inv_C = device.load_scalars(row + AT_LAST, 4, unit.shape[1])
        v = y - x
        for i in tl.static_range(1, K):
            v -= T_v[i] * u[i]
        rows = ()
        to_alpha = tl.zeros([ROWS, SMALL], tl.float32)
        grad_row = grad_raw_ptr + place * r
        for i in tl.static_range(K):
            if i > 0:
                v += T_v[i] * u[i]
            # only the direction of u_i matters: the part of the cotangent along u_i vanishes
            grad_u = (T_v[i] * grad_mixed + T_g[i] * v - along_u[i] * u[i]).to(kind)
            tl.store(grad_row[:, None] + how.U_AT + i * d + cols, grad_u, mask=inside)
            rows = rows + (grad_u.to(how.ROUND),)
            one = device.in_lanes(grad_alpha[i], ROWS, D, SMALL)
            to_alpha = tl.where((alphas == i)[None, :], one, to_alpha)
            grad_mixed -= T_g[i] * u[i]
        to_alpha = to_alpha.to(kind)
        if K > 0:
            alpha_at = grad_row[:, None] + how.U_AT + K * d + alphas[None, :]
            tl.store(alpha_at, to_alpha, mask=in_alpha)
        # what remains of it is the cotangent of x
        x_at = grad_x_ptr + place[:, None] * d + cols
        tl.store(x_at, grad_mixed.to(grad_x_ptr.dtype.element_ty), mask=inside)
        # cotangents of h_t, of A and Delta, of the unit B and C, and of the raw ones
        written, w_states = device.spread(s * mixed, N // BLOCKS), device.spread(w, N // BLOCKS)
        to_delta = tl.zeros([ROWS, D], tl.float32)
        sums, new_H, new_grad_A = (), (), ()
        for i in tl.static_range(BLOCKS):
            h = next_h
            if i + 1 < BLOCKS:
                next_h = device.load_head_states(h_at, in_row, how, i + 1, BLOCKS)
            if not HOLD:
                A_t = device.load_head_states(A_at, in_row, how, i, BLOCKS)
                decay, _ = device.discretize(A_t, delta, how)
                B = device.load_block(row + AT_B, i, BLOCKS, how)
                C = device.load_block(row + AT_B + n, i, BLOCKS, how)
            reach = decay * h
            total = H[i] + w_states * C
            to_exponent = total * reach
            if how.INPUT_SCALE == "one_minus_decay":
                # s is 1 - decay
                to_exponent -= total * decay * device.spread(mixed, N) * B
            to_delta += LN2 * device.sum_states(to_exponent * A_t)
            if how.SELECTIVE:
                to_C = (reach + written * B) * w_states
                both = tl.permute(tl.join(total * written, to_C), (0, 1, 3, 2))
                both = tl.reshape(both, [ROWS, D, 2 * N // BLOCKS])
                sums = sums + (device.sum_channels(both, ROWS, D, 2 * N // BLOCKS),)
            new_grad_A = new_grad_A + (grad_A[i] + to_exponent * device.spread(delta, N // BLOCKS),)
            new_H = new_H + (total * decay,)
            if i + 1 < BLOCKS:
                # the loads of all blocks would otherwise be issued before the first one is computed
                tl.debug_barrier()
        H, grad_A = new_H, new_grad_A
        states = no_small
        if how.SELECTIVE:
            states = device.join_rows(sums, ROWS, BLOCKS, SMALL // BLOCKS)
        if how.INPUT_SCALE == "delta":
            to_delta += mixed * (to_written + BC * w)
        elif how.INPUT_SCALE == "bounded_delta":
            inverse = reciprocal(1 + delta)
            to_delta += mixed * (inverse * inverse) * (to_written + BC * w)
        to_delta = activate_vjp(to_delta, raw_delta, how.ACTIVATION).to(kind)
        tl.store(grad_row[:, None] + cols, to_delta, mask=inside)
        if how.SELECTIVE:
            states = parts.sum_of_parts(states, PARTS)
            along = unit * states
            GROUPS: tl.constexpr = along.shape[1] // N
            sums_of = tl.sum(tl.reshape(along, [ROWS, GROUPS, N]), axis=2)[:, :, None]
            along = tl.reshape(tl.broadcast_to(sums_of, [ROWS, GROUPS, N]), along.shape)
            states_at, given = triton_weights.state_columns(alphas, d, how)
            inv = tl.where((states_at < d + n)[None, :], inv_B, inv_C)
            to_states = (inv * (states - unit * along)).to(kind)
            in_states = is_first_part[:, None] & given[None, :]
            tl.store(grad_row[:, None] + states_at[None, :], to_states, mask=in_states)
            states = to_states.to(how.ROUND)
        if how.FEEDBACK and not how.SINGLE:
            small = to_alpha.to(how.ROUND)
            grads = triton_weights.in_tiles(to_delta.to(how.ROUND), rows, states, small, how)
    at = sample[:, None] * (n * d) + cols
    for i in tl.static_range(BLOCKS):
        device.store_head_states(H_ptr + at, H[i], inside, how, i)
        device.store_head_states(grad_A_ptr + at, grad_A[i], inside, how, i)
