"""Loops over the states of a token in the reverse sweep, for a memory (n, d) that is CROWDED.

The cotangent H of the memory occupies half of a program's registers, so nothing else of its size is
held: A and the memory before and after the token are loaded once more where they are used, in
blocks of states. A thread has all states of one channel.

Letters: d channels, n state per channel.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.direct.triton_blocks import (
    discretize,
    load_block,
    load_block_uncached,
    load_states,
    reach,
)
from bedouin.kernels.direct.triton_state_grads import (
    add_product,
    lanes_of_states,
    load_states_in_columns,
    store_columns,
)
from bedouin.kernels.direct.triton_sums import LANES, sums_of_rows


@triton.jit
def sums_over_states(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    delta,  # (BLOCK_D,)
    mixed,  # (BLOCK_D,), x~
    BC_ptr,  # (2 n,): B and C
    memory_ptr,  # (n, d), h_{t-1}
    A_ptr,  # (n, d), log2(e) A
    sizes,  # Sizes
    options,  # Options
):
    """Four vectors (d,), sums over n: of H B, or of H s B if the scale is coupled; of H and of C
    times d h_t / d log2(lambda); and of s B C if the scale is coupled, else zeros."""
    COUPLED: tl.constexpr = options.INPUT_SCALE == "one_minus_decay"
    FULL: tl.constexpr = options.FULL
    n: tl.constexpr = sizes.n
    with_B = tl.zeros([sizes.BLOCK_D], dtype=options.ACC)
    with_H, with_C, with_BC = with_B, with_B, with_B
    for block in tl.static_range(sizes.BLOCKS):
        A_log2 = load_block(A_ptr, block, n, sizes)
        h = load_block_uncached(memory_ptr, block, n, sizes)
        B, C = load_states(BC_ptr, block, sizes), load_states(BC_ptr + n, block, sizes)
        decay, s_rows = discretize(delta, A_log2, COUPLED, options)
        if COUPLED:
            with_BC += tl.sum(s_rows * (B * C)[:, None], axis=0)
            with_B += tl.sum(H[block] * s_rows * B[:, None], axis=0)
        else:
            with_B += tl.sum(H[block] * B[:, None], axis=0)
        exponent = reach(h, decay, s_rows, mixed, B, COUPLED, FULL) * A_log2
        with_H += tl.sum(H[block] * exponent, axis=0)
        with_C += tl.sum(C[:, None] * exponent, axis=0)
    return with_B, with_H, with_C, with_BC


@triton.jit
def store_crowded_grads(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    w,  # (BLOCK_D,), cotangent of F(y)_t
    delta,  # (BLOCK_D,)
    mixed,  # (BLOCK_D,), x~
    written,  # (BLOCK_D,), s * x~, unless the scale is coupled
    later_ptr,  # (n, d), h_t
    BC_ptr,  # (2 n,): B and C, after 1 / |B| and 1 / |C|
    grad_ptr,  # (2 n,), written: that of B, that of C
    A_ptr,  # (n, d), log2(e) A
    sizes,  # Sizes
    options,  # Options
):
    """`store_state_grads_in_columns` of a crowded memory, 32 states at a time."""
    COUPLED: tl.constexpr = options.INPUT_SCALE == "one_minus_decay"
    AT_ONCE: tl.constexpr = LANES // sizes.BLOCK_N
    of_B = ()
    of_C = ()
    for first in tl.static_range(0, sizes.BLOCKS, AT_ONCE):
        lanes_of_B = ()
        lanes_of_C = ()
        for block in tl.static_range(first, first + AT_ONCE):
            if COUPLED:
                C = load_states(BC_ptr + sizes.n, block, sizes)
                A_log2 = load_block(A_ptr, block, sizes.n, sizes)
                _, s_rows = discretize(delta, A_log2, COUPLED, options)
                tile = (H[block] + C[:, None] * w[None, :]) * s_rows * mixed[None, :]
            else:
                # without w * written, which is the same for all states but for a factor C
                tile = H[block] * written[None, :]
            lanes_of_B = lanes_of_B + lanes_of_states(tile, sizes)
        of_B = of_B + (sums_of_rows(lanes_of_B, sizes.ROWS),)
        for block in tl.static_range(first, first + AT_ONCE):
            h = load_block_uncached(later_ptr, block, sizes.n, sizes)
            lanes_of_C = lanes_of_C + lanes_of_states(h * w[None, :], sizes)
        of_C = of_C + (sums_of_rows(lanes_of_C, sizes.ROWS),)
    states = load_states_in_columns(BC_ptr, sizes)
    if not COUPLED:
        of_B = add_product(of_B, w, written, states, sizes)
    store_columns(of_B + of_C, states, grad_ptr, sizes)
