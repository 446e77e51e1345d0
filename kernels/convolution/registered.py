"""The short convolution in Triton as an operation of torch.library, once differentiable.

Triton is imported when an operation runs.
Letters: b batch, t time, c channels, w width, a channels to which something is added.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.launch import arguments_of, ceil_div, evenly_spaced, next_power_of_two
from bedouin.kernels.operation import empty_like, operation

OPERANDS = (
    "Tensor x, Tensor weight, Tensor window, Tensor? added, SymInt count, SymInt size, float eps"
)

TILE = 4096
"""Numbers of a program's tile: 32 for each of 128 threads."""

CHANNELS = 64
"""Channels of a program's block where none belong to a group: rows of 128 bytes in bfloat16."""


def _launch_arguments(
    x: Tensor,  # (b, t, c)
    weight: Tensor,  # (c, w)
    window: Tensor,  # (b, w - 1, c)
    added: Tensor | None,  # (b, t, a)
    count: int,
    size: int,
    eps: float,
) -> tuple[list[Tensor], list[int], dict[str, Any]]:
    """The tensors, of which x and added have evenly spaced rows; t, c, a, the tiles of tokens and
    blocks of channels, the distances of the rows, and the number of groups; constants."""
    _, t, c = x.shape
    x = evenly_spaced(x)
    # a kernel does not read what stands for absent tensors
    more, a = (x, 0) if added is None else (evenly_spaced(added), added.shape[-1])
    if not count:
        size = min(CHANNELS, c)
    block = next_power_of_two(size)
    tokens = min(next_power_of_two(t), max(1, TILE // block))
    numbers = [t, c, a, ceil_div(t, tokens), ceil_div(c, size), x.stride(1), more.stride(1)]
    numbers.append(count)
    constants = {"WIDTH": weight.shape[1], "TOKENS": tokens, "SIZE": size, "BLOCK": block}
    tensors = [x, weight.contiguous(), window.contiguous(), more]
    return tensors, numbers, constants | {"EPS": eps, "ADDS": added is not None}


@operation("short_convolution", f"({OPERANDS}) -> (Tensor, Tensor)")
def short_convolution_operation(*given: Any) -> tuple[Tensor, Tensor]:
    """The result (b, t, c + a), as x, and the window (b, w - 1, c) after the last token."""
    from bedouin.kernels.convolution.triton_kernels import convolution_kernel

    tensors, numbers, constants = _launch_arguments(*given)
    outputs, grid = _fake(*given), (len(tensors[0]) * numbers[3] * numbers[4],)
    known = arguments_of(convolution_kernel, constants)
    convolution_kernel[grid](*tensors, *outputs, *numbers, **known)
    return outputs


@short_convolution_operation.register_fake
def _fake(*given: Any) -> tuple[Tensor, Tensor]:
    x, _, window, added = given[:4]
    (b, t, c), a = x.shape, 0 if added is None else added.shape[-1]
    return x.new_empty(b, t, c + a), window.new_empty(window.shape)


@operation(
    "short_convolution_backward",
    f"(Tensor grad, Tensor? grad_after, {OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,  # (b, t, c + a)
    grad_after: Tensor | None,  # (b, w - 1, c); None: zeros
    *given: Any,
) -> tuple[Tensor, ...]:
    """Cotangents of x (b, t, c), weight (c, w), window (b, w - 1, c) and added (b, t, a), which is
    empty where there is none."""
    from bedouin.kernels.convolution.triton_kernels import cotangent_kernel, input_kernel

    tensors, numbers, constants = _launch_arguments(*given)
    x, weight = given[:2]
    (b, t, c), w, (tiles, blocks) = x.shape, weight.shape[1], numbers[3:5]
    grid, grad = (b * tiles * blocks,), evenly_spaced(grad)
    grad_x, grad_weight, grad_window, grad_added = empty_like(*given[:4])
    cotangent = torch.empty_like(grad_x)
    sums = x.new_empty(b * tiles, w, c, dtype=torch.float32)
    cotangent_kernel[grid](
        *(grad, *tensors, cotangent, grad_added, *numbers, grad.stride(1)),
        **arguments_of(cotangent_kernel, constants),
    )
    input_kernel[grid](
        *(cotangent, *tensors[:3], grad_x, grad_window, sums, *numbers[:2], *numbers[3:6]),
        **arguments_of(input_kernel, constants),
    )
    if grad_after is not None:
        inside = min(t, w - 1)
        grad_x[:, t - inside :] += grad_after[:, w - 1 - inside :]
        grad_window[:, t:] += grad_after[:, : w - 1 - inside]
    return grad_x, sums.sum(0).T.contiguous().to(grad_weight.dtype), grad_window, grad_added


_backward.register_fake(lambda grad, grad_after, *given: empty_like(*given[:4]))
short_convolution_operation.register_vjp(_backward)
