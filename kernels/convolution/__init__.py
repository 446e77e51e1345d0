"""The short causal convolution of a layer with what follows it: SiLU, and unit length of heads.

Letters: b batch, t time, c channels, w width, a channels to which something is added, g channels of
a group.
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.checks import check_sequence, check_shape
from bedouin.kernels.convolution.reference import Groups, short_convolution_reference
from bedouin.kernels.convolution.registered import short_convolution_operation

__all__ = ["Groups", "short_convolution", "short_convolution_reference"]

MAX_GROUP = 1024
"""Most channels of a group, which a program of the Triton kernels holds with several tokens."""


def short_convolution(
    x: Tensor,  # (b, t, c)
    weight: Tensor,  # (c, w)
    window: Tensor,  # (b, w - 1, c), the inputs before the first token
    added: Tensor | None = None,  # (b, t, a), a <= c
    groups: Groups | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # (b, t, c + a), as x, and (b, w - 1, c), as the window
    """SiLU(conv(x)), whose first groups of channels v are normalized to v rsqrt(|v|^2 + eps), as
    `groups` says (None: no groups), followed by the a channels SiLU(conv(x)[..., :a] + added); and
    the window after the last token, which is the last w - 1 inputs.

        conv(x)_t = sum_i weight[:, i] * x_{t - w + 1 + i}

    Computes in at least float32. The Triton version is once differentiable and saves its operands
    alone. Raises ValueError for shapes that do not fit, or a backend that cannot run.
    """
    check_sequence("x", x)
    (b, t, c), w = x.shape, weight.shape[-1]
    check_shape("weight", weight, (c, w), "(c, w)")
    check_shape("window", window, (b, w - 1, c), "(b, w - 1, c)")
    if added is not None:
        check_shape("added", added, (b, t, added.shape[-1]), "(b, t, a)")
    # the kernels compute norms of all blocks, and read those of groups
    groups = Groups(0, c, 1.0) if groups is None else groups
    if groups.number * groups.size > c or (added is not None and added.shape[-1] > c):
        raise ValueError(
            f"groups and added must have at most the {c} channels of x, got {groups.number} groups "
            f"of {groups.size} and {0 if added is None else added.shape[-1]} channels"
        )
    unfit = None
    if groups.number and groups.size > MAX_GROUP:
        unfit = f"groups of {groups.size} channels (at most {MAX_GROUP})"
    dtype = torch.float64 if torch.float64 in (x.dtype, weight.dtype) else x.dtype
    if x.numel() and choose_backend(backend, x.device, dtype, unfit) == "triton":
        out, after = short_convolution_operation(x, weight, window, added, *groups)
        return out, after
    return short_convolution_reference(x, weight, window, added, groups)
