"""The scan's forward kernel, with device functions of both kernels.

One program takes the sequence of one sample and one block of channels, with the memory (n, block)
in registers. For the backward it stores the memory before every CHUNK-th token.
Letters: b batch, t time, d channels, n state per channel, H heads of b/H samples each
(kernels/heads.py).
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import discretize
from bedouin.kernels.device.elementary import LOG2E


@triton.jit
def load_scan_rows(pointer, stride, left, channel, d):
    """x or delta of four tokens, the first at `pointer`; 0 where fewer than four are left.

    A token of zeros leaves the memory as it is.
    """
    rows = ()
    stride = tl.cast(stride, tl.int64)
    for i in tl.static_range(4):
        end = tl.where(i < left, d, 0)
        row = tl.load(pointer + i * stride + channel, mask=channel < end, other=0.0)
        rows = rows + (row,)
    return rows


@triton.jit
def load_columns(pointer, stride, left, state, n):
    """B or C of four tokens (n, 4), the first at `pointer`; 0 where fewer than four are left."""
    token = tl.arange(0, 4).to(tl.int64)
    mask = (state < n)[:, None] & (token < left)[None, :]
    return tl.load(pointer + state[:, None] + token[None, :] * stride, mask=mask, other=0.0)


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
    x_ptr,  # (b, t, d)
    delta_ptr,  # (b, t, d)
    A_ptr,  # (H, n, d)
    B_ptr,  # (b, t, n)
    C_ptr,  # (b, t, n)
    start_ptr,  # (b, n, d), h before the first token
    D_ptr,  # (H, d)
    y_ptr,  # (b, t, d)
    end_ptr,  # (b, d, n), h after the last token
    kept_ptr,  # (b, ceil(t / CHUNK), d, n), h before each chunk
    T,
    d,
    n,
    zero,
    x_stride_b,
    x_stride_t,
    delta_stride_b,
    delta_stride_t,
    B_stride_b,
    B_stride_t,
    C_stride_b,
    C_stride_t,
    head_samples,  # b/H
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    HAS_D: tl.constexpr,
    KEEP: tl.constexpr,
    FAST: tl.constexpr,
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
    in_cell = (state < n)[:, None] & (channel < d)[None, :]
    # Neighbours in memory belong to neighbouring threads. `zero`, for which the compiler has no
    # alignment, keeps it from giving a thread four of them: then a thread would hold few states of
    # several channels, and every sum over states would be an exchange between threads. An unknown
    # stride does not do: Triton 3.6 then spreads the states over threads, 3.9 the channels.
    lanes = state[:, None] * d + channel[None, :] + zero
    cell = state[:, None] + channel[None, :] * n
    size, chunks = d * n, tl.cdiv(T, CHUNK)

    head = batch // head_samples
    A_ptr += head * size
    D_ptr += head * d
    A_log2 = load_exponent(A_ptr + lanes, in_cell)
    h = tl.load(start_ptr + batch * size + lanes, mask=in_cell, other=0.0).to(tl.float32)
    if HAS_D:
        D = tl.load(D_ptr + channel, mask=channel < d, other=0.0).to(tl.float32)
    x_ptr += batch * x_stride_b
    delta_ptr += batch * delta_stride_b
    B_ptr += batch * B_stride_b
    C_ptr += batch * C_stride_b
    y_ptr += batch * T * d
    kept_ptr += batch * chunks * size
    # Four tokens at a time, while the next four are on their way. One token at a time a warp waits
    # for the exchange of B and C more than it computes.
    xs = load_scan_rows(x_ptr, x_stride_t, T, channel, d)
    deltas = load_scan_rows(delta_ptr, delta_stride_t, T, channel, d)
    Bs = load_columns(B_ptr, B_stride_t, T, state, n)
    Cs = load_columns(C_ptr, C_stride_t, T, state, n)
    for done in range(0, T, 4):
        if KEEP:
            if done % CHUNK == 0:
                tl.store(kept_ptr + cell, h, mask=in_cell)
                kept_ptr += size
        x_4, delta_4 = xs, deltas
        B_4 = split_columns(Bs.to(tl.float32), BLOCK_N)
        C_4 = split_columns(Cs.to(tl.float32), BLOCK_N)
        x_ptr += tl.cast(x_stride_t, tl.int64) * 4
        delta_ptr += tl.cast(delta_stride_t, tl.int64) * 4
        B_ptr += tl.cast(B_stride_t, tl.int64) * 4
        C_ptr += tl.cast(C_stride_t, tl.int64) * 4
        left = T - done - 4
        xs = load_scan_rows(x_ptr, x_stride_t, left, channel, d)
        deltas = load_scan_rows(delta_ptr, delta_stride_t, left, channel, d)
        Bs = load_columns(B_ptr, B_stride_t, left, state, n)
        Cs = load_columns(C_ptr, C_stride_t, left, state, n)
        for i in tl.static_range(4):
            x, delta = x_4[i].to(tl.float32), delta_4[i].to(tl.float32)
            decay, s = discretize(A_log2, delta[None, :], INPUT_SCALE, FULL, FAST)
            h *= decay
            written = s * x[None, :] * B_4[i][:, None]
            y = tl.sum((h if EXCLUSIVE else h + written) * C_4[i][:, None], axis=0)
            h += written
            if HAS_D:
                y += D * x
            end = tl.where(done + i < T, d, 0)
            tl.store(y_ptr + channel, y.to(y_ptr.dtype.element_ty), mask=channel < end)
            y_ptr += d
    tl.store(end_ptr + batch * size + cell, h.to(end_ptr.dtype.element_ty), mask=in_cell)
