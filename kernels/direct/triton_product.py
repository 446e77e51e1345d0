"""Products of a matrix with the vectors of all samples, spread over persistent programs.

Every program keeps a tile of the matrix in shared memory from token to token; the counters of
device/sync.py order the programs.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.sync import load_uncached


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
    zero,  # 0, unknown to the compiler, which else keeps addresses in registers over tokens
    batch,
    m_end,
    v_end,
    vector_stride,
    out_stride,
    product,  # Product
):
    """One tile of a matrix (m, v) times the vectors of all samples."""
    AHEAD: tl.constexpr = 4
    BLOCK_K: tl.constexpr = product.BLOCK_K
    CHUNKS: tl.constexpr = product.CHUNKS
    m0, v0, split = _origin(tile, m_end, product.BLOCK_M, BLOCK_K * CHUNKS)
    rows = m0 + tl.arange(0, product.BLOCK_M)
    out_ptr += tl.cast(split, tl.int64) * batch * out_stride
    for b0 in range(zero, batch, product.BLOCK_B):
        samples = (b0 + tl.arange(0, product.BLOCK_B)).to(tl.int64)
        row_ptr = vector_ptr + samples * vector_stride
        # all loads are issued first: one chunk after the other would add up their latencies
        loaded = ()
        for chunk in tl.static_range(min(AHEAD, CHUNKS)):
            at = v0 + chunk * BLOCK_K
            loaded = loaded + (_load_vectors(row_ptr, at, samples < batch, v_end, BLOCK_K),)
        for chunk in tl.static_range(CHUNKS):
            now = _delay(loaded[chunk], CHUNKS > 1 and product.COMPILED)
            if chunk + AHEAD < CHUNKS:
                at = v0 + (chunk + AHEAD) * BLOCK_K
                loaded = loaded + (_load_vectors(row_ptr, at, samples < batch, v_end, BLOCK_K),)
            factor = now.to(product.DOT)
            if chunk == 0:
                out = tl.dot(chunks[0], factor, input_precision=product.PRECISION)
            else:
                out = tl.dot(chunks[chunk], factor, out, input_precision=product.PRECISION)
        at = samples[None, :] * out_stride + rows[:, None]
        mask = (rows < m_end)[:, None] & (samples < batch)[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _delay(v, DELAY: tl.constexpr):
    """v, kept in registers up to here: shared memory then has room for one chunk only."""
    if DELAY and v.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [v], dtype=v.dtype, is_pure=False, pack=2
        )
    else:
        return v


@triton.jit
def _load_vectors(row_ptr, v0, in_batch, v_end, BLOCK_K: tl.constexpr):
    """(BLOCK_K, samples), not from the first level of cache: other programs have written them."""
    columns = v0 + tl.arange(0, BLOCK_K)
    mask = (columns < v_end)[:, None] & in_batch[None, :]
    at = row_ptr[None, :] + columns[:, None]
    return load_uncached(at, mask)


@triton.jit
def load_tile(
    matrix_ptr,  # (m, v)
    tile,  # its number
    m_end,
    v_end,
    stride_m,
    stride_v,
    product,  # Product
):
    """A tile of a matrix in chunks of columns: CHUNKS times (BLOCK_M, BLOCK_K)."""
    BLOCK_K: tl.constexpr = product.BLOCK_K
    m0, v0, _ = _origin(tile, m_end, product.BLOCK_M, BLOCK_K * product.CHUNKS)
    rows = m0 + tl.arange(0, product.BLOCK_M)
    out = ()
    for chunk in tl.static_range(product.CHUNKS):
        columns = v0 + chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (rows < m_end)[:, None] & (columns < v_end)[None, :]
        at = rows[:, None].to(tl.int64) * stride_m + columns[None, :].to(tl.int64) * stride_v
        out = out + (tl.load(matrix_ptr + at, mask=mask, other=0.0).to(product.DOT),)
    return out
