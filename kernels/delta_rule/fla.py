"""The gated delta rule by the kernels of flash-linear-attention.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head.
"""

from importlib.util import find_spec

import torch
from einops import rearrange
from torch import Tensor

from bedouin.kernels.backend import constant_in_graphs, triton_version
from bedouin.kernels.delta_rule.reference import DeltaInputs

FLA_DTYPES = (torch.bfloat16, torch.float16)

FLA_IS_INSTALLED = find_spec("fla") is not None
"""Found once, because torch.compile breaks the graph at `find_spec`."""


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


def check_call(
    query: Tensor,  # (b, t, h, p)
) -> None:
    """ValueError for a call that flash-linear-attention does not compute, or not correctly."""
    if not query.is_cuda or query.dtype not in FLA_DTYPES:
        raise ValueError(
            "backend='fla' needs a CUDA device and bfloat16 or float16, got "
            f"{query.device.type} and {query.dtype}: use torch.autocast('cuda', torch.bfloat16), "
            "or backend='auto' or 'torch'"
        )
    if fla_is_wrong(query.device):
        raise ValueError(
            "backend='fla' needs Triton 3.7.1 or more on a GPU of this kind, for which the "
            "installed one miscompiles its backward pass: use backend='auto' or 'triton', or "
            "install a torch that comes with such a Triton"
        )


def delta_rule_fla(
    inputs: DeltaInputs,
    memory: Tensor,  # (b, h, p, v)
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """`delta_rule` by the kernels of flash-linear-attention."""
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    query, key, value, beta, log_decay = inputs
    o, last = chunk_gated_delta_product(
        q=query,
        k=rearrange(key, "b t k h p -> b (t k) h p").contiguous(),
        v=rearrange(value, "b t k h v -> b (t k) h v").contiguous(),
        g=log_decay,
        beta=rearrange(beta.to(key.dtype), "b t k h -> b (t k) h").contiguous(),
        num_householder=key.shape[2],
        initial_state=memory,
        output_final_state=True,
    )
    return o, last
