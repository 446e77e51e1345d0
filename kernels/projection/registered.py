"""The split of the projected input as an operation of torch.library.

Letters: b batch, t time, p channels of a head, r raw values of a head, q those with a bias,
c convolved channels, w width of the convolution, H heads; b' = H b folded samples
(kernels/heads.py).
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
    bias: Tensor,  # (H, q)
    weight: Tensor | None,  # (c, w)
    window: Tensor | None,  # (b, w - 1, c)
    parts: tuple[int, ...],  # a list from the dispatcher
) -> Results:
    from bedouin.kernels.projection.launch import launch_split

    results = _results(projected, bias, weight, window, parts)
    launch_split(projected, bias, weight, window, tuple(parts), results)
    return results


def _results(
    projected: Tensor,  # (b, t, columns)
    bias: Tensor,  # (H, q)
    weight: Tensor | None,  # (c, w)
    window: Tensor | None,  # (b, w - 1, c)
    parts: tuple[int, ...],  # a list from the dispatcher
) -> Results:
    """Memory for the results."""
    (b, t, _), H = projected.shape, len(bias)
    _, p, r, *_ = Parts.of(tuple(parts), H)
    x, raw, gate = (projected.new_empty(H * b, t, size) for size in (p, r, p))
    return x, raw, gate


_split.register_fake(_results)


@operation(
    "split_projection_backward",
    "(Tensor grad_x, Tensor grad_raw, Tensor grad_gate, Tensor projected, Tensor? weight, "
    "Tensor? window, int[] parts, int num_heads) -> (Tensor, Tensor, Tensor)",
)
def _split_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the projected input, of the bias and the weight in one tensor (H q + c w), and
    of the window, empty where there is none; the last two in float32."""
    from bedouin.kernels.projection.launch import launch_split_backward

    projected, weight, window, parts, num_heads = given[3:]
    return launch_split_backward(given[:3], projected, weight, window, tuple(parts), num_heads)


@_split_backward.register_fake
def _split_backward_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    projected, weight, window, parts, num_heads = given[3:]
    of = Parts.of(tuple(parts), num_heads)
    size = num_heads * of.q + (0 if weight is None else weight.numel())
    sums = projected.new_empty(size, dtype=torch.float32)
    grad_window = sums.new_empty(0 if window is None else window.shape)
    return projected.new_empty(projected.shape), sums, grad_window


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    projected, bias, weight, window, ctx.parts = inputs
    ctx.save_for_backward(projected, weight, window)
    ctx.bias = bias.shape, bias.dtype


def _vjp(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """`grads`: of x (b', t, p), the raw values (b', t, r) and the gate (b', t, p)."""
    saved = projected, weight, window = ctx.saved_tensors
    (num_heads, q), dtype = ctx.bias
    with torch.no_grad():
        given = *grads, projected, weight, window, ctx.parts, num_heads
        grad_input, sums, grad_window = _split_backward(*given)
        # mostly one conversion, of both together
        sums = sums.to(dtype if weight is None else torch.promote_types(dtype, weight.dtype))
    of_bias, of_weight = sums.split_with_sizes([num_heads * q, sums.numel() - num_heads * q])
    found: list[Tensor | None] = [grad_input, of_bias.view(num_heads, q).to(dtype)]
    found.append(None if weight is None else of_weight.view(weight.shape).to(weight.dtype))
    found.append(None if window is None else grad_window.to(window.dtype))
    return *refuse_second_derivative(found, [*grads, *saved]), None


_split.register_autograd(_vjp, setup_context=_save)


def split_projection(
    projected: Tensor,  # (b, t, columns)
    bias: Tensor,  # (H, q)
    weight: Tensor | None,  # (c, w); None: no convolution, or one of width 1
    window: Tensor | None,  # (b, w - 1, c); None: zeros
    parts: tuple[Part, ...],
) -> Results:
    """x, the raw values with their bias, and the gate, of each head; SiLU of the convolution of the
    parts that are `convolved`. The biases are those of the values that the parts say, in the order
    of the raw values.

    In Triton, once differentiable; computes in float32, the results have the dtype of the input.
    No size may be 0. `window` has the inputs before the first token.
    """
    flat = tuple([int(value) for part in parts for value in part])
    found: Results = _split(projected, bias, weight, window, flat)
    return found
