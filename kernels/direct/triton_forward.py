"""A token of the direct sweep of one head: y_t and h_t from h_{t-1}, y_{t-1} and the raw values.

One launch a token, one program a sample. The raw values are raw^x_t + W^y norm(y_{t-1}); this
product is the launch before (triton_product.py). Without feedback one launch has all tokens.

    (I - diag(sigma) (I - Q)) y = p + sigma * Q x    p = (lambda * h_{t-1}) C, sigma = sum of s B C
    h_t = lambda * h_{t-1} + (s * (x + (I - Q) (y - x))) B^T

With I - Q = U^T T U and rest = p + sigma * x, that is y = rest + sigma * U^T T U (y - x), and
U (y - x) solves the k x k system (I - S T) U (y - x) = U (rest - x), S = U diag(sigma) U^T.
Rows u_i are raw values, U has unit rows: scalars are multiplied by `inv`, 1 / |u_i|, instead.

The raw values are laid out as `RawLayout` says. h is (b, n, d) here.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import input_scale
from bedouin.kernels.device.elementary import sigmoid
from bedouin.kernels.device.norms import inverse_norm, max_norms_of_three
from bedouin.kernels.device.raw import load_raw
from bedouin.kernels.device.reflections import (
    combine,
    eliminate,
    inverse_sizes,
    local_system,
    products,
    rows_times,
    scale,
    scale_symmetric,
    total_of,
    upper_times,
    wy_upper,
)
from bedouin.kernels.device.sync import await_launch
from bedouin.kernels.direct.triton_blocks import (
    discretize_block,
    load_block,
    load_block_states,
    load_blocks,
    store_blocks,
    unaligned,
)
from bedouin.kernels.direct.triton_bundles import (
    BundleSizes,
    ForwardBuffers,
    Options,
    TokenRows,
    Tokens,
    token_row,
)
from bedouin.kernels.direct.triton_sums import (
    channel_sums,
    over_channels,
    scalars_at,
    scalars_of,
    store_one,
)


@triton.jit
def _part(v, ptr, block, sizes):
    """A block of a vector (n,), from memory if there are several."""
    if sizes.BLOCKS == 1:
        return v
    else:
        return load_block_states(ptr, block, sizes)


@triton.jit
def _add_fed(value, fed, at, mask, buffers, sizes):
    """`value`, of raw^x, and what is fed back at the columns `at` of a sample's row, rounded to the
    dtype of W^y as in the reverse sweep; without feedback `value`."""
    if buffers.SPLITS == 0:
        return value
    else:
        split = sizes.batch * buffers.fed_stride
        total = tl.load(fed + at, mask=mask, other=0.0)
        for i in tl.static_range(1, buffers.SPLITS):
            total += tl.load(fed + i * split + at, mask=mask, other=0.0)
        kind: tl.constexpr = buffers.normed_ptr.dtype.element_ty
        return value + total.to(kind).to(value.dtype)


@triton.jit
def solve_token(
    h,  # BLOCKS times (BLOCK_N, BLOCK_D), h_{t-1}
    tokens,  # Tokens
    buffers,  # ForwardBuffers
    sizes,  # BundleSizes
    options,  # Options
    sample,
    t,
):
    """y_t, norm(y_t) and the statistics of token t; returns h_t, as h."""
    K: tl.constexpr = options.K
    d: tl.constexpr = sizes.d
    n: tl.constexpr = sizes.n
    BLOCKS: tl.constexpr = sizes.BLOCKS
    COUPLED: tl.constexpr = options.INPUT_SCALE == "one_minus_decay"
    rows, cols = tl.arange(0, BLOCKS * sizes.BLOCK_N), tl.arange(0, sizes.BLOCK_D)
    in_n, in_d = rows < n, cols < d
    # raw is [Delta d | B n | C n | u k d | alpha k], B and C only if options.SELECTIVE
    u_at = d + (2 * n if options.SELECTIVE else 0)
    raw = token_row(tokens.raw, sample, t, options.ALIGNED)
    fed = buffers.fed_ptr + tl.multiple_of(sample * buffers.fed_stride, options.ALIGNED)
    token = sample * sizes.t_end + t
    A_ptr = unaligned(buffers.A_ptr, t, sizes)
    x = tl.load(token_row(tokens.x, sample, t) + cols, mask=in_d, other=0.0).to(tl.float32)
    # all of raw^x before the product is awaited
    alpha_at, is_alpha = scalars_at(u_at + K * d, K, sizes)
    delta = load_raw(raw, raw, cols, in_d, False, "")
    u_x = ()
    for i in tl.static_range(K):
        u_x = u_x + (load_raw(raw, raw, u_at + i * d + cols, in_d, False, ""),)
    alpha = ()
    for i in tl.static_range(len(alpha_at)):
        alpha = alpha + (load_raw(raw, raw, alpha_at[i], is_alpha[i], False, ""),)
    if options.SELECTIVE:
        B = load_raw(raw, raw, d + rows, in_n, False, "")
        C = load_raw(raw, raw, d + n + rows, in_n, False, "")
    else:
        B = tl.where(in_n, 1.0, 0.0).to(tl.float32)
        C = B
    await_launch(options.OVERLAP)
    delta = _add_fed(delta, fed, cols, in_d, buffers, sizes)
    u = ()
    for i in tl.static_range(K):
        u = u + (_add_fed(u_x[i], fed, u_at + i * d + cols, in_d, buffers, sizes),)
    beta = ()
    for i in tl.static_range(len(alpha_at)):
        total = _add_fed(alpha[i], fed, alpha_at[i], is_alpha[i], buffers, sizes)
        beta = beta + (options.BETA_MAX * sigmoid(total),)
    beta = scalars_of(beta, K, sizes)
    if options.SELECTIVE:
        B = _add_fed(B, fed, d + rows, in_n, buffers, sizes)
        C = _add_fed(C, fed, d + n + rows, in_n, buffers, sizes)
        B *= inverse_norm(tl.sum(B * B, axis=0), n * options.EPS)
        C *= inverse_norm(tl.sum(C * C, axis=0), n * options.EPS)
    delta = activate(delta, options.ACTIVATION, options.FAST)
    BC_ptr = buffers.BC_ptr
    if BLOCKS > 1:
        # kept in memory: B and C of a block are as many registers as a vector (d,)
        BC_ptr += sample * (2 * n)
        tl.store(BC_ptr + rows, B, mask=in_n)
        tl.store(BC_ptr + n + rows, C, mask=in_n)
        tl.debug_barrier()
    # p_t + sigma_t x_t, and the inner products that the local equation needs
    decayed = ()  # lambda * h
    scales = ()
    with_C = ()
    with_BC = ()
    for block in tl.static_range(BLOCKS):
        A_log2 = load_block(A_ptr, block, n, sizes)
        decay, s_rows = discretize_block(delta, A_log2, COUPLED, options)
        if COUPLED:
            B_rows, C_rows = _part(B, BC_ptr, block, sizes), _part(C, BC_ptr + n, block, sizes)
            with_BC = with_BC + (tl.sum(s_rows * (B_rows * C_rows)[:, None], axis=0),)
            if BLOCKS == 1:
                scales = (s_rows,)
        decayed = decayed + (h[block] * decay,)
        C_rows = _part(C, BC_ptr + n, block, sizes)
        with_C = with_C + (tl.sum(decayed[block] * C_rows[:, None], axis=0),)
    if COUPLED:
        sigma = total_of(with_BC)
    else:
        s = input_scale(delta, options.INPUT_SCALE, options.FAST)
        sigma = s * tl.sum(B * C, axis=0)
    rest = total_of(with_C) + sigma * x
    sigma_u, with_rest = rows_times(u, sigma, K), rows_times(u, rest - x, K)
    PAIRS: tl.constexpr = K * (K + 1) // 2
    dots = channel_sums(products(u, u, K) + products(sigma_u, u, K) + with_rest, sizes)
    inv = inverse_sizes(dots, d, K, options.EPS)
    G = scale_symmetric(dots[0:PAIRS], inv, K)
    S = scale_symmetric(dots[PAIRS : 2 * PAIRS], inv, K)
    T = wy_upper(G, beta, K)

    # y = rest + sigma U^T e, e = T U (y - x), so (I - S T) U (y - x) = U (rest - x)
    q = scale(dots[2 * PAIRS : 2 * PAIRS + K], inv, K)
    U_v, pivot = eliminate(local_system(S, T, False, K), q, K, 1, True, options.FAST)
    e = over_channels(scale(upper_times(T, U_v, K), inv, K), sizes)
    y = rest + sigma * combine(e, u, K)

    normed = y
    if options.NORM:
        square = channel_sums((y * y,), sizes)
        rms = over_channels((inverse_norm(square[0] / d, options.NORM_EPS),), sizes)
        normed = y * rms[0]
    if buffers.SPLITS > 0:
        at = buffers.normed_ptr + (token + 1) * d + cols
        in_time = cols < tl.where(t + 1 < sizes.t_end, d, 0)
        tl.store(at, normed.to(buffers.normed_ptr.dtype.element_ty), mask=in_time)
    tl.store(buffers.y_ptr + token * d + cols, y.to(buffers.y_ptr.dtype.element_ty), mask=in_d)

    # h_t, and F(y)_t = h_t C with defect, scale and magnitude
    dots = channel_sums(rows_times(u, y - x, K), sizes)
    U_v = scale(dots, inv, K)
    mixed = x + combine(over_channels(scale(upper_times(T, U_v, K), inv, K), sizes), u, K)
    terms = tl.abs(x) + tl.abs(mixed)
    new_h = ()
    with_C = ()
    largest = ()
    for block in tl.static_range(BLOCKS):
        B_rows, C_rows = _part(B, BC_ptr, block, sizes), _part(C, BC_ptr + n, block, sizes)
        if COUPLED:
            if BLOCKS == 1:
                s_rows = scales[0]
            else:
                # again: held over the local equation they would cost too many registers
                block_A = load_block(A_ptr, block, n, sizes)
                _, s_rows = discretize_block(delta, block_A, COUPLED, options)
            new_h = new_h + (decayed[block] + s_rows * mixed[None, :] * B_rows[:, None],)
            largest = largest + (tl.max(s_rows, axis=0),)
        else:
            new_h = new_h + (decayed[block] + (s * mixed)[None, :] * B_rows[:, None],)
        with_C = with_C + (tl.sum(new_h[block] * C_rows[:, None], axis=0),)
    if COUPLED:
        top = largest[0]
        for block in tl.static_range(1, BLOCKS):
            top = tl.maximum(top, largest[block])
        terms *= top
    else:
        terms *= s
    F = total_of(with_C)
    # a maximum ignores NaN, and a sample that is not finite must show it
    finite = 0 * dots[0]
    if options.NORM:
        finite += 0 * square[0]
    defect, size, magnitude = max_norms_of_three(F - y, F, terms)
    cell = buffers.statistics_ptr + token
    row = tl.cast(sizes.batch, tl.int64) * sizes.t_end
    store_one(cell, defect + finite, sizes)
    store_one(cell + row, size + finite, sizes)
    tl.store(cell + 2 * row, magnitude)
    store_one(cell + 3 * row, pivot, sizes)
    return new_h


@triton.jit
def _sweep_token(
    h_ptr,  # (b, n, d)
    kept_ptr,  # (b, slots, n, d)
    tokens,  # Tokens
    buffers,  # ForwardBuffers
    sizes,  # BundleSizes
    options,  # Options
    t,
    KEEP: tl.constexpr,
):
    """Token t of the program's sample."""
    sample = tl.program_id(0).to(tl.int64)
    d: tl.constexpr = sizes.d
    n: tl.constexpr = sizes.n
    h_ptr = unaligned(h_ptr + sample * n * d, t, sizes)
    h = load_blocks(h_ptr, n, sizes)
    if (t > 0) & (t % KEEP == 0):
        # the reverse sweep starts a chunk here
        slot = sample * (tl.cdiv(sizes.t_end, KEEP) - 1) + t // KEEP - 1
        store_blocks(unaligned(kept_ptr + slot * n * d, t, sizes), h, n, sizes)
    h = solve_token(h, tokens, buffers, sizes, options, sample, t)
    # perhaps by other threads than those that have read it
    tl.debug_barrier()
    store_blocks(h_ptr, h, n, sizes)


@triton.jit
def _sweep(
    h_ptr,  # (b, n, d)
    kept_ptr,  # (b, slots, n, d)
    tokens,  # Tokens
    buffers,  # ForwardBuffers
    sizes,  # BundleSizes
    options,  # Options
    t,
    KEEP: tl.constexpr,
):
    """Token t of the program's sample, or without feedback all tokens from it on."""
    if buffers.SPLITS > 0:
        _sweep_token(h_ptr, kept_ptr, tokens, buffers, sizes, options, t, KEEP)
    else:
        for present in range(t, sizes.t_end):
            _sweep_token(h_ptr, kept_ptr, tokens, buffers, sizes, options, present, KEEP)
            # h is perhaps read by other threads than those that have stored it
            tl.debug_barrier()


@triton.jit(do_not_specialize=["t", "batch", "t_end"])
def sweep_kernel(
    x_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r), raw^x
    fed_ptr,  # (SPLITS, b, width), W^y norm(y_{t-1}), as a sum, if there is feedback
    A_ptr,  # (n, d), log2(e) A
    h_ptr,  # (b, n, d), in place
    kept_ptr,  # (b, ceil(t / KEEP) - 1, n, d): h before tokens KEEP, 2 KEEP, ...
    BC_ptr,  # (b, 2 n): B and C of the present token, if BLOCKS > 1
    y_ptr,  # (b, t, d)
    # (b, t, d), with feedback: norm(y_{t-1}), in the dtype of W^y; that of y0 is there
    normed_ptr,
    statistics_ptr,  # (4, b, t): defect, scale, magnitude, pivot
    t,
    batch,
    t_end,
    d: tl.constexpr,
    n: tl.constexpr,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride,
    SPLITS: tl.constexpr,  # 0: no feedback
    K: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # states at a time
    BLOCKS: tl.constexpr,  # how many times
    ROWS: tl.constexpr,  # warps that hold equal numbers of channels; 0: spread in another way
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,  # a power of two that divides all offsets of rows of raw values
    OVERLAP: tl.constexpr,
    FAST: tl.constexpr,
):
    """Token t of all samples, or without feedback all tokens from it on, a program a sample, as the
    module's docstring says."""
    _sweep(
        h_ptr,
        kept_ptr,
        Tokens(
            TokenRows(x_ptr, x_stride_b, x_stride_t), TokenRows(raw_ptr, raw_stride_b, raw_stride_t)
        ),
        ForwardBuffers(
            fed_ptr, fed_stride, SPLITS, A_ptr, BC_ptr, y_ptr, normed_ptr, statistics_ptr
        ),
        BundleSizes(d, n, BLOCK_D, BLOCK_N, BLOCKS, ROWS, batch, t_end),
        Options(
            K,
            ACTIVATION,
            SELECTIVE,
            INPUT_SCALE,
            FULL,
            NORM,
            ALIGNED,
            OVERLAP,
            FAST,
            BETA_MAX,
            NORM_EPS,
            EPS,
        ),
        t,
        KEEP,
    )
