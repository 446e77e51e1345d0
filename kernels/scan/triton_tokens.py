"""Device functions of the scan's kernels: tokens loaded ahead of their use, and one step.

Letters: b batch, t time, d channels, n state per channel.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_coupled, build_decay, input_scale
from bedouin.kernels.device.elementary import LOG2E


@triton.jit
def load_row(pointer, batch, t, stride_b, stride_t, offsets, end):
    """Entries `offsets` of token t; 0 from `end` on. Not converted, which would wait for them."""
    row = pointer + batch * stride_b + t * stride_t + offsets
    return tl.load(row, mask=offsets < end, other=0.0)


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


@triton.jit
def build_step(A_log2, delta, INPUT_SCALE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr):
    """lambda (n, d) of one token, and s, (n, d) if coupled, else (d,)."""
    if INPUT_SCALE == "one_minus_decay":
        return build_coupled(A_log2 * delta[None, :], FULL, FAST)
    else:
        decay = build_decay(A_log2 * delta[None, :], FULL, FAST)
        return decay, input_scale(delta, INPUT_SCALE, FAST)


@triton.jit
def write(x, s, B, INPUT_SCALE: tl.constexpr):
    """s x B^T (n, d) of one token."""
    if INPUT_SCALE == "one_minus_decay":
        written = s * (x[None, :] * B[:, None])
    else:
        written = (s * x)[None, :] * B[:, None]
    return written
