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

The first factor of a product is always a tile as it was loaded, or its transpose, unless it has
fewer than 64 rows: a first factor of 64 rows that was computed would be read by wgmma from
registers, which ptxas before CUDA 13.3 overwrites too early. For the same reason a program has no
more than 4 warps: Triton before 3.8 does not make one group of 4 warps wait for another.

Letters: b batch, t time, h heads, p key channels and v value channels of a head, n chunks, c tokens
of a chunk. s: `Tiles`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import FAST

PRECISION = tl.constexpr("tf32x3")
"""Of products of float32: three on tensor cores, whose sum has nearly float32's precision. "ieee"
has all of it, without tensor cores."""


@triton.jit
def factor(x, LIKE):
    """x as a factor of a product: rounded to the dtype of the tensor LIKE, but in the interpreter
    then in float32, because bfloat16 cannot be multiplied there."""
    low = x.to(LIKE.dtype.element_ty)
    return low if FAST else low.to(tl.float32)


@triton.jit
def load_columns(X, ROW, first, h, column, left, C: tl.constexpr, SIZE: tl.constexpr):
    """Columns of the c tokens of a chunk and of head h, `left` of which exist, as a factor."""
    row, column, at = tl.arange(0, C)[:, None], column[None, :], first * ROW + h * SIZE
    there = (row < left) & (column < SIZE)
    return factor(tl.load(X + at + row * ROW + column, there, 0.0), X)


@triton.jit
def store_tile(X, at, ROW, column, left, values, C: tl.constexpr, SIZE: tl.constexpr):
    row, column = tl.arange(0, C)[:, None], column[None, :]
    tl.store(X + at + row * ROW + column, values, (row < left) & (column < SIZE))


@triton.jit
def load_part(X, ROW, first, h, part, left, s):
    """The PART key channels from part * PART."""
    return load_columns(X, ROW, first, h, tl.arange(0, s.PART) + part * s.PART, left, s.C, s.P)


@triton.jit
def load_tokens(X, first, h, H, left, C: tl.constexpr):
    """A number of each token of a chunk and of head h, and zeros after the last: (c,)."""
    i = tl.arange(0, C)
    return tl.load(X + (first + i) * H + h, i < left, 0.0).to(tl.float32)


@triton.jit
def decays(DECAY, first, h, H, left, C: tl.constexpr):
    """G of the tokens of a chunk (c,), and its last entry."""
    g = load_tokens(DECAY, first, h, H, left, C)
    return tl.cumsum(g, 0), tl.sum(g, 0)


@triton.jit
def ratios(G, C: tl.constexpr):
    """exp(G_i - G_j) for j <= i, else 0: (c, c)."""
    i = tl.arange(0, C)
    difference = G[:, None] - G[None, :]
    return tl.exp(tl.where(i[:, None] >= i[None, :], difference, float("-inf")))


@triton.jit
def load_square(X, at, C: tl.constexpr):
    """A matrix (c, c), as a factor."""
    i = tl.arange(0, C)
    return factor(tl.load(X + at * (C * C) + i[:, None] * C + i[None, :]), X)


@triton.jit
def state_cells(at, i, j, s):
    """Offsets of rows i and columns j of matrix `at` of (p, v) matrices, and which of them
    exist."""
    i, j = i[:, None], j[None, :]
    return (at * s.P + i) * s.V + j, (i < s.P) & (j < s.V)


@triton.jit
def load_state(X, at, j, s):
    """Columns j of a memory X in parts of PART rows; of zeros for None."""
    parts = ()
    for n in tl.static_range((s.P + s.PART - 1) // s.PART):
        if X is not None:
            cells, exist = state_cells(at, tl.arange(0, s.PART) + n * s.PART, j, s)
            parts = parts + (tl.load(X + cells, exist, 0.0).to(tl.float32),)
        else:
            parts = parts + (tl.zeros((s.PART, j.shape[0]), tl.float32),)
    return parts


@triton.jit
def store_state(X, at, S, j, s):
    for n in tl.static_range(len(S)):
        cells, exist = state_cells(at, tl.arange(0, s.PART) + n * s.PART, j, s)
        tl.store(X + cells, S[n], exist)


@triton.jit
def block_of(A, i: tl.constexpr):
    """A[i] of a tensor (blocks, 16, 16)."""
    return tl.sum(tl.where(tl.arange(0, A.shape[0])[:, None, None] == i, A, 0.0), 0)


@triton.jit
def column_of_blocks(A, column):
    """Of the blocks (16, 16) of A (c, c), in each row of blocks the one at `column`, a number or
    one for each row: (c / 16, 16, 16)."""
    size: tl.constexpr = A.shape[0] // 16
    wanted = tl.arange(0, size)[None, None, :, None] == column
    return tl.sum(tl.where(wanted, tl.reshape(A, (size, 16, size, 16)), 0.0), 2)


@triton.jit
def unit_lower_inverse(A):
    """T = (I + A)^-1 for a strictly lower triangular A (c, c), as blocks (16, 16): of each row of
    blocks those up to the diagonal.

    The diagonal is inverted by substitution, in all blocks at once; before it T_ij = -T_ii times
    the sum of A_il T_lj over j <= l < i. Powers of A, which would take fewer steps, have large
    numbers that cancel where keys are equal and beta is 2.
    """
    size: tl.constexpr = A.shape[0] // 16
    D = column_of_blocks(A, tl.arange(0, size)[:, None, None, None])
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(D)
    for n in range(15):
        solved = tl.sum(tl.where(row == n, X, 0.0), 1)
        X -= tl.sum(tl.where(column == n, D, 0.0), 2)[:, :, None] * solved[:, None, :]
    T = ()
    for i in tl.static_range(size):
        diagonal = block_of(X, i)
        for j in tl.static_range(i):
            total = tl.zeros((16, 16), tl.float32)
            for n in tl.static_range(j, i):
                factor_of_T = block_of(column_of_blocks(A, n), i)
                above = T[n * (n + 1) // 2 + j]
                total = tl.dot(factor_of_T, above, total, input_precision=PRECISION)
            T = T + (-tl.dot(diagonal, total, input_precision=PRECISION),)
        T = T + (diagonal,)
    return T


@triton.jit
def store_blocks(X, at, T, C: tl.constexpr):
    """A lower triangular matrix (c, c) from its blocks in the order of `unit_lower_inverse`."""
    i = tl.arange(0, 16)
    cells = X + at * (C * C) + i[:, None] * C + i[None, :]
    for row in tl.static_range(C // 16):
        for column in tl.static_range(row + 1):
            tl.store(cells + (row * C + column) * 16, T[row * (row + 1) // 2 + column])
        for column in tl.static_range(row + 1, C // 16):
            tl.store(cells + (row * C + column) * 16, tl.zeros((16, 16), tl.float32))


@triton.jit(do_not_specialize=["t", "H", "N"])
def prepare_kernel(
    inputs,  # `DeltaInputs`, with a token for each step, in evenly spaced rows
    apart,  # distances of the rows of query and key
    kept,  # `Kept`, of which inverses and scores are written
    t,
    H,
    N,
    s: tl.constexpr,
):
    """(I + N diag(beta))^-1 and P of one chunk and head."""
    program = tl.program_id(0).to(tl.int64)
    n, h, b = program % N, program // N % H, program // N // H
    first, left = b * t + n * s.C, t - n * s.C
    i = tl.arange(0, s.C)
    gram = tl.zeros((s.C, s.C), tl.float32)
    scores = tl.zeros((s.C, s.C), tl.float32)
    for part in range((s.P + s.PART - 1) // s.PART):
        q = load_part(inputs.query, apart[0], first, h, part, left, s)
        k = load_part(inputs.key, apart[1], first, h, part, left, s)
        gram = tl.dot(k, tl.trans(k), gram, input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
    G, _ = decays(inputs.log_decay, first, h, H, left, s.C)
    ratio = ratios(G, s.C)
    cells = program * (s.C * s.C) + i[:, None] * s.C + i[None, :]
    tl.store(kept.scores + cells, scores * ratio * s.P**-0.5)
    beta = load_tokens(inputs.beta, first, h, H, left, s.C)
    system = tl.where(i[:, None] > i[None, :], gram * ratio * beta[None, :], 0.0)
    store_blocks(kept.inverses, program, unit_lower_inverse(system), s.C)


@triton.jit(do_not_specialize=["t", "H", "N"])
def sweep_kernel(
    inputs,  # as in `prepare_kernel`
    apart,  # distances of the rows of query, key and value
    kept,  # `Kept`, of which errors and states are written unless they are None
    S0,  # (b, h, p, v), or None: zeros
    Y,  # (b, t, h, v), written
    S_LAST,  # (b, h, p, v), written
    t,
    H,
    N,
    s: tl.constexpr,
):
    """Outputs and the memory after the last chunk, for one sample, head and block of value
    channels; the errors and the memory before each chunk where these are kept."""
    blocks: tl.constexpr = (s.V + s.BLOCK - 1) // s.BLOCK
    program = tl.program_id(0).to(tl.int64)
    head = program // blocks
    b, h = head // H, head % H
    j = program % blocks * s.BLOCK + tl.arange(0, s.BLOCK)
    # zeros before the first chunk are not kept
    skipped: tl.constexpr = 0 if S0 is not None else 1
    S = load_state(S0, head, j, s)
    for n in range(N):
        first, left = b * t + n * s.C, t - n * s.C
        v = load_columns(inputs.value, apart[2], first, h, j, left, s.C, s.V)
        inverse = load_square(kept.inverses, head * N + n, s.C)
        scores = load_square(kept.scores, head * N + n, s.C)
        beta = load_tokens(inputs.beta, first, h, H, left, s.C)
        G, total = decays(inputs.log_decay, first, h, H, left, s.C)
        if kept.errors is not None:
            if n >= skipped:
                slot = head * (N - skipped) + n - skipped
                store_state(kept.states, slot, S, j, s)
        known = tl.zeros((s.C, s.BLOCK), tl.float32)
        o = tl.zeros((s.C, s.BLOCK), tl.float32)
        for part in tl.static_range(len(S)):
            low = factor(S[part], kept.scores)
            q = load_part(inputs.query, apart[0], first, h, part, left, s)
            k = load_part(inputs.key, apart[1], first, h, part, left, s)
            known = tl.dot(k, low, known, input_precision=PRECISION)
            o = tl.dot(q, low, o, input_precision=PRECISION)
        grown = tl.exp(G)[:, None]
        rest = factor(v.to(tl.float32) - grown * known, kept.scores)
        error = tl.dot(inverse, rest, input_precision=PRECISION)
        written = beta[:, None] * error
        o *= grown * s.P**-0.5
        o = tl.dot(scores, factor(written, kept.scores), o, input_precision=PRECISION)
        written = factor(tl.exp(total - G)[:, None] * written, kept.scores)
        grown_S = ()
        for part in tl.static_range(len(S)):
            old = tl.exp(total) * S[part]
            k = load_part(inputs.key, apart[1], first, h, part, left, s)
            new = tl.dot(tl.trans(k), written, old, input_precision=PRECISION)
            grown_S = grown_S + (new,)
        S = grown_S
        at = (first * H + h) * s.V
        store_tile(Y, at, H * s.V, j, left, o, s.C, s.V)
        if kept.errors is not None:
            store_tile(kept.errors, at, H * s.V, j, left, error, s.C, s.V)
    store_state(S_LAST, head, S, j, s)


@triton.jit(do_not_specialize=["H"])
def step_kernel(
    inputs,  # as in `prepare_kernel`, with a token of each sample
    apart,  # distances of the rows of query, key and value
    S0,  # (b, h, p, v), or None: zeros
    Y,  # (b, 1, h, v), written
    S_LAST,  # (b, h, p, v), written
    H,
    P_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    P: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    """S <- e^g S + beta k (v - e^g S^T k)^T and S^T q / sqrt(p), of V_BLOCK value channels, for a
    single token whose gradient is not wanted.

    The kernels of chunks give the same, but multiply tiles of 16 rows or more, of which a token
    fills one: on an H200 their two launches take 20 microseconds for a sample with 4 heads of 128 x
    256, this one takes 2.
    """
    blocks: tl.constexpr = (V_SIZE + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0).to(tl.int64)
    head = program // blocks
    b, h = head // H, head % H
    i, j = tl.arange(0, P), program % blocks * V_BLOCK + tl.arange(0, V_BLOCK)
    q = tl.load(inputs.query + b * apart[0] + h * P_SIZE + i, i < P_SIZE, 0.0).to(tl.float32)
    k = tl.load(inputs.key + b * apart[1] + h * P_SIZE + i, i < P_SIZE, 0.0).to(tl.float32)
    v = tl.load(inputs.value + b * apart[2] + h * V_SIZE + j, j < V_SIZE, 0.0).to(tl.float32)
    beta = tl.load(inputs.beta + head).to(tl.float32)
    cells = (head * P_SIZE + i[:, None]) * V_SIZE + j[None, :]
    inside = (i[:, None] < P_SIZE) & (j[None, :] < V_SIZE)
    S = tl.zeros((P, V_BLOCK), tl.float32)
    if S0 is not None:
        S += tl.load(S0 + cells, inside, 0.0).to(tl.float32)
        S *= tl.exp(tl.load(inputs.log_decay + head).to(tl.float32))
    error = v - tl.sum(S * k[:, None], 0)
    S += k[:, None] * (beta * error)[None, :]
    o = tl.sum(S * q[:, None], 0) * P_SIZE**-0.5
    tl.store(Y + head * V_SIZE + j, o, j < V_SIZE)
    tl.store(S_LAST + cells, S, inside)
