"""The gated delta rule in chunks of tokens, backward, in Triton; names as in triton_chunks.py.

With the cotangents do of the outputs and dS of the memory after a chunk, and T = I + N diag(beta),

    dv = T^-T (beta (P^T do + exp(G_last - G) k dS))
    dS <- exp(G_last) dS + (exp(G) q)^T do / sqrt(p) - (exp(G) k)^T dv

`reverse_kernel` carries dS from the last chunk to the first. `gradients_kernel` then has a program
for each chunk and head. With J_ij = do_i . e_j / sqrt(p) and M_ij = -dv_i . e_j, both times
exp(G_i - G_j) and zero but for j <= i and for j < i, and Z = exp(G_last - G) e dS^T:

    dq = exp(G) do S^T / sqrt(p) + J (beta k)
    dk = M (beta k) - exp(G) dv S^T + beta (J^T q + M^T k + Z)
    dbeta_j = sum_i (J_ij q_i . k_j + M_ij k_i . k_j) + k_j . Z_j

The gradient of G is q dq, plus the part of k dk in which k is read, minus beta dbeta, plus at the
last token what reaches S there. dq and dk are computed as their transposes, J^T and M^T as products
of their own: so the first factor of every product is a tile as it was loaded, for the reason that
triton_chunks.py gives.
"""

import triton
import triton.language as tl

from bedouin.kernels.delta_rule import triton_chunks as chunks
from bedouin.kernels.delta_rule.triton_chunks import PRECISION


@triton.jit(do_not_specialize=["t", "H", "N"])
def reverse_kernel(
    inputs,  # `DeltaInputs`, with a token for each step, in evenly spaced rows
    apart,  # distances of the rows of query, key and GY
    kept,  # `Kept`
    GY,  # (b, t, h v)
    GS_LAST,  # (b, h, p, v), or None: zeros
    GS,  # as the states that are kept, after each chunk, written
    grads,  # as `inputs`, contiguous, of which that of value is written
    GS0,  # (b, h, p, v), written, or None
    t,
    H,
    N,
    s: tl.constexpr,
):
    """The gradient of v, the cotangents of the memory after each chunk, and where a memory is given
    of that before the first, for one sample, head and block of value channels."""
    blocks: tl.constexpr = (s.V + s.BLOCK - 1) // s.BLOCK
    program = tl.program_id(0).to(tl.int64)
    head = program // blocks
    b, h = head // H, head % H
    j = program % blocks * s.BLOCK + tl.arange(0, s.BLOCK)
    # zeros after the last chunk are not kept
    skipped: tl.constexpr = 0 if GS_LAST is not None else 1
    dS = chunks.load_state(GS_LAST, head, j, s)
    for passed in range(N):
        n = N - 1 - passed
        first, left = b * t + n * s.C, t - n * s.C
        do = chunks.load_columns(GY, apart[2], first, h, j, left, s.C, s.V)
        inverse = chunks.load_square(kept.inverses, head * N + n, s.C)
        scores = chunks.load_square(kept.scores, head * N + n, s.C)
        beta = chunks.load_tokens(inputs.beta, first, h, H, left, s.C)
        G, total = chunks.decays(inputs.log_decay, first, h, H, left, s.C)
        if passed >= skipped:
            chunks.store_state(GS, head * (N - skipped) + n, dS, j, s)
        de = tl.zeros((s.C, s.BLOCK), tl.float32)
        for part in tl.static_range(len(dS)):
            ds = chunks.factor(dS[part], kept.scores)
            k = chunks.load_part(inputs.key, apart[1], first, h, part, left, s)
            de = tl.dot(k, ds, de, input_precision=PRECISION)
        de *= tl.exp(total - G)[:, None]
        de = tl.dot(tl.trans(scores), do, de, input_precision=PRECISION)
        de = chunks.factor(beta[:, None] * de, kept.scores)
        dv = tl.dot(tl.trans(inverse), de, input_precision=PRECISION)
        grown = tl.exp(G)[:, None]
        seen = chunks.factor(grown * do.to(tl.float32) * s.P**-0.5, kept.scores)
        known = chunks.factor(-grown * dv, kept.scores)
        before = ()
        for part in tl.static_range(len(dS)):
            old = tl.exp(total) * dS[part]
            q = chunks.load_part(inputs.query, apart[0], first, h, part, left, s)
            k = chunks.load_part(inputs.key, apart[1], first, h, part, left, s)
            old = tl.dot(tl.trans(q), seen, old, input_precision=PRECISION)
            old = tl.dot(tl.trans(k), known, old, input_precision=PRECISION)
            before = before + (old,)
        dS = before
        chunks.store_tile(grads.value, (first * H + h) * s.V, H * s.V, j, left, dv, s.C, s.V)
    if GS0 is not None:
        chunks.store_state(GS0, head, dS, j, s)


@triton.jit(do_not_specialize=["t", "H", "N"])
def gradients_kernel(
    inputs,  # as in `reverse_kernel`
    apart,  # likewise
    kept,  # likewise
    GY,  # likewise
    GS,  # likewise
    grads,  # as `inputs`, contiguous, of which those of all but value are written
    t,
    H,
    N,
    ENDED: tl.constexpr,
    STARTED: tl.constexpr,
    s: tl.constexpr,
):
    """The gradients of q, k, beta and the log decays of one chunk and head."""
    program = tl.program_id(0).to(tl.int64)
    n, h, b = program % N, program // N % H, program // N // H
    first, left = b * t + n * s.C, t - n * s.C
    token = tl.arange(0, s.C)

    J = tl.zeros((s.C, s.C), tl.float32)
    M = tl.zeros((s.C, s.C), tl.float32)
    J_T = tl.zeros((s.C, s.C), tl.float32)
    M_T = tl.zeros((s.C, s.C), tl.float32)
    for start in range(0, s.V, s.BLOCK):
        j = start + tl.arange(0, s.BLOCK)
        e = chunks.load_columns(kept.errors, H * s.V, first, h, j, left, s.C, s.V)
        dv = chunks.load_columns(grads.value, H * s.V, first, h, j, left, s.C, s.V)
        do = chunks.load_columns(GY, apart[2], first, h, j, left, s.C, s.V)
        J = tl.dot(do, tl.trans(e), J, input_precision=PRECISION)
        M = tl.dot(dv, tl.trans(e), M, input_precision=PRECISION)
        J_T = tl.dot(e, tl.trans(do), J_T, input_precision=PRECISION)
        M_T = tl.dot(e, tl.trans(dv), M_T, input_precision=PRECISION)

    beta = chunks.load_tokens(inputs.beta, first, h, H, left, s.C)
    G, total = chunks.decays(inputs.log_decay, first, h, H, left, s.C)
    scale: tl.constexpr = s.P**-0.5
    before = token[:, None] > token[None, :]
    # rows of the transposes are the tokens that are written, whose beta they have
    after = token[:, None] < token[None, :]
    difference = tl.where(token[:, None] <= token[None, :], G[None, :] - G[:, None], float("-inf"))
    ratio = tl.exp(difference) * beta[:, None]
    J_T = chunks.factor(ratio * scale * J_T, kept.errors)
    M_T = tl.where(after, -ratio * M_T, 0.0)
    ratio = chunks.ratios(G, s.C)
    J *= ratio * scale
    M = tl.where(before, -ratio * M, 0.0)
    both = chunks.factor(M * beta[None, :] + M_T, kept.errors)

    pairs = tl.zeros((s.C, s.C), tl.float32)
    for part in range((s.P + s.PART - 1) // s.PART):
        q = chunks.load_part(inputs.query, apart[0], first, h, part, left, s)
        k = chunks.load_part(inputs.key, apart[1], first, h, part, left, s)
        pairs += J * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        pairs += M * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    grad_beta = tl.sum(pairs, 0)
    grad_G = tl.sum(pairs * beta[None, :], 1)
    J = chunks.factor(J * beta[None, :], kept.errors)

    # S of the first chunk or its cotangent of the last one may be zeros, which were not kept
    first_kept: tl.constexpr = 0 if STARTED else 1
    after_kept = N if ENDED else N - 1
    head = program // N
    of_S, of_dS = head * (N - first_kept) + n - first_kept, head * after_kept + n
    rows_of_S = tl.where(n >= first_kept, s.P, 0)
    rows_of_dS = tl.where(n < after_kept, s.P, 0)
    grown, rest = tl.exp(G)[None, :], tl.exp(total - G)[None, :]
    of_state = tl.zeros((s.C,), tl.float32)
    last = 0.0
    for part in range((s.P + s.PART - 1) // s.PART):
        i = tl.arange(0, s.PART) + part * s.PART
        dq = tl.zeros((s.PART, s.C), tl.float32)
        dk = tl.zeros((s.PART, s.C), tl.float32)
        Z = tl.zeros((s.PART, s.C), tl.float32)
        product = tl.zeros((s.PART,), tl.float32)
        for start in range(0, s.V, s.BLOCK):
            j = start + tl.arange(0, s.BLOCK)
            e = chunks.load_columns(kept.errors, H * s.V, first, h, j, left, s.C, s.V)
            dv = chunks.load_columns(grads.value, H * s.V, first, h, j, left, s.C, s.V)
            do = chunks.load_columns(GY, apart[2], first, h, j, left, s.C, s.V)
            cells, exist = chunks.state_cells(of_S, i, j, s)
            S = chunks.factor(
                tl.load(kept.states + cells, exist & (i[:, None] < rows_of_S), 0.0), kept.states
            )
            cells, exist = chunks.state_cells(of_dS, i, j, s)
            dS = chunks.factor(tl.load(GS + cells, exist & (i[:, None] < rows_of_dS), 0.0), GS)
            dq = tl.dot(S, tl.trans(do), dq, input_precision=PRECISION)
            dk = tl.dot(S, tl.trans(dv), dk, input_precision=PRECISION)
            Z = tl.dot(dS, tl.trans(e), Z, input_precision=PRECISION)
            product += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        q = chunks.load_part(inputs.query, apart[0], first, h, part, left, s)
        k = chunks.load_part(inputs.key, apart[1], first, h, part, left, s)
        q_T, k_T = tl.trans(q).to(tl.float32), tl.trans(k).to(tl.float32)
        dq *= grown * scale
        dk *= -grown
        Z *= rest
        grad_G += tl.sum(dq * q_T, 0) + tl.sum(dk * k_T, 0)
        of_state += tl.sum(Z * k_T, 0)
        last += tl.sum(product, 0)
        dq = tl.dot(tl.trans(k), J_T, dq, input_precision=PRECISION)
        dk = tl.dot(tl.trans(q), J, dk + Z * beta[None, :], input_precision=PRECISION)
        dk = tl.dot(tl.trans(k), both, dk, input_precision=PRECISION)
        place = (first * H + h) * s.P
        chunks.store_tile(grads.query, place, H * s.P, i, left, tl.trans(dq), s.C, s.P)
        chunks.store_tile(grads.key, place, H * s.P, i, left, tl.trans(dk), s.C, s.P)

    grad_beta += of_state
    place = (first + token) * H + h
    tl.store(grads.beta + place, grad_beta, token < left)
    # what the chunk adds to S, and S before it, decay until the last token
    last = tl.sum(beta * of_state, 0) + tl.exp(total) * last
    grad_G -= beta * grad_beta
    later = tl.sum(tl.where(before, 0.0, grad_G[None, :]), 1)
    tl.store(grads.log_decay + place, later + last, token < left)
