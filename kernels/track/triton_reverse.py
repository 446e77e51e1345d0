"""The reverse sweep: what is computed beside it, and the chain itself.

With H the cotangent of h_t that token t + 1 sends, w that of y_t, and q = A a:

    written_ = H B + (B C) w                                      the cotangent of `written`
    raw_ = g H B + slope sum_n H q + read w                       that of raw Delta
    x_ = Delta written_
    w_{t-1} = grad_{t-1} + the adjoint of norm of W_y^T (raw_, x_) + gate_
    H_{t-1} = exp(A Delta) * (H + w C^T - beta written_ B^T)

with gate_ the cotangent of norm(y_{t-1}) that the gate sends. The chain is H, w -> raw_, x_ -> one
product with W_y -> w, and beside that product H -> the sums of H with B and q of the next earlier
token. What it multiplies depends on the sweep alone and is computed for all chunks of tokens at
once by `replay_kernel`, from their first h:

    slope = Delta'(raw);  g = slope (x^ - beta sum_n q B);  read = (B C) g + slope sum_n q C

and so are q itself, and grad_{t-1} with what gate_ adds to it. The gradients of A, B and C are
computed afterwards, from w, written_ and H at the edges of chunks (`triton_gradients.py`), and that
of x^ from written_ (`triton_sweep.py`).
The norm's adjoint subtracts norm(y) <v, norm(y)> / c for v = W_y^T (raw_, x_). That inner product
is one of (raw_, x_) with W_y norm(y), which the sweep has kept: its terms are passed between the
warps together with raw_ and x_, and added with the terms of v.
Letters as in `triton_sweep.py`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import LN2, exp2
from bedouin.kernels.track import device


@triton.jit
def _load_replayed(
    first,  # pointers to the rows of x, of Delta and `written`, fed, scalars, B, C, zeros (P,),
    # past, grad_y and grad_normed
    stride,  # of x
    grad_stride,  # of grad_y and grad_normed
    step,
    s,
):
    x = device.load_vector(first[0] + step * stride, s.c, s)
    row = device.load_vector(first[1] + step * s.P, s.P, s)
    fed = device.load_vector(first[2] + step * s.P, s.P, s)
    at = first[3] + step * 2 + first[6]
    B = device.load_row(first[4] + step * s.WORDS, s)
    C = device.load_row(first[5] + step * s.WORDS, s)
    past = device.load_vector(first[7] + step * s.P, s.P, s)
    grad_y = device.load_vector(first[8] + tl.maximum(step - 1, 0) * grad_stride, s.c, s)
    grad_normed = device.load_vector(first[9] + step * grad_stride, s.c, s)
    return x, row, fed, tl.load(at), tl.load(at + 1), B, C, past, grad_y, grad_normed


@triton.jit(do_not_specialize=["t_end", "H"])
def replay_kernel(
    inputs,  # `Recurrence`
    strides,  # of the samples and tokens of x, B, C, delta and erase
    kept,  # `Kept`
    grad_y_ptr,  # (b, t, H c)
    grad_normed_ptr,  # (b, t, H c), of norm(y_{t-1})
    memory_ptr,  # (f, t, N P / V), written: words of q
    factors_ptr,  # (f, t, P), written: pairs of g and read
    slopes_ptr,  # (f, t, P), written: pairs of Delta and its slope
    read_ptr,  # (f, t, P), written: a B
    grad_past_ptr,  # (f, t, P), written: the cotangent of y_{t-1} but for the recurrence
    t_end,
    H,
    s: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of tokens."""
    f = tl.program_id(0).to(tl.int64)
    b, head = f // H, f % H
    chunk = tl.program_id(1)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, t_end)
    p, channels = tl.arange(0, s.P), device.places_of_channels(s)
    places = device.places_of_words(s)
    A = device.load_rates(inputs.A_log + head * s.c * s.n, s)
    h = device.load_kept(kept.states + (f * tl.cdiv(t_end, CHUNK) + chunk) * s.SIZE, s)
    token, row_of_head, grad_stride = f * t_end, (b * t_end * H + head) * s.c, H * s.c
    first = (
        inputs.x + b * strides[0][0] + head * s.c,
        kept.rows + token * s.P,
        kept.fed + token * s.P,
        kept.scalars + token * 2,
        kept.B + token * s.WORDS,
        kept.C + token * s.WORDS,
        device.unknown_zeros(p, t_end, s.P),
        kept.past + token * s.P,
        grad_y_ptr + row_of_head,
        grad_normed_ptr + row_of_head,
    )
    step = tl.cast(begin, tl.int64)
    loaded = _load_replayed(first, strides[0][1], grad_stride, step, s)
    A, h = device.wait_for(A), device.wait_for(h)
    for t in range(begin, end):
        x, row, fed, B_C, beta, B_words, C_words, past, grad_y, grad_normed = loaded
        delta, written = device.unpack(row, 2)
        B, C = device.unpack(B_words, s.V), device.unpack(C_words, s.V)
        mixed = x.to(tl.float32) + device.unpack(fed, 2)[1]
        step = tl.minimum(t + 1, end - 1).to(tl.int64)
        loaded = _load_replayed(first, strides[0][1], grad_stride, step, s)
        products = ()
        after = ()
        r = tl.zeros((s.WORDS // s.NL, s.P, s.NL), tl.float32)
        q_B = r
        q_C = r
        for v in tl.static_range(s.V):
            a = exp2(A[v] * delta[None, :, None]) * h[v]
            q = device.not_zero(A[v]) * a
            products = products + (q,)
            r += a * B[v][:, None, :]
            q_B += q * B[v][:, None, :]
            q_C += q * C[v][:, None, :]
            after = after + (a + written[None, :, None] * B[v][:, None, :],)
        h = after
        slope = device.slope_of(delta)
        g = slope * (mixed - beta * LN2 * device.over_states(q_B))
        read = B_C * g + slope * LN2 * device.over_states(q_C)
        place = token + t
        memory, word = memory_ptr + place * (s.SIZE // s.V), device.pack(products, s.V)
        tl.store(memory + places[0] + places[1], word)
        device.put(factors_ptr + place * s.P, device.pair(g, read), channels, s.P, s)
        device.put(slopes_ptr + place * s.P, device.pair(delta, slope * LN2), channels, s.P, s)
        device.put(read_ptr + place * s.P, device.over_states(r), channels, s.P, s)
        y_past, inverse = device.unpack(past, 2)
        grad_normed, normed = grad_normed.to(tl.float32), y_past * inverse
        grad_past = inverse * (grad_normed - normed * (tl.sum(grad_normed * normed, 0) / s.c))
        grad_past += tl.where(t > 0, grad_y.to(tl.float32), 0.0)
        device.put(grad_past_ptr + place * s.P, grad_past, channels, s.P, s)


@triton.jit
def _load_transposed(ptr, dtype: tl.constexpr, s):
    """W_y (2 c, c) of Delta and x by outputs, (P / NL, 4, P, NL) for output jr NL + jl of input p,
    and zeros for two vectors more."""
    jr, vector, jl = tl.arange(0, s.P // s.NL), tl.arange(0, 4), tl.arange(0, s.NL)
    p = tl.arange(0, s.P)[None, None, :, None]
    j = (jr * s.NL)[:, None, None, None] + jl[None, None, None, :]
    vector = vector[None, :, None, None]
    inside = (j < s.c) & (p < s.c) & (vector < 2)
    return device.load_rounded(ptr + (vector * (s.c * s.c) + j * s.c + p), inside, dtype)


@triton.jit
def _load_token(
    first,  # pointers to the rows of slopes, factors, fed, past, B, C, scalars, q, zeros, grad_past
    step,
    places,
    s,
):
    """What the chain reads of a token, as it is in memory: a conversion would wait for it."""
    slopes = device.load_vector(first[0] + step * s.P, s.P, s)
    factors = device.load_vector(first[1] + step * s.P, s.P, s)
    fed = device.load_vector(first[2] + step * s.P, s.P, s)
    past = device.load_vector(first[3] + step * s.P, s.P, s)
    grad_past = device.load_vector(first[9] + step * s.P, s.P, s)
    B = device.load_row(first[4] + step * s.WORDS, s)
    C = device.load_row(first[5] + step * s.WORDS, s)
    at = first[6] + step * 2 + first[8]
    scalars = tl.load(at), tl.load(at + 1)
    q = tl.load(first[7] + step * (s.P * s.WORDS) + places[0] + places[1])
    return slopes, factors, fed, past, grad_past, scalars, B, C, q


@triton.jit
def _with_memory(H, B_words, q_words, s):
    """The sums over states of H with B and with q, each (P,)."""
    B, q = device.unpack(B_words, s.V), device.unpack(q_words, s.V)
    H_B = H[0] * B[0][:, None, :]
    H_q = H[0] * q[0]
    for v in tl.static_range(1, s.V):
        H_B += H[v] * B[v][:, None, :]
        H_q += H[v] * q[v]
    return device.over_states(H_B), device.over_states(H_q)


@triton.jit(do_not_specialize=["t_end", "H_heads"])
def reverse_kernel(
    inputs,  # `Recurrence`
    kept,  # `Kept`
    slopes_ptr,  # (f, t, P): pairs of Delta and its slope
    factors_ptr,  # (f, t, P): pairs of g and read
    memory_ptr,  # (f, t, N P / V), words of q
    grad_past_ptr,  # (f, t, P): the cotangent of y_{t-1} but for the recurrence
    grad_y_ptr,  # (b, t, H c), of which the last token is read
    last_ptr,  # (f, c, n): H after the last token; None: zeros
    grads,  # as `inputs`, of which h0 and y0 are written: H and w before the first token
    edges_ptr,  # (f, chunks, N, P), written: H after the last token of each chunk
    adjoint_ptr,  # (f, t, P), written: pairs of w and written_
    grad_fed_ptr,  # (b, t, H, 2, c), of which the first is written: raw_
    t_end,
    H_heads,
    s: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The tokens of a head of a sample, from the last one to the first."""
    f = tl.program_id(0).to(tl.int64)
    b, head = f // H_heads, f % H_heads
    p, channels = tl.arange(0, s.P), device.places_of_channels(s)
    places = device.places_of_words(s)
    A = device.load_rates(inputs.A_log + head * s.c * s.n, s)
    W = _load_transposed(inputs.W + head * (2 * s.c * s.c), grad_fed_ptr.dtype.element_ty, s)
    slot = tl.arange(0, 4)[None, :, None, None]
    if last_ptr is not None:
        H = device.load_memory(last_ptr + f * s.c * s.n, 0.0, s)
    else:
        H = device.zeros_like(A)
    chunks = tl.cdiv(t_end, CHUNK)
    sample = f * t_end
    first = (
        slopes_ptr + sample * s.P,
        factors_ptr + sample * s.P,
        kept.fed + sample * s.P,
        kept.past + sample * s.P,
        kept.B + sample * s.WORDS,
        kept.C + sample * s.WORDS,
        kept.scalars + sample * 2,
        memory_ptr + sample * (s.P * s.WORDS),
        device.unknown_zeros(p, t_end, s.P),
        grad_past_ptr + sample * s.P,
    )
    step = (t_end - 1).to(tl.int64)
    loaded = _load_token(first, step, places, s)
    last_row = grad_y_ptr + ((b * t_end + step) * H_heads + head) * s.c
    w = device.load_vector(last_row, s.c, s).to(tl.float32)
    part = tl.arange(0, 32)
    A, H = device.wait_for(A), device.wait_for(H)
    H_B, H_q = _with_memory(H, loaded[6], loaded[8], s)
    for passed in range(0, t_end):
        step = (t_end - 1 - passed).to(tl.int64)
        earlier = tl.maximum(step - 1, 0)
        slopes, factor_words, fed, past, grad_past, scalars, B_words, C_words, _ = loaded
        loaded = _load_token(first, earlier, places, s)
        B_C, beta = scalars
        delta, slope = device.unpack(slopes, 2)
        y_past, inverse = device.unpack(past, 2)
        along = y_past * inverse * (-1.0 / s.c)
        g, read = device.unpack(factor_words, 2)
        fed_delta, fed_x = device.unpack(fed, 2)
        # on the chain, from here
        grad_written = H_B + B_C * w
        grad_raw = g * H_B + slope * H_q + read * w
        grad_x = delta * grad_written
        rows = tl.join(tl.join(grad_raw, grad_raw * fed_delta), tl.join(grad_x, grad_x * fed_x))
        # (P, 2, 2) has the last join first: raw_, x_, then the terms of the inner product
        rows = tl.permute(tl.reshape(rows, (s.P // s.NL, s.NL, 4)), (0, 2, 1))[:, :, None, :]
        factor = tl.where(slot < 2, W, along[None, None, :, None])
        w_before = grad_past + inverse * device.over_inputs(factor * rows, 4 * s.P // s.NL, s)
        # to here; beside this product
        if (step + 1 == t_end) | ((step + 1) % CHUNK == 0):
            chunk = f * chunks + step // CHUNK
            device.store_kept(edges_ptr + chunk * s.SIZE, H, s)
        B, C = device.unpack(B_words, s.V), device.unpack(C_words, s.V)
        after = ()
        for v in tl.static_range(s.V):
            grad_h = H[v] + w[None, :, None] * C[v][:, None, :]
            grad_h -= (beta * grad_written)[None, :, None] * B[v][:, None, :]
            after = after + (grad_h * exp2(A[v] * delta[None, :, None]),)
        H = after
        adjoint = device.pair(w, grad_written)
        device.put(adjoint_ptr + (sample + step) * s.P, adjoint, channels, s.P, s)
        to = grad_fed_ptr + ((b * t_end + step) * H_heads + head) * (2 * s.c)
        device.put(to, grad_raw.to(grad_fed_ptr.dtype.element_ty), channels, s.c, s)
        ahead = tl.maximum(step - CHUNK, 0)
        memory = first[7] + ahead * (s.P * s.WORDS)
        device.prefetch(memory, part, s.P * s.WORDS // 32, s.P * s.WORDS // 32)
        H_B, H_q = _with_memory(H, loaded[6], loaded[8], s)
        w = w_before
    if inputs.y0 is not None:
        device.put(grads.y0 + f * s.c, w, channels, s.c, s)
    if inputs.h0 is not None:
        device.store_memory(grads.h0 + f * s.c * s.n, H, s)
