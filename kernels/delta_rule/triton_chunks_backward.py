"""The gated delta rule in chunks of tokens, backward, in Triton; names as in triton_chunks.py.

With the cotangents do of the outputs and dS of the memory after a chunk, and T = I + N diag(beta),

    dv = T^-T (beta (P^T do + exp(G_last - G) k dS))
    dS <- exp(G_last) dS + (exp(G) q)^T do / sqrt(p) - (exp(G) k)^T dv

`reverse_kernel` carries dS from the last chunk to the first. `gradients_kernel` then has a program
for each chunk and head. With J_ij = do_i . e_j / sqrt(p) and M_ij = - dv_i . e_j, times
exp(G_i - G_j), for j <= i and j < i, and Z = exp(G_last - G) e dS^T:

    dq = exp(G) do S^T / sqrt(p) + J (beta k)
    dk = M (beta k) - exp(G) dv S^T + beta (J^T q + M^T k + Z)
    dbeta_j = sum_i (J_ij q_i . k_j + M_ij k_i . k_j) + k_j . Z_j

The gradient of G is q dq, plus the part of k dk in which k_i reads, minus beta dbeta, plus at the
last token what reaches S there. A product's transpose is computed from loaded factors: Triton
before 3.7.1 miscompiles a product whose factor is the transpose of a product on sm_90.
"""

import triton
import triton.language as tl

from bedouin.kernels.delta_rule.triton_chunks import (
    decays,
    factor,
    load_square,
    load_tile,
    load_tokens,
    state_cells,
    store_tile,
)


@triton.jit
def reverse_kernel(
    Q,
    K,
    BETA,
    DECAY,
    INVERSE,
    SCORES,
    GY,
    GS_LAST,
    GV,
    GS,
    GS0,
    t,
    H,
    N,
    Q_ROW,
    K_ROW,
    GY_ROW,
    GATED: tl.constexpr,
    ENDED: tl.constexpr,
    WANTED: tl.constexpr,
    P_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    P_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of v, and the cotangents of the memory after each chunk and before the first,
    for one sample, head and block of value channels."""
    blocks: tl.constexpr = (V_SIZE + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0).to(tl.int64)
    head = program // blocks
    b, h = head // H, head % H
    i, j = tl.arange(0, P_BLOCK), program % blocks * V_BLOCK + tl.arange(0, V_BLOCK)
    cells, exist = state_cells(head, i, j, P_SIZE, V_SIZE)
    if ENDED:
        dS = tl.load(GS_LAST + cells, exist, 0.0).to(tl.float32)
    else:
        dS = tl.zeros((P_BLOCK, V_BLOCK), tl.float32)
    for passed in range(N):
        n = N - 1 - passed
        first, left = b * t + n * C, t - n * C
        q = load_tile(Q, first * Q_ROW + h * P_SIZE, Q_ROW, i, left, C, P_SIZE)
        k = load_tile(K, first * K_ROW + h * P_SIZE, K_ROW, i, left, C, P_SIZE)
        do = load_tile(GY, first * GY_ROW + h * V_SIZE, GY_ROW, j, left, C, V_SIZE)
        inverse = load_square(INVERSE, head * N + n, C).to(DOT)
        scores = load_square(SCORES, head * N + n, C).to(DOT)
        q, k, ds = factor(q, SCORES, DOT), factor(k, SCORES, DOT), factor(dS, SCORES, DOT)
        beta = load_tokens(BETA, first, h, H, left, C)
        G, total = decays(DECAY, first, h, H, left, C, GATED)
        kept, inside = state_cells(head * N + n, i, j, P_SIZE, V_SIZE)
        tl.store(GS + kept, dS, inside & (passed >= (0 if ENDED else 1)))
        de = tl.exp(total - G)[:, None] * tl.dot(k, ds, input_precision=PRECISION)
        de = tl.dot(tl.trans(scores), factor(do, SCORES, DOT), de, input_precision=PRECISION)
        de = factor(beta[:, None] * de, SCORES, DOT)
        dv = tl.dot(tl.trans(inverse), de, input_precision=PRECISION)
        store_tile(GV, (first * H + h) * V_SIZE, H * V_SIZE, j, left, dv, C, V_SIZE)
        grown = tl.exp(G)[:, None]
        read = factor(grown * do.to(tl.float32) * P_SIZE**-0.5, SCORES, DOT)
        dS = tl.dot(tl.trans(q), read, tl.exp(total) * dS, input_precision=PRECISION)
        read = factor(-grown * dv, SCORES, DOT)
        dS = tl.dot(tl.trans(k), read, dS, input_precision=PRECISION)
    if WANTED:
        tl.store(GS0 + cells, dS, exist)


@triton.jit
def gradients_kernel(
    Q,
    K,
    BETA,
    DECAY,
    ERROR,
    STATES,
    GY,
    GV,
    GS,
    GQ,
    GK,
    GBETA,
    GDECAY,
    t,
    H,
    N,
    Q_ROW,
    K_ROW,
    GY_ROW,
    GATED: tl.constexpr,
    ENDED: tl.constexpr,
    STARTED: tl.constexpr,
    P_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    P_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of q, k, beta and the log decays of one chunk and head."""
    program = tl.program_id(0).to(tl.int64)
    n, h, b = program % N, program // N % H, program // N // H
    first, left = b * t + n * C, t - n * C
    token, i = tl.arange(0, C), tl.arange(0, P_BLOCK)
    G, total = decays(DECAY, first, h, H, left, C, GATED)
    # rows of S and of its cotangent, which have none where they are zeros and were not written
    rows = tl.where(n >= (0 if STARTED else 1), P_SIZE, 0)
    grad_rows = tl.where(n < (N if ENDED else N - 1), P_SIZE, 0)

    scale: tl.constexpr = P_SIZE**-0.5
    dq = tl.zeros((C, P_BLOCK), tl.float32)
    dk = tl.zeros((C, P_BLOCK), tl.float32)
    J = tl.zeros((C, C), tl.float32)
    M = tl.zeros((C, C), tl.float32)
    J_T = tl.zeros((C, C), tl.float32)
    M_T = tl.zeros((C, C), tl.float32)
    for start in range(0, V_SIZE, V_BLOCK):
        j = start + tl.arange(0, V_BLOCK)
        at = (first * H + h) * V_SIZE
        e = load_tile(ERROR, at, H * V_SIZE, j, left, C, V_SIZE).to(DOT)
        dv = factor(load_tile(GV, at, H * V_SIZE, j, left, C, V_SIZE), ERROR, DOT)
        do = load_tile(GY, first * GY_ROW + h * V_SIZE, GY_ROW, j, left, C, V_SIZE)
        do = factor(do, ERROR, DOT)
        cells, exist = state_cells(program, i, j, P_SIZE, V_SIZE)
        S = tl.load(STATES + cells, exist & (i[:, None] < rows), 0.0).to(DOT)
        dq = tl.dot(do, tl.trans(S), dq, input_precision=PRECISION)
        dk = tl.dot(dv, tl.trans(S), dk, input_precision=PRECISION)
        J = tl.dot(do, tl.trans(e), J, input_precision=PRECISION)
        M = tl.dot(dv, tl.trans(e), M, input_precision=PRECISION)
        J_T = tl.dot(e, tl.trans(do), J_T, input_precision=PRECISION)
        M_T = tl.dot(e, tl.trans(dv), M_T, input_precision=PRECISION)

    q = load_tile(Q, first * Q_ROW + h * P_SIZE, Q_ROW, i, left, C, P_SIZE)
    k = load_tile(K, first * K_ROW + h * P_SIZE, K_ROW, i, left, C, P_SIZE)
    q, k = factor(q, ERROR, DOT), factor(k, ERROR, DOT)
    beta = load_tokens(BETA, first, h, H, left, C)
    difference = G[:, None] - G[None, :]
    until = token[:, None] >= token[None, :]
    before = token[:, None] > token[None, :]
    ratio = tl.exp(tl.where(until, difference, float("-inf")))
    J *= scale * ratio
    M = tl.where(before, -ratio * M, 0.0)
    pairs = J * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    pairs += M * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    grad_beta = tl.sum(pairs, 0)
    grad_G = tl.sum(pairs * beta[None, :], 1)

    grown = tl.exp(G)[:, None]
    dq *= scale * grown
    dk *= -grown
    grad_G += tl.sum(dq * q.to(tl.float32), 1) + tl.sum(dk * k.to(tl.float32), 1)
    J, M = factor(J * beta[None, :], ERROR, DOT), factor(M * beta[None, :], ERROR, DOT)
    dq = tl.dot(J, k, dq, input_precision=PRECISION)
    dk = tl.dot(M, k, dk, input_precision=PRECISION)
    store_tile(GQ, (first * H + h) * P_SIZE, H * P_SIZE, i, left, dq, C, P_SIZE)

    # row i of the transposes belongs to the token that is written, so their masks are transposed
    ratio = tl.exp(tl.where(token[:, None] <= token[None, :], -difference, float("-inf")))
    J_T = factor(scale * ratio * J_T * beta[:, None], ERROR, DOT)
    M_T = tl.where(token[:, None] < token[None, :], -ratio * M_T, 0.0)
    M_T = factor(M_T * beta[:, None], ERROR, DOT)
    dk = tl.dot(J_T, q, dk, input_precision=PRECISION)
    dk = tl.dot(M_T, k, dk, input_precision=PRECISION)

    Z = tl.zeros((C, P_BLOCK), tl.float32)
    product = tl.zeros((P_BLOCK, V_BLOCK), tl.float32)
    for start in range(0, V_SIZE, V_BLOCK):
        j = start + tl.arange(0, V_BLOCK)
        at = (first * H + h) * V_SIZE
        e = load_tile(ERROR, at, H * V_SIZE, j, left, C, V_SIZE).to(DOT)
        cells, exist = state_cells(program, i, j, P_SIZE, V_SIZE)
        dS = tl.load(GS + cells, exist & (i[:, None] < grad_rows), 0.0).to(DOT)
        Z = tl.dot(e, tl.trans(dS), Z, input_precision=PRECISION)
        if GATED:
            S = tl.load(STATES + cells, exist & (i[:, None] < rows), 0.0).to(tl.float32)
            product += S * dS.to(tl.float32)
    Z *= tl.exp(total - G)[:, None]
    dk += beta[:, None] * Z
    store_tile(GK, (first * H + h) * P_SIZE, H * P_SIZE, i, left, dk, C, P_SIZE)
    of_state = tl.sum(Z * k.to(tl.float32), 1)
    grad_beta += of_state
    at = (first + token) * H + h
    tl.store(GBETA + at, grad_beta, token < left)
    if GATED:
        # what the chunk adds to S, and S before it, decay until the last token
        last = tl.sum(beta * of_state, 0) + tl.exp(total) * tl.sum(tl.sum(product, 1), 0)
        grad_G -= beta * grad_beta
        later = tl.sum(tl.where(before, 0.0, grad_G[None, :]), 1)
        tl.store(GDECAY + at, later + last, token < left)
