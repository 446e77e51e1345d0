"""The gated delta rule in plain torch: as a loop, which is the specification, and in chunks.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head; in chunks also n chunks, c tokens of a chunk, i = c k steps of a chunk.
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.delta_rule.types import CHUNK, DeltaInputs
from bedouin.kernels.launch import accumulator


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
    *,
    chunk_steps: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """`delta_rule` in chunks of tokens with `chunk_steps` Householder steps, or a token.

    With G_i the decay from the start of the chunk to step i, the memory after step i is
    G_i S + sum_{j <= i} (G_i / G_j) key_j e_j^T, where the e_j solve the unit lower triangular
    system

        e_i + beta_i sum_{j < i} (G_i / G_j) (key_i . key_j) e_j = beta_i (value_i - G_i S^T key_i)

    It is solved for all chunks at once with S unknown; then one product a chunk gives the next S.
    Source: DeltaNet (arXiv 2406.06484), section 3; Gated DeltaNet (2412.06464), section 3.3.
    """
    b, t, k, h, p = inputs.key.shape
    c = min(t, max(1, chunk_steps // k))
    query, key, value, beta, decay = inputs
    decay = torch.zeros_like(query[..., 0]) if decay is None else decay
    query = p**-0.5 * _chunks(query, c, "b (n c) h p -> b h n c p")
    key = _chunks(key, c, "b (n c) k h p -> b h n (c k) p")
    value = _chunks(value, c, "b (n c) k h v -> b h n (c k) v")
    beta = _chunks(beta, c, "b (n c) k h -> b h n (c k)")
    decay = _chunks(decay, c, "b (n c) h -> b h n c")
    at_token = decay.cumsum(-1)  # (b, h, n, c): log G after each token
    at_step = at_token.repeat_interleave(k, dim=-1)  # (b, h, n, i)
    token = torch.arange(c, device=key.device)
    step = torch.arange(c * k, device=key.device)
    earlier = step.unsqueeze(-1) > step
    visible = token.unsqueeze(-1) >= step // k

    gram = (key @ key.mT) * _ratio(at_step, at_step, earlier)
    system = beta.unsqueeze(-1) * gram  # (b, h, n, i, i); its diagonal is read as ones
    known = torch.cat([value, torch.exp(at_step).unsqueeze(-1) * key], dim=-1)
    solved = torch.linalg.solve_triangular(
        system, beta.unsqueeze(-1) * known, upper=False, unitriangular=True
    )
    written, read = solved.split([value.shape[-1], p], dim=-1)
    scores = (query @ key.mT) * _ratio(at_token, at_step, visible)
    query = torch.exp(at_token).unsqueeze(-1) * query
    last = at_token[..., -1:]
    key = torch.exp(last - at_step).unsqueeze(-1) * key

    outputs = []
    for n in range(key.shape[2]):
        e = written[:, :, n] - read[:, :, n] @ memory  # (b, h, i, v)
        outputs.append(query[:, :, n] @ memory + scores[:, :, n] @ e)
        memory = torch.exp(last[:, :, n]).unsqueeze(-1) * memory + key[:, :, n].mT @ e
    return rearrange(torch.cat(outputs, dim=2), "b h t v -> b t h v")[:, :t], memory


def _chunks(
    tensor: Tensor,  # (b, t, ...)
    c: int,
    pattern: str,
) -> Tensor:
    """`tensor` rearranged in chunks of c tokens; the last is filled up with zeros,
    which neither decay nor write."""
    missing = -tensor.shape[1] % c
    if missing:
        tensor = F.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing))
    return rearrange(tensor, pattern, c=c)


def _ratio(
    later: Tensor,  # (..., r)
    earlier: Tensor,  # (..., i)
    mask: Tensor,  # (r, i)
) -> Tensor:  # (..., r, i)
    """exp(later_r - earlier_i) where `mask` is True, else 0; masked before exp, which overflows."""
    difference = later.unsqueeze(-1) - earlier.unsqueeze(-2)
    return torch.exp(difference.masked_fill(~mask, -torch.inf))


def rounded(inputs: DeltaInputs, dtype: torch.dtype) -> DeltaInputs:
    """Inputs whose query, key and value have `dtype`, and whose beta times the squared length of
    the key is what it was.

    A step multiplies what the memory has at the key by 1 - beta |key|^2. With beta = 2 and a length
    that rounding has made greater than 1, the memory would grow by a constant factor at every token
    that repeats the key.
    """
    query, key, value, beta, log_decay = inputs
    low = key.to(dtype)
    if low is not key:
        beta = beta * _share(key, low)
    return DeltaInputs(query.to(dtype), low, value.to(dtype), beta, log_decay)


@torch.no_grad()
def _share(
    key: Tensor,  # (b, t, 1, h, p)
    low: Tensor,  # (b, t, 1, h, p)
) -> Tensor:  # (b, t, 1, h)
    """The squared lengths of the keys divided by those of the rounded ones, which may be 0."""
    wide = accumulator(key.dtype)
    exact, found = (v.to(wide).square().sum(-1) for v in (key, low))
    return torch.where(found > 0, exact / found, 1)


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
