"""The gated delta rule as a loop: the specification.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head.
"""

import torch
from torch import Tensor

from bedouin.kernels.delta_rule.types import DeltaInputs


def delta_rule_reference(
    inputs: DeltaInputs,
    memory: Tensor,  # (b, h, p, v)
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """`delta_rule` as a loop over tokens and Householder steps: the specification."""
    query, key, value, beta, log_decay = inputs
    outputs = []
    for t in range(query.shape[1]):
        if log_decay is not None:
            memory = memory * torch.exp(log_decay[:, t])[..., None, None]
        for j in range(key.shape[2]):
            row = key[:, t, j]  # (b, h, p)
            error = value[:, t, j] - torch.einsum("bhp,bhpv->bhv", row, memory)
            step = beta[:, t, j].unsqueeze(-1) * error
            memory = memory + row.unsqueeze(-1) * step.unsqueeze(-2)
        outputs.append(torch.einsum("bhp,bhpv->bhv", query[:, t], memory))
    return torch.stack(outputs, dim=1) * query.shape[-1] ** -0.5, memory
