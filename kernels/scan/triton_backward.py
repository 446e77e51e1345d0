"""The scan's backward kernel.

One program takes the sequence of one sample and one block of channels. From the memory that the
forward kernel stored before each chunk it recomputes the CHUNK memories of the chunk into a
workspace, and then applies the adjoint recurrence to the chunk from its last token to its first. No
atomics: sums over programs are written in parts and added by torch, so that results are
reproducible bit for bit.
Letters: b batch, t time, d channels, n state per channel, H heads of b/H samples each
(kernels/heads.py).
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import coupled_reach, discretize
from bedouin.kernels.device.elementary import FAST, LN2
from bedouin.kernels.scan.triton_forward import advanced, load_exponent


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
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    blocks = tl.cdiv(d, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    block, batch = program % blocks, program // blocks
    # Offsets inside one (d, n) fit into 32 bits, which saves registers; bases are 64 bits wide.
    channel = block.to(tl.int32) * BLOCK_D + tl.arange(0, BLOCK_D)
    state = tl.arange(0, BLOCK_N)
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
        # The last chunk's walk has read what is overwritten here.
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
            decay, s = discretize(A_log2, delta[:, None], INPUT_SCALE, FULL, FAST)
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

            decay, s = discretize(A_log2, delta[:, None], INPUT_SCALE, FULL, FAST)
            decayed = decay * before
            written = s * x[:, None]
            read = decayed if EXCLUSIVE else decayed + written * B[None, :]
            through = g + grad_y[:, None] * C[None, :]
            g_written = g if EXCLUSIVE else through
            grad_C = tl.sum(grad_y[:, None] * read, axis=0)
            grad_B = tl.sum(g_written * written, axis=0)
            g_scaled = g_written * B[None, :]

            # d lambda / d(A delta) is lambda, or lambda + 1 for "full".
            if INPUT_SCALE == "one_minus_decay":
                grad_x = tl.sum(g_scaled * s, axis=1)
                sign = tl.where(decay > 0, 1.0, tl.where(decay < 0, -1.0, 0.0)).to(tl.float32)
                grad_s = g_scaled * x[:, None]
                grad_exponent = (through * before - sign * grad_s) * coupled_reach(decay, s, FULL)
            else:
                grad_exponent = through * (decayed + before if FULL else decayed)
            grad_A += grad_exponent * delta[:, None]
            grad_delta = tl.sum(grad_exponent * A_log2, axis=1) * LN2
            if INPUT_SCALE == "delta":
                pulled = tl.sum(g_scaled, axis=1)
                grad_x = pulled * delta
                grad_delta += pulled * x
            if INPUT_SCALE == "bounded_delta":
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
