"""The gated delta rule with several Householder steps a token: loop, chunks, a Triton kernel, and
the kernels of flash-linear-attention.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head; in chunks also n chunks, c tokens of a chunk, i = c k steps of a chunk.
"""

from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from bedouin.baselines.delta_rule_kernel import delta_rule_operation
from bedouin.checks import one_of
from bedouin.kernels.backend import Backend, choose_backend, triton_version
from bedouin.kernels.outside import constant_in_graphs
from bedouin.packing import zero_outside

DeltaBackend = Literal["auto", "torch", "triton", "fla"]

CHUNK_STEPS = 64
"""Householder steps of a chunk, as in flash-linear-attention."""

FLA_DTYPES = (torch.bfloat16, torch.float16)

FLA_IS_INSTALLED = find_spec("fla") is not None
"""Found once, because torch.compile breaks the graph at `find_spec`."""

KERNEL_CHANNELS = 256
"""The most key channels of a head in the Triton kernel, which holds all of them in one program."""


class DeltaInputs(NamedTuple):
    """What a token contributes. The keys have length 1 or 0; a log_decay of None is no decay."""

    query: Tensor  # (b, t, h, p)
    key: Tensor  # (b, t, k, h, p)
    value: Tensor  # (b, t, k, h, v)
    beta: Tensor  # (b, t, k, h), in [0, 2]
    log_decay: Tensor | None  # (b, t, h), <= 0

    def before_padding(
        self,
        real: Tensor,  # (b, t) bool
    ) -> "DeltaInputs":
        """Inputs that neither decay nor write where `real` is False."""
        decay = None if self.log_decay is None else zero_outside(real, self.log_decay)
        return self._replace(beta=zero_outside(real, self.beta), log_decay=decay)


def check_delta_backend(backend: str) -> None:
    """ValueError for an unknown name, and for "fla" without that package."""
    one_of("backend", backend, get_args(DeltaBackend))
    if backend == "fla" and not FLA_IS_INSTALLED:
        raise ValueError(
            "backend='fla' needs the package flash-linear-attention: install it, or use "
            "backend='auto' or 'torch'"
        )


def delta_rule(
    inputs: DeltaInputs,
    memory: Tensor,  # (b, h, p, v)
    dtype: torch.dtype,
    backend: DeltaBackend,
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """S <- exp(log_decay) S, then k times S <- (I - beta key key^T) S + beta key value^T; returns
    S^T query / sqrt(p) of every token, and the last S.

    `dtype` is the one that products have in this call. "torch" computes in the dtype of `inputs`,
    in chunks, which take a half to a quarter of the loop's time on a CPU. "triton" computes in
    float32, token by token; it has no second derivative. "fla" casts query, key, value and beta to
    `dtype`, which must be bfloat16 or float16. "auto" is "fla" for more than one token where that
    is possible, the package is installed, and Triton compiles it correctly (`fla_is_wrong`); else
    "triton" on a GPU, except in float64 and under transforms of torch.func.
    Sources: DeltaNet (arXiv 2406.06484), Gated DeltaNet (2412.06464), DeltaProduct (2502.10297).
    """
    if _takes_fla(inputs.query, dtype, backend):
        return delta_rule_fla(inputs, memory, dtype)
    if _takes_kernel(inputs, backend):
        o, last, _ = delta_rule_operation(*inputs, memory)
        return o, last
    if inputs.query.shape[1] == 1:
        return delta_rule_reference(inputs, memory)
    return delta_rule_chunked(inputs, memory)


def _takes_fla(
    query: Tensor,  # (b, t, h, p)
    dtype: torch.dtype,
    backend: DeltaBackend,
) -> bool:
    """Whether `delta_rule` calls flash-linear-attention; ValueError where it must and cannot."""
    fits = query.is_cuda and dtype in FLA_DTYPES
    if backend == "fla" and not fits:
        raise ValueError(
            "backend='fla' needs a CUDA device and bfloat16 or float16, got "
            f"{query.device.type} and {dtype}: use torch.autocast('cuda', torch.bfloat16), or "
            "backend='auto' or 'torch'"
        )
    if backend == "auto":
        usable = fits and query.shape[1] > 1 and FLA_IS_INSTALLED
        return usable and not fla_is_wrong(query.device)
    return backend == "fla"


def _takes_kernel(inputs: DeltaInputs, backend: DeltaBackend) -> bool:
    """Whether `delta_rule` calls the Triton kernel; ValueError where it must and cannot."""
    if backend == "torch":
        return False
    unfit, p = None, inputs.key.shape[-1]
    if p > KERNEL_CHANNELS:
        unfit = f"heads of {p} key channels, more than {KERNEL_CHANNELS}"
    chosen: Backend = "triton" if backend == "triton" else "auto"
    device, dtype = inputs.key.device, inputs.key.dtype
    return choose_backend(chosen, device, dtype, unfit, plain="torch") == "triton"


# torch.compile of torch 2.11 follows `triton_version` into the table of regular expressions, and
# ends with StopIteration at its guard on the keys of that table.
@constant_in_graphs
def fla_is_wrong(device: torch.device) -> bool:
    """Whether Triton miscompiles the backward pass of flash-linear-attention for this GPU.

    Triton from 3.4 to before 3.7.1 does so on Hopper (issue 640 of flash-linear-attention, which
    refuses gated calls). Calls without a gate were seen to end in illegal memory accesses.
    """
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper and (3, 4) <= triton_version() < (3, 7, 1)


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


def delta_rule_chunked(
    inputs: DeltaInputs,
    memory: Tensor,  # (b, h, p, v)
    *,
    chunk_steps: int = CHUNK_STEPS,
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
    if torch.compiler.is_compiling():
        tensor = _RowMajorGradient.apply(tensor)  # type: ignore[no-untyped-call]
    missing = -tensor.shape[1] % c
    if missing:
        tensor = F.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing))
    return rearrange(tensor, pattern, c=c)


class _RowMajorGradient(torch.autograd.Function):
    """The identity, whose gradient is copied to row-major order.

    The gradient of a rearrangement has permuted strides. With lengths that vary, the compiler
    predicts other strides for the operations that follow, and views of their results then fail.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone(memory_format=torch.contiguous_format)


def _ratio(
    later: Tensor,  # (..., r)
    earlier: Tensor,  # (..., i)
    mask: Tensor,  # (r, i)
) -> Tensor:  # (..., r, i)
    """exp(later_r - earlier_i) where `mask` is True, else 0; masked before exp, which overflows."""
    difference = later.unsqueeze(-1) - earlier.unsqueeze(-2)
    return torch.exp(difference.masked_fill(~mask, -torch.inf))


def delta_rule_fla(
    inputs: DeltaInputs,
    memory: Tensor,  # (b, h, p, v)
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """`delta_rule` by the kernels of flash-linear-attention, with products in `dtype`."""
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    query, key, value, beta, log_decay = inputs
    o, last = chunk_gated_delta_product(
        q=query.to(dtype),
        k=rearrange(key.to(dtype), "b t k h p -> b (t k) h p").contiguous(),
        v=rearrange(value.to(dtype), "b t k h v -> b (t k) h v").contiguous(),
        g=log_decay,
        beta=rearrange(beta.to(dtype), "b t k h -> b (t k) h").contiguous(),
        num_householder=key.shape[2],
        initial_state=memory,
        output_final_state=True,
    )
    return o.to(memory.dtype), last
