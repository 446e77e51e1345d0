"""The forward pass of a layer's core: W^x, the sweep, the output stage.

Letters as in `types.py`.
"""

import torch
from torch import Tensor

from bedouin.kernels.core.launch import launch_start
from bedouin.kernels.core.products import (
    add_product_,
    columns_of,
    first_rows,
    loop_rows,
    project,
    samples_of,
)
from bedouin.kernels.core.types import CoreOptions, CoreSaved, CoreTensors
from bedouin.kernels.direct.buffers import SweepBuffers, count_kept, state_major
from bedouin.kernels.direct.heads.launch import launch_head_sweep
from bedouin.kernels.direct.triton_launch import launch_sweep
from bedouin.kernels.direct.triton_summary import launch_summary
from bedouin.kernels.feedback import normalize_feedback
from bedouin.kernels.launch import accumulator
from bedouin.kernels.linear import padding
from bedouin.kernels.output.launch import output_forward
from bedouin.kernels.output.types import OutputOperands
from bedouin.kernels.padding import CLOSED, hold_memory_, ignore_padding_
from bedouin.kernels.plans import Launcher

CoreResult = tuple[Tensor, Tensor, CoreSaved, tuple[Tensor, Tensor, Tensor]]
"""The gated output (b, t, d), the last h (b', p, n), what is saved, and the statistics (4, b', t),
residual and smallest pivot (2, b'), converged (b',)."""


def core_forward(
    tensors: CoreTensors,
    biases: tuple[Tensor, Tensor | None],  # of Delta (d,) and of all others (H r,)
    options: CoreOptions,
    real: Tensor | None,  # (b, t) bool, False in the padding after the tokens; None: there is none
    launcher: Launcher,
) -> CoreResult:
    """No size may be 0. The output has the dtype of `projected`, in which the products are
    computed; in the padding it is any finite value. Several heads with feedback must be such that
    `takes_heads_together` is true."""
    dtype, sizes, x = tensors.projected.dtype, tensors.sizes(), tensors.x
    W_x, W_y = _lowered(tensors.W_x, dtype), _lowered(tensors.W_y, dtype)
    assert W_x is not None
    H, b, t, p, n, r, f = sizes
    folded, wide = sizes.folded, r + padding(r)
    like = x.new_empty(0, dtype=accumulator(x.dtype))
    A, statistics = like.new_empty(sizes.of_heads(n, p)), like.new_empty(4, folded, t)
    y = like.new_empty(folded, t, p)
    kept = like.new_empty(folded, count_kept(t, options.keep_every), n, p)
    h = like.new_empty(folded, n, p) if tensors.h0 is None else state_major(tensors.h0)
    normed = y if W_y is None else W_y.new_empty(folded, t, p)
    bias = W_x.new_empty(sizes.of_heads(wide + p))
    # zeroed, and read by nothing
    counts = W_x.new_empty(3, dtype=torch.int32)
    launch_start(tensors, biases, options, A, bias, h, normed, counts, W_x, W_y, launcher)
    if W_y is not None and tensors.y0 is not None:
        eps = options.parameterization.feedback_norm_eps
        normed[:, 0] = normalize_feedback(tensors.y0, eps)

    rows = columns_of(tensors.projected, 0, H, p)
    of_raw, of_gate = bias.split([wide, p], -1)
    raw = project(rows, first_rows(W_x, wide), of_raw).view(folded, t, wide)
    gate = project(rows, W_x.narrow(-2, r, p), of_gate)
    padded = None if real is None else ~real
    if padded is not None:
        hold_memory_(raw, padded, p, -CLOSED)
    loop = loop_rows(W_y, sizes)
    given = raw.narrow(2, 0, r), loop, A, h, kept, y, normed, statistics
    buffers = SweepBuffers(samples_of(x, H), *given)
    how = options.parameterization, options.keep_every
    if H == 1 or loop is None:
        launch_sweep(buffers, *how, launcher=launcher)
    else:
        launch_head_sweep(buffers, *how, launcher=launcher)
    if padded is not None:
        ignore_padding_(statistics, padded)
    if W_y is None:
        normed = W_x.new_empty(0)
    else:
        add_product_(gate, normed.view(gate.shape), W_y.narrow(-2, f, p).mT)
    hidden = W_x.new_empty(b, t, H * p)
    operands = output_operands(tensors, y, rows, gate)
    output_forward(
        operands, options.eps, W_x.dtype, into=columns_of(hidden, 0, H, p), launcher=launcher
    )
    low_W_x = W_x.new_empty(0) if W_x is tensors.W_x else W_x
    low_W_y = W_x.new_empty(0) if W_y is tensors.W_y or W_y is None else W_y
    saved = CoreSaved(y, raw, gate, normed, kept, A, low_W_x, low_W_y)
    summary = statistics.new_empty(2, folded)
    converged = torch.empty(folded, dtype=torch.bool, device=x.device)
    launch_summary(statistics, summary, converged, launcher=launcher)
    return hidden, h.mT, saved, (statistics, summary, converged)


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
    heads, d = 1 if x.dim() == 2 else x.shape[0], tensors.D.shape[0]
    z = None
    if tensors.weight is not None:
        z = columns_of(tensors.projected, d, heads, d // heads)
    return OutputOperands(y.view(gate.shape), x, tensors.D, gate, None, z, tensors.weight)
