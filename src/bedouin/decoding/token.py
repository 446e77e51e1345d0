"""One token on buffers: what it needs of a layer, and when a CUDA graph of it may be used.

A token is the layer's own exact step, whatever its options: a graph removes the time that the host
needs to launch it. Letters: b batch, m d_model, d d_inner, n d_state, w - 1 and c the sizes of a
convolution's window.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bedouin.kernels.backend import (
    choose_backend,
    interpreter_is_on,
    is_cuda_device,
    is_transformed,
)
from bedouin.kernels.operands import RawLayout
from bedouin.solvers.deferred import DeferredWarning
from bedouin.solvers.draws import Draws
from bedouin.solvers.solution import SolveStats, has_values
from bedouin.solvers.solve import SolveOptions
from bedouin.state import BedouinState, StateSize, check_state
from bedouin.wrapped import is_untouched


class DecodedLayer(Protocol):
    """What decoding uses of a layer, which this package therefore need not import."""

    state_size: StateSize
    solve_options: SolveOptions
    D: nn.Parameter

    training: bool
    stats: SolveStats | None
    draws: Draws
    deferred: DeferredWarning

    def modules(self) -> Iterator[nn.Module]: ...

    def layout(self) -> RawLayout | None: ...

    def check_input(self, x: Tensor, rank: int) -> None: ...

    def init_state(self, batch_size: int) -> BedouinState: ...

    def step(self, x_t: Tensor, state: BedouinState) -> tuple[Tensor, BedouinState]: ...

    def solve_token(
        self, x_t: Tensor, state: BedouinState
    ) -> tuple[Tensor, BedouinState, SolveStats]: ...


class Buffers:
    """State and statistics of b samples at fixed places, in one block that is copied at once."""

    def __init__(self, layer: DecodedLayer, b: int) -> None:
        self._size, like = layer.state_size, layer.init_state(0).y
        d, n, window = self._size
        conv = () if window is None else (b, *window)
        self._shapes = (b, n, d), (b, d), conv, (3, b)
        counts = [torch.Size(shape).numel() if shape else 0 for shape in self._shapes]
        self._counts = counts
        self.block = like.new_zeros(sum(counts))
        self.state, statistics = self._views(self.block)
        self.residual, self.pivot, self.converged = statistics.unbind()
        self.all_converged = torch.ones(b, dtype=torch.bool, device=like.device)
        self.num_steps = torch.ones(b, dtype=torch.int64, device=like.device)

    def _views(
        self,
        block: Tensor,  # (size,)
    ) -> tuple[BedouinState, Tensor]:
        """The state in a block, h state-major in memory; and (3, b): residual, smallest pivot, and
        1 where the token converged."""
        h, y, conv, statistics = block.split(self._counts)
        of_h, of_y, of_conv, of_statistics = self._shapes
        window = conv.view(of_conv) if of_conv else None
        return BedouinState(h.view(of_h).mT, y.view(of_y), window), statistics.view(of_statistics)

    def load(self, state: BedouinState) -> None:
        """Copy a state in; raises TypeError or ValueError where it does not fit."""
        state = check_state(state, len(self.num_steps), self._size, self.residual)
        self._copy(state)

    def _copy(self, state: BedouinState) -> None:
        for to, value in zip(self.state, state, strict=True):
            to.copy_(value)

    def update(self, state: BedouinState, stats: SolveStats) -> None:
        """Take over the results of a token."""
        self._copy(state)
        self.residual.copy_(stats.residual)
        self.converged.copy_(stats.converged)
        self.all_converged.logical_and_(stats.converged)
        assert stats.conditioning is not None
        self.pivot.copy_(stats.conditioning)

    def copies(self) -> tuple[BedouinState, SolveStats]:
        """State and statistics, in one new block."""
        # outside inference mode tensors have version counters, which tell whether a state that is
        # passed back was changed or can stay in place
        with torch._C._InferenceMode(False):
            block = self.block.clone()
            state, (residual, pivot, converged) = self._views(block)
        return state, SolveStats(self.num_steps, residual, converged > 0, pivot)

    def take_stats(self) -> SolveStats:
        """Statistics of the last token, where `converged` covers all tokens since the last call."""
        converged = self.all_converged.clone()
        self.all_converged.fill_(True)
        return SolveStats(self.num_steps, self.residual.clone(), converged, self.pivot.clone())


def allows_graph(layer: DecodedLayer) -> bool:
    """Whether this call may replay a graph, whatever its input.

    Not where a gradient may be needed, nor where the host must read every outcome.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    options = layer.solve_options
    return options.backend != "reference" and options.on_unconverged != "raise"


def takes_graph(
    layer: DecodedLayer,
    x_t: Tensor,  # (b, m), or tokens (b,)
) -> bool:
    """Whether a graph of this call may be captured. On a CPU only in Triton's interpreter, where a
    replay runs the token again."""
    if not allows_graph(layer) or not len(x_t) or not has_values(x_t):
        return False
    # other mixers are user code, which may read the device
    if layer.layout() is None:
        return False
    if is_cuda_device(x_t.device):
        # with "triton", too: the layer refuses what its kernels cannot compute
        supported = choose_backend("auto", x_t.device, layer.D.dtype) == "triton"
    else:
        supported = layer.solve_options.backend == "triton" and interpreter_is_on()
    # last, since it looks at every module: a replay calls no Python functions
    return supported and all(is_untouched(module) for module in layer.modules())


def may_replay(layer: DecodedLayer, x_t: Any) -> bool:
    """Whether this call replays a graph if one exists for x_t."""
    if not isinstance(x_t, Tensor) or not x_t.is_cuda or not allows_graph(layer):
        return False
    if torch.version.hip is not None:
        return False
    return not torch.cuda.is_current_stream_capturing()


def advance(
    layer: DecodedLayer,
    u: Tensor,  # (b, m)
    buffers: Buffers,
) -> Tensor:  # (b, m)
    """One token; the buffers move on by it."""
    output, state, stats = layer.solve_token(u, buffers.state)
    buffers.update(state, stats)
    return output
