"""Cotangents of the raw B and C of a token.

Letters: d channels, n state per channel.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_coupled
from bedouin.kernels.device.reflections import sums


@triton.jit
def store_state_grads(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), cotangent of h_t
    decayed,  # BLOCKS times (BLOCK_N, BLOCK_D), lambda * h_{t-1}
    w,  # (BLOCK_D,), cotangent of F(y)_t
    delta,  # (BLOCK_D,)
    mixed,  # (BLOCK_D,), x~
    written,  # (BLOCK_D,), s * x~, unless the scale is coupled
    BC_ptr,  # (2 n,): B and C, after 1 / |B| and 1 / |C|
    grad_ptr,  # (2 n,), written: that of B, that of C
    A_ptr,  # (n, d), log2(e) A
    sizes,  # Sizes
    options,  # Options
):
    """Cotangents of the raw B and C: of the unit B and C, less their parts along B and C.

    With h_t = decayed + (s * x~) B^T those of the unit vectors are the sums over d of
    (H + w C^T) (s * x~) and of h_t w.
    """
    ACC: tl.constexpr = options.ACC
    d: tl.constexpr = sizes.d
    n: tl.constexpr = sizes.n
    BLOCK_N: tl.constexpr = sizes.BLOCK_N
    BLOCKS: tl.constexpr = sizes.BLOCKS
    inv_B = tl.load(BC_ptr - 2)
    inv_C = tl.load(BC_ptr - 1)
    cols = tl.arange(0, sizes.BLOCK_D)
    grads = ()
    for block in tl.static_range(BLOCKS):
        n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        B = tl.load(BC_ptr + n_rows, mask=n_rows < n, other=0.0)
        C = tl.load(BC_ptr + n + n_rows, mask=n_rows < n, other=0.0)
        total = H[block] + C[:, None] * w[None, :]
        if options.INPUT_SCALE == "one_minus_decay":
            state = n_rows[:, None] * d + cols[None, :]
            in_state = (n_rows < n)[:, None] & (cols < d)[None, :]
            A_log2 = tl.load(A_ptr + state, mask=in_state, other=0.0)
            _, s_rows = build_coupled(A_log2 * delta[None, :], options.FULL, options.FAST)
            tile = s_rows * mixed[None, :]
        else:
            tile = written[None, :]
        h = decayed[block] + tile * B[:, None]
        grads = grads + (total * tile, h * w[None, :])
    grads = sums(grads, 1)
    along_B = tl.zeros([], dtype=ACC)
    along_C = tl.zeros([], dtype=ACC)
    for block in tl.static_range(BLOCKS):
        n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        B = tl.load(BC_ptr + n_rows, mask=n_rows < n, other=0.0)
        C = tl.load(BC_ptr + n + n_rows, mask=n_rows < n, other=0.0)
        along_B += tl.sum(grads[2 * block] * B, axis=0)
        along_C += tl.sum(grads[2 * block + 1] * C, axis=0)
    kind: tl.constexpr = grad_ptr.dtype.element_ty
    for block in tl.static_range(BLOCKS):
        n_rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        B = tl.load(BC_ptr + n_rows, mask=n_rows < n, other=0.0)
        C = tl.load(BC_ptr + n + n_rows, mask=n_rows < n, other=0.0)
        grad_B = inv_B * (grads[2 * block] - B * along_B)
        grad_C = inv_C * (grads[2 * block + 1] - C * along_C)
        tl.store(grad_ptr + n_rows, grad_B.to(kind), mask=n_rows < n)
        tl.store(grad_ptr + n + n_rows, grad_C.to(kind), mask=n_rows < n)
