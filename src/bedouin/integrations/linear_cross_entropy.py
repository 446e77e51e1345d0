"""Cross-entropy of a linear head without all of its logits at once.

Letters: n tokens, m width, v classes.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

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
    """The sum of `cross_entropy(linear(x, weight, bias), labels)`, at least float32. The gradients
    are computed with the loss, a chunk of tokens at a time, so that memory holds the logits of one
    chunk, the gradients of x and, in at least float32, of the weight. Under autocast the products
    have its dtype. Labels of ignore_index count nothing. Source: Liger Kernel (arXiv 2410.10989).
    Raises ValueError for other shapes, and in the backward pass RuntimeError for create_graph."""
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
            given = (x, weight, bias, labels, ignore_index, torch.is_grad_enabled())
            total: Tensor = _Chunked.apply(*given)  # type: ignore[no-untyped-call]
            return total
        options: Any = {"ignore_index": ignore_index, "reduction": "sum"}
        if kernel == "fla":
            loss = import_module("fla.modules").FusedLinearCrossEntropyLoss(**options)
            total = loss(x, labels, weight, bias)
        else:
            module = import_module("liger_kernel.transformers")
            loss = module.LigerFusedLinearCrossEntropyLoss(**options, accum_dtype=torch.float32)
            total = loss(weight, x, labels, bias)
        return total


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (n, m)
        weight: Tensor,  # (v, m)
        bias: Tensor | None,  # (v,)
        labels: Tensor,  # (n,)
        ignore_index: int,
        has_grad: bool,
    ) -> Tensor:  # ()
        dtype = accumulator(x.dtype)
        total = torch.zeros((), dtype=dtype, device=x.device)
        wants = [has_grad and needs for needs in ctx.needs_input_grad[:3]]
        dx = torch.zeros_like(x) if wants[0] else None
        dw = torch.zeros_like(weight, dtype=dtype) if wants[1] else None
        db = torch.zeros(len(weight), dtype=dtype, device=x.device) if wants[2] else None
        size = max(1, CHUNK // len(weight))
        for start in range(0, len(x), size):
            part, aim = x[start : start + size], labels[start : start + size].unsqueeze(1)
            real = aim != ignore_index
            aim = aim.where(real, 0)
            logs = F.log_softmax(F.linear(part, weight, bias), -1, dtype=dtype)
            found = logs.gather(1, aim)
            total -= found.where(real, 0).sum()
            if not any(wants):
                del logs  # before those of the next chunk
                continue
            # softmax minus one at the label, in the memory of its logarithm
            grads = logs.exp_().scatter_(1, aim, found.expm1()).mul_(real)
            del logs
            if db is not None:
                db += grads.sum(0)
            grads = grads.to(x.dtype)
            if dx is not None:
                torch.mm(grads, weight, out=dx[start : start + size])
            if dw is not None:
                dw += grads.mT @ part
            del grads
        ctx.save_for_backward(dx, dw, db)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # grad: ()
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy has first derivatives only, got create_graph=True: compute "
                "the loss from logits"
            )
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        # written in the dtype of the result, since that of the weight is large in another
        outs = ((v, None if v is None else torch.empty_like(v, dtype=kind)) for v, kind in pairs)
        grads = (None if v is None else torch.mul(v, grad, out=out) for v, out in outs)
        return (*grads, None, None, None)
