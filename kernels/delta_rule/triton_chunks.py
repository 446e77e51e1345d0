"""The gated delta rule in chunks of tokens, forward, in Triton.

For the tokens i of a chunk, G_i is the sum of the log decays from its start to i, S the memory
before it, N_ij = exp(G_i - G_j) k_i . k_j for j < i, and P_ij = exp(G_i - G_j) q_i . k_j / sqrt(p)
for j <= i. The errors e_i = v_i - (memory before the write of i)^T k_i, outputs and next memory are

    (I + N diag(beta)) e = v - exp(G) k S
    o = exp(G) q S / sqrt(p) + P (beta e)
    S <- exp(G_last) S + k^T (exp(G_last - G) beta e)

`prepare_kernel` finds the inverse of I + N diag(beta) and P of all chunks at once. `sweep_kernel`
has a program for each sample, head and block of value channels, which keeps S in registers for all
chunks. No exponent is positive, whatever the decay: differences are masked before exp.
Source: DeltaNet (arXiv 2406.06484), section 3; Gated DeltaNet (2412.06464), section 3.3.

Letters: b batch, t time, h heads, p key channels and v value channels of a head, n chunks, c tokens
of a chunk.
"""

import triton
import triton.language as tl


@triton.jit
def factor(x, LIKE, DOT: tl.constexpr):
    """x as a factor of a product: rounded to the dtype of the tensor LIKE, in the dtype DOT, which
    is another one only in the interpreter, where bfloat16 cannot be multiplied."""
    return x.to(LIKE.dtype.element_ty).to(DOT)


@triton.jit
def load_tile(X, at, ROW, column, left, C: tl.constexpr, SIZE: tl.constexpr):
    """Columns of the c tokens of a chunk, `left` of which exist, from address X + at."""
    row, column = tl.arange(0, C)[:, None], column[None, :]
    return tl.load(X + at + row * ROW + column, (row < left) & (column < SIZE), 0.0)


@triton.jit
def store_tile(X, at, ROW, column, left, values, C: tl.constexpr, SIZE: tl.constexpr):
    row, column = tl.arange(0, C)[:, None], column[None, :]
    tl.store(X + at + row * ROW + column, values, (row < left) & (column < SIZE))


@triton.jit
def load_tokens(X, first, h, H, left, C: tl.constexpr):
    """A number of each token of a chunk and of head h, and zeros after the last: (c,)."""
    i = tl.arange(0, C)
    return tl.load(X + (first + i) * H + h, i < left, 0.0).to(tl.float32)


@triton.jit
def decays(DECAY, first, h, H, left, C: tl.constexpr, GATED: tl.constexpr):
    """G of the tokens of a chunk (c,), and its last entry."""
    if GATED:
        g = load_tokens(DECAY, first, h, H, left, C)
    else:
        g = tl.zeros((C,), tl.float32)
    return tl.cumsum(g, 0), tl.sum(g, 0)


@triton.jit
def load_square(X, at, C: tl.constexpr):
    """A matrix (c, c)."""
    i = tl.arange(0, C)
    return tl.load(X + at * (C * C) + i[:, None] * C + i[None, :])


@triton.jit
def state_cells(at, i, j, P_SIZE: tl.constexpr, V_SIZE: tl.constexpr):
    """Offsets of columns j of the matrix `at` of (p, v) matrices, and which of them exist."""
    i, j = i[:, None], j[None, :]
    return (at * P_SIZE + i) * V_SIZE + j, (i < P_SIZE) & (j < V_SIZE)


@triton.jit
def add_off_diagonal(X, A, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverse X of the diagonal blocks of I + A of the size WIDTH, that of the diagonal
    blocks of twice the size: its lower left part is - X_22 A_21 X_11."""
    block = tl.arange(0, A.shape[0]) // WIDTH
    below = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
    product = tl.dot(X, tl.where(below, A, 0.0), input_precision=PRECISION)
    return X - tl.dot(product, X, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for a strictly lower triangular A (c, c), c = 16, 32 or 64.

    The diagonal blocks of 16 rows are inverted by substitution, all at once. Powers of A, which
    would take fewer steps, have large numbers that cancel where keys are equal and beta is 2.
    """
    block, i = tl.arange(0, C // 16), tl.arange(0, 16)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    D = tl.sum(tl.where(diagonal, tl.reshape(A, (C // 16, 16, C // 16, 16)), 0.0), 2)
    row, column = i[None, :, None], i[None, None, :]
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(D)
    for j in range(15):
        solved = tl.sum(tl.where(row == j, X, 0.0), 1)
        X -= tl.sum(tl.where(column == j, D, 0.0), 2)[:, :, None] * solved[:, None, :]
    X = tl.reshape(tl.where(diagonal, X[:, :, None, :], 0.0), (C, C))
    if C > 16:
        X = add_off_diagonal(X, A, 16, PRECISION)
    if C > 32:
        X = add_off_diagonal(X, A, 32, PRECISION)
    return X


@triton.jit
def prepare_kernel(
    Q,
    K,
    BETA,
    DECAY,
    INVERSE,
    SCORES,
    t,
    H,
    N,
    Q_ROW,
    K_ROW,
    GATED: tl.constexpr,
    P_SIZE: tl.constexpr,
    P_BLOCK: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(I + N diag(beta))^-1 and P of one chunk and head."""
    program = tl.program_id(0).to(tl.int64)
    n, h, b = program % N, program // N % H, program // N // H
    first, left = b * t + n * C, t - n * C
    i, column = tl.arange(0, C), tl.arange(0, P_BLOCK)
    q = load_tile(Q, first * Q_ROW + h * P_SIZE, Q_ROW, column, left, C, P_SIZE)
    k = load_tile(K, first * K_ROW + h * P_SIZE, K_ROW, column, left, C, P_SIZE)
    q, k = factor(q, SCORES, DOT), factor(k, SCORES, DOT)
    beta = load_tokens(BETA, first, h, H, left, C)
    G, _ = decays(DECAY, first, h, H, left, C, GATED)
    until = i[:, None] >= i[None, :]
    ratio = tl.exp(tl.where(until, G[:, None] - G[None, :], float("-inf")))
    gram = ratio * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    system = tl.where(i[:, None] > i[None, :], gram * beta[None, :], 0.0)
    cells = program * (C * C) + i[:, None] * C + i[None, :]
    tl.store(INVERSE + cells, unit_lower_inverse(system, C, PRECISION))
    scores = ratio * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    tl.store(SCORES + cells, scores * P_SIZE**-0.5)


@triton.jit
def sweep_kernel(
    Q,
    K,
    V,
    BETA,
    DECAY,
    INVERSE,
    SCORES,
    S0,
    Y,
    S_LAST,
    ERROR,
    STATES,
    t,
    H,
    N,
    Q_ROW,
    K_ROW,
    V_ROW,
    GATED: tl.constexpr,
    STARTED: tl.constexpr,
    KEEP: tl.constexpr,
    P_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    P_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs and the memory after the last chunk, for one sample, head and block of value
    channels; with KEEP also the errors and the memory before each chunk."""
    blocks: tl.constexpr = (V_SIZE + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0).to(tl.int64)
    head = program // blocks
    b, h = head // H, head % H
    i, j = tl.arange(0, P_BLOCK), program % blocks * V_BLOCK + tl.arange(0, V_BLOCK)
    cells, exist = state_cells(head, i, j, P_SIZE, V_SIZE)
    if STARTED:
        S = tl.load(S0 + cells, exist, 0.0).to(tl.float32)
    else:
        S = tl.zeros((P_BLOCK, V_BLOCK), tl.float32)
    for n in range(N):
        first, left = b * t + n * C, t - n * C
        q = load_tile(Q, first * Q_ROW + h * P_SIZE, Q_ROW, i, left, C, P_SIZE)
        k = load_tile(K, first * K_ROW + h * P_SIZE, K_ROW, i, left, C, P_SIZE)
        v = load_tile(V, first * V_ROW + h * V_SIZE, V_ROW, j, left, C, V_SIZE)
        inverse = load_square(INVERSE, head * N + n, C).to(DOT)
        scores = load_square(SCORES, head * N + n, C).to(DOT)
        q, k, s = factor(q, SCORES, DOT), factor(k, SCORES, DOT), factor(S, SCORES, DOT)
        beta = load_tokens(BETA, first, h, H, left, C)
        G, total = decays(DECAY, first, h, H, left, C, GATED)
        grown = tl.exp(G)[:, None]
        rest = v.to(tl.float32) - grown * tl.dot(k, s, input_precision=PRECISION)
        error = tl.dot(inverse, factor(rest, SCORES, DOT), input_precision=PRECISION)
        written = beta[:, None] * error
        o = grown * tl.dot(q, s, input_precision=PRECISION) * P_SIZE**-0.5
        o = tl.dot(scores, factor(written, SCORES, DOT), o, input_precision=PRECISION)
        at = (first * H + h) * V_SIZE
        store_tile(Y, at, H * V_SIZE, j, left, o, C, V_SIZE)
        if KEEP:
            store_tile(ERROR, at, H * V_SIZE, j, left, error, C, V_SIZE)
            kept, inside = state_cells(head * N + n, i, j, P_SIZE, V_SIZE)
            tl.store(STATES + kept, S, inside & (n >= (0 if STARTED else 1)))
        written = factor(tl.exp(total - G)[:, None] * written, SCORES, DOT)
        S = tl.exp(total) * S
        S = tl.dot(tl.trans(k), written, S, input_precision=PRECISION)
    tl.store(S_LAST + cells, S, exist)
