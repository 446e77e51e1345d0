"""The short causal convolution of a layer with what follows it: SiLU, and unit length of heads.

The Triton version is an operation of torch.library, once differentiable, which imports Triton when
it runs.
Letters: b batch, t time, c channels, w width, a channels to which something is added, g channels of
a group.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.checks import check_sequence, check_shapes
from bedouin.kernels.convolution.reference import Groups, short_convolution_reference
from bedouin.kernels.launch import as_constants, ceil_div, evenly_spaced, next_power_of_two
from bedouin.kernels.operation import empty_like, operation

__all__ = ["Groups", "short_convolution", "short_convolution_reference"]

MAX_GROUP = 1024
"""Most channels of a group, which a program of the Triton kernels holds with several tokens."""


def short_convolution(
    x: Tensor,  # (b, t, c)
    weight: Tensor,  # (c, w)
    window: Tensor,  # (b, w - 1, c), the inputs before the first token
    added: Tensor | None = None,  # (b, t, a), a <= c
    groups: Groups | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # (b, t, c + a), as x, and (b, w - 1, c), as the window
    """SiLU(conv(x)), whose first groups of channels v are normalized to v rsqrt(|v|^2 + eps), as
    `groups` says (None: no groups), followed by the a channels SiLU(conv(x)[..., :a] + added); and
    the window after the last token, which is the last w - 1 inputs.

        conv(x)_t = sum_i weight[:, i] * x_{t - w + 1 + i}

    Computes in at least float32. The Triton version is once differentiable and saves its operands
    alone. Raises ValueError for shapes that do not fit, or a backend that cannot run.
    """
    check_sequence("x", x)
    (b, t, c), w = x.shape, weight.shape[-1]
    check_shapes((c, w), "(c, w)", weight=weight)
    check_shapes((b, w - 1, c), "(b, w - 1, c)", window=window)
    if added is not None:
        check_shapes((b, t, added.shape[-1]), "(b, t, a)", added=added)
    # the kernels compute norms of all blocks, and read those of groups
    groups = Groups(0, c, 1.0) if groups is None else groups
    if groups.number * groups.size > c or (added is not None and added.shape[-1] > c):
        raise ValueError(
            f"groups and added must have at most the {c} channels of x, got {groups.number} groups "
            f"of {groups.size} and {0 if added is None else added.shape[-1]} channels"
        )
    unfit = None
    if groups.number and groups.size > MAX_GROUP:
        unfit = f"groups of {groups.size} channels (at most {MAX_GROUP})"
    dtype = torch.float64 if torch.float64 in (x.dtype, weight.dtype) else x.dtype
    if x.numel() and choose_backend(backend, x.device, dtype, unfit) == "triton":
        out, after = short_convolution_operation(x, weight, window, added, *groups)
        return out, after
    return short_convolution_reference(x, weight, window, added, groups)


OPERANDS = (
    "Tensor x, Tensor weight, Tensor window, Tensor? added, SymInt count, SymInt size, float eps"
)

TILE = 4096
"""Numbers of a program's tile: 32 for each of 128 threads."""

CHANNELS = 64
"""Channels of a program's block where none belong to a group: rows of 128 bytes in bfloat16."""


class ConvolutionInputs(NamedTuple):
    """The tensors of the operation."""

    x: Tensor  # (b, t, c)
    weight: Tensor  # (c, w)
    window: Tensor  # (b, w - 1, c)
    added: Tensor | None  # (b, t, a)


class Tiles(NamedTuple):
    """What the kernels are compiled for."""

    WIDTH: int
    TOKENS: int  # of a program
    SIZE: int  # channels of a program
    BLOCK: int  # these, rounded up to a power of two
    EPS: float


def _launch_arguments(
    given: tuple[Any, ...],  # the arguments of the operation
) -> tuple[ConvolutionInputs, list[int], tuple[int, int], dict[str, Any]]:
    """The tensors, of which x and added have evenly spaced rows; t, c, the distance of the rows of
    x, a and that of added, and the number of groups; the tiles of tokens of all samples and the
    blocks of channels; constants."""
    x, weight, window, added, count, size, eps = given
    b, t, c = x.shape
    x, added = evenly_spaced(x), None if added is None else evenly_spaced(added)
    if not count:
        size = min(CHANNELS, c)
    block = next_power_of_two(size)
    tokens = min(next_power_of_two(t), max(1, TILE // block))
    more = (0, 0) if added is None else (added.shape[-1], added.stride(1))
    numbers, tiles = [t, c, x.stride(1), *more, count], (b * ceil_div(t, tokens), ceil_div(c, size))
    how = as_constants(Tiles(weight.shape[1], tokens, size, block, eps))
    read = ConvolutionInputs(x, weight.contiguous(), window.contiguous(), added)
    return read, numbers, tiles, {"how": how, "enable_fp_fusion": True}


def _like(*given: Any) -> tuple[Tensor, Tensor]:
    x, _, window, added = given[:4]
    (b, t, c), a = x.shape, 0 if added is None else added.shape[-1]
    return x.new_empty(b, t, c + a), window.new_empty(window.shape)


@operation("short_convolution", f"({OPERANDS}) -> (Tensor, Tensor)", _like)
def short_convolution_operation(*given: Any) -> tuple[Tensor, Tensor]:
    """The result (b, t, c + a), as x, and the window (b, w - 1, c) after the last token."""
    from bedouin.kernels.convolution.triton_kernels import convolution_kernel

    inputs, numbers, (tiles, blocks), constants = _launch_arguments(given)
    outputs = _like(*given)
    convolution_kernel[(tiles * blocks,)](inputs, *outputs, *numbers, **constants)
    return outputs


@short_convolution_operation.register_vjp(optional=(1,))
def _backward(
    grad: Tensor,  # (b, t, c + a)
    grad_after: Tensor | None,  # (b, w - 1, c); None: zeros
    *given: Any,
) -> tuple[Tensor, ...]:
    """Cotangents of x (b, t, c), weight (c, w), window (b, w - 1, c) and added (b, t, a), which is
    empty where there is none."""
    from bedouin.kernels.convolution.triton_kernels import cotangent_kernel, input_kernel

    inputs, numbers, (tiles, blocks), constants = _launch_arguments(given)
    x, w = given[0], given[1].shape[1]
    (_, t, c), grid, grad = x.shape, (tiles * blocks,), evenly_spaced(grad)
    grad_x, grad_weight, grad_window, grad_added = empty_like(*given[:4])
    cotangent = torch.empty_like(grad_x)
    sums = x.new_empty(tiles, w, c, dtype=torch.float32)
    cotangent_kernel[grid](
        *(grad, inputs, cotangent, grad_added, *numbers, grad.stride(1)), **constants
    )
    input_kernel[grid](*(cotangent, inputs, grad_x, grad_window, sums, *numbers[:3]), **constants)
    if grad_after is not None:
        inside = min(t, w - 1)
        grad_x[:, t - inside :] += grad_after[:, w - 1 - inside :]
        grad_window[:, t:] += grad_after[:, : w - 1 - inside]
    return grad_x, sums.sum(0).T.contiguous().to(grad_weight.dtype), grad_window, grad_added
