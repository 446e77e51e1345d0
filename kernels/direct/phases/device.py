"""Layouts, packed values and small functions of the phases.

A program of S and R is one sample of one head. Its memory h is a tuple of V tensors (NR, P, NL) for
state n = (nr NL + nl) V + v of channel p: Triton puts NL and 32 / NL channels on the lanes of a
warp, the next channels on the warps, and NR into registers. A sum over the states is then a sum in
a thread and log2(NL) shuffles, without a barrier. B and C are read as words of V values.

The compiler would choose other layouts from the addresses of large loads and stores, and its
versions break ties differently. The pass that does so is left out (`kernels/coalescing.py`).
What a thread's values differ in is added last to their addresses, as an offset that is constant:
one address for all of them is then computed. Vectors of channels are stored by (P, NL) addresses
of which all lanes of a channel store the same: those of (P,) would cost a barrier each.

Letters: P channels, N states, both rounded up to powers of two.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.reflections import load_tuple


@triton.jit
def high(word):
    """The float32 whose upper half is the lower half of an int32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def word_of_two(a, b, FAST: tl.constexpr):
    """Two float32 rounded to bfloat16, as the lower and the upper half of an int32."""
    if FAST:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = (a.to(tl.int32, bitcast=True) + 32768) >> 16
        return (low & 65535) | ((b.to(tl.int32, bitcast=True) + 32768) & -65536)


@triton.jit
def nearest_word(a, b):
    """An int32 whose lower half is a in bfloat16, and which is itself, as a float32, the nearest to
    b that this leaves: reading b takes no instruction."""
    low = ((a.to(tl.int32, bitcast=True) + 32768) >> 16) & 65535
    bits = b.to(tl.int32, bitcast=True)
    # of the magnitude: a difference below 0 would become NaN where b is nearly 0
    upper = tl.maximum((bits & 2147483647) - low + 32768, 0) & -65536
    return (bits & -2147483648) | upper | low


@triton.jit
def join_words(low, high_):
    """Two int32 in an int64."""
    return (low.to(tl.int64) & 4294967295) | (high_.to(tl.int64) << 32)


@triton.jit
def unpack(word, V: tl.constexpr, NEAREST: tl.constexpr):
    """The V = 2 float32 or 4 bfloat16 of an int64; NEAREST: of words that `nearest_word` made."""
    low, high_ = word.to(tl.int32), (word >> 32).to(tl.int32)
    if V == 2:
        out = (low.to(tl.float32, bitcast=True), high_.to(tl.float32, bitcast=True))
    elif NEAREST:
        out = (
            high(low), low.to(tl.float32, bitcast=True),
            high(high_), high_.to(tl.float32, bitcast=True),
        )  # fmt: skip
    else:
        out = (
            high(low), (low & -65536).to(tl.float32, bitcast=True),
            high(high_), (high_ & -65536).to(tl.float32, bitcast=True),
        )  # fmt: skip
    return out


@triton.jit
def pack(v, V: tl.constexpr, FAST: tl.constexpr):
    """V float32 in an int64, as bfloat16 if V = 4."""
    if V == 2:
        low, high_ = v[0].to(tl.int32, bitcast=True), v[1].to(tl.int32, bitcast=True)
    else:
        low, high_ = word_of_two(v[0], v[1], FAST), word_of_two(v[2], v[3], FAST)
    return join_words(low, high_)


@triton.jit
def slope_of(delta, ACTIVATION: tl.constexpr):
    """The derivative of Delta by its raw value, from Delta."""
    if ACTIVATION == "sigmoid":
        return delta * (1.0 - delta)
    else:
        # 1 - exp(-Delta), by its series where that difference cancels
        series = delta * (1.0 - delta * (0.5 - delta * (1.0 / 6 - delta / 24)))
        found = tl.where(delta < 0.03125, series, 1.0 - tl.exp(-delta))
        return found if ACTIVATION == "softplus" else -found


@triton.jit
def reach_of(decay, FULL: tl.constexpr):
    """The derivative of lambda by A Delta."""
    return decay + 1.0 if FULL else decay


@triton.jit
def load_states(
    ptr,  # (n, d)
    d: tl.constexpr, n: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, NL: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A or a memory, zeros beyond its d channels and n states."""
    nr, p, nl = tl.arange(0, N // (NL * V)), tl.arange(0, P), tl.arange(0, NL)
    out = ()
    for v in tl.static_range(V):
        state = ((nr * NL)[:, None, None] + nl[None, None, :]) * V + v
        at = ptr + (state * d + p[None, :, None])
        if d == P and n == N:
            out = out + (tl.load(at),)
        else:
            out = out + (tl.load(at, mask=(state < n) & (p[None, :, None] < d), other=0.0),)
    return out


@triton.jit
def no_states(A, V: tl.constexpr):
    """A memory of zeros, in the layout of A."""
    out = ()
    for v in tl.static_range(V):
        out = out + (tl.zeros_like(A[v]),)
    return out


@triton.jit
def wait_for(h, V: tl.constexpr):
    """h itself, by products that wait for its loads.

    Without them the wait stands at the first use. In a loop, or behind a branch of a loop, it would
    include the loads that each pass has issued before, because one counter is kept for all."""
    out = ()
    for v in tl.static_range(V):
        out = out + (2.0 * (0.5 * h[v]),)
    return out


@triton.jit
def store_states(
    ptr,  # (n, d)
    h, d: tl.constexpr, n: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, NL: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_states`."""
    nr, p, nl = tl.arange(0, N // (NL * V)), tl.arange(0, P), tl.arange(0, NL)
    for v in tl.static_range(V):
        state = ((nr * NL)[:, None, None] + nl[None, None, :]) * V + v
        at = ptr + (state * d + p[None, :, None])
        if d == P and n == N:
            tl.store(at, h[v])
        else:
            tl.store(at, h[v], mask=(state < n) & (p[None, :, None] < d))


@triton.jit
def places_of_states(P: tl.constexpr, N: tl.constexpr, NL: tl.constexpr, V: tl.constexpr):
    """The places (NR, P, NL) of a part of the memory in memory that only the phases read, as a sum
    of two tensors, those of a thread and the offsets of its values."""
    nr, p, nl = tl.arange(0, N // (NL * V)), tl.arange(0, P), tl.arange(0, NL)
    return p[None, :, None] * NL + nl[None, None, :], (nr * (P * NL))[:, None, None]


@triton.jit
def load_row(ptr, WORDS: tl.constexpr, NL: tl.constexpr):
    """The words (WORDS / NL, NL) of B or C of a token."""
    at = ptr + tl.arange(0, NL)[None, :]
    return tl.load(at + (tl.arange(0, WORDS // NL) * NL)[:, None])


@triton.jit
def load_words(ptr, places):
    """The words at places (NR, P, NL), in the layout of the memory."""
    at = ptr + places[0] + places[1]
    return tl.load(at)


@triton.jit
def store_words(ptr, places, word):
    """The inverse of `load_words`."""
    at = ptr + places[0] + places[1]
    tl.store(at, word)


@triton.jit
def places_of_channels(P: tl.constexpr, NL: tl.constexpr):
    """The channels (P, NL)."""
    # zeros, of which the compiler does not know that they are, keep the second axis
    return tl.arange(0, P)[:, None] + (tl.arange(0, NL) // NL)[None, :]


@triton.jit
def put(ptr, v, places, inside, ALL: tl.constexpr, P: tl.constexpr, NL: tl.constexpr):
    """Store a vector (P,), `inside` or ALL of it. All lanes that have a value store it, in one
    access: the branch of a single lane costs more."""
    at = ptr + places
    value = tl.broadcast_to(v[:, None], (P, NL))
    if ALL:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=inside)


@triton.jit
def load_channels(ptr, p, d: tl.constexpr, P: tl.constexpr):
    """A vector of d channels (P,), in its dtype."""
    if d == P:
        return tl.load(ptr + p)
    else:
        return tl.load(ptr + p, mask=p < d, other=0.0)


@triton.jit
def row_of(ptr, p, d: tl.constexpr, P: tl.constexpr):
    """A vector of d channels as float32 (P,)."""
    return load_channels(ptr, p, d, P).to(tl.float32)


@triton.jit
def load_lanes(ptr, places, inside, ALL: tl.constexpr):
    """The values of a vector at places (P, NL), where each lane of a channel reads the same, as
    `put` stores it: in the layout of sums over the states, which without a product with W^y the
    compiler would not choose."""
    at = ptr + places
    return tl.load(at) if ALL else tl.load(at, mask=inside, other=0.0)


@triton.jit
def vector_of(value):  # (P,), or (P, NL) of `load_lanes`
    """What has been read as it is in memory, as float32 (P,)."""
    if len(value.shape) == 1:
        return value.to(tl.float32)
    else:
        # a maximum would ignore NaN
        return tl.sum(value.to(tl.float32) * (1.0 / value.shape[1]), 1)


@triton.jit
def unknown_zeros(
    i,  # of any shape, in [0, COUNT)
    size,  # not negative
    COUNT: tl.constexpr,
):  # fmt: skip
    """Zeros in the shape of i, of which the compiler does not know that they are, unless it knows
    `size`. They are added to the address of a value that all threads load: the compiler would move
    it into registers of a warp, which waits for it at once."""
    return i // (size + COUNT)


@triton.jit
def prefetch(
    ptr,
    rows,  # which, at most 32, so that the first warp has all of them
    stride,  # of a row
    SIZE: tl.constexpr,  # values of a row
    FAST: tl.constexpr,
):
    """Bring rows from memory into the L2 cache. Nothing waits for that, and it takes no registers;
    what is loaded a chunk of tokens later then arrives within a token's time. Requests by all warps
    instead of the first one took longer than they saved."""
    if FAST:
        BYTES: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        at = ptr + rows.to(tl.int64) * stride
        for line in tl.static_range((SIZE * BYTES + 127) // 128):
            tl.inline_asm_elementwise(
                """{
                .reg .pred first_warp;
                .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.lt.u32 first_warp, thread, 32;
                @first_warp prefetch.global.L2 [$1];
                mov.u32 $0, 0;
                }""",
                "=r,l", [(at + line * (128 // BYTES)).to(tl.int64)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def prefetch_rows(
    pointers,  # a tuple, to contiguous rows
    rows,
    SIZES: tl.constexpr,  # values of a row of each
    FAST: tl.constexpr,
):
    """`prefetch` of the same rows of several tensors."""
    for i in tl.static_range(len(pointers)):
        prefetch(pointers[i], rows, SIZES[i], SIZES[i], FAST)


@triton.jit
def load_reflections(
    u_ptr,  # (K, d), raw
    scalars_ptr,  # of a token: two others, 1 / |u| (K,), T, G, beta (K,)
    p, d: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The raw vectors of the reflections, 1 / |u|, and T, packed, as tuples; empty without
    reflections."""
    u = ()
    for i in tl.static_range(K):
        u = u + (load_channels(u_ptr + i * d, p, d, P),)
    inverse = load_tuple(scalars_ptr + 2, K)
    return u, inverse, load_tuple(scalars_ptr + 2 + K, K * (K + 1) // 2)


@triton.jit
def unit_vectors(u, inverse, K: tl.constexpr):
    """The unit vectors (P,) of the reflections, a tuple."""
    out = ()
    for i in tl.static_range(K):
        out = out + (u[i].to(tl.float32) * inverse[i],)
    return out


@triton.jit
def over_states(v):
    """The sum of (NR, P, NL) over the states, (P,)."""
    return tl.sum(tl.sum(v, 0), 1)


@triton.jit
def over_inputs(v, R: tl.constexpr, P: tl.constexpr, NL: tl.constexpr):
    """The sum of (..., P, NL) over all axes but that of P, of which a thread has R values: as four
    sums at the same time, because each addition to one of them waits for the one before."""
    return tl.sum(tl.sum(tl.sum(tl.reshape(v, (4, R // 4, P, NL)), 1), 0), 1)


@triton.jit
def over_channels(v, P: tl.constexpr, NL: tl.constexpr):
    """The sum of a vector (P,) by each thread for its channel: one of all threads together would
    cost barriers."""
    rows = tl.reshape(v, (P // NL, NL))[:, None, :]
    return over_inputs(tl.broadcast_to(rows, (P // NL, P, NL)), P // NL, P, NL)
