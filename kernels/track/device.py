"""Layouts, packed values and small functions of the tracker's kernels.

A program of the sweeps is one head of one sample. Its memory h is a tuple of V tensors (NR, P, NL)
for state n = (nr NL + nl) V + v of channel p: Triton puts NL and 32 / NL channels on the lanes of a
warp, the next channels on the warps, and NR into registers. A sum over the states is then a sum in
a thread and log2(NL) shuffles, without a barrier. B, C and kept memories are words of V values.

The compiler would choose other layouts from the addresses of large loads and stores; the pass that
does so is left out (`without_coalescing`). What a thread's values differ in is added last to
their addresses, as an offset that is constant: one address for all of them is then computed.
Vectors of channels are stored by (P, NL) addresses of which all lanes of a channel store the same:
those of (P,) would cost a barrier each.

Letters: c channels, n states; P and N: both rounded up to powers of two. s: `Layout`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import FAST, LOG2E


@triton.jit
def high(word):
    """The float32 whose upper half is the lower half of an int32."""
    return (word << 16).to(tl.float32, bitcast=True)


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
def pair(a, b):
    """Two float32 in an int64."""
    low, high_ = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    return (low.to(tl.int64) & 4294967295) | (high_.to(tl.int64) << 32)


@triton.jit
def pack(v, V: tl.constexpr):
    """V float32 in an int64, as bfloat16 if V = 4."""
    if V == 2:
        return pair(v[0], v[1])
    else:
        return pair(nearest_word(v[0], v[1]), nearest_word(v[2], v[3]))


@triton.jit
def unpack(word, V: tl.constexpr):
    """The V = 2 float32 or 4 bfloat16 of an int64 of `pack`."""
    low, high_ = word.to(tl.int32), (word >> 32).to(tl.int32)
    if V == 2:
        return low.to(tl.float32, bitcast=True), high_.to(tl.float32, bitcast=True)
    else:
        return (
            high(low), low.to(tl.float32, bitcast=True),
            high(high_), high_.to(tl.float32, bitcast=True),
        )  # fmt: skip


@triton.jit
def slope_of(delta):
    """The derivative of Delta = softplus(raw) by its raw value, 1 - exp(-Delta)."""
    # by its series where that difference cancels
    series = delta * (1.0 - delta * (0.5 - delta * (1.0 / 6 - delta / 24)))
    return tl.where(delta < 0.03125, series, 1.0 - tl.exp(-delta))


@triton.jit
def load_rounded(ptr, mask, dtype: tl.constexpr):
    """Parameters as a product in `dtype` takes them, in float32."""
    return tl.load(ptr, mask=mask, other=0.0).to(dtype).to(tl.float32)


@triton.jit
def states_of(v: tl.constexpr, s):
    """The states (NR, 1, NL) of part v of a memory."""
    nr, nl = tl.arange(0, s.N // (s.NL * s.V)), tl.arange(0, s.NL)
    return ((nr * s.NL)[:, None, None] + nl[None, None, :]) * s.V + v


@triton.jit
def load_memory(ptr, fill, s):
    """A memory (c, n), with `fill` beyond its channels and states."""
    p = tl.arange(0, s.P)[None, :, None]
    out = ()
    for v in tl.static_range(s.V):
        state = states_of(v, s)
        inside = (state < s.n) & (p < s.c)
        at = ptr + (p * s.n + state)
        out = out + (tl.load(at, mask=inside, other=fill).to(tl.float32),)
    return out


@triton.jit
def load_rates(ptr, s):
    """A = -exp(A_log) (c, n) as an exponent of 2, zeros beyond its channels and states."""
    A_log = load_memory(ptr, float("-inf"), s)
    out = ()
    for v in tl.static_range(s.V):
        out = out + (rates_of(A_log[v]),)
    return out


@triton.jit
def rates_of(A_log):
    """A = -exp(A_log) as an exponent of 2."""
    return tl.exp(A_log) * -LOG2E


@triton.jit
def store_memory(ptr, h, s):
    """The inverse of `load_memory`."""
    p = tl.arange(0, s.P)[None, :, None]
    for v in tl.static_range(s.V):
        state = states_of(v, s)
        tl.store(ptr + (p * s.n + state), h[v], mask=(state < s.n) & (p < s.c))


@triton.jit
def load_kept(ptr, s):
    """A memory (N, P) that `store_kept` has stored."""
    out = ()
    for v in tl.static_range(s.V):
        out = out + (tl.load(ptr + (states_of(v, s) * s.P + tl.arange(0, s.P)[None, :, None])),)
    return out


@triton.jit
def store_kept(ptr, h, s):
    for v in tl.static_range(s.V):
        tl.store(ptr + (states_of(v, s) * s.P + tl.arange(0, s.P)[None, :, None]), h[v])


@triton.jit
def not_zero(A):
    """A rate by which a product with it can be divided: 1e-20 changes no decay."""
    return tl.where(tl.abs(A) < 1e-20, -1e-20, A)


@triton.jit
def zeros_like(A):
    """A memory of zeros, in the layout of A."""
    out = ()
    for v in tl.static_range(len(A)):
        out = out + (tl.zeros_like(A[v]),)
    return out


@triton.jit
def wait_for(h):
    """h itself, by products that wait for its loads.

    Without them the wait stands at the first use. In a loop, or behind a branch of a loop, it would
    include the loads that each pass has issued before, because one counter is kept for all."""
    out = ()
    for v in tl.static_range(len(h)):
        out = out + (2.0 * (0.5 * h[v]),)
    return out


@triton.jit
def places_of_words(s):
    """The places (NR, P, NL) of the words of a memory, as a sum of two tensors, those of a thread
    and the offsets of its values."""
    nr, p, nl = tl.arange(0, s.N // (s.NL * s.V)), tl.arange(0, s.P), tl.arange(0, s.NL)
    return p[None, :, None] * s.NL + nl[None, None, :], (nr * (s.P * s.NL))[:, None, None]


@triton.jit
def load_row(ptr, s):
    """The words (WORDS / NL, NL) of B or C of a token."""
    at = ptr + tl.arange(0, s.NL)[None, :]
    return tl.load(at + (tl.arange(0, s.WORDS // s.NL) * s.NL)[:, None])


@triton.jit
def places_of_channels(s):
    """The channels (P, NL)."""
    # zeros, of which the compiler does not know that they are, keep the second axis
    return tl.arange(0, s.P)[:, None] + (tl.arange(0, s.NL) // s.NL)[None, :]


@triton.jit
def put(ptr, v, channels, COUNT: tl.constexpr, s):
    """Store the first COUNT of a vector (P,). All lanes that have a value store it, in one access:
    the branch of a single lane costs more."""
    at = ptr + channels
    value = tl.broadcast_to(v[:, None], (s.P, s.NL))
    if COUNT == s.P:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=channels < COUNT)


@triton.jit
def load_vector(ptr, COUNT: tl.constexpr, s):
    """A vector of COUNT channels (P,), in its dtype: a conversion would wait for it."""
    p = tl.arange(0, s.P)
    return tl.load(ptr + p) if COUNT == s.P else tl.load(ptr + p, mask=p < COUNT, other=0.0)


@triton.jit
def unknown_zeros(
    i,  # of any shape, in [0, COUNT)
    size,  # not negative
    COUNT: tl.constexpr,
):
    """Zeros in the shape of i, of which the compiler does not know that they are. They are added to
    the address of a value that all threads load: the compiler would move it into registers of a
    warp, which waits for it at once."""
    return i // (size + COUNT)


@triton.jit
def prefetch(
    ptr,
    rows,  # which, at most 32, so that the first warp has all of them
    stride,  # of a row
    SIZE: tl.constexpr,  # values of a row
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
def over_states(v):
    """The sum of (NR, P, NL) over the states, (P,)."""
    return tl.sum(tl.sum(v, 0), 1)


@triton.jit
def over_inputs(v, R: tl.constexpr, s):
    """The sum of (..., P, NL) over all axes but that of P, of which a thread has R values: as four
    sums at the same time, because each addition to one of them waits for the one before."""
    return tl.sum(tl.sum(tl.sum(tl.reshape(v, (4, R // 4, s.P, s.NL)), 1), 0), 1)
