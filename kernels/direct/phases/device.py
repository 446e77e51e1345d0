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
from bedouin.kernels.track.device import high, over_inputs, prefetch, word_of_two


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
    scalars_ptr,  # of a token: another, 1 / |u| (K,), T, G, beta (K,)
    p, d: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The raw vectors of the reflections, 1 / |u|, and T, packed, as tuples; empty without
    reflections."""
    u = ()
    for i in tl.static_range(K):
        u = u + (load_channels(u_ptr + i * d, p, d, P),)
    inverse = load_tuple(scalars_ptr + 1, K)
    return u, inverse, load_tuple(scalars_ptr + 1 + K, K * (K + 1) // 2)


@triton.jit
def unit_vectors(u, inverse, K: tl.constexpr):
    """The unit vectors (P,) of the reflections, a tuple."""
    out = ()
    for i in tl.static_range(K):
        out = out + (u[i].to(tl.float32) * inverse[i],)
    return out


@triton.jit
def over_channels(v, P: tl.constexpr, NL: tl.constexpr):
    """The sum of a vector (P,) by each thread for its channel: one of all threads together would
    cost barriers."""
    rows = tl.reshape(v, (P // NL, NL))[:, None, :]
    return over_inputs(tl.broadcast_to(rows, (P // NL, P, NL)), P // NL, P, NL)
