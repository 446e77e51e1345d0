"""Raw values of a token: raw^x + W^y norm(y_{t-1}); from them B, C and beta.

Letters: d channels, n state per channel, k reflections.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import inverse_norm, sigmoid


@triton.jit
def load_raw(raw_ptr, fed_ptr, at, mask, FEEDBACK: tl.constexpr, CACHE: tl.constexpr):
    """The raw values at the columns `at`, of its shape; CACHE is the modifier of the loads."""
    raw = tl.load(raw_ptr + at, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    if FEEDBACK:
        raw += tl.load(fed_ptr + at, mask=mask, other=0.0, cache_modifier=CACHE).to(tl.float32)
    return raw


@triton.jit
def load_unit(raw_ptr, fed_ptr, at, mask, n, FEEDBACK: tl.constexpr, EPS: tl.constexpr):
    """The raw B or C (n,), and 1 / its norm, sqrt(|v|^2 + n EPS) as in `unit`."""
    v = load_raw(raw_ptr, fed_ptr, at, mask, FEEDBACK, "")
    return v, inverse_norm(tl.sum(v * v, axis=0), n * EPS)


@triton.jit
def load_beta(
    raw_ptr,  # (k,): alpha
    fed_ptr,
    K: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BETA_MAX: tl.constexpr,
):
    """beta_1 .. beta_k, beta_max sigmoid(alpha), as a tuple of scalars."""
    beta = ()
    for i in tl.static_range(K):
        alpha = load_raw(raw_ptr, fed_ptr, i, True, FEEDBACK, "")
        beta = beta + (BETA_MAX * sigmoid(alpha),)
    return beta
