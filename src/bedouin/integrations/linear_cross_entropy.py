"""Cross-entropy of a linear head without all of its logits at once.

Letters: n tokens, m width, v classes.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bedouin.checks import one_of
from bedouin.kernels.launch import accumulator

Kernel = Literal["torch", "liger", "fla"]
"""What computes the loss: this module, or Triton kernels of Liger Kernel or of FLA."""
CHUNK = 2**26  # how many logits exist at once, at least those of one token
_LIBRARIES = {"liger": "liger_kernel", "fla": "fla"}
_INSTALLS = {"liger": "liger-kernel", "fla": "flash-linear-attention"}


def choose_kernel(kernel: str | bool, device: torch.device) -> Kernel:
    """`kernel`; for "auto" or True the first of liger, fla and torch that can run on the device.
    Raises ValueError for another name or a kernel without GPU, ImportError without its library."""
    if kernel in (True, "auto"):
        usable = [name for name, library in _LIBRARIES.items() if find_spec(library) is not None]
        return cast(Kernel, usable[0] if usable and device.type == "cuda" else "torch")
    found = one_of("kernel", cast(Kernel, kernel), get_args(Kernel))
    if found == "torch":
        return found
    if device.type != "cuda":
        raise ValueError(f'kernel {found!r} needs tensors on a GPU, got {device}: use "torch"')
    if find_spec(_LIBRARIES[found]) is None:
        remedy = f'pip install {_INSTALLS[found]}, or use "torch"'
        raise ImportError(f"kernel {found!r} needs {_LIBRARIES[found]}: {remedy}")
    return found


def linear_cross_entropy(
    x: Tensor,  # (n, m)
    weight: Tensor,  # (v, m)
    labels: Tensor,  # (n,) int64
    bias: Tensor | None = None,  # (v,)
    *,
    ignore_index: int = -100,
    kernel: Kernel = "torch",
) -> Tensor:  # ()
    """The sum of `cross_entropy(linear(x, weight, bias), labels)`, at least float32, a chunk of
    tokens at a time. The backward pass computes the logits of a chunk anew, so that memory holds
    those of one chunk, and the weight and its gradient in at least float32. Under autocast the
    products have its dtype. Labels of ignore_index count nothing. ValueError for other shapes."""
    if x.ndim != 2 or weight.shape[1:] != x.shape[1:] or labels.shape != x.shape[:1]:
        raise ValueError(
            "x, weight and labels must have shapes (n, m), (v, m) and (n,), got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}"
        )
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        if kernel == "torch" or not len(x):
            return _by_chunks(x, weight, labels, bias, ignore_index)
        options: Any = {"ignore_index": ignore_index, "reduction": "sum"}
        if kernel == "fla":
            loss = import_module("fla.modules").FusedLinearCrossEntropyLoss(**options)
            total: Tensor = loss(x, labels, weight, bias)
        else:
            module = import_module("liger_kernel.transformers")
            loss = module.LigerFusedLinearCrossEntropyLoss(**options, accum_dtype=torch.float32)
            total = loss(weight, x, labels, bias)
        return total


def _by_chunks(
    x: Tensor,  # (n, m)
    weight: Tensor,  # (v, m)
    labels: Tensor,  # (n,)
    bias: Tensor | None,  # (v,)
    ignore_index: int,
) -> Tensor:  # ()
    dtype = accumulator(x.dtype)
    # the gradients of chunks add up in the dtype of what the chunks share
    wide_weight, wide_bias = weight.to(dtype), None if bias is None else bias.to(dtype)

    def loss_of(x: Tensor, labels: Tensor) -> Tensor:
        of_bias = None if bias is None or wide_bias is None else wide_bias.to(bias.dtype)
        logits = F.linear(x, wide_weight.to(weight.dtype), of_bias).to(dtype)
        return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")

    pairs = zip(*(v.split(max(1, CHUNK // len(weight))) for v in (x, labels)), strict=True)
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.stack([checkpoint(loss_of, *pair, **options) for pair in pairs]).sum()
