"""Loops over the states of a token in the reverse sweep, for a memory (n, d) that is CROWDED.

The cotangent H of the memory occupies half of a program's registers, so nothing else of its size is
held: A and the memory before and after the token are loaded once more where they are used, in
blocks of states. A barrier at every other block keeps the compiler from issuing all loads first,
whose results would occupy as many registers. Sums over states or channels go through device memory,
from which they are loaded in one register of a thread; the layout of blocks would take several.

Letters: d channels, n state per channel.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import coupled_reach
from bedouin.kernels.device.reflections import sums
from bedouin.kernels.direct.triton_blocks import (
    discretize,
    load_block,
    load_block_uncached,
    load_states,
    store_block,
)

AT_ONCE = tl.constexpr(2)
"""Blocks whose sums over channels are computed in one exchange."""


@triton.jit
def sums_over_states(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    delta,  # (BLOCK_D,)
    mixed,  # (BLOCK_D,), x~
    BC_ptr,  # (2 n,): B and C
    memory_ptr,  # (n, d), h_{t-1}
    A_ptr,  # (n, d), log2(e) A
    vectors_ptr,  # (4, d), written
    sizes,  # Sizes
    options,  # Options
):
    """Four vectors (d,), sums over n: of H B, or of H s B if the scale is coupled; of H and of C
    times d h_t / d log2(lambda); and of s B C if the scale is coupled, else zeros."""
    COUPLED: tl.constexpr = options.INPUT_SCALE == "one_minus_decay"
    FULL: tl.constexpr = options.FULL
    d: tl.constexpr = sizes.d
    n: tl.constexpr = sizes.n
    zeros = tl.zeros([sizes.BLOCK_N, sizes.BLOCK_D], dtype=options.ACC)
    with_B, with_H, with_C, with_BC = zeros, zeros, zeros, zeros
    for block in tl.static_range(sizes.BLOCKS):
        if block % 2 == 0:
            tl.debug_barrier()
        A_log2 = load_block(A_ptr, block, n, sizes)
        h = load_block_uncached(memory_ptr, block, n, sizes)
        B, C = load_states(BC_ptr, block, sizes), load_states(BC_ptr + n, block, sizes)
        decay, s_rows = discretize(delta, A_log2, COUPLED, options)
        if COUPLED:
            with_BC += s_rows * (B * C)[:, None]
            with_B += H[block] * s_rows * B[:, None]
        else:
            with_B += H[block] * B[:, None]
        exponent = reach(h, decay, s_rows, mixed, B, COUPLED, FULL) * A_log2
        with_H += H[block] * exponent
        with_C += C[:, None] * exponent
    totals = (with_B, with_H, with_C)
    if COUPLED:
        totals = totals + (with_BC,)
    totals = sums(totals)
    cols = tl.arange(0, sizes.BLOCK_D)
    in_d = cols < d
    for i in tl.static_range(len(totals)):
        tl.store(vectors_ptr + i * d + cols, totals[i], mask=in_d)
    tl.debug_barrier()
    out = ()
    for i in tl.static_range(len(totals)):
        out = out + (tl.load(vectors_ptr + i * d + cols, mask=in_d, other=0.0),)
    if not COUPLED:
        out = out + (tl.zeros([sizes.BLOCK_D], dtype=options.ACC),)
    return out


@triton.jit
def store_crowded_grads(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    w,  # (BLOCK_D,), cotangent of F(y)_t
    delta,  # (BLOCK_D,)
    mixed,  # (BLOCK_D,), x~
    written,  # (BLOCK_D,), s * x~, unless the scale is coupled
    later_ptr,  # (n, d), h_t
    BC_ptr,  # (2 n,): B and C, after 1 / |B| and 1 / |C|
    unit_ptr,  # (2 n,), written: the cotangents of the unit B and C
    grad_ptr,  # (2 n,), written: those of the raw B and C
    A_ptr,  # (n, d), log2(e) A
    sizes,  # Sizes
    options,  # Options
):
    """`store_state_grads` of a crowded memory."""
    n: tl.constexpr = sizes.n
    BLOCK_N: tl.constexpr = sizes.BLOCK_N
    COUPLED: tl.constexpr = options.INPUT_SCALE == "one_minus_decay"
    for first in tl.static_range(0, sizes.BLOCKS, AT_ONCE):
        parts = ()
        for block in tl.static_range(first, first + AT_ONCE):
            C = load_states(BC_ptr + n, block, sizes)
            total = H[block] + C[:, None] * w[None, :]
            if COUPLED:
                A_log2 = load_block(A_ptr, block, n, sizes)
                _, s_rows = discretize(delta, A_log2, COUPLED, options)
                tile = s_rows * mixed[None, :]
            else:
                tile = written[None, :]
            h = load_block_uncached(later_ptr, block, n, sizes)
            parts = parts + (total * tile, h * w[None, :])
        parts = sums(parts, 1)
        for i in tl.static_range(AT_ONCE):
            rows = (first + i) * BLOCK_N + tl.arange(0, BLOCK_N)
            tl.store(unit_ptr + rows, parts[2 * i], mask=rows < n)
            tl.store(unit_ptr + n + rows, parts[2 * i + 1], mask=rows < n)
    tl.debug_barrier()
    rows = tl.arange(0, sizes.BLOCKS * BLOCK_N)
    kind: tl.constexpr = grad_ptr.dtype.element_ty
    units = ()
    grads = ()
    along = ()
    for part in tl.static_range(2):
        units = units + (tl.load(BC_ptr + part * n + rows, mask=rows < n, other=0.0),)
        grads = grads + (tl.load(unit_ptr + part * n + rows, mask=rows < n, other=0.0),)
        along = along + (grads[part] * units[part],)
    along = sums(along)
    for part in tl.static_range(2):
        inv = tl.load(BC_ptr - 2 + part)
        grad = inv * (grads[part] - units[part] * along[part])
        tl.store(grad_ptr + part * n + rows, grad.to(kind), mask=rows < n)


@triton.jit
def take_back(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    w,  # (BLOCK_D,), cotangent of F(y)_t
    delta,  # (BLOCK_D,)
    mixed,  # (BLOCK_D,), x~
    BC_ptr,  # (2 n,): B and C
    memory_ptr,  # (n, d), h_{t-1}
    A_ptr,  # (n, d), log2(e) A
    grad_A_ptr,  # (n, d), added to
    sizes,  # Sizes
    options,  # Options
):
    """Add the cotangent of A; returns that of h_{t-1}, as H."""
    COUPLED: tl.constexpr = options.INPUT_SCALE == "one_minus_decay"
    n: tl.constexpr = sizes.n
    new_H = ()
    for block in tl.static_range(sizes.BLOCKS):
        if block % 2 == 0:
            tl.debug_barrier()
        A_log2 = load_block(A_ptr, block, n, sizes)
        h = load_block_uncached(memory_ptr, block, n, sizes)
        grad_A = load_block_uncached(grad_A_ptr, block, n, sizes)
        B, C = load_states(BC_ptr, block, sizes), load_states(BC_ptr + n, block, sizes)
        decay, s_rows = discretize(delta, A_log2, COUPLED, options)
        total = H[block] + C[:, None] * w[None, :]
        along = reach(h, decay, s_rows, mixed, B, COUPLED, options.FULL)
        grad_A += total * along * delta[None, :]
        store_block(grad_A_ptr, grad_A, block, n, sizes)
        new_H = new_H + (total * decay,)
    return new_H


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
