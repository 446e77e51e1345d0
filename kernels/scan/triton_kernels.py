"""The scan's kernels.

A program of the forward kernel takes the sequence of one sample and one block of channels, with the
memory (n, block) in registers. For the backward it stores the memory before every CHUNK-th token.
From that a program of the backward kernel recomputes the CHUNK memories of a chunk into a
workspace, and then applies the adjoint recurrence to the chunk from its last token to its first. No
atomics: sums over programs are written in parts and added by torch, so that results are
reproducible bit for bit.
Letters: b batch, t time, d channels, n state per channel, H heads of b/H samples each
(kernels/heads.py).
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import LN2, LOG2E, coupled_reach, discretize


@triton.jit
def _places(d, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sample of a program, the number of its block of channels, its channels and the states.

    Offsets inside one (d, n) fit into 32 bits, which saves registers; bases are 64 bits wide."""
    blocks = tl.cdiv(d, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    block, batch = program % blocks, program // blocks
    channel = block.to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    return batch, block, channel, tl.arange(0, BLOCK_N)


@triton.jit
def advanced(rows, strides, count, AXIS: tl.constexpr):
    """Pointers `count` samples later for AXIS 0, or tokens for AXIS 1."""
    out = ()
    for i in tl.static_range(len(rows)):
        out = out + (rows[i] + count * tl.cast(strides[i][AXIS], tl.int64),)
    return out


@triton.jit
def _load_four(rows, strides, left, channel, state, d, n):
    """x and delta of four tokens (d,), and B and C (n, 4), the first at `rows`; 0 where fewer than
    four are left.

    A token of zeros leaves the memory as it is.
    """
    x = ()
    delta = ()
    for i in tl.static_range(4):
        there, at = channel < tl.where(i < left, d, 0), advanced(rows, strides, i, 1)
        x = x + (tl.load(at[0] + channel, mask=there, other=0.0),)
        delta = delta + (tl.load(at[1] + channel, mask=there, other=0.0),)
    token = tl.arange(0, 4).to(tl.int64)
    there = (state < n)[:, None] & (token < left)[None, :]
    at = advanced(rows, strides, token[None, :], 1)
    B = tl.load(at[2] + state[:, None], mask=there, other=0.0)
    return x, delta, B, tl.load(at[3] + state[:, None], mask=there, other=0.0)


@triton.jit
def split_columns(tile, BLOCK_N: tl.constexpr):
    """The columns of (n, 4): every thread gets its states of four tokens in one exchange."""
    even, odd = tl.split(tl.reshape(tile, (BLOCK_N, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_exponent(pointers, mask):
    """A log2(e): exp2 is the instruction of the device, exp costs four more."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * LOG2E


@triton.jit(do_not_specialize=["T", "zero", "head_samples"])
def forward_kernel(
    rows,  # x, delta (b, t, d), B, C (b, t, n)
    A_ptr,  # (H, n, d)
    start_ptr,  # (b, n, d), h before the first token
    D_ptr,  # (H, d), or None
    y_ptr,  # (b, t, d)
    end_ptr,  # (b, d, n), h after the last token
    kept_ptr,  # (b, ceil(t / CHUNK), d, n), h before each chunk, or None
    T,
    d,
    n,
    zero,
    strides,  # of the samples and the tokens of the rows
    head_samples,  # b/H
    how: tl.constexpr,  # `ScanOptions`; Triton has a parameter `options` itself
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    FULL: tl.constexpr = how.eigenvalues == "full"
    batch, _, channel, state = _places(d, BLOCK_D, BLOCK_N)
    in_cell = (state < n)[:, None] & (channel < d)[None, :]
    # Neighbours in memory belong to neighbouring threads. `zero`, for which the compiler has no
    # alignment, keeps it from giving a thread four of them: then a thread would hold few states of
    # several channels, and every sum over states would be an exchange between threads. An unknown
    # stride does not do: Triton 3.6 then spreads the states over threads, 3.9 the channels.
    lanes = state[:, None] * d + channel[None, :] + zero
    cell = state[:, None] + channel[None, :] * n
    size, chunks = d * n, tl.cdiv(T, CHUNK)

    head = batch // head_samples
    A_log2 = load_exponent(A_ptr + head * size + lanes, in_cell)
    h = tl.load(start_ptr + batch * size + lanes, mask=in_cell, other=0.0).to(tl.float32)
    if D_ptr is not None:
        D = tl.load(D_ptr + head * d + channel, mask=channel < d, other=0.0).to(tl.float32)
    rows = advanced(rows, strides, batch, 0)
    y_ptr += batch * T * d
    slot = batch * chunks * size
    # Four tokens at a time, while the next four are loaded. One token at a time a warp waits
    # for the exchange of B and C more than it computes.
    xs, deltas, Bs, Cs = _load_four(rows, strides, T, channel, state, d, n)
    for done in range(0, T, 4):
        if kept_ptr is not None:
            if done % CHUNK == 0:
                tl.store(kept_ptr + slot + cell, h, mask=in_cell)
                slot += size
        x_4, delta_4 = xs, deltas
        B_4 = split_columns(Bs.to(tl.float32), BLOCK_N)
        C_4 = split_columns(Cs.to(tl.float32), BLOCK_N)
        rows = advanced(rows, strides, 4, 1)
        xs, deltas, Bs, Cs = _load_four(rows, strides, T - done - 4, channel, state, d, n)
        for i in tl.static_range(4):
            x, delta = x_4[i].to(tl.float32), delta_4[i].to(tl.float32)
            decay, s = discretize(A_log2, delta[None, :], how.input_scale, FULL)
            h *= decay
            written = s * x[None, :] * B_4[i][:, None]
            y = tl.sum((h if how.exclusive else h + written) * C_4[i][:, None], axis=0)
            h += written
            if D_ptr is not None:
                y += D * x
            end = tl.where(done + i < T, d, 0)
            tl.store(y_ptr + channel, y.to(y_ptr.dtype.element_ty), mask=channel < end)
            y_ptr += d
    tl.store(end_ptr + batch * size + cell, h.to(end_ptr.dtype.element_ty), mask=in_cell)


@triton.jit
def _load_row(rows, strides, i: tl.constexpr, t, T, offsets, size):
    """Entries `offsets` of the `size` of row i of token t; zeros from token T on. Not converted,
    which would wait for them."""
    mask = offsets < tl.where(t < T, size, 0)
    return tl.load(rows[i] + t * strides[i][1] + offsets, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["head_samples"])
def backward_kernel(
    rows,  # x, delta (b, t, d), B, C (b, t, n), grad_y (b, t, d)
    grad_end_ptr,  # (b, d, n), cotangent of h after the last token
    A_ptr,  # (H, d, n)
    D_ptr,  # (H, d), or None
    kept_ptr,  # (b, ceil(t / CHUNK), d, n), h before each chunk
    work_ptr,  # (programs, CHUNK, BLOCK_D, BLOCK_N)
    grad_x_ptr,  # (b, t, d)
    grad_delta_ptr,  # (b, t, d)
    grad_A_ptr,  # (b, d, n)
    grad_B_ptr,  # (b, t, blocks, n)
    grad_C_ptr,  # (b, t, blocks, n)
    grad_h0_ptr,  # (b, d, n)
    grad_D_ptr,  # (b, d)
    T,
    d,
    n,
    strides,  # of the samples and the tokens of the rows
    head_samples,  # b/H
    how: tl.constexpr,  # `ScanOptions`; Triton has a parameter `options` itself
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    FULL: tl.constexpr = how.eigenvalues == "full"
    batch, block, channel, state = _places(d, BLOCK_D, BLOCK_N)
    blocks, program = tl.cdiv(d, BLOCK_D), tl.program_id(0).to(tl.int64)
    in_d, in_n = channel < d, state < n
    cell, in_cell = channel[:, None] * n + state[None, :], in_d[:, None] & in_n[None, :]
    size, chunks = d * n, tl.cdiv(T, CHUNK)
    slot = tl.arange(0, BLOCK_D)[:, None] * BLOCK_N + state[None, :]
    slots = work_ptr + program * (CHUNK * BLOCK_D * BLOCK_N) + slot

    head = batch // head_samples
    rows = advanced(rows, strides, batch, 0)
    A_log2 = load_exponent(A_ptr + head * size + cell, in_cell)
    g = tl.load(grad_end_ptr + batch * size + cell, mask=in_cell, other=0.0).to(tl.float32)
    grad_A = tl.zeros((BLOCK_D, BLOCK_N), dtype=tl.float32)
    if D_ptr is not None:
        D = tl.load(D_ptr + head * d + channel, mask=in_d, other=0.0).to(tl.float32)
        grad_D = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for back in range(chunks):
        chunk = (chunks - 1 - back).to(tl.int64)  # offsets of long sequences have more than 32 bits
        # The reverse loop over the chunk before has read what is overwritten here.
        tl.debug_barrier()
        kept = kept_ptr + (batch * chunks + chunk) * size
        h = tl.load(kept + cell, mask=in_cell, other=0.0).to(tl.float32)
        t = chunk * CHUNK
        x_0 = _load_row(rows, strides, 0, t, T, channel, d)
        delta_0 = _load_row(rows, strides, 1, t, T, channel, d)
        B_0 = _load_row(rows, strides, 2, t, T, state, n)
        x_1 = _load_row(rows, strides, 0, t + 1, T, channel, d)
        delta_1 = _load_row(rows, strides, 1, t + 1, T, channel, d)
        for i in range(CHUNK):
            t = chunk * CHUNK + i
            x, delta, B = x_0.to(tl.float32), delta_0.to(tl.float32), B_0.to(tl.float32)
            x_0, delta_0 = x_1, delta_1
            x_1 = _load_row(rows, strides, 0, t + 2, T, channel, d)
            delta_1 = _load_row(rows, strides, 1, t + 2, T, channel, d)
            B_0 = _load_row(rows, strides, 2, t + 1, T, state, n)
            tl.store(slots + i * (BLOCK_D * BLOCK_N), h)
            decay, s = discretize(A_log2, delta[:, None], how.input_scale, FULL)
            h = decay * h + s * x[:, None] * B[None, :]
        tl.debug_barrier()
        t = chunk * CHUNK + CHUNK - 1
        before_0 = tl.load(slots + (CHUNK - 1) * (BLOCK_D * BLOCK_N))
        grad_y_0 = _load_row(rows, strides, 4, t, T, channel, d)
        x_0 = _load_row(rows, strides, 0, t, T, channel, d)
        delta_0 = _load_row(rows, strides, 1, t, T, channel, d)
        B_0 = _load_row(rows, strides, 2, t, T, state, n)
        C_0 = _load_row(rows, strides, 3, t, T, state, n)
        for back_i in range(CHUNK):
            i = CHUNK - 1 - back_i
            t = chunk * CHUNK + i
            before, grad_y = before_0, grad_y_0.to(tl.float32)
            x, delta = x_0.to(tl.float32), delta_0.to(tl.float32)
            B, C = B_0.to(tl.float32), C_0.to(tl.float32)
            ahead = tl.maximum(i - 1, 0)
            before_0 = tl.load(slots + ahead * (BLOCK_D * BLOCK_N))
            t_0 = chunk * CHUNK + ahead
            grad_y_0 = _load_row(rows, strides, 4, t_0, T, channel, d)
            x_0 = _load_row(rows, strides, 0, t_0, T, channel, d)
            delta_0 = _load_row(rows, strides, 1, t_0, T, channel, d)
            B_0 = _load_row(rows, strides, 2, t_0, T, state, n)
            C_0 = _load_row(rows, strides, 3, t_0, T, state, n)

            decay, s = discretize(A_log2, delta[:, None], how.input_scale, FULL)
            decayed = decay * before
            written = s * x[:, None]
            read = decayed if how.exclusive else decayed + written * B[None, :]
            through = g + grad_y[:, None] * C[None, :]
            g_written = g if how.exclusive else through
            grad_C = tl.sum(grad_y[:, None] * read, axis=0)
            grad_B = tl.sum(g_written * written, axis=0)
            g_scaled = g_written * B[None, :]

            # d lambda / d(A delta) is lambda, or lambda + 1 for "full".
            if how.input_scale == "one_minus_decay":
                grad_x = tl.sum(g_scaled * s, axis=1)
                sign = tl.where(decay > 0, 1.0, tl.where(decay < 0, -1.0, 0.0)).to(tl.float32)
                grad_s = g_scaled * x[:, None]
                grad_exponent = (through * before - sign * grad_s) * coupled_reach(decay, s, FULL)
            else:
                grad_exponent = through * (decayed + before if FULL else decayed)
            grad_A += grad_exponent * delta[:, None]
            grad_delta = tl.sum(grad_exponent * A_log2, axis=1) * LN2
            if how.input_scale == "delta":
                pulled = tl.sum(g_scaled, axis=1)
                grad_x = pulled * delta
                grad_delta += pulled * x
            if how.input_scale == "bounded_delta":
                pulled = tl.sum(g_scaled, axis=1) / (1 + delta)
                grad_x = pulled * delta
                grad_delta += pulled * x / (1 + delta)
            if D_ptr is not None:
                grad_x += D * grad_y
                grad_D += grad_y * x
            g = decay * through

            token = batch * T + t
            out = token * d + channel
            end_d, end_n = tl.where(t < T, d, 0), tl.where(t < T, n, 0)
            of_delta = grad_delta.to(grad_delta_ptr.dtype.element_ty)
            tl.store(grad_x_ptr + out, grad_x.to(grad_x_ptr.dtype.element_ty), mask=channel < end_d)
            tl.store(grad_delta_ptr + out, of_delta, mask=channel < end_d)
            part = (token * blocks + block) * n + state
            tl.store(grad_B_ptr + part, grad_B, mask=state < end_n)
            tl.store(grad_C_ptr + part, grad_C, mask=state < end_n)
    tl.store(grad_A_ptr + batch * size + cell, grad_A, mask=in_cell)
    if D_ptr is not None:
        tl.store(grad_D_ptr + batch * d + channel, grad_D, mask=in_d)
    tl.store(grad_h0_ptr + batch * size + cell, g.to(grad_h0_ptr.dtype.element_ty), mask=in_cell)
