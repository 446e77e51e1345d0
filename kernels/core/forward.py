"""The forward pass of a layer's core: W^x, the sweep, the output stage.

Letters as in `types.py`.
"""

import torch
from torch import Tensor

from bedouin.kernels.core.launch import launch_start
from bedouin.kernels.core.products import (
    add_product_,
    first_rows,
    loop_rows,
    project,
    rows_of,
    samples_of,
)
from bedouin.kernels.core.types import CoreOptions, CoreSaved, CoreTensors
from bedouin.kernels.direct.buffers import SweepBuffers, count_kept, state_major
from bedouin.kernels.direct.heads.launch import launch_head_sweep
from bedouin.kernels.direct.registered import summarize
from bedouin.kernels.direct.triton_launch import launch_sweep
from bedouin.kernels.feedback import normalize_feedback
from bedouin.kernels.launch import accumulator
from bedouin.kernels.linear import padding
from bedouin.kernels.output.launch import output_forward
from bedouin.kernels.output.types import OutputOperands
from bedouin.kernels.padding import CLOSED, hold_memory_, ignore_padding_

CoreResult = tuple[Tensor, Tensor, CoreSaved, tuple[Tensor, Tensor, Tensor]]
"""The gated output (b, t, d), the last h (b', p, n), what is saved, and the statistics (4, b', t),
residual and smallest pivot (2, b'), converged (b',)."""


def core_forward(
    tensors: CoreTensors,
    biases: tuple[Tensor, Tensor | None],  # of Delta (d,) and of all others (H r,)
    options: CoreOptions,
    real: Tensor | None,  # (b, t) bool, False in the padding after the tokens; None: there is none
) -> CoreResult:
    """No size may be 0. The output has the dtype of `projected`, in which the products are
    computed; in the padding it is any finite value. Several heads with feedback must be such that
    `takes_heads_together` is true."""
    W_x, W_y = (_lowered(W, tensors.projected.dtype) for W in (tensors.W_x, tensors.W_y))
    assert W_x is not None
    sizes, x = tensors.sizes(), tensors.x
    H, b, t, p, n, r, f = sizes
    folded, wide = sizes.folded, r + padding(r)
    like = x.new_empty(0, dtype=accumulator(x.dtype))
    A, statistics = like.new_empty(sizes.of_heads(n, p)), like.new_empty(4, folded, t)
    y = like.new_empty(folded, t, p)
    kept = like.new_empty(folded, count_kept(t, options.keep_every), n, p)
    h = like.new_empty(folded, n, p) if tensors.h0 is None else state_major(tensors.h0)
    normed = y if W_y is None else W_y.new_empty(folded, t, p)
    bias = W_x.new_empty(sizes.of_heads(wide + p))
    counts = W_x.new_empty(3, dtype=torch.int32)
    launch_start(tensors, biases, options, A, bias, h, normed, counts, W_x, W_y)
    if W_y is not None and tensors.y0 is not None:
        eps = options.parameterization.feedback_norm_eps
        normed[:, 0] = normalize_feedback(tensors.y0, eps)

    rows = rows_of(x, H)
    raw = project(rows, first_rows(W_x, wide), bias[..., :wide]).view(folded, t, wide)
    gate = project(rows, W_x[..., r:, :], bias[..., wide:])
    padded = None if real is None else ~real
    if padded is not None:
        hold_memory_(raw, padded, p, -CLOSED)
    loop = loop_rows(W_y, sizes)
    given = raw[..., :r], loop, A, h, kept, y, normed, statistics
    buffers = SweepBuffers(samples_of(x, H), *given)
    if H == 1 or loop is None:
        launch_sweep(buffers, options.parameterization, options.keep_every, counts=counts)
    else:
        launch_head_sweep(buffers, options.parameterization, options.keep_every)
    if padded is not None:
        ignore_padding_(statistics, padded)
    if W_y is None:
        normed = W_x.new_empty(0)
    else:
        add_product_(gate, normed.view(gate.shape), W_y[..., f:, :].mT)
    hidden = W_x.new_empty(b, t, H * p)
    operands = output_operands(tensors, y, rows, gate)
    output_forward(operands, options.eps, W_x.dtype, into=rows_of(hidden, H))
    weights = (
        W_x.new_empty(0) if W is given or W is None else W
        for W, given in ((W_x, tensors.W_x), (W_y, tensors.W_y))
    )
    saved = CoreSaved(y, raw, gate, normed, kept, A, *weights)
    return hidden, h.mT, saved, (statistics, *summarize(statistics))


def _lowered(
    W: Tensor | None,  # any shape
    dtype: torch.dtype,
) -> Tensor | None:  # as W
    """W itself if it has the dtype, else memory for it in that dtype."""
    if W is None or W.dtype == dtype:
        return W
    return torch.empty(W.shape, dtype=dtype, device=W.device)


def output_operands(
    tensors: CoreTensors,
    y: Tensor,  # (b', t, p)
    x: Tensor,  # (i, p) or (H, i, p), the rows of `tensors.x`
    gate: Tensor,  # (i, p) or (H, i, p)
) -> OutputOperands:
    """The operands of the output stage, as rows."""
    z, of_channels = tensors.z, gate.shape[:-2] + gate.shape[-1:]
    weight = None if tensors.weight is None else tensors.weight.reshape(of_channels)
    return OutputOperands(
        y.view(gate.shape),
        x,
        tensors.D.reshape(of_channels),
        gate,
        None,
        None if z is None else rows_of(z, 1 if x.dim() == 2 else x.shape[0]),
        weight,
    )
