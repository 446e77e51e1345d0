"""The split of the projected input as an operation of torch.library.

Letters: b batch, t time, p channels of a head, r raw values of a head, c convolved channels,
w width of the convolution, H heads; b' = H b folded samples (kernels/heads.py).
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.operation import operation
from bedouin.kernels.projection.parts import Part, Parts

Results = tuple[Tensor, Tensor, Tensor]
"""x (b', t, p), the raw values (b', t, r) and the gate (b', t, p)."""


@operation(
    "split_projection",
    "(Tensor projected, Tensor bias, Tensor? weight, Tensor? window, int[] parts) "
    "-> (Tensor, Tensor, Tensor)",
)
def _split(
    projected: Tensor,  # (b, t, columns)
    bias: Tensor,  # (H, r)
    weight: Tensor | None,  # (c, w)
    window: Tensor | None,  # (b, w - 1, c)
    parts: list[int],
) -> Results:
    from bedouin.kernels.projection.launch import launch_split

    results = _results(projected, bias, weight, window, parts)
    launch_split(projected, bias, weight, window, tuple(parts), results)
    return results


def _results(
    projected: Tensor,  # (b, t, columns)
    bias: Tensor,  # (H, r)
    weight: Tensor | None,  # (c, w)
    window: Tensor | None,  # (b, w - 1, c)
    parts: list[int],
) -> Results:
    """Memory for the results."""
    (b, t, _), H = projected.shape, len(bias)
    _, p, r, _ = Parts.of(tuple(parts), H)
    x, raw, gate = (projected.new_empty(H * b, t, size) for size in (p, r, p))
    return x, raw, gate


_split.register_fake(_results)


@operation(
    "split_projection_backward",
    "(Tensor grad_x, Tensor grad_raw, Tensor grad_gate, Tensor projected, Tensor? weight, "
    "Tensor? window, int[] parts, int num_heads) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _split_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the projected input, the bias (H, r), the weight (c, w) and the window; float32
    but for the first, empty where there is none."""
    from bedouin.kernels.projection.launch import launch_split_backward

    projected, weight, window, parts, num_heads = given[3:]
    return launch_split_backward(given[:3], projected, weight, window, tuple(parts), num_heads)


@_split_backward.register_fake
def _split_backward_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    projected, weight, window, parts, num_heads = given[3:]
    of, b = Parts.of(tuple(parts), num_heads), projected.shape[0]
    wide = projected.new_empty(0, dtype=torch.float32)
    w = 1 if weight is None else weight.shape[1]
    grad_weight = wide.new_empty((0, of.c) if weight is None else (of.c, w))
    grad_window = wide.new_empty(b if window is not None else 0, w - 1, of.c)
    grad_bias = wide.new_empty(num_heads, of.r)
    return projected.new_empty(projected.shape), grad_bias, grad_weight, grad_window


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    projected, bias, weight, window, ctx.parts = inputs
    ctx.save_for_backward(projected, weight, window)
    ctx.bias = len(bias), bias.dtype


def _vjp(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """`grads`: of x (b', t, p), the raw values (b', t, r) and the gate (b', t, p)."""
    saved = projected, weight, window = ctx.saved_tensors
    num_heads, dtype = ctx.bias
    with torch.no_grad():
        given = *grads, projected, weight, window, ctx.parts, num_heads
        grad_input, grad_bias, grad_weight, grad_window = _split_backward(*given)
    found: list[Tensor | None] = [grad_input, grad_bias.to(dtype)]
    for grad, v in ((grad_weight, weight), (grad_window, window)):
        found.append(None if v is None else grad.to(v.dtype))
    return *refuse_second_derivative(found, [*grads, *saved]), None


_split.register_autograd(_vjp, setup_context=_save)


def split_projection(
    projected: Tensor,  # (b, t, columns)
    bias: Tensor,  # (H, r)
    weight: Tensor | None,  # (c, w); None: no convolution, or one of width 1
    window: Tensor | None,  # (b, w - 1, c), given with a weight
    parts: tuple[Part, ...],
) -> Results:
    """x, the raw values with their bias, and the gate, of each head; SiLU of the convolution of the
    parts that are `convolved`.

    In Triton, once differentiable; computes in float32, the results have the dtype of the input.
    No size may be 0. `window` has the inputs before the first token.
    """
    flat = [int(value) for part in parts for value in part]
    found: Results = _split(projected, bias, weight, window, flat)
    return found
