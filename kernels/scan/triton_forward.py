"""The scan's forward kernel, with device functions of both kernels.

One program takes the sequence of one sample and one block of channels, with the memory (n, block)
in registers. For the backward it stores the memory before every CHUNK-th token.
Letters: b batch, t time, d channels, n state per channel, H heads of b/H samples each
(kernels/heads.py).
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import discretize
from bedouin.kernels.device.elementary import FAST, LOG2E


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
    # Four tokens at a time, while the next four are on their way. One token at a time a warp waits
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
            decay, s = discretize(A_log2, delta[None, :], INPUT_SCALE, FULL, FAST)
            h *= decay
            written = s * x[None, :] * B_4[i][:, None]
            y = tl.sum((h if EXCLUSIVE else h + written) * C_4[i][:, None], axis=0)
            h += written
            if D_ptr is not None:
                y += D * x
            end = tl.where(done + i < T, d, 0)
            tl.store(y_ptr + channel, y.to(y_ptr.dtype.element_ty), mask=channel < end)
            y_ptr += d
    tl.store(end_ptr + batch * size + cell, h.to(end_ptr.dtype.element_ty), mask=in_cell)
