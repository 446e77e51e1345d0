"""One token: what it needs of a layer, its buffers, its kernel, and when the kernel may be used.

A token of few samples is four launches, each of which needs the one before: in_proj beside the
feedback's product, x_proj, one kernel for the rest, out_proj. With more samples, or modules in
place of the projections, torch computes the products, the feedback's in a launch of its own.
Several heads take as many launches: the kernels read and write the channels of each head in place.
Letters: b batch, m d_model, d d_inner, n d_state, r raw values, H num_heads, p = d / H head_dim.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from bedouin.heads import HeadLinear
from bedouin.kernels.backend import (
    autocast_dtype,
    choose_backend,
    interpreter_is_on,
    is_cuda_device,
    is_transformed,
    without_autocast,
)
from bedouin.kernels.decode import (
    DecayKind,
    Product,
    StepOperands,
    StepOptions,
    StepParameters,
    decode_token,
    multiply,
    takes_products,
    unsupported_token,
)
from bedouin.kernels.feedback import normalize_feedback
from bedouin.kernels.launch import last_axis_contiguous
from bedouin.kernels.operands import Parameterization, RawLayout
from bedouin.parameterization import OutputStage
from bedouin.solvers.deferred import DeferredWarning
from bedouin.solvers.draws import Draws
from bedouin.solvers.solution import BackwardStats, SolveStats, has_values, join_parts
from bedouin.solvers.solve import SolveOptions
from bedouin.state import BedouinState, StateSize, check_state
from bedouin.wrapped import apply_projection, is_plain, is_untouched, norm_parameters


class DecodedLayer(Protocol):
    """What decoding uses of a layer, which this package therefore need not import."""

    has_fused_step: ClassVar[bool]
    has_drive: ClassVar[bool]

    d_inner: int
    d_state: int
    num_heads: int
    head_dim: int
    unfused: str | None
    state_size: StateSize
    feedback: tuple[str, ...]
    output: OutputStage
    solve_options: SolveOptions

    in_proj: nn.Linear
    x_proj: Any
    y_proj: nn.Linear | HeadLinear | None
    out_proj: nn.Linear
    norm: nn.RMSNorm | None
    dt_bias: nn.Parameter
    raw_bias: nn.Parameter | None
    D: nn.Parameter

    training: bool
    stats: SolveStats | None
    draws: Draws
    deferred: DeferredWarning

    @property
    def components(self) -> tuple[str, ...]: ...

    @property
    def conv(self) -> nn.Module | None: ...

    @property
    def feedback_norm_eps(self) -> float | None: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def layout(self) -> RawLayout | None: ...

    def parameterization(self) -> Parameterization: ...

    def decay_parameter(self) -> tuple[DecayKind, float, Tensor | None]: ...

    def drive(self, x: Tensor) -> Tensor: ...

    def next_draw(self) -> int | None: ...

    def check_input(self, x: Tensor, rank: int) -> None: ...

    def init_state(self, batch_size: int) -> BedouinState: ...

    def step(self, x_t: Tensor, state: BedouinState) -> tuple[Tensor, BedouinState]: ...


class TokenStats(SolveStats):
    """Statistics of one token: views of a copied block, made when they are read."""

    def __init__(self, num_steps: Tensor, block: Tensor, at: int, num_heads: int) -> None:
        # bypasses the frozen `__setattr__`; the other fields are properties here
        source = block, at, num_heads
        self.__dict__.update(num_steps=num_steps, _source=source, _backward=BackwardStats())

    @cached_property
    def _joined(self) -> SolveStats:
        block, at, num_heads = self.__dict__["_source"]
        steps = self.num_steps
        residual, pivot, converged = cut_statistics(block, at, num_heads * len(steps))
        return join_heads(steps, residual, converged.view(torch.bool), pivot)

    @property
    def residual(self) -> Tensor:
        return self._joined.residual

    @property
    def conditioning(self) -> Tensor | None:
        return self._joined.conditioning

    @property
    def converged(self) -> Tensor:
        return self._joined.converged


def cut_statistics(
    block: Tensor,  # (size,)
    at: int,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual, pivot (H b,) and converged (H b,) uint8, which begin at element `at` of a block;
    count: H b."""
    end = at + 2 * count
    return block[at : at + count], block[at + count : end], block[end:].view(torch.uint8)[:count]


def join_heads(
    num_steps: Tensor,  # (b,)
    residual: Tensor,  # (H b,)
    converged: Tensor,  # (H b,)
    pivot: Tensor,  # (H b,)
) -> SolveStats:
    """The statistics of samples from those of their heads; of one head, the same tensors."""
    num_heads = len(residual) // len(num_steps)
    steps = num_steps.expand(num_heads, -1).flatten()
    return join_parts(SolveStats(steps, residual, converged, pivot), num_heads)


class Buffers:
    """State and statistics of b samples at fixed places, in one block that is copied at once."""

    def __init__(self, layer: DecodedLayer, b: int, low: torch.dtype) -> None:
        d, n = layer.d_inner, layer.d_state
        state = layer.init_state(0).y
        self.shape, self.like, self.num_heads = (b, n, d), state, layer.num_heads
        self._end, count = b * n * d + b * d, layer.num_heads * b
        self.block = state.new_zeros(self._end + 2 * count + -(-count // state.element_size()))
        h, self.y = self._state(self.block)
        self.h = h.mT
        self.residual, self.pivot, self.converged = cut_statistics(self.block, self._end, count)
        self.normed = torch.zeros(b, d, dtype=low, device=state.device)
        self.all_converged = torch.ones(count, dtype=torch.uint8, device=state.device)
        self.num_steps = torch.ones(b, dtype=torch.int64, device=state.device)

    def _state(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """h (b, d, n), state-major in memory, and y (b, d) in a block."""
        b, n, d = self.shape
        h = block.as_strided((b, d, n), (n * d, 1, d))
        return h, block.as_strided((b, d), (d, 1), b * n * d)

    def load(self, state: BedouinState, norm_eps: float | None) -> None:
        """Copy a state in; raises TypeError or ValueError where it does not fit."""
        b, n, d = self.shape
        state = check_state(state, b, StateSize(d, n), self.like)
        self.h.copy_(state.ssm.mT)
        self.y.copy_(state.y)
        of_heads = self.y.unflatten(1, (self.num_heads, -1))
        self.normed.copy_(normalize_feedback(of_heads, norm_eps).flatten(1))

    def copies(self) -> tuple[BedouinState, SolveStats]:
        """State and statistics, in one new block."""
        # outside inference mode tensors have version counters, which tell whether a state that is
        # passed back was changed or can stay in place
        with torch._C._InferenceMode(False):
            block = self.block.clone()
            h, y = self._state(block)
        return BedouinState(h, y), TokenStats(self.num_steps, block, self._end, self.num_heads)

    def take_stats(self) -> SolveStats:
        """Statistics of the last token, where `converged` covers all tokens since the last call."""
        converged = self.all_converged.bool()
        self.all_converged.fill_(1)
        return join_heads(self.num_steps, self.residual.clone(), converged, self.pivot.clone())


def make_buffers(layer: DecodedLayer, x_t: Tensor) -> Buffers:
    """Buffers for the rows of x_t (b, m), with the dtype that the feedback's product takes."""
    low = autocast_dtype(x_t) or layer.D.dtype
    return Buffers(layer, len(x_t), low)


def unsupported_step(layer: DecodedLayer) -> str | None:
    """What the fused path does not cover, as a part of a message; None where it covers all."""
    if not vars(type(layer)).get("has_fused_step", False):
        return "subclasses"
    if layer.unfused is not None or layer.conv is not None:
        return layer.unfused or "d_conv"
    return unsupported_token(layer.head_dim, layer.d_state, layer.layout())


def asks_for_fused_step(layer: DecodedLayer) -> bool:
    """Whether this call may take the fused path, whatever the layer and its input.

    Not where a gradient may be needed, nor where the host must read every outcome.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    return layer.solve_options.backend != "reference" and (
        layer.solve_options.on_unconverged != "raise"
    )


def takes_fused_step(layer: DecodedLayer, x_t: Tensor) -> bool:
    """Whether `step` may take the fused path for x_t (b, m)."""
    if not asks_for_fused_step(layer) or not len(x_t) or not has_values(x_t):
        return False
    if is_cuda_device(x_t.device):
        # with "triton", too: the plain path refuses what kernels cannot compute
        supported = choose_backend("auto", x_t.device, layer.D.dtype) == "triton"
    else:
        supported = layer.solve_options.backend == "triton" and interpreter_is_on()
    if not supported or unsupported_step(layer) is not None:
        return False
    # last, since it looks at every module: a replay calls no Python functions, and those on y_proj
    # and the mixer are answered with an error
    return all(is_untouched(module) for module in layer.modules())


def may_replay(layer: DecodedLayer, x_t: Tensor) -> bool:
    """Whether this call replays a graph if one exists for x_t."""
    if not isinstance(x_t, Tensor) or not x_t.is_cuda or not asks_for_fused_step(layer):
        return False
    if torch.version.hip is not None:
        return False
    return not torch.cuda.is_current_stream_capturing()


def advance(layer: DecodedLayer, u: Tensor, buffers: Buffers) -> Tensor:
    """One token: u (b, m) -> (b, m); the buffers move on by it."""
    weight, norm_eps = norm_parameters(layer.norm)
    options = step_options(layer, None if weight is None else norm_eps)
    d, low = layer.d_inner, buffers.normed.dtype
    fuses = _fuses_products(layer, u, low)
    projected, raw, fed = (_multiplied if fuses else _projected)(layer, u, buffers)
    x = projected[:, :d]
    with without_autocast(u.device):
        drive = _split_heads(x, layer.num_heads)
        if layer.has_drive:
            drive = layer.drive(drive.to(buffers.h.dtype))
        hidden = torch.empty(len(u), d, dtype=low if fuses else u.dtype, device=u.device)
        operands = StepOperands(
            x,
            drive,
            projected[:, d:] if layer.output == "norm" else None,
            raw,
            fed,
            buffers.h,
            buffers.y,
            buffers.normed,
            hidden,
            buffers.residual,
            buffers.pivot,
            buffers.converged,
            buffers.all_converged,
        )
        backend, parameters = layer.solve_options.backend, step_parameters(layer, weight)
        decode_token(operands, parameters, options, backend=backend, overlaps=fuses)
    if not fuses:
        output: Tensor = layer.out_proj(hidden)
        return output
    output = torch.empty(u.shape, dtype=low, device=u.device)
    product = Product(layer.out_proj.weight, hidden, output)
    multiply(product, dtype=low, overlaps=True, backend=backend)
    return output


def _fuses_products(layer: DecodedLayer, u: Tensor, low: torch.dtype) -> bool:
    """Whether the kernel of products computes those of u (b, m), whose modules just multiply."""
    modules = [layer.in_proj, layer.x_proj, layer.out_proj]
    if layer.y_proj is not None:
        modules.append(layer.y_proj)
    if not all(is_plain(module) for module in modules):
        return False
    weights = tuple(module.weight for module in modules)
    return takes_products(len(u), weights, low, layer.solve_options.backend)


def _projected(
    layer: DecodedLayer, u: Tensor, buffers: Buffers
) -> tuple[Tensor, Tensor, Tensor | None]:
    """W_in u (b, d or 2 d), W^x x (H, b, r + p) and W^y norm(y_{t-1}) (H, b, f + p) by the modules,
    the last two without an axis of heads for one head."""
    projected = layer.in_proj(u)
    raw: Tensor = layer.x_proj(_split_heads(projected[:, : layer.d_inner], layer.num_heads))
    fed = None
    if layer.y_proj is not None:
        with without_autocast(u.device):
            normed = _split_heads(buffers.normed, layer.num_heads)
            fed = apply_projection(layer.y_proj, normed, layer.D.dtype)
    return projected, raw, fed


def _multiplied(
    layer: DecodedLayer, u: Tensor, buffers: Buffers
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`_projected` in two launches."""
    low, heads = buffers.normed.dtype, layer.num_heads
    backend = layer.solve_options.backend

    def empty_product(weight: Tensor) -> Tensor:
        shape = *weight.shape[:-2], len(u), weight.shape[-2]
        return torch.empty(shape, dtype=low, device=u.device)

    projected = empty_product(layer.in_proj.weight)
    inward = Product(layer.in_proj.weight, last_axis_contiguous(u), projected)
    feedback = None
    if layer.y_proj is not None:
        weight = layer.y_proj.weight
        feedback = Product(weight, _split_heads(buffers.normed, heads), empty_product(weight))
    multiply(inward, feedback, dtype=low, backend=backend)
    x, weight = _split_heads(projected[:, : layer.d_inner], heads), layer.x_proj.weight
    raw = empty_product(weight)
    multiply(Product(weight, x, raw), dtype=low, overlaps=True, backend=backend)
    return projected, raw, None if feedback is None else feedback.out


def _split_heads(
    v: Tensor,  # (b, d)
    num_heads: int,
) -> Tensor:  # (b, d), or (H, b, p) for several heads
    """The channels of each head, a view."""
    return v if num_heads == 1 else v.unflatten(1, (num_heads, -1)).transpose(0, 1)


def step_options(layer: DecodedLayer, norm_eps: float | None) -> StepOptions:
    """The layer's options as the kernel takes them."""
    options, (kind, sharpness, _) = layer.parameterization(), layer.decay_parameter()
    fed = {name: name in layer.feedback for name in layer.components}
    first = next(iter(fed.values()))
    return StepOptions(
        options.known_layout(),
        options.input_scale,
        options.eigenvalues,
        options.feedback_norm_eps,
        kind,
        sharpness,
        (first, fed.get("B", False), fed.get("C", False), fed["mixer"]),
        norm_eps,
        layer.num_heads,
    )


def step_parameters(
    layer: DecodedLayer,
    weight: Tensor | None,  # (d,), of the norm
) -> StepParameters:
    """The layer's parameters as the kernel takes them."""
    decay = layer.decay_parameter()[2]
    return StepParameters(decay, layer.dt_bias, layer.raw_bias, layer.D, weight)


def fused_step(
    layer: DecodedLayer, x_t: Tensor, state: BedouinState
) -> tuple[Tensor, BedouinState]:
    """One token without a graph: within a capture of the caller, or in the interpreter."""
    buffers = make_buffers(layer, x_t)
    buffers.load(state, layer.feedback_norm_eps)
    output = advance(layer, x_t, buffers)
    layer.next_draw()
    new_state, layer.stats = buffers.copies()
    return output, new_state
