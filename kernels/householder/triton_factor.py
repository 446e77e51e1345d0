"""Kernels of the k x k factor T of H_1 ... H_k = I - U^T T U, forward and backward.

One program of one warp takes one token: its Gram matrix, collected over blocks of channels in one
partial sum per thread, and then small algebra in registers. The backward collects it once more.
Small matrices are whole tiles, padded to a power of two: rows of u and beta are 0 there, so that
Gram matrices are, and T.
Letters: t tokens, k reflections, d channels.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _gram(a, b):
    """a b^T of two tiles (k, d)."""
    return tl.sum(a[:, None, :] * b[None, :, :], axis=2)


@triton.jit
def _product(a, b):
    """a b of k x k matrices."""
    return tl.sum(a[:, :, None] * b[None, :, :], axis=1)


@triton.jit
def _product_left_transposed(a, b):
    """a^T b of k x k matrices."""
    return tl.sum(a[:, :, None] * b[:, None, :], axis=0)


@triton.jit
def _diagonal(a, i, j):
    """The diagonal of a, whose row and column numbers are i (k, 1) and j (1, k)."""
    return tl.sum(tl.where(i == j, a, 0.0), axis=1)


@triton.jit
def _inverse_unipotent(N, identity, BLOCK_K: tl.constexpr):
    """(I + N)^-1 for a strictly upper triangular N: (I - N)(I + N^2)(I + N^4)..."""
    inverse = identity - N
    power = N
    if BLOCK_K > 2:
        power = _product(power, power)
        inverse = _product(inverse, identity + power)
    if BLOCK_K > 4:
        power = _product(power, power)
        inverse = _product(inverse, identity + power)
    return inverse


@triton.jit
def _raw_gram(
    u_token,
    u_stride_k,
    d,
    K: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """u u^T of one token."""
    row = tl.arange(0, BLOCK_K)
    partial = tl.zeros((BLOCK_K, BLOCK_K, BLOCK_D), dtype=ACC)
    for start in range(0, d, BLOCK_D):
        channel = start + tl.arange(0, BLOCK_D)
        mask = (row < K)[:, None] & (channel < d)[None, :]
        u = tl.load(u_token + row[:, None] * u_stride_k + channel[None, :], mask=mask, other=0.0)
        u = u.to(ACC)
        partial += u[:, None, :] * u[None, :, :]
    return tl.sum(partial, axis=2)


@triton.jit
def _unit_gram(raw, d, i, j, EPS: tl.constexpr, ACC: tl.constexpr):
    """The rows' inverse lengths, and strictly above the diagonal their normalized products."""
    length = 1 / tl.sqrt(_diagonal(raw, i, j) + d * tl.full((), EPS, ACC))
    return length, tl.where(i < j, raw * length[:, None] * length[None, :], 0.0)


@triton.jit
def factor_kernel(
    u_ptr,  # (t, k, d)
    beta_ptr,  # (t, k)
    factor_ptr,  # (t, k, k)
    d,
    u_stride_t,
    u_stride_k,
    beta_stride_t,
    beta_stride_k,
    K: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_K)
    i, j = row[:, None], row[None, :]
    raw = _raw_gram(u_ptr + token * u_stride_t, u_stride_k, d, K, ACC, BLOCK_K, BLOCK_D)
    _, above = _unit_gram(raw, d, i, j, EPS, ACC)
    beta = tl.load(beta_ptr + token * beta_stride_t + row * beta_stride_k, mask=row < K, other=0.0)
    beta = beta.to(ACC)
    identity = tl.where(i == j, 1.0, 0.0).to(ACC)
    factor = _inverse_unipotent(beta[:, None] * above, identity, BLOCK_K) * beta[None, :]
    out = factor_ptr + token * (K * K) + i * K + j
    tl.store(out, factor.to(factor_ptr.dtype.element_ty), mask=(i < K) & (j < K))


@triton.jit
def factor_backward_kernel(
    grad_ptr,  # (t, k, k)
    u_ptr,  # (t, k, d)
    beta_ptr,  # (t, k)
    grad_u_ptr,  # (t, k, d)
    grad_beta_ptr,  # (t, k)
    d,
    u_stride_t,
    u_stride_k,
    beta_stride_t,
    beta_stride_k,
    K: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK_K)
    i, j = row[:, None], row[None, :]
    u_token = u_ptr + token * u_stride_t
    raw = _raw_gram(u_token, u_stride_k, d, K, ACC, BLOCK_K, BLOCK_D)
    length, above = _unit_gram(raw, d, i, j, EPS, ACC)
    beta = tl.load(beta_ptr + token * beta_stride_t + row * beta_stride_k, mask=row < K, other=0.0)
    beta = beta.to(ACC)
    in_k = (i < K) & (j < K)
    grad = tl.load(grad_ptr + token * (K * K) + i * K + j, mask=in_k, other=0.0).to(ACC)

    # T = P diag(beta), P = (I + N)^-1, N = diag(beta) above
    identity = tl.where(i == j, 1.0, 0.0).to(ACC)
    inverse = _inverse_unipotent(beta[:, None] * above, identity, BLOCK_K)
    grad_beta = tl.sum(grad * inverse, axis=0)
    grad_N = -_gram(_product_left_transposed(inverse, grad * beta[None, :]), inverse)
    grad_N = tl.where(i < j, grad_N, 0.0)
    grad_beta = tl.sum(tl.where(i == j, grad_beta[None, :], grad_N * above), axis=1)
    grad_above = beta[:, None] * grad_N
    both = grad_above + tl.trans(grad_above)
    # u_i sees the other rows through their products with it, and itself through its length
    own = -tl.sum(both * raw * length[None, :], axis=1) * length * length * length
    weights = tl.where(i == j, own[:, None], both * length[:, None] * length[None, :])

    grad_beta_row = grad_beta_ptr + token * K + row
    tl.store(grad_beta_row, grad_beta.to(grad_beta_ptr.dtype.element_ty), mask=row < K)
    for start in range(0, d, BLOCK_D):
        channel = start + tl.arange(0, BLOCK_D)
        mask = (row < K)[:, None] & (channel < d)[None, :]
        u = tl.load(u_token + row[:, None] * u_stride_k + channel[None, :], mask=mask, other=0.0)
        grad_u = tl.sum(weights[:, :, None] * u.to(ACC)[None, :, :], axis=1)
        out = grad_u_ptr + (token * K + row[:, None]) * d + channel[None, :]
        tl.store(out, grad_u.to(grad_u_ptr.dtype.element_ty), mask=mask)
