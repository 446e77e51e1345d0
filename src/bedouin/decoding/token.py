"""When a CUDA graph of one token may be used.

A token is the layer's own exact step, whatever its options: a graph removes the time that the host
needs to launch it. Letters: b batch, m d_model.
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
from bedouin.solvers.draws import Draws
from bedouin.solvers.reporting import DeferredWarning
from bedouin.solvers.solution import SolveStats, has_values
from bedouin.solvers.solve import SolveOptions
from bedouin.state import BedouinState, StateSize
from bedouin.wrapped import is_untouched


class DecodedLayer(Protocol):
    """What decoding uses of a layer, which this package therefore need not import."""

    state_size: StateSize
    num_heads: int
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

    @property
    def num_parts(self) -> int: ...

    def advance(
        self, x_t: Tensor, before: BedouinState
    ) -> tuple[Tensor, BedouinState, SolveStats]: ...


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
