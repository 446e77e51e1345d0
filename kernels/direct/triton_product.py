"""Products of a matrix with the vectors of all samples, spread over persistent programs.

Every program keeps a tile of the matrix in shared memory from token to token. Counters in device
memory order the programs: who has written `announce`s it, who reads waits for a count.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.sync import load_stream


@triton.jit
def _origin(tile, m_end, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """First row, first column and part of the sum over columns of a tile: rows first."""
    tiles_m = tl.cdiv(m_end, BLOCK_M)
    return tile % tiles_m * BLOCK_M, tile // tiles_m * COLUMNS, tile // tiles_m


@triton.jit
def tile_product(
    chunks,  # of the tile, CHUNKS times (BLOCK_M, BLOCK_K)
    tile,  # its number
    vector_ptr,  # (b, v), rows `vector_stride` apart
    out_ptr,  # (splits, b, m), rows `out_stride` apart
    zero,  # 0, which the compiler does not know: or it keeps addresses in registers over tokens
    batch,
    m_end,
    v_end,
    vector_stride,
    out_stride,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """One tile of a matrix times the vectors of all samples."""
    AHEAD: tl.constexpr = 4
    m0, v0, split = _origin(tile, m_end, BLOCK_M, BLOCK_K * CHUNKS)
    rows = m0 + tl.arange(0, BLOCK_M)
    out_ptr += split * batch * out_stride
    for b0 in range(zero, batch, BLOCK_B):
        samples = b0 + tl.arange(0, BLOCK_B)
        row_ptr = vector_ptr + samples.to(tl.int64) * vector_stride
        # all on their way at once: chunk after chunk would cost as many latencies
        coming = ()
        for chunk in tl.static_range(min(AHEAD, CHUNKS)):
            at = v0 + chunk * BLOCK_K
            coming = coming + (_load_vectors(row_ptr, at, samples < batch, v_end, BLOCK_K),)
        for chunk in tl.static_range(CHUNKS):
            now = _hold(coming[chunk], CHUNKS > 1 and COMPILED)
            if chunk + AHEAD < CHUNKS:
                at = v0 + (chunk + AHEAD) * BLOCK_K
                coming = coming + (_load_vectors(row_ptr, at, samples < batch, v_end, BLOCK_K),)
            if chunk == 0:
                out = tl.dot(chunks[0], now.to(DOT), input_precision=PRECISION)
            else:
                out = tl.dot(chunks[chunk], now.to(DOT), out, input_precision=PRECISION)
        at = samples[None, :] * out_stride + rows[:, None]
        mask = (rows < m_end)[:, None] & (samples < batch)[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _hold(v, HOLD: tl.constexpr):
    """v, in registers until now: shared memory then holds one chunk, not all that are coming."""
    if HOLD and v.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [v], dtype=v.dtype, is_pure=False, pack=2
        )
    else:
        return v


@triton.jit
def _load_vectors(row_ptr, v0, in_batch, v_end, BLOCK_K: tl.constexpr):
    """(BLOCK_K, samples), past the first level of cache: others have just written them."""
    columns = v0 + tl.arange(0, BLOCK_K)
    mask = (columns < v_end)[:, None] & in_batch[None, :]
    at = row_ptr[None, :] + columns[:, None]
    return load_stream(at, mask)


@triton.jit
def load_tile(
    matrix_ptr,
    tile,
    m_end,
    v_end,
    stride_m,
    stride_v,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A tile of a matrix (m, v) in chunks of columns."""
    m0, v0, _ = _origin(tile, m_end, BLOCK_M, BLOCK_K * CHUNKS)
    rows = m0 + tl.arange(0, BLOCK_M)
    out = ()
    for chunk in tl.static_range(CHUNKS):
        columns = v0 + chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (rows < m_end)[:, None] & (columns < v_end)[None, :]
        at = rows[:, None].to(tl.int64) * stride_m + columns[None, :].to(tl.int64) * stride_v
        out = out + (tl.load(matrix_ptr + at, mask=mask, other=0.0).to(DOT),)
    return out
