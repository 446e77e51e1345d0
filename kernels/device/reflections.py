"""The k x k algebra of one token, in scalars that every thread holds.

Vectors (k,) and matrices (k, k) are tuples of scalars, unrolled at compile time, so that they need
no shuffles and no barriers. Symmetric and upper triangular matrices are packed, P = k (k + 1) / 2
entries: (i, j), i <= j, is at j (j + 1) / 2 + i. Other matrices are stored row after row. Tuples of
vectors (d,) are called rows.
Letters: d channels, k reflections.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import inverse_norm, reciprocal


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


# A combine function of tl.reduce takes two scalars for every reduced tensor, so no bundle.
@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def sums(values, AXIS: tl.constexpr = 0):
    """Sums of tensors over an axis, up to eight in one reduction, so that they share barriers."""
    N: tl.constexpr = len(values)
    out = ()
    for i in tl.static_range(N // 8):
        out = out + tl.reduce(values[8 * i : 8 * i + 8], AXIS, _add8)
    DONE8: tl.constexpr = N // 8 * 8
    if N - DONE8 >= 4:
        out = out + tl.reduce(values[DONE8 : DONE8 + 4], AXIS, _add4)
    DONE4: tl.constexpr = N // 4 * 4
    if N - DONE4 >= 2:
        out = out + tl.reduce(values[DONE4 : DONE4 + 2], AXIS, _add2)
    if N % 2 == 1:
        out = out + (tl.sum(values[N - 1], AXIS),)
    return out


@triton.jit
def products(a, b, K: tl.constexpr):
    """a_i b_j for i <= j, packed, of two tuples of rows (d,)."""
    out = ()
    for j in tl.static_range(K):
        for i in tl.static_range(K):
            if i <= j:
                out = out + (a[i] * b[j],)
    return out


@triton.jit
def scale(values, factor, K: tl.constexpr):
    """factor_i values_i (k,)."""
    out = ()
    for i in tl.static_range(K):
        out = out + (values[i] * factor[i],)
    return out


@triton.jit
def rows_times(rows, v, K: tl.constexpr):
    """rows_i v, elementwise, for v (d,) or a scalar."""
    out = ()
    for i in tl.static_range(K):
        out = out + (rows[i] * v,)
    return out


@triton.jit
def inverse_sizes(G, d, K: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(|u_i|^2 + d EPS) as in `unit`, (k,), from the packed inner products of the rows."""
    inv = ()
    for i in tl.static_range(K):
        inv = inv + (inverse_norm(G[i * (i + 1) // 2 + i], d * EPS),)
    return inv


@triton.jit
def scale_symmetric(packed, factor, K: tl.constexpr):
    """factor_i factor_j packed_ij, packed."""
    out = ()
    for j in tl.static_range(K):
        for i in tl.static_range(K):
            if i <= j:
                out = out + (packed[j * (j + 1) // 2 + i] * factor[i] * factor[j],)
    return out


@triton.jit
def wy_upper(G, beta, K: tl.constexpr):
    """The WY factor T, packed, of I - H_1 ... H_k = U^T T U from G = U U^T, packed, and beta (k,).

    T_jj = beta_j, T_:j,j = -beta_j T_:j,:j G_:j,j.
    """
    T = ()
    for j in tl.static_range(K):
        for i in tl.static_range(K):
            if i < j:
                total = T[i * (i + 1) // 2 + i] * G[j * (j + 1) // 2 + i]
                for m in tl.static_range(K):
                    if (m > i) and (m < j):
                        total += T[m * (m + 1) // 2 + i] * G[j * (j + 1) // 2 + m]
                T = T + (-beta[j] * total,)
            elif i == j:
                T = T + (beta[j],)
    return T


@triton.jit
def _packed_times(S, v, BELOW: tl.constexpr, ABOVE: tl.constexpr, K: tl.constexpr):
    """S v (k,), S packed, symmetric, or only its diagonal with what is BELOW or ABOVE it."""
    out = ()
    for i in tl.static_range(K):
        terms = ()
        for j in tl.static_range(K):
            if (i == j) or (i < j and ABOVE) or (i > j and BELOW):
                S_ij = S[(j * (j + 1) // 2 + i) if i <= j else (i * (i + 1) // 2 + j)]
                terms = terms + (S_ij * v[j],)
        out = out + (total_of(terms),)
    return out


@triton.jit
def upper_times(T, v, K: tl.constexpr):
    """T v (k,), T packed, upper triangular."""
    return _packed_times(T, v, False, True, K)


@triton.jit
def upper_transposed_times(T, v, K: tl.constexpr):
    """T^T v (k,), T packed, upper triangular."""
    return _packed_times(T, v, True, False, K)


@triton.jit
def symmetric_times(S, v, K: tl.constexpr):
    """S v (k,), S packed, symmetric."""
    return _packed_times(S, v, True, True, K)


@triton.jit
def square_times(M, v, K: tl.constexpr):
    """M v (k,), the K K entries of M row by row."""
    out = ()
    for i in tl.static_range(K):
        out = out + (combine(v, M[i * K : (i + 1) * K], K),)
    return out


@triton.jit
def _system_entry(S, T, i: tl.constexpr, j: tl.constexpr, K: tl.constexpr):
    """(I - S T)_ij."""
    total = S[i * (i + 1) // 2] * T[j * (j + 1) // 2]
    for m in tl.static_range(K):
        if (m > 0) and (m <= j):
            S_im = S[(m * (m + 1) // 2 + i) if i <= m else (i * (i + 1) // 2 + m)]
            total += S_im * T[j * (j + 1) // 2 + m]
    if i == j:
        return 1 - total
    else:
        return -total


@triton.jit
def local_system(S, T, TRANSPOSED: tl.constexpr, K: tl.constexpr):
    """I - S T (k, k), or its transpose, from packed S and T."""
    out = ()
    for row in tl.static_range(K):
        for column in tl.static_range(K):
            if TRANSPOSED:
                out = out + (_system_entry(S, T, column, row, K),)
            else:
                out = out + (_system_entry(S, T, row, column, K),)
    return out


@triton.jit
def eliminate(matrix, b, K: tl.constexpr, N: tl.constexpr, APPROXIMATE: tl.constexpr):
    """matrix^-1 b for b (k, N) by elimination with row pivoting, and min(1, smallest |pivot|).

    A pivot of 0 gives Inf or NaN, without a branch or an error. One reciprocal a pivot, which may
    be APPROXIMATE, and no other division.
    """
    smallest = tl.full([], 1.0, b[0].dtype)
    inverses = ()
    for c in tl.static_range(K):
        best = tl.abs(matrix[c * K + c])
        chosen = tl.full([], c, tl.int32)
        for row in tl.static_range(K):
            if row > c:
                size = tl.abs(matrix[row * K + c])
                chosen = tl.where(size > best, row, chosen)
                best = tl.where(size > best, size, best)
        # the chosen row takes the place of row c; columns before c are 0 by now
        top = _chosen_row(matrix, chosen, c, c, K, K)
        top_b = _chosen_row(b, chosen, c, 0, K, N)
        smallest = tl.minimum(smallest, tl.abs(top[0]))
        inverse = reciprocal(top[0]) if APPROXIMATE else 1 / top[0]
        inverses = inverses + (inverse,)
        new_matrix = ()
        new_b = ()
        for row in tl.static_range(K):
            if row < c:
                new_matrix = new_matrix + matrix[row * K : (row + 1) * K]
                new_b = new_b + b[row * N : (row + 1) * N]
            elif row == c:
                new_matrix = new_matrix + matrix[row * K : row * K + c] + top
                new_b = new_b + top_b
            else:
                here = chosen == row
                factor = tl.where(here, matrix[c * K + c], matrix[row * K + c]) * inverse
                new_matrix = new_matrix + matrix[row * K : row * K + c + 1]
                for column in tl.static_range(K):
                    if column > c:
                        value = tl.where(here, matrix[c * K + column], matrix[row * K + column])
                        new_matrix = new_matrix + (value - factor * top[column - c],)
                for column in tl.static_range(N):
                    value = tl.where(here, b[c * N + column], b[row * N + column])
                    new_b = new_b + (value - factor * top_b[column],)
        matrix = new_matrix
        b = new_b
    # back substitution, last first
    out = ()
    for step in tl.static_range(K):
        solved = ()
        for column in tl.static_range(N):
            total = b[(K - 1 - step) * N + column]
            for done in tl.static_range(K):
                if done < step:
                    entry = matrix[(K - 1 - step) * K + K - 1 - done]
                    total -= entry * out[(step - 1 - done) * N + column]
            solved = solved + (total * inverses[K - 1 - step],)
        out = solved + out
    return out, smallest


@triton.jit
def _chosen_row(
    matrix, chosen, c: tl.constexpr, first: tl.constexpr, K: tl.constexpr, N: tl.constexpr
):
    """Columns from `first` on of row `chosen` >= c of a matrix (k, N)."""
    out = ()
    for column in tl.static_range(N):
        if column >= first:
            value = matrix[c * N + column]
            for row in tl.static_range(K):
                if row > c:
                    value = tl.where(chosen == row, matrix[row * N + column], value)
            out = out + (value,)
    return out


@triton.jit
def total_of(parts):
    """The sum of one or more tensors, in their order."""
    total = parts[0]
    for i in tl.static_range(1, len(parts)):
        total += parts[i]
    return total


@triton.jit
def combine(weights, rows, K: tl.constexpr):
    """sum over i of weights_i rows_i, of any shape."""
    return total_of(scale(rows, weights, K))


@triton.jit
def add(a, b, K: tl.constexpr):
    """a + b (k,)."""
    out = ()
    for i in tl.static_range(K):
        out = out + (a[i] + b[i],)
    return out


@triton.jit
def gradient_factors(U_v, T_v, G, beta, inv, BETA_MAX: tl.constexpr, K: tl.constexpr):
    """E^-1 a, E r and E^2 (3 k,), with which `reflections_vjp` takes x~ = x + U^T T U v back:
    r_i = (U v)_i - sum over j > i of G_ij (T U v)_j and a_i = r_i (1 - beta_i / BETA_MAX)."""
    a = ()
    r = ()
    squares = ()
    for i in tl.static_range(K):
        r_i = U_v[i]
        for j in tl.static_range(K):
            if j > i:
                r_i -= G[j * (j + 1) // 2 + i] * T_v[j]
        a = a + (r_i * (1 - beta[i] / BETA_MAX) / inv[i],)
        r = r + (r_i * inv[i],)
        squares = squares + (inv[i] * inv[i],)
    return a + r + squares


@triton.jit
def reflections_vjp(
    U_g, T_g, T_v, G,
    factors,  # those of `gradient_factors`
    K: tl.constexpr,
):  # fmt: skip
    """What the cotangents of u lose along u (k,), and the cotangents of alpha (k,)."""
    along = ()
    grad_alpha = ()
    for i in tl.static_range(K):
        total = U_g[i]
        for j in tl.static_range(K):
            if j < i:
                total -= T_g[j] * G[i * (i + 1) // 2 + j]
        along = along + (factors[2 * K + i] * T_v[i] * total + T_g[i] * factors[K + i],)
        grad_alpha = grad_alpha + (T_g[i] * factors[i],)
    return along, grad_alpha
