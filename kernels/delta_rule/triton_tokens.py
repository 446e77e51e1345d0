"""The gated delta rule in Triton: a program for each sample, head and block of value channels.

The memory S stays in registers for all tokens. Forward keeps the error value - S^T key of each
step, which has v numbers where S has p v. Backward carries the cotangent of S from the last token
to the first, for which the errors suffice, and then computes S again from the first token to the
last, as forward did: S of no token is kept, and none is divided by a decay, which may be 0. Both
passes together have the sums and products of one pass in which S is at hand.

Letters: b batch, t time, k Householder steps a token, h heads, p key channels and v value channels
of a head, n blocks of value channels.
"""

import triton
import triton.language as tl


@triton.jit
def _row(X, at, i, SIZE: tl.constexpr):
    """Numbers i of row `at` of rows of SIZE numbers, and zeros after its end."""
    return tl.load(X + at * SIZE + i, i < SIZE, 0.0).to(tl.float32)


@triton.jit
def _parts(X, at, i, SIZE: tl.constexpr):
    """Row `at` in parts of the length of i."""
    parts = ()
    for start in tl.static_range(0, SIZE, i.shape[0]):
        parts = parts + (_row(X, at, start + i, SIZE),)
    return parts


@triton.jit
def _step(X, K, BETA, at, i, j, P_SIZE: tl.constexpr, V_SIZE: tl.constexpr):
    """Key and beta of a step, and numbers j of its row of X."""
    return _parts(K, at, i, P_SIZE), tl.load(BETA + at).to(tl.float32), _row(X, at, j, V_SIZE)


@triton.jit
def _decay(DECAY, token, GATED: tl.constexpr):
    return tl.load(DECAY + token).to(tl.float32) if GATED else 0.0


@triton.jit
def _cells(X, program, row, j, P_SIZE: tl.constexpr, V_SIZE: tl.constexpr):
    """Places of rows of a memory, which is transposed, and which of them exist."""
    row = row[:, None]
    cells = X + (program * V_SIZE + j[None, :]) * P_SIZE + row
    # the hint forbids vectors of rows: neighbouring threads hold neighbouring rows, as of a key
    return tl.multiple_of(cells, (1, 1)), (row < P_SIZE) & (j[None, :] < V_SIZE)


@triton.jit
def _memory(X, program, i, j, P_SIZE: tl.constexpr, V_SIZE: tl.constexpr):
    """Columns j of a memory, in parts of its rows."""
    parts = ()
    for start in tl.static_range(0, P_SIZE, i.shape[0]):
        cells, inside = _cells(X, program, start + i, j, P_SIZE, V_SIZE)
        parts = parts + (tl.load(cells, inside, 0.0).to(tl.float32),)
    return parts


@triton.jit
def _store_memory(X, S, program, i, j, P_SIZE: tl.constexpr, V_SIZE: tl.constexpr):
    for n in tl.static_range(len(S)):
        cells, inside = _cells(X, program, i + n * i.shape[0], j, P_SIZE, V_SIZE)
        tl.store(cells, S[n], inside)


@triton.jit
def _add(S, k, v):
    """S + k v^T."""
    parts = ()
    for n in tl.static_range(len(S)):
        parts = parts + (S[n] + k[n][:, None] * v[None, :],)
    return parts


@triton.jit
def _recall(S, k):
    """S^T k."""
    cells = S[0] * k[0][:, None]
    for n in tl.static_range(1, len(S)):
        cells += S[n] * k[n][:, None]
    return tl.sum(cells, 0)


@triton.jit
def _times(S, v, X, at, i, SIZE: tl.constexpr, ADD: tl.constexpr):
    """S v in parts, written to row `at` of X, or added to it."""
    products = ()
    for n in tl.static_range(len(S)):
        product, channel = tl.sum(S[n] * v[None, :], 1), i + n * i.shape[0]
        if ADD:  # without waiting for what is there
            tl.atomic_add(X + at * SIZE + channel, product, channel < SIZE, sem="relaxed")
        else:
            tl.store(X + at * SIZE + channel, product, channel < SIZE)
        products = products + (product,)
    return products


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    BETA,
    DECAY,
    S0,
    Y,
    ERROR,
    S_LAST,
    t,
    H,
    GATED: tl.constexpr,
    STEPS: tl.constexpr,
    P_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j = tl.arange(0, PART), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    S = _memory(S0, program, i, j, P_SIZE, V_SIZE)
    first, last = b * t * STEPS * H + h, t * STEPS - 1
    ahead = _step(V, K, BETA, first, i, j, P_SIZE, V_SIZE)
    next_decay = _decay(DECAY, b * t * H + h, GATED)
    for place in range(t):
        token = (b * t + place) * H + h
        q, decay = _parts(Q, token, i, P_SIZE), next_decay
        next_decay = _decay(DECAY, (b * t + tl.minimum(place + 1, t - 1)) * H + h, GATED)
        if GATED:
            S = [part * tl.exp(decay) for part in S]
        for step in range(STEPS):
            n = place * STEPS + step
            k, beta, v = ahead
            next_at = first + tl.minimum(n + 1, last) * H
            ahead = _step(V, K, BETA, next_at, i, j, P_SIZE, V_SIZE)  # awaited in the next step
            error = v - _recall(S, k)
            tl.store(ERROR + (first + n * H) * V_SIZE + j, error, j < V_SIZE)
            S = _add(S, k, beta * error)
        tl.store(Y + token * V_SIZE + j, _recall(S, q) * P_SIZE**-0.5, j < V_SIZE)
    _store_memory(S_LAST, S, program, i, j, P_SIZE, V_SIZE)


@triton.jit
def backward_kernel(
    Q,
    K,
    V,
    BETA,
    DECAY,
    S0,
    ERROR,
    GY,
    GS_LAST,
    GQ,
    GK,
    GV,
    GBETA,
    GDECAY,
    GS0,
    t,
    H,
    GATED: tl.constexpr,
    STEPS: tl.constexpr,
    P_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """GQ, GK, GBETA and GDECAY are the parts of their gradients that a block of channels gives."""
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j = tl.arange(0, PART), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.program_id(1).to(tl.int64) * tl.num_programs(0) * t  # in tokens
    first, last = b * t * STEPS * H + h, t * STEPS - 1
    grad_S = _memory(GS_LAST, program, i, j, P_SIZE, V_SIZE)
    ahead = _step(ERROR, K, BETA, first + last * H, i, j, P_SIZE, V_SIZE)
    token = (b * t + t - 1) * H + h
    q, grad_o = _parts(Q, token, i, P_SIZE), _row(GY, token, j, V_SIZE)
    for passed in range(t):
        token = (b * t + t - 1 - passed) * H + h
        grad_S = _add(grad_S, q, grad_o * P_SIZE**-0.5)
        before = (b * t + tl.maximum(t - 2 - passed, 0)) * H + h
        q, grad_o = _parts(Q, before, i, P_SIZE), _row(GY, before, j, V_SIZE)
        decay = _decay(DECAY, token, GATED)
        for back in range(STEPS):
            n = last - passed * STEPS - back
            k, beta, error = ahead
            next_at, at = first + tl.maximum(n - 1, 0) * H, first + n * H
            ahead = _step(ERROR, K, BETA, next_at, i, j, P_SIZE, V_SIZE)
            _times(grad_S, beta * error, GK, own * STEPS + at, i, P_SIZE, False)
            grad_step = _recall(grad_S, k)
            tl.store(GBETA + own * STEPS + at, tl.sum(grad_step * error, 0))
            grad_v = beta * grad_step
            tl.store(GV + at * V_SIZE + j, grad_v, j < V_SIZE)
            grad_S = _add(grad_S, k, -grad_v)
        if GATED:
            grad_S = [part * tl.exp(decay) for part in grad_S]
    _store_memory(GS0, grad_S, program, i, j, P_SIZE, V_SIZE)

    tl.debug_barrier()  # before a thread reads of GV, or adds to GK, what another has written
    S = _memory(S0, program, i, j, P_SIZE, V_SIZE)
    # The gradient of a log decay is the sum of S times its cotangent. A decay leaves that sum, a
    # step adds value * grad_value to it, and an output takes o * grad_o = query * grad_query.
    product = 0.0
    for n_part in tl.static_range(len(S)):
        product += tl.sum(tl.sum(S[n_part] * grad_S[n_part], 1), 0)
    ahead = _step(ERROR, K, BETA, first, i, j, P_SIZE, V_SIZE)
    next_v, next_grad_v = _row(V, first, j, V_SIZE), _row(GV, first, j, V_SIZE)
    next_decay = _decay(DECAY, b * t * H + h, GATED)
    for place in range(t):
        token = (b * t + place) * H + h
        q, grad_o = _parts(Q, token, i, P_SIZE), _row(GY, token, j, V_SIZE)
        decay = next_decay
        next_decay = _decay(DECAY, (b * t + tl.minimum(place + 1, t - 1)) * H + h, GATED)
        if GATED:
            tl.store(GDECAY + own + token, product)
            S = [part * tl.exp(decay) for part in S]
        for step in range(STEPS):
            n = place * STEPS + step
            k, beta, error = ahead
            v, grad_v = next_v, next_grad_v
            next_at = first + tl.minimum(n + 1, last) * H
            ahead = _step(ERROR, K, BETA, next_at, i, j, P_SIZE, V_SIZE)
            next_v, next_grad_v = _row(V, next_at, j, V_SIZE), _row(GV, next_at, j, V_SIZE)
            _times(S, -grad_v, GK, own * STEPS + first + n * H, i, P_SIZE, True)
            S = _add(S, k, beta * error)
            if GATED:
                product += tl.sum(grad_v * v, 0)
        grad_q = _times(S, grad_o * P_SIZE**-0.5, GQ, own + token, i, P_SIZE, False)
        if GATED:
            for n_part in tl.static_range(len(S)):
                product -= tl.sum(grad_q[n_part] * q[n_part], 0)
