"""Launches that overlap, and numbers that the programs of one cooperative launch exchange.

The numbers lie in device memory. One word holds a number and the index of its exchange, and is
polled until it has this one.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def await_launch(OVERLAP: tl.constexpr):
    """Wait for the launch before this one, and let the next one begin. With OVERLAP both are
    programmatic dependent launches: a kernel may begin while the one before it runs, and may read
    what that one writes only after this call. What still earlier launches have written can be read
    at once, because a kernel begins when all programs of the one before it have passed this call,
    or have ended."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _pieces(values):
    """The bits of floats, 32 in each int64."""
    if values.dtype == tl.float64:
        bits = values.to(tl.int64, bitcast=True)
        return bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF
    else:
        return (values.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF,)


@triton.jit
def post(words, values, number):
    """Store floats (N,) for `collect`, marked with a number > 0.

    `words`: N int64, 2 N for float64, from 0; nothing may be posted there before all have collected
    what was posted before.
    """
    pieces = _pieces(values)
    at = tl.arange(0, values.shape[0])
    mark = tl.cast(number, tl.int64) << 32
    for i in tl.static_range(len(pieces)):
        word = pieces[i] | mark
        tl.atomic_xchg(words + i * values.shape[0] + at, word, sem="relaxed", scope="gpu")


@triton.jit
def collect(
    words, number, PARTS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """The sum (N,) of what PARTS programs post with this number, of consecutive `words`; ROWS is a
    power of two, at least PARTS."""
    part, at = tl.arange(0, ROWS), tl.arange(0, N)
    PIECES: tl.constexpr = 2 if ACC == tl.float64 else 1
    place = words + part[:, None] * (PIECES * N) + at[None, :]
    mask = (part < PARTS)[:, None] & (at < N)[None, :]
    bits = _await(place, mask, number) & 0xFFFFFFFF
    if ACC == tl.float64:
        values = (bits | (_await(place + N, mask, number) << 32)).to(tl.float64, bitcast=True)
    else:
        values = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.sum(values, axis=0)


@triton.jit
def _await(place, mask, number):
    """The words as soon as all of them have the number; 0 with it where the mask is false."""
    none = tl.cast(number, tl.int64) << 32
    words = tl.load(place, mask=mask, other=none, volatile=True)
    while tl.min((words >> 32).to(tl.int32)) < number:
        words = tl.load(place, mask=mask, other=none, volatile=True)
    return words
