"""The gated delta rule in plain torch: as a loop, which is the specification, and in chunks.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head; in chunks also n chunks, c steps of a chunk.
"""

from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.launch import accumulator

DeltaBackend = Literal["auto", "torch", "reference", "triton", "fla"]

CHUNK = 64
"""Householder steps of a chunk, as in flash-linear-attention."""


class DeltaInputs(NamedTuple):
    """What a token contributes. The keys have length 1 or 0; a log_decay of None is no decay."""

    query: Tensor  # (b, t, h, p)
    key: Tensor  # (b, t, k, h, p)
    value: Tensor  # (b, t, k, h, v)
    beta: Tensor  # (b, t, k, h), in [0, 2]
    log_decay: Tensor | None  # (b, t, h), <= 0


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


def delta_rule_plain(
    inputs: DeltaInputs,
    memory: Tensor,  # (b, h, p, v)
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """`delta_rule` in plain torch: in chunks, or of a single token as the loop. Computes in float64
    where a tensor has it, else in float32; the outputs have the dtype of the values."""
    wide = accumulator(*(v.dtype for v in (*inputs, memory) if v is not None))
    b, t, _, h, v_size = inputs.value.shape
    if not t:
        return inputs.value.new_empty(b, 0, h, v_size), memory
    rule = delta_rule_reference if t == 1 else delta_rule_chunked
    query, key, value, beta = (v.to(wide) for v in inputs[:4])
    decay = None if inputs.log_decay is None else inputs.log_decay.to(wide)
    o, last = rule(DeltaInputs(query, key, value, beta, decay), memory.to(wide))
    return o.to(inputs.value.dtype), last.to(memory.dtype)


def delta_rule_chunked(
    inputs: DeltaInputs,
    memory: Tensor,  # (b, h, p, v)
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """`delta_rule` in chunks of CHUNK Householder steps.

    With G_i the decay from the start of the chunk to step i, the memory after step i is
    G_i S + sum_{j <= i} (G_i / G_j) key_j e_j^T, where the e_j solve the unit lower triangular
    system

        e_i + beta_i sum_{j < i} (G_i / G_j) (key_i . key_j) e_j = beta_i (value_i - G_i S^T key_i)

    It is solved for all chunks at once with S unknown; then one product a chunk gives the next S.
    Source: DeltaNet (arXiv 2406.06484), section 3; Gated DeltaNet (2412.06464), section 3.3.
    """
    k = inputs.key.shape[2]
    query, key, value, beta, decay = steps_as_tokens(inputs)
    assert decay is not None
    _, steps, _, p = query.shape
    c = min(steps, CHUNK)
    query = p**-0.5 * _chunks(query, c)  # (b, h, n, c, p)
    key, value = (_chunks(v.squeeze(2), c) for v in (key, value))
    beta, decay = (_chunks(v, c) for v in (beta.squeeze(2), decay))  # (b, h, n, c)
    G = decay.cumsum(-1)  # its logarithm
    step = torch.arange(c, device=key.device)

    gram = (key @ key.mT) * _ratio(G, step.unsqueeze(-1) > step)
    system = beta.unsqueeze(-1) * gram  # (b, h, n, c, c); its diagonal is read as ones
    known = torch.cat([value, torch.exp(G).unsqueeze(-1) * key], dim=-1)
    solved = torch.linalg.solve_triangular(
        system, beta.unsqueeze(-1) * known, upper=False, unitriangular=True
    )
    written, read = solved.split([value.shape[-1], p], dim=-1)
    scores = (query @ key.mT) * _ratio(G, step.unsqueeze(-1) >= step)
    query = torch.exp(G).unsqueeze(-1) * query
    last = G[..., -1:]
    key = torch.exp(last - G).unsqueeze(-1) * key

    outputs = []
    for n in range(key.shape[2]):
        e = written[:, :, n] - read[:, :, n] @ memory  # (b, h, c, v)
        outputs.append(query[:, :, n] @ memory + scores[:, :, n] @ e)
        memory = torch.exp(last[:, :, n]).unsqueeze(-1) * memory + key[:, :, n].mT @ e
    return torch.cat(outputs, dim=2).transpose(1, 2)[:, k - 1 : steps : k], memory


def _chunks(
    v: Tensor,  # (b, steps, h, ...)
    c: int,
) -> Tensor:  # (b, h, n, c, ...)
    """v in chunks of c steps; the last is filled up with zeros, which neither decay nor write."""
    missing = -v.shape[1] % c
    if missing:
        v = F.pad(v, (*(0, 0) * (v.dim() - 2), 0, missing))
    return rearrange(v, "b (n c) h ... -> b h n c ...", c=c)


def _ratio(
    G: Tensor,  # (..., c)
    mask: Tensor,  # (c, c)
) -> Tensor:  # (..., c, c)
    """exp(G_i - G_j) where `mask` is True, else 0; masked before exp, which overflows."""
    difference = G.unsqueeze(-1) - G.unsqueeze(-2)
    return torch.exp(difference.masked_fill(~mask, -torch.inf))


def steps_as_tokens(inputs: DeltaInputs) -> DeltaInputs:
    """The same rule with a token for each Householder step: k t tokens of one step, with a decay,
    of which every k-th, the last step of a token of `inputs`, has a query and the others zeros."""
    query, key, value, beta, log_decay = inputs
    k = key.shape[2]
    decay = torch.zeros_like(beta[:, :, 0]) if log_decay is None else log_decay
    if k > 1:
        query = F.pad(query.unsqueeze(2), (0, 0, 0, 0, k - 1, 0)).flatten(1, 2)
        decay = F.pad(decay.unsqueeze(2), (0, 0, 0, k - 1)).flatten(1, 2)
        key, value, beta = (v.flatten(1, 2).unsqueeze(2) for v in (key, value, beta))
    return DeltaInputs(query, key, value, beta, decay)
