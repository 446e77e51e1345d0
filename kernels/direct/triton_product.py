"""The product of a token with W^y, or with its transpose: a launch that overlaps its neighbours.

The weight is the largest operand of a token and depends on no other token, so a program loads its
part while the launch before it still runs; torch's product would begin afterwards. Parts of READ
PARTS columns are multiplied by different programs: a longer sum would take longer than its loads.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.sync import await_launch


@triton.jit(do_not_specialize=["t", "batch"])
def product_kernel(
    v_ptr,  # (b, t, columns or more)
    W_ptr,  # (rows, columns), contiguous
    out_ptr,  # (splits, b, width), of which the first rows are written: W v, over the splits
    t,
    batch,
    rows,
    columns,
    width,
    v_stride_b,
    v_stride_t,
    SAMPLES: tl.constexpr,  # at least the batch
    OUT: tl.constexpr,  # rows of W of a program
    READ: tl.constexpr,  # columns that are multiplied at once
    PARTS: tl.constexpr,  # how many times
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
):
    """Some rows and columns of W times v of token t."""
    row = tl.program_id(0) * OUT + tl.arange(0, OUT)
    split = tl.program_id(1)
    sample = tl.arange(0, SAMPLES)[:, None]
    first = split * (READ * PARTS) + tl.arange(0, READ)
    in_rows = (row < rows)[None, :]
    parts = ()
    for i in tl.static_range(PARTS):
        column = (first + i * READ)[:, None]
        at = W_ptr + row[None, :] * columns + column
        parts = parts + (tl.load(at, mask=in_rows & (column < columns), other=0.0).to(DOT),)
    await_launch(OVERLAP)
    token = v_ptr + tl.cast(t, tl.int64) * v_stride_t + sample.to(tl.int64) * v_stride_b
    total = tl.zeros((SAMPLES, OUT), tl.float32)
    for i in tl.static_range(PARTS):
        column = (first + i * READ)[None, :]
        v = tl.load(token + column, mask=(sample < batch) & (column < columns), other=0.0)
        # rounded to the dtype of W, also where the interpreter multiplies in a wider one
        v = v.to(W_ptr.dtype.element_ty).to(DOT)
        total = tl.dot(v, parts[i], total, input_precision=PRECISION)
    to = out_ptr + (split * batch + sample) * width + row[None, :]
    tl.store(to, total, mask=(sample < batch) & in_rows)
