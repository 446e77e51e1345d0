"""The walk through the tokens of a sweep without feedback in chunks, for few samples.

The channels of a sample are spread over several programs, which exchange sums over the channels
once a chunk instead of once a token. A program first runs the plain scan of x, without e, through
the chunk, and computes U p of each token from it. What e of a token t adds to U p of a later token
s of the chunk is a matrix that depends on raw values alone,

    K_st = U_s diag(s_t * sum over n of C_s B_t lambda_{t+1} ... lambda_s) U_t^T,

so that every program can complete q_s = U_s p_s + c_s + sum over t < s of K_st e_t and solve for
e_s, token after token, in scalars. Then it runs the scan of x + U^T e through the chunk, from the
same memory. The adjoint takes the tokens in reverse order, with K_st^T.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_coupled, fast_scale
from bedouin.kernels.device.reflections import (
    add,
    combine,
    joined_sums,
    load_tuple,
    rows_times,
    store_sums,
    store_tuple,
    take_apart,
)
from bedouin.kernels.device.sync import collect, post
from bedouin.kernels.direct.open_loop.triton_walk import (
    decay_of,
    load_rows,
    read_memory,
    solve_row,
    solve_row_transposed,
)
from bedouin.kernels.direct.triton_bundles import matrix_of, strided_row


@triton.jit
def _written(
    value, vector, delta, A_log2,
    INPUT_SCALE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """(s * value) B^T (n, d)."""
    if INPUT_SCALE == "one_minus_decay":
        _, s = build_coupled(A_log2 * delta[None, :], FULL, FAST)
        return s * value[None, :] * vector[:, None]
    else:
        value *= fast_scale(delta, INPUT_SCALE, FAST)
        return value[None, :] * vector[:, None]


@triton.jit(do_not_specialize=["t_end", "chunks", "per_head"])
def couplings_kernel(
    raw_ptr,  # (b, t, r)
    delta_ptr,  # (b, t, d), Delta
    solver_ptr,  # (b, t, WIDTH), as in triton_prepare.py
    A_ptr,  # (n, d) or (H, n, d), log2(e) A
    couplings_ptr,  # (b, chunks, TOKENS (TOKENS - 1) / 2, K, K), written: the pair of tokens t and
    # s > t of a chunk is at s (s - 1) / 2 + t; zeros for tokens past the end
    t_end,
    chunks,
    per_head,  # samples of a head; None: one head
    d: tl.constexpr,
    n: tl.constexpr,
    raw_stride_b,
    raw_stride_t,
    TOKENS: tl.constexpr,  # of a chunk
    WIDTH: tl.constexpr,  # of a row of `solver`
    BC_AT: tl.constexpr,  # where B is in it
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,  # channels at a time
    BLOCK_N: tl.constexpr,
    SELECTIVE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """K_st of all pairs of tokens of a chunk, one program a chunk."""
    U_AT: tl.constexpr = d + (2 * n if SELECTIVE else 0)
    PAIRS: tl.constexpr = TOKENS * (TOKENS - 1) // 2
    chunk = tl.program_id(0).to(tl.int64)
    sample, start = chunk // chunks, chunk % chunks * TOKENS
    rows, neighbours = tl.arange(0, BLOCK_N), tl.multiple_of(tl.arange(0, BLOCK_D), 1)
    in_n = rows < n
    A = matrix_of(A_ptr, sample, per_head, d, n)
    raw = raw_ptr + tl.multiple_of(sample * raw_stride_b, ALIGNED) + U_AT
    deltas = delta_ptr + sample * t_end * d
    solvers = solver_ptr + sample * t_end * WIDTH + BC_AT + rows
    zero, one = tl.zeros([BLOCK_D], dtype=ACC), tl.full([BLOCK_D], 1.0, ACC)
    sums = ()
    for _ in tl.static_range(PAIRS * K * K):
        sums = sums + (zero,)
    for block in range(0, (d + BLOCK_D - 1) // BLOCK_D):
        cols = block * BLOCK_D + neighbours
        in_d = cols < d
        in_state = in_n[:, None] & in_d[None, :]
        A_log2 = tl.load(A + rows[:, None] * d + cols[None, :], mask=in_state, other=0.0)
        # what each token so far writes, as far as it has decayed, and its reflections
        written = ()
        before = ()
        terms = ()
        for s in tl.static_range(TOKENS):
            t = start + s
            here = in_d & (0 * cols + t < t_end)
            delta = tl.load(deltas + t * d + cols, mask=here, other=0.0)
            u = load_rows(raw + tl.multiple_of(t * raw_stride_t, ALIGNED), cols, here, d, K)
            row = solvers + tl.minimum(t, t_end - 1) * WIDTH
            u = _convert(u, K, ACC)
            if s > 0:
                C = tl.load(row + n, mask=in_n, other=0.0)
                decay = decay_of(delta, A_log2, rows, True, FULL, FAST)
                decayed = ()
                for i in tl.static_range(s):
                    m = written[i] * decay
                    decayed = decayed + (m,)
                    gained = rows_times(u, tl.sum(m * C[:, None], axis=0), K)
                    for j in tl.static_range(K):
                        terms = terms + rows_times(before[i * K : (i + 1) * K], gained[j], K)
                written = decayed
            if s + 1 < TOKENS:
                B = tl.load(row, mask=in_n, other=0.0)
                written = written + (_written(one, B, delta, A_log2, INPUT_SCALE, FULL, FAST),)
                before = before + u
        sums = add(sums, terms, PAIRS * K * K)
    store_sums(couplings_ptr + chunk * (PAIRS * K * K), sums)


@triton.jit
def _convert(values, N: tl.constexpr, ACC: tl.constexpr):
    out = ()
    for i in tl.static_range(N):
        out = out + (values[i].to(ACC),)
    return out


@triton.jit
def _load_chunk(
    raw, given, deltas, start, t_end, raw_stride_t, given_stride_t, cols, in_d,
    d: tl.constexpr, TOKENS: tl.constexpr, K: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Delta, the given value and u_1 .. u_k of each token, not converted; zeros past the end."""
    out = ()
    for j in tl.static_range(TOKENS):
        t = start + j
        here = in_d & (0 * cols + t < t_end)
        delta = tl.load(deltas + t * d + cols, mask=here, other=0.0)
        value = tl.load(given + t * given_stride_t + cols, mask=here, other=0.0)
        u = load_rows(raw + tl.multiple_of(t * raw_stride_t, ALIGNED), cols, here, d, K)
        out = out + (delta, value) + u
    return out


@triton.jit
def _rows_of(held, j: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr):
    """u_1 .. u_k of token j of what `_load_chunk` returned."""
    return _convert(held[j * (K + 2) + 2 : (j + 1) * (K + 2)], K, ACC)


@triton.jit
def _prefetch(pointers, FAST: tl.constexpr):
    """Load sectors of lines into the first level of cache, without registers for them."""
    if FAST:
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _gather(
    m, held, row, rows, in_n, A_log2, j: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr,
    REVERSE: tl.constexpr, K: tl.constexpr,
    INPUT_SCALE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The memory behind token j of the scan without e, and u_1 p .. u_k p, whose sums over the
    channels are U p."""
    delta, value = held[j * (K + 2)], held[j * (K + 2) + 1].to(ACC)
    u = _rows_of(held, j, K, ACC)
    vector = tl.load(row + READ + rows, mask=in_n, other=0.0)
    written = tl.load(row + WRITTEN + rows, mask=in_n, other=0.0)
    if REVERSE:
        read = read_memory(m, vector, delta, A_log2, True, INPUT_SCALE, FULL, FAST)
        m += value[None, :] * written[:, None]
        m *= decay_of(delta, A_log2, rows, True, FULL, FAST)
    else:
        m *= decay_of(delta, A_log2, rows, True, FULL, FAST)
        read = read_memory(m, vector, delta, A_log2, False, INPUT_SCALE, FULL, FAST)
        m += _written(value, written, delta, A_log2, INPUT_SCALE, FULL, FAST)
    return m, rows_times(u, read, K)


@triton.jit
def _pass(
    h, held, weights, row, rows, in_n, A_log2,
    j: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr,
    REVERSE: tl.constexpr, K: tl.constexpr,
    INPUT_SCALE: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The memory behind token j, and its y or v."""
    delta = held[j * (K + 2)]
    value = held[j * (K + 2) + 1].to(ACC)
    value += combine(weights[j * K : (j + 1) * K], _rows_of(held, j, K, ACC), K)
    written = tl.load(row + WRITTEN + rows, mask=in_n, other=0.0)
    if REVERSE:
        h += value[None, :] * written[:, None]
        h *= decay_of(delta, A_log2, rows, True, FULL, FAST)
        return h, value
    else:
        h *= decay_of(delta, A_log2, rows, True, FULL, FAST)
        h += _written(value, written, delta, A_log2, INPUT_SCALE, FULL, FAST)
        vector = tl.load(row + READ + rows, mask=in_n, other=0.0)
        return h, read_memory(h, vector, delta, A_log2, False, INPUT_SCALE, FULL, FAST)


@triton.jit
def _add_coupling(q, weights, pair, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """q + K_st weights, or q + K_st^T weights."""
    entries = load_tuple(pair, K * K)
    out = ()
    for i in tl.static_range(K):
        total = q[i] + entries[i if TRANSPOSED else i * K] * weights[0]
        for j in tl.static_range(K):
            if j > 0:
                total += entries[(j * K + i) if TRANSPOSED else (i * K + j)] * weights[j]
        out = out + (total,)
    return out


@triton.jit
def _solve_chunk(
    q, solvers, couplings, start, t_end,
    REVERSE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """E e, or if REVERSE E f, of all tokens (TOKENS K,), from the sums q over the channels."""
    weights = ()
    for step in tl.static_range(TOKENS):
        at = TOKENS - 1 - step if REVERSE else step
        row = solvers + tl.minimum(start + at, t_end - 1) * WIDTH
        here = load_tuple(row, K)
        if REVERSE:
            here = add(here, q[(TOKENS - 1 - step) * K : (TOKENS - step) * K], K)
        else:
            here = add(here, q[step * K : (step + 1) * K], K)
        # the tokens before this one in the order of the walk, the one next to it last
        for before in tl.static_range(step):
            if REVERSE:
                # token t is `at`, token s the one TOKENS - 1 - before
                s = TOKENS - 1 - before
                pair = couplings + (s * (s - 1) // 2 + at) * K * K
                weights_s = weights[(step - 1 - before) * K : (step - before) * K]
                here = _add_coupling(here, weights_s, pair, K, True)
            else:
                pair = couplings + (step * (step - 1) // 2 + before) * K * K
                weights_t = weights[before * K : (before + 1) * K]
                here = _add_coupling(here, weights_t, pair, K, False)
        if REVERSE:
            weights = solve_row_transposed(here, row, K) + weights
        else:
            weights = weights + solve_row(here, row, K)
    return weights


@triton.jit(
    do_not_specialize=["t_end", "chunks", "first_chunk", "last_chunk", "every", "slots", "per_head"]
)
def chunks_kernel(
    given_ptr,  # (b, t, d) or (H, b / H, t, d): x, or if REVERSE the cotangent of y
    raw_ptr,  # (b, t, r)
    delta_ptr,  # (b, t, d), Delta
    solver_ptr,  # (b, t, WIDTH), as in triton_prepare.py
    couplings_ptr,  # (b, chunks, TOKENS (TOKENS - 1) / 2, K, K), as of `couplings_kernel`
    A_ptr,  # (n, d) or (H, n, d), log2(e) A
    h_ptr,  # (b, n, d): the first memory, overwritten by the last; or the cotangent of the last,
    # overwritten by that of the first
    out_ptr,  # (b, t, d), written: y, or v
    e_ptr,  # (b, t, K), written unless REVERSE: E e
    kept_ptr,  # (b, slots, n, d), written: h before tokens every, 2 every, ...; or the cotangents
    # of h after tokens every - 1, 2 every - 1, ..., and of the last
    sums_ptr,  # (2, b, PARTS, 2^LEVELS), int64, for float64 twice as many, zeros: sums over the
    # channels of each program, of a chunk and of the one before it
    t_end,
    chunks,
    first_chunk,  # of this launch, in the order of the walk
    last_chunk,  # the one after the last of this launch
    every,  # a multiple of TOKENS
    slots,
    per_head,  # samples of a head; None: one head
    d: tl.constexpr,
    n: tl.constexpr,
    given_stride_h,  # None: one head
    given_stride_b,
    given_stride_t,
    raw_stride_b,
    raw_stride_t,
    REVERSE: tl.constexpr,
    GATHER: tl.constexpr,  # compute the sums of the chunks
    SPREAD: tl.constexpr,  # use them
    TOKENS: tl.constexpr,  # of a chunk
    PARTS: tl.constexpr,  # programs of a sample
    ROWS: tl.constexpr,  # a power of two, at least PARTS
    LEVELS: tl.constexpr,  # 2^LEVELS is at least TOKENS K
    WIDTH: tl.constexpr,  # of a row of `solver`
    SECTORS: tl.constexpr,  # a power of two, at least WIDTH / 8
    PAIR_SECTORS: tl.constexpr,  # of the couplings of a chunk, likewise
    BC_AT: tl.constexpr,  # where B is in it
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,  # channels of a program
    BLOCK_N: tl.constexpr,
    SELECTIVE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """What `walk_kernel` computes, PARTS programs a sample. With one chunk a launch, once with
    GATHER and once with SPREAD, the programs of a launch need not run at the same time."""
    SUMS: tl.constexpr = 2**LEVELS
    PAIR_SIZE: tl.constexpr = TOKENS * (TOKENS - 1) // 2 * K * K
    WORDS: tl.constexpr = 2 * SUMS if ACC == tl.float64 else SUMS
    READ: tl.constexpr = BC_AT if REVERSE else BC_AT + n
    WRITTEN: tl.constexpr = BC_AT + n if REVERSE else BC_AT
    U_AT: tl.constexpr = d + (2 * n if SELECTIVE else 0)
    sample, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0) % PARTS
    samples = tl.num_programs(0).to(tl.int64) // PARTS
    rows = tl.arange(0, BLOCK_N)
    # A thread has one channel, and all of its states: not four neighbours, which the compiler would
    # give it if it knew that they are aligned.
    cols = part * BLOCK_D + tl.multiple_of(tl.arange(0, BLOCK_D), 1)
    in_n, in_d = rows < n, cols < d
    state = rows[:, None] * d + cols[None, :]
    in_state = in_n[:, None] & in_d[None, :]
    A = matrix_of(A_ptr, sample, per_head, d, n) + state
    A_log2 = tl.load(A, mask=in_state, other=0.0)
    h_at = h_ptr + sample * n * d + state
    h = tl.load(h_at, mask=in_state, other=0.0)
    kept = kept_ptr + sample * slots * n * d + state
    if REVERSE and GATHER:
        if first_chunk == 0:
            tl.store(kept + (slots - 1).to(tl.int64) * (n * d), h, mask=in_state)
    raw = raw_ptr + tl.multiple_of(sample * raw_stride_b, ALIGNED) + U_AT
    given = strided_row(
        given_ptr, sample, 0, per_head, given_stride_h, given_stride_b, given_stride_t
    )
    deltas = delta_ptr + sample * t_end * d
    solvers = solver_ptr + sample * t_end * WIDTH
    couplings = couplings_ptr + sample * chunks * PAIR_SIZE
    step = -1 if REVERSE else 1
    enters = chunks - 1 if REVERSE else chunks * 0
    entered = enters + step * first_chunk
    # the next slot, and the chunks before the one after which it is written
    per_slot = every // TOKENS
    if REVERSE:
        slot, until = entered // per_slot - 1, entered % per_slot
    else:
        slot, until = entered // per_slot, per_slot - 1 - entered % per_slot
    start = entered.to(tl.int64) * TOKENS
    held = _load_chunk(
        raw, given, deltas, start, t_end, raw_stride_t, given_stride_t, cols, in_d,
        d, TOKENS, K, ALIGNED,
    )  # fmt: skip
    for i in range(first_chunk, last_chunk):
        chunk = (enters + step * i).to(tl.int64)
        start = chunk * TOKENS
        sums = sums_ptr + (i % 2 * samples + sample) * (PARTS * WORDS)
        if GATHER:
            m = h
            values = ()
            for at in tl.static_range(TOKENS):
                if REVERSE:
                    row = solvers + tl.minimum(start + TOKENS - 1 - at, t_end - 1) * WIDTH
                    m, products = _gather(
                        m, held, row, rows, in_n, A_log2, TOKENS - 1 - at, READ, WRITTEN,
                        True, K, INPUT_SCALE, FULL, FAST, ACC,
                    )  # fmt: skip
                    values = products + values
                else:
                    row = solvers + tl.minimum(start + at, t_end - 1) * WIDTH
                    m, products = _gather(
                        m, held, row, rows, in_n, A_log2, at, READ, WRITTEN,
                        False, K, INPUT_SCALE, FULL, FAST, ACC,
                    )  # fmt: skip
                    values = values + products
            post(sums + part * WORDS, joined_sums(values, LEVELS), i + 1)
        ahead = tl.where(i + 1 < last_chunk, start + step * TOKENS, start)
        held_next = _load_chunk(
            raw, given, deltas, ahead, t_end, raw_stride_t, given_stride_t, cols, in_d,
            d, TOKENS, K, ALIGNED,
        )  # fmt: skip
        # the scalars of the next chunk, while this one is exchanged: 8 float32 are a sector
        sector = tl.arange(0, TOKENS * SECTORS)
        token = tl.minimum(ahead + sector // SECTORS, t_end - 1)
        _prefetch(solvers + token * WIDTH + tl.minimum(sector % SECTORS * 8, WIDTH - 8), FAST)
        pair = tl.arange(0, PAIR_SECTORS) * 8
        pairs = couplings + ahead // TOKENS * PAIR_SIZE
        _prefetch(pairs + tl.minimum(pair, PAIR_SIZE - 1), FAST)
        if SPREAD:
            total = collect(sums, i + 1, PARTS, ROWS, SUMS, ACC)
            weights = _solve_chunk(
                take_apart(total, LEVELS),
                solvers, couplings + chunk * PAIR_SIZE, start, t_end,
                REVERSE, TOKENS, WIDTH, K,
            )  # fmt: skip
            for at in tl.static_range(TOKENS):
                t = start + (TOKENS - 1 - at if REVERSE else at)
                row = solvers + tl.minimum(t, t_end - 1) * WIDTH
                h, value = _pass(
                    h, held, weights, row, rows, in_n, A_log2,
                    TOKENS - 1 - at if REVERSE else at, READ, WRITTEN,
                    REVERSE, K, INPUT_SCALE, FULL, FAST, ACC,
                )  # fmt: skip
                out = out_ptr + (sample * t_end + t) * d + cols
                here = in_d & (0 * cols + t < t_end)
                tl.store(out, value.to(out_ptr.dtype.element_ty), mask=here)
                if not REVERSE:
                    if (part == 0) & (t < t_end):
                        e = e_ptr + (sample * t_end + t) * K
                        store_tuple(e, weights[at * K : (at + 1) * K], K)
            if (until == 0) & (i + 1 < chunks):
                tl.store(kept + slot.to(tl.int64) * (n * d), h, mask=in_state)
            slot = tl.where(until == 0, slot + step, slot)
            until = tl.where(until == 0, per_slot, until) - 1
        held = held_next
    if SPREAD:
        tl.store(h_at, h, mask=in_state)
