"""The forward pass of a layer's core: W^x, the sweep, the output stage.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.core.launch import launch_start
from bedouin.kernels.core.types import CoreOptions, CoreSaved, CoreTensors
from bedouin.kernels.direct.buffers import SweepBuffers, count_kept, state_major
from bedouin.kernels.direct.registered import summarize
from bedouin.kernels.direct.triton_launch import launch_sweep
from bedouin.kernels.feedback import normalize_feedback
from bedouin.kernels.launch import accumulator
from bedouin.kernels.linear import padding
from bedouin.kernels.output.launch import output_forward
from bedouin.kernels.output.types import OutputOperands

CoreResult = tuple[Tensor, Tensor, CoreSaved, tuple[Tensor, Tensor, Tensor]]
"""The gated output (b, t, d), the last h (b, d, n), what is saved, and the statistics (4, b, t),
residual and smallest pivot (2, b), converged (b,)."""


def core_forward(
    tensors: CoreTensors,
    biases: tuple[Tensor, Tensor | None],  # of Delta (d,) and of all others (r,)
    options: CoreOptions,
) -> CoreResult:
    """No size may be 0. W_x, W_y and the output have one dtype."""
    W_x, W_y = tensors.W_x, tensors.W_y
    x, z = tensors.split()
    (b, t, d), n = x.shape, tensors.decay.shape[1]
    r = W_x.shape[0] - d
    wide = r + padding(r)
    like = x.new_empty(0, dtype=accumulator(x.dtype))
    A, y, statistics = like.new_empty(n, d), like.new_empty(b, t, d), like.new_empty(4, b, t)
    h = like.new_empty(b, n, d) if tensors.h0 is None else state_major(tensors.h0)
    kept = like.new_empty(b, count_kept(t, options.keep_every), n, d)
    normed = y if W_y is None else W_y.new_empty(b, t, d)
    bias, counts = W_x.new_empty(wide + d), W_x.new_empty(3, dtype=torch.int32)
    launch_start(tensors, biases, options, A, bias, h, normed, counts)
    if W_y is not None and tensors.y0 is not None:
        eps = options.parameterization.feedback_norm_eps
        normed[:, 0] = normalize_feedback(tensors.y0, eps)

    rows = x.flatten(0, 1)
    raw = F.linear(rows, first_rows(W_x, wide), bias[:wide]).view(b, t, wide)
    gate = F.linear(rows, W_x[r:], bias[wide:]).view(b, t, d)
    loop = None if W_y is None else W_y[:r]
    buffers = SweepBuffers(x, raw[..., :r], loop, A, h, kept, y, normed, statistics)
    launch_sweep(buffers, options.parameterization, options.keep_every, counts=counts)
    if W_y is None:
        normed = W_x.new_empty(0)
    else:
        gate.flatten(0, 1).addmm_(normed.flatten(0, 1), W_y[r:].mT)
    operands = OutputOperands(y, x, tensors.D, gate, None, z, tensors.weight)
    hidden = output_forward(operands, options.eps, W_x.dtype)
    saved = CoreSaved(y, raw, gate, normed, kept, A)
    return hidden, h.mT, saved, (statistics, *summarize(statistics))


def first_rows(
    W: Tensor,  # (r + d, d)
    wide: int,
) -> Tensor:  # (wide, d)
    """The first rows of W, with zeros where it has fewer."""
    missing = wide - W.shape[0]
    return F.pad(W, (0, 0, 0, missing)) if missing > 0 else W[:wide]
