"""Diagonal selective scan, the sequence mixing of a Bedouin layer: the specification.

Letters: b batch, t time, d channels, n state per channel, H heads (kernels/heads.py).
"""

import torch
from torch import Tensor

from bedouin.kernels.heads import count_heads, per_sample, sum_samples
from bedouin.kernels.launch import accumulator
from bedouin.kernels.scan.types import Eigenvalues, InputScale, ScanOperands, ScanOptions


def discretize(
    delta: Tensor,  # (..., d)
    A: Tensor,  # (d, n), or one for each leading index, (..., d, n); negative
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
) -> tuple[Tensor, Tensor]:
    """Decay and input scale of each token: lambda (..., d, n), s (..., d, 1) or (..., d, n).

    lambda = exp(A delta); "full" eigenvalues map it to 2 lambda - 1 in [-1, 1].
    s = delta, delta / (1 + delta), or 1 - |lambda| (the coupled scale, gain at most 1), which keeps
    its relative accuracy where lambda is near 1 or -1.
    """
    exponent = delta.unsqueeze(-1) * A
    power = torch.exp(exponent)
    decay = 2 * power - 1 if eigenvalues == "full" else power
    if input_scale == "one_minus_decay":
        rest = _one_minus_exp(exponent, power)
        return decay, 2 * torch.minimum(power, rest) if eigenvalues == "full" else rest
    if input_scale == "bounded_delta":
        delta = delta / (1 + delta)
    return decay, delta.unsqueeze(-1)


def _one_minus_exp(
    exponent: Tensor,  # (..., d, n)
    power: Tensor,  # (..., d, n)
) -> Tensor:  # (..., d, n)
    """1 - exp(z) from z <= 0 and power = exp(z).

    The difference cancels near z = 0, the derivative of expm1 (its value + 1) far from it.
    """
    return torch.where(exponent > -1, -torch.expm1(exponent), 1 - power)


def discretize_vjp(
    grad_decay: Tensor,  # (b, d, n)
    grad_scale: Tensor,  # (b, d, 1) or (b, d, n): the shape of s
    decay: Tensor,  # (b, d, n), as `discretize` gives it
    delta: Tensor,  # (b, d)
    A: Tensor,  # (d, n), or one for each sample, (b, d, n)
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
) -> tuple[Tensor, Tensor]:
    """Cotangents of delta (b, d) and of A, summed over the batch where all samples have one A."""
    if input_scale == "one_minus_decay":
        sign = decay.sign() if eigenvalues == "full" else 1.0
        grad_decay = grad_decay - sign * grad_scale
    # d lambda / d(A delta): lambda itself, or for "full" 2 exp(A delta), in which lambda' + 1 would
    # lose all digits near lambda' = -1
    full = eigenvalues == "full"
    grad_exponent = grad_decay * (2 * torch.exp(delta.unsqueeze(-1) * A) if full else decay)
    grad_delta = (grad_exponent * A).sum(-1)
    grad_A = (grad_exponent * delta.unsqueeze(-1)).sum_to_size(A.shape)
    if input_scale == "delta":
        grad_delta = grad_delta + grad_scale.squeeze(-1)
    elif input_scale == "bounded_delta":
        grad_delta = grad_delta + grad_scale.squeeze(-1) / (1 + delta).square()
    return grad_delta, grad_A


def contract(
    h: Tensor,  # (..., d, n)
    C: Tensor,  # (..., n)
) -> Tensor:  # (..., d)
    """The read-out h C, a contraction over the state axis."""
    return (h @ C.unsqueeze(-1)).squeeze(-1)


def erase_memory(
    decayed: Tensor,  # (..., d, n), a
    B: Tensor,  # (..., n)
    erase: Tensor,  # (..., 1), beta^e, or (..., 0)
) -> Tensor:  # (..., d, n)
    """a' = a - beta^e (a B) B^T, the memory without what it held under the key B; a itself where
    nothing is erased."""
    if not erase.shape[-1]:
        return decayed
    return decayed - (erase * contract(decayed, B)).unsqueeze(-1) * B.unsqueeze(-2)


def erase_memory_vjp(
    grad: Tensor,  # (..., d, n), the cotangent of a'
    decayed: Tensor,  # (..., d, n), a
    B: Tensor,  # (..., n)
    erase: Tensor,  # (..., 1) or (..., 0)
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of a (..., d, n), B (..., n) and beta^e (..., 1) or (..., 0)."""
    if not erase.shape[-1]:
        return grad, torch.zeros_like(B), torch.zeros_like(erase)
    erased, along_B = contract(decayed, B), contract(grad, B)
    grad_erased = -erase * along_B
    grad_B = contract(decayed.mT, grad_erased) - erase * contract(grad.mT, erased)
    grad_erase = -(erased * along_B).sum(-1, keepdim=True)
    return grad + grad_erased.unsqueeze(-1) * B.unsqueeze(-2), grad_B, grad_erase


def selective_scan_reference(
    x: Tensor,  # (b, t, d)
    delta: Tensor,  # (b, t, d)
    A: Tensor,  # (d, n) or (H, d, n)
    B: Tensor,  # (b, t, n)
    C: Tensor,  # (b, t, n)
    h0: Tensor,  # (b, d, n)
    erase: Tensor,  # (b, t, 1) or (b, t, 0)
    *,
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:  # (b, t, d), (b, d, n)
    """The read-outs and the last h of h_t = a'_t + (s_t * x_t) B_t^T, where a'_t is
    lambda_t * h_{t-1} after `erase_memory`.

    The read-out is h_t C_t, or with `exclusive` that of the memory before token t is written,
    p_t = a'_t C_t. Computes in float32 or float64; y has the dtype of x, the last h
    that of h0.
    """
    dtype, y_dtype, h_dtype = accumulator(x.dtype), x.dtype, h0.dtype
    x, delta, A, B, C, h, erase = (v.to(dtype) for v in (x, delta, A, B, C, h0, erase))
    if A.dim() == 3:
        A = per_sample(A, x.shape[0])
    outputs = []
    for t in range(x.shape[1]):
        decay, s = discretize(delta[:, t], A, input_scale, eigenvalues)
        decayed = erase_memory(decay * h, B[:, t], erase[:, t])
        h = decayed + s * x[:, t].unsqueeze(-1) * B[:, t].unsqueeze(-2)
        outputs.append(contract(decayed if exclusive else h, C[:, t]))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)
    return y.to(y_dtype), h.to(h_dtype)


def selective_scan_vjp(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n), of the last h
    operands: ScanOperands,  # of one dtype
    erase: Tensor,  # (b, t, 1) or (b, t, 0)
    options: ScanOptions,
) -> tuple[Tensor, ...]:
    """Cotangents of x, delta, A, B, C, h0 and erase, by the adjoint recurrence.

    For use inside a registered operation, where autograd is off. The memories are recomputed, so
    only the operands have to be saved.
    """
    x, delta, A, B, C, h0, _ = operands
    input_scale, eigenvalues, exclusive = options
    heads, has_heads = count_heads(A), A.dim() == 3
    if has_heads:
        A = per_sample(A, x.shape[0])
    before, scales = [h0], []
    for t in range(x.shape[1]):
        decay, s = discretize(delta[:, t], A, input_scale, eigenvalues)
        written = s * x[:, t].unsqueeze(-1) * B[:, t].unsqueeze(-2)
        before.append(erase_memory(decay * before[-1], B[:, t], erase[:, t]) + written)
        scales.append((decay, s))
    g, grad_A, tokens = grad_h, torch.zeros_like(A), []
    for t in reversed(range(x.shape[1])):
        (decay, s), drive, B_t = scales[t], x[:, t].unsqueeze(-1), B[:, t].unsqueeze(-2)
        read = grad_y[:, t].unsqueeze(-1) * C[:, t].unsqueeze(-2)
        # the read-out depends on what the token writes unless it is exclusive
        G = g if exclusive else g + read
        decayed = decay * before[t]
        seen = erase_memory(decayed, B[:, t], erase[:, t]) if exclusive else before[t + 1]
        grad_C = (seen * grad_y[:, t].unsqueeze(-1)).sum(-2)
        grad_s = (G * drive * B_t).sum_to_size(s.shape)
        g, grad_B, grad_erase = erase_memory_vjp(g + read, decayed, B[:, t], erase[:, t])
        grad_B = grad_B + (G * s * drive).sum(-2)
        grad_delta, grad_A_t = discretize_vjp(
            g * before[t], grad_s, decay, delta[:, t], A, input_scale, eigenvalues
        )
        grad_A = grad_A + grad_A_t
        tokens.append(((G * s * B_t).sum(-1), grad_delta, grad_B, grad_C, grad_erase))
        g = g * decay
    grad_x, grad_delta, grad_B, grad_C, grad_erase = (
        torch.stack(values[::-1], 1) for values in zip(*tokens, strict=True)
    )
    if has_heads:
        grad_A = sum_samples(grad_A, heads)
    return grad_x, grad_delta, grad_A, grad_B, grad_C, g, grad_erase
