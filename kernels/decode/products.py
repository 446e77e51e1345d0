"""Products of weights with the vectors of a few samples, in one launch.

Letters: b samples, r rows of a weight, c its columns, H heads.
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.decode.arguments import Product
from bedouin.kernels.guard import Launching, falls_back

MAX_SAMPLES = 4
"""Most samples of `multiply`. It reads a weight once but computes each sample by itself; counted in
instructions, that takes less time than reading up to this number."""

MAX_COLUMNS = 8192
"""Most columns of a weight: one program holds whole rows in registers."""


@falls_back
def multiply(
    first: Product,
    second: Product | None = None,
    *,
    dtype: torch.dtype,
    overlaps: bool = False,
    backend: Backend = "auto",
) -> None:
    """Compute one or two products in one launch of Triton's kernel, or each by torch for the
    reference.

    Weights and vectors are rounded to `dtype`, as autocast does; sums are at least float32.
    overlaps: the weights are read while the launch before is still running, which therefore must
    not write them (kernels/decode/triton_overlap.py).
    """
    if backend == "reference":
        for product in (first, second):
            if product is not None:
                product.out.copy_(product.v.to(dtype) @ product.weight.to(dtype).mT)
        return
    # imports Triton
    from bedouin.kernels.decode.triton_products import launch_products

    with Launching(first.v):
        launch_products(first, second, dtype, overlaps)


def takes_products(
    b: int,
    weights: tuple[Tensor, ...],  # (r, c) or (H, r, c) each
    dtype: torch.dtype,
    backend: Backend,
) -> bool:
    """Whether `multiply` may take such weights: one to MAX_SAMPLES samples, contiguous weights in
    the memory of a device on which the kernels run, all of one dtype."""
    first = weights[0]
    if not 0 < b <= MAX_SAMPLES or choose_backend(backend, first.device, dtype) != "triton":
        return False
    return all(
        # a subclass, such as a quantized weight, may have other contents than its shape says
        type(weight) in (Tensor, torch.nn.Parameter)
        and weight.is_contiguous()
        and weight.dtype == first.dtype
        and weight.device == first.device
        and weight.shape[-1] <= MAX_COLUMNS
        for weight in weights
    )
