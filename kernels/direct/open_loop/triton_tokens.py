"""What follows a walk without feedback, one program a token: the statistics, and the gradients.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate_vjp
from bedouin.kernels.device.norms import max_norms_of_three, max_norms_of_two
from bedouin.kernels.device.raw import load_raw
from bedouin.kernels.device.reflections import (
    combine,
    load_tuple,
    reflections_vjp,
    reflections_vjp_scalars,
    rows_times,
    subtract,
    sums,
    upper_times,
    upper_transposed_times,
)
from bedouin.kernels.direct.open_loop.triton_prepare import (
    known_input_gain,
    load_raw_reflections,
)
from bedouin.kernels.direct.triton_bundles import matrix_of, strided_row


@triton.jit(do_not_specialize=["t_end", "per_head"])
def token_statistics_kernel(
    x_ptr,  # (b, t, d) or (H, b / H, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    A_ptr,  # (n, d) or (H, n, d), log2(e) A
    delta_ptr,  # (b, t, d), Delta
    solver_ptr,  # (b, t, WIDTH), as in triton_prepare.py
    e_ptr,  # (b, t, K), E e
    statistics_ptr,  # (4, b, t), of which defect, scale and magnitude are written
    t_end,
    per_head,  # samples of a head; None: one head
    d: tl.constexpr,
    n: tl.constexpr,
    x_stride_h,  # None: one head
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    WIDTH: tl.constexpr,  # of a row of `solver`
    BC_AT: tl.constexpr,  # where B is in it
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SELECTIVE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """Defect, scale and magnitude of every token, as `Sweep` defines them.

    The walk adds x + U^T e to the memory, where F adds x + U^T T U (y - x): the defect is
    sigma * U^T (T U (y - x) - e).
    """
    token = tl.program_id(0).to(tl.int64)
    sample, t = token // t_end, token % t_end
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    PAIRS: tl.constexpr = K * (K + 1) // 2
    raw = raw_ptr + tl.multiple_of(sample * raw_stride_b + t * raw_stride_t, ALIGNED)
    row = solver_ptr + token * WIDTH
    x_row = strided_row(x_ptr, sample, t, per_head, x_stride_h, x_stride_b, x_stride_t)
    x = tl.load(x_row + cols, mask=in_d, other=0.0).to(ACC)
    y = tl.load(y_ptr + token * d + cols, mask=in_d, other=0.0)
    delta = tl.load(delta_ptr + token * d + cols, mask=in_d, other=0.0)
    u = load_raw_reflections(raw + d + (2 * n if SELECTIVE else 0), cols, d, K, ACC)
    U_v = sums(rows_times(u, y - x, K))
    BC = tl.load(row + BC_AT + rows, mask=in_n, other=0.0)
    BC *= tl.load(row + BC_AT + n + rows, mask=in_n, other=0.0)
    A = matrix_of(A_ptr, sample, per_head, d, n)
    sigma, largest = known_input_gain(delta, BC, A, rows, cols, d, n, INPUT_SCALE, FULL, FAST)
    T_v = upper_times(load_tuple(row + K + K * K + PAIRS, PAIRS), U_v, K)
    missing = sigma * combine(subtract(T_v, load_tuple(e_ptr + token * K, K), K), u, K)
    terms = largest * (tl.abs(x) + tl.abs(x + combine(T_v, u, K)))
    defect, size, magnitude = max_norms_of_three(missing, y + missing, terms)
    # a maximum ignores NaN, and a sample that is not finite must show it
    finite = 0 * U_v[0]
    cell = statistics_ptr + token
    row_of = tl.num_programs(0).to(tl.int64)
    tl.store(cell, defect + finite)
    tl.store(cell + row_of, size + finite)
    tl.store(cell + 2 * row_of, magnitude)


@triton.jit
def _sum_parts(
    parts, blocks, n: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The sum over the first axis of parts (blocks, n)."""
    block, state = tl.arange(0, BLOCKS), tl.arange(0, BLOCK_N)
    mask = (block < blocks)[:, None] & (state < n)[None, :]
    values = tl.load(parts + block[:, None] * n + state[None, :], mask=mask, other=0.0)
    return tl.sum(values, axis=0)


@triton.jit
def _store_unit_gradient(ptr, grad, unit_row, inverse, n: tl.constexpr, BLOCK_N: tl.constexpr):
    """The cotangent of a raw vector from that of its direction, `grad`."""
    rows = tl.arange(0, BLOCK_N)
    unit = tl.load(unit_row + rows, mask=rows < n, other=0.0)
    grad = inverse * (grad - unit * tl.sum(grad * unit, axis=0))
    tl.store(ptr + rows, grad.to(ptr.dtype.element_ty), mask=rows < n)


@triton.jit(do_not_specialize=["t_end", "blocks", "per_head"])
def gradients_kernel(
    x_ptr,  # (b, t, d) or (H, b / H, t, d)
    y_ptr,  # (b, t, d)
    g_ptr,  # (b, t, d), cotangent of y
    raw_ptr,  # (b, t, r)
    v_ptr,  # (b, t, d)
    solver_ptr,  # (b, t, WIDTH), as in triton_prepare.py
    factor_ptr,  # (b, t, P + 4 K + 2), likewise
    grad_mixed_ptr,  # (b, t, d), of x~
    grad_delta_ptr,  # (b, t, d), of Delta
    grad_B_ptr,  # (b, t, blocks, n), parts of that of the unit B
    grad_C_ptr,  # (b, t, blocks, n)
    grad_x_ptr,  # (b, t, d), written
    grad_raw_ptr,  # (b, t, r or more), written, may be the memory of the raw values
    statistics_ptr,  # (2, b, t), written: defect and scale of the adjoint equation
    t_end,
    blocks,
    per_head,  # samples of a head; None: one head
    d: tl.constexpr,
    n: tl.constexpr,
    x_stride_h,  # None: one head
    x_stride_b,
    x_stride_t,
    g_stride_b,
    g_stride_t,
    raw_stride_b,
    raw_stride_t,
    grad_raw_stride_b,
    grad_raw_stride_t,
    WIDTH: tl.constexpr,  # of a row of `solver`
    BC_AT: tl.constexpr,  # where B is in it
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two, at least `blocks`
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACC: tl.constexpr,
):
    """The cotangents of x_t and of the raw values, from those that the scan's backward computes.

    x~ = x + U^T T U (y - x) is taken back one reflection after the other.
    """
    token = tl.program_id(0).to(tl.int64)
    sample, t = token // t_end, token % t_end
    cols = tl.arange(0, BLOCK_D)
    in_d = cols < d
    PAIRS: tl.constexpr = K * (K + 1) // 2
    FACTOR: tl.constexpr = PAIRS + 4 * K + 2
    raw = raw_ptr + tl.multiple_of(sample * raw_stride_b + t * raw_stride_t, ALIGNED)
    offset = sample * grad_raw_stride_b + t * grad_raw_stride_t
    grad_raw = grad_raw_ptr + tl.multiple_of(offset, ALIGNED)
    kind: tl.constexpr = grad_raw_ptr.dtype.element_ty
    row, factor = solver_ptr + token * WIDTH, factor_ptr + token * FACTOR
    at = token * d + cols
    u_at = d + (2 * n if SELECTIVE else 0)
    # before the sums and their barriers: the cotangents may take the memory of the raw values
    u = load_raw_reflections(raw + u_at, cols, d, K, ACC)
    raw_delta = load_raw(raw, raw, cols, in_d, False, ACC, ".cg")
    grad_mixed = tl.load(grad_mixed_ptr + at, mask=in_d, other=0.0)
    U_g = sums(rows_times(u, grad_mixed, K))
    T_g = upper_transposed_times(load_tuple(row + K + K * K + PAIRS, PAIRS), U_g, K)
    # the adjoint equation is v = g + U^T T^T U (cotangent of x~)
    g_row = g_ptr + sample * g_stride_b + t * g_stride_t
    applied = tl.load(g_row + cols, mask=in_d, other=0.0).to(ACC) + combine(T_g, u, K)
    v = tl.load(v_ptr + at, mask=in_d, other=0.0)
    defect, size = max_norms_of_two(applied - v, applied)
    finite = 0 * U_g[0]
    tl.store(statistics_ptr + token, defect + finite)
    tl.store(statistics_ptr + tl.num_programs(0).to(tl.int64) + token, size + finite)

    G, T_v = load_tuple(factor, PAIRS), load_tuple(factor + PAIRS, K)
    factors = load_tuple(factor + PAIRS + K, 3 * K)
    x_row = strided_row(x_ptr, sample, t, per_head, x_stride_h, x_stride_b, x_stride_t)
    v = tl.load(y_ptr + at, mask=in_d, other=0.0).to(ACC)
    v -= tl.load(x_row + cols, mask=in_d, other=0.0).to(ACC)
    along, grad_alpha = reflections_vjp_scalars(U_g, T_g, T_v, G, factors, K)
    grad_x = reflections_vjp(grad_mixed, v, u, T_g, T_v, along, grad_raw + u_at, cols, d, K)
    for i in tl.static_range(K):
        tl.store(grad_raw + u_at + K * d + i, grad_alpha[i].to(kind))
    tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=in_d)
    grad_delta = tl.load(grad_delta_ptr + at, mask=in_d, other=0.0)
    grad_delta = activate_vjp(grad_delta, raw_delta, ACTIVATION)
    tl.store(grad_raw + cols, grad_delta.to(kind), mask=in_d)
    if SELECTIVE:
        part = token * blocks * n
        grad_B = _sum_parts(grad_B_ptr + part, blocks, n, BLOCKS, BLOCK_N)
        grad_C = _sum_parts(grad_C_ptr + part, blocks, n, BLOCKS, BLOCK_N)
        inv_B, inv_C = tl.load(factor + FACTOR - 2), tl.load(factor + FACTOR - 1)
        _store_unit_gradient(grad_raw + d, grad_B, row + BC_AT, inv_B, n, BLOCK_N)
        _store_unit_gradient(grad_raw + d + n, grad_C, row + BC_AT + n, inv_C, n, BLOCK_N)
