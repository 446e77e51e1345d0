"""A sample's memory (n, d) in blocks of states: BLOCKS times (BLOCK_N, BLOCK_D), in a tuple.

Letters: d channels, n state per channel.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_coupled, build_decay, coupled_reach


@triton.jit
def load_blocks(ptr, n, sizes):
    """The first n rows of (n, d) in blocks of states, BLOCKS times (BLOCK_N, BLOCK_D)."""
    out = ()
    for block in tl.static_range(sizes.BLOCKS):
        out = out + (load_block(ptr, block, n, sizes),)
    return out


@triton.jit
def load_block(ptr, block, n, sizes):
    """One of the blocks of `load_blocks`."""
    at, mask = _block_at(ptr, block, n, sizes)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _block_at(ptr, block, n, sizes):
    """The pointers of a block, and which of them are inside of (n, d)."""
    rows = block * sizes.BLOCK_N + tl.arange(0, sizes.BLOCK_N)
    cols = tl.arange(0, sizes.BLOCK_D)
    mask = (rows < n)[:, None] & (cols < sizes.d)[None, :]
    return ptr + rows[:, None] * sizes.d + cols[None, :], mask


@triton.jit
def store_blocks(ptr, tiles, n, sizes):
    """The counterpart of `load_blocks`."""
    for block in tl.static_range(sizes.BLOCKS):
        store_block(ptr, tiles[block], block, n, sizes)


@triton.jit
def store_block(ptr, tile, block, n, sizes):
    """The counterpart of `load_block`."""
    at, mask = _block_at(ptr, block, n, sizes)
    tl.store(at, tile, mask=mask)


@triton.jit
def load_block_states(ptr, block, sizes):
    """A block of a vector (n,)."""
    rows = block * sizes.BLOCK_N + tl.arange(0, sizes.BLOCK_N)
    return tl.load(ptr + rows, mask=rows < sizes.n, other=0.0)


@triton.jit
def load_states_of_both(ptr, block, sizes):
    """`load_block_states` of B and of C, the n entries after B."""
    return load_block_states(ptr, block, sizes), load_block_states(ptr + sizes.n, block, sizes)


@triton.jit
def unaligned(ptr, t, sizes):
    """`ptr`, with its alignment hidden from the compiler where a thread is to have fewer than four
    neighbouring channels; t is a token.

    With known alignment a thread would have four. With ROWS it has a 32nd of a warp's channels,
    with all their states, so that sums over states are sums within threads.
    """
    CHANNELS: tl.constexpr = sizes.BLOCK_D // sizes.ROWS // 32 if sizes.ROWS > 0 else 4
    if CHANNELS < 4:
        return ptr + CHANNELS * (t >> 30)  # 0, unknown to the compiler
    else:
        return ptr


@triton.jit
def discretize_block(delta, A_log2, COUPLED: tl.constexpr, options):
    """lambda (n, d) and the coupled scale (n, d); lambda twice where s has no state axis."""
    if COUPLED:
        return build_coupled(A_log2 * delta[None, :], options.FULL, options.FAST)
    else:
        decay = build_decay(A_log2 * delta[None, :], options.FULL, options.FAST)
        return decay, decay


@triton.jit
def reach(h, decay, s, mixed, B, COUPLED: tl.constexpr, FULL: tl.constexpr):
    """d h_t / d (A Delta) (n, d), through the decay and through the coupled scale s."""
    if COUPLED:
        if FULL:
            sign = tl.where(decay > 0, 1.0, tl.where(decay < 0, -1.0, 0.0)).to(h.dtype)
            h -= sign * mixed[None, :] * B[:, None]
        else:
            h -= mixed[None, :] * B[:, None]
        return h * coupled_reach(decay, s, FULL)
    elif FULL:
        return h * (decay + 1)
    else:
        return h * decay
