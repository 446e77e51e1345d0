"""Operands without reflections for kernels that need at least one: a reflection with beta = 0.

Q is exactly I then: T = 0, and the matrix of the local system is 1. Letters: b batch, t time,
d channels.
"""

from dataclasses import replace

import torch

from bedouin.kernels.operands import Operands, Parameterization
from bedouin.kernels.padding import CLOSED, closed_value


def with_reflection(
    operands: Operands, parameterization: Parameterization
) -> tuple[Operands, Parameterization]:
    """The same map for kernels: without reflections one with u = 0 and beta = sigmoid(alpha) = 0 is
    appended, which gets no feedback, else nothing is changed.

    `unit` of 0 is 0, with a finite derivative.
    """
    layout = parameterization.known_layout()
    if layout.num_householder:
        return operands, parameterization
    raw = operands.raw
    u = raw.new_zeros(*raw.shape[:-1], operands.x.shape[-1])
    alpha = raw.new_full((*raw.shape[:-1], 1), closed_value(-CLOSED, raw.dtype))
    padded = operands._replace(raw=torch.cat([raw, u, alpha], -1))
    return padded, replace(parameterization, layout=replace(layout, num_householder=1))
