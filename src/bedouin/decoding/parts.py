"""What decoding keeps of a layer at fixed addresses, and when a token may be a CUDA graph.

A token is the layer's own exact step, whatever its options: a graph removes the time that the host
needs to launch it. Every token updates the state in place.
A layer's graphs do not refer to the layer, which refers to them: the methods of parts take it.
Letters: b batch, m d_model.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bedouin.heads import fold_state, unfold_state
from bedouin.kernels.backend import (
    choose_backend,
    has_values,
    interpreter_is_on,
    is_cuda_device,
    is_transformed,
)
from bedouin.kernels.branches import beside, unbranched
from bedouin.solvers.reporting import Measured, Outcome, failure_message
from bedouin.state import BedouinState, RecurrentState, check_state
from bedouin.wrapped import is_untouched

CHECK_TOKENS = 32
"""Tokens between two asynchronous checks of whether all of them were solved."""


DecodedLayer = Any
"""A `FixedPointLayer`, whose module imports this package, or a layer that `decodes_by_step`."""


class FixedPointPart:
    """The part of a Bedouin or FixedPointRNN: state and statistics of b samples, the state that of
    folded samples (bedouin.heads), as the layer's kernels take it."""

    def __init__(
        self,
        layer: DecodedLayer,
        like: Tensor,  # (b, ...)
    ) -> None:
        self._b, self._size = len(like), layer.state_size
        self._heads, self._parts = layer.num_heads, layer.num_parts
        (d, n, window), first = self._size, layer.init_state(0).y
        # the states before the channels in memory, as the sweeps store h
        h = first.new_zeros(self._heads * self._b, n, d // self._heads)
        y = first.new_zeros(self._heads * self._b, d // self._heads)
        conv = None if window is None else first.new_zeros(self._b, *window)
        self.state = BedouinState(h.mT, y, conv)
        # of the last token: of a graph, at fixed places, too
        self._measured: Measured | None = None
        self._all_converged = torch.ones(
            self._parts * self._b, dtype=torch.bool, device=first.device
        )
        self._tokens = 0
        # the state after it, with the versions of its tensors
        self._last: list[tuple[Tensor, int]] | None = None

    def advance(
        self,
        layer: DecodedLayer,
        u: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        """The arithmetic of a token, which a graph captures."""
        layer.check_input(u, rank=2)
        output: Tensor = layer.advance(u, self.state, self._keep)
        return output

    def _keep(self, after: BedouinState, measured: Measured) -> None:
        with beside("state", *after):
            self._copy(after)
        self._measured = measured
        with beside("statistics", measured.defect, measured.scale, measured.magnitude):
            self._all_converged.logical_and_(measured.converged)

    def start(self) -> None:
        """Discard whether tokens have converged, as those of a capture."""
        self._all_converged.fill_(True)

    def load(self, layer: DecodedLayer, state: BedouinState) -> None:
        """Copy a state into the buffers, unless it is the unchanged state of the last token. Raises
        TypeError or ValueError where it does not fit."""
        last = self._last
        if last is not None and isinstance(state, BedouinState):
            same = zip(state, last, strict=False)
            if all([v is before and v._version == version for v, (before, version) in same]):
                return
        self._copy(fold_state(check_state(state, self._b, self._size, self.state.y), self._heads))

    def _copy(self, state: BedouinState) -> None:
        # one launch for all of them
        torch._foreach_copy_(list(self.state), list(state))

    def begin(self, layer: DecodedLayer) -> None:
        """What comes before a token."""
        layer.deferred.flush()
        if layer.training:
            layer.draws.next(layer.solve_options.cap)

    def end(self, layer: DecodedLayer) -> None:
        """What comes after a token."""
        self._last = None
        self._tokens += 1
        if self._tokens % CHECK_TOKENS == 0 and layer.solve_options.on_unconverged == "warn":
            subject = type(layer).__name__
            if not layer.deferred.is_pending(subject):
                measured = self._copied()._replace(frozen=self._all_converged.clone().unsqueeze(1))
                named = f"{subject} (an earlier call)"
                message = partial(failure_message, measured, self._parts, None, named)
                layer.deferred.schedule(measured.converged, subject, message)
                self.start()

    def copies(self, layer: DecodedLayer) -> BedouinState:
        """A copy of the state after the last token; also sets `layer.stats`."""
        # outside inference mode, where gradients are on, tensors have version counters, by
        # which a state that is passed back is found to be unchanged, and then stays in place
        with torch._C._InferenceMode(False), torch.no_grad():
            state = unfold_state(self.state, self._heads)
            conv = None if state.conv is None else state.conv.clone()
            outcome = Outcome(self._parts)
            outcome.take(self._copied())
            layer.__dict__["_outcome"] = outcome
        state = BedouinState(state.ssm, state.y, conv)
        self._last = [(v, v._version) for v in state]
        return state

    def _copied(self) -> Measured:
        """What was measured of the last token, at places of its own."""
        measured = self._measured
        assert measured is not None and measured.pivot is not None
        frozen = measured.converged.unsqueeze(1)
        defect, scale = measured.defect.clone(), measured.scale.clone()
        return Measured(defect, scale, measured.pivot.clone(), frozen=frozen)


class StepPart:
    """The part of a layer whose `step` a graph captures: the state of b samples."""

    def __init__(
        self,
        layer: DecodedLayer,
        like: Tensor,  # (b, ...)
    ) -> None:
        self._b = len(like)
        self.state: RecurrentState = layer.init_state(self._b)

    def advance(
        self,
        layer: DecodedLayer,
        u: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        """The arithmetic of a token, which a graph captures."""
        output: Tensor
        # what the branches of the sweep read is made in the step itself
        with unbranched():
            output, after = layer.step(u, self.state)
            self._copy(after)
        return output

    def load(self, layer: DecodedLayer, state: Any) -> None:
        """Copy a state into the buffers. Raises TypeError or ValueError where it does not fit."""
        self._copy(layer.checked_state(state, self._b))

    def _copy(self, state: RecurrentState) -> None:
        torch._foreach_copy_(list(self.state.tensors), list(state.tensors))

    def start(self) -> None:
        """What follows the capture: nothing."""

    def begin(self, layer: DecodedLayer) -> None:
        """What comes before a token: nothing."""

    def end(self, layer: DecodedLayer) -> None:
        """What comes after a token: nothing."""

    def copies(self, layer: DecodedLayer) -> RecurrentState:
        """A copy of the state after the last token."""
        with torch._C._InferenceMode(False), torch.no_grad():
            return self.state.clone()


def make_part(
    layer: DecodedLayer,
    like: Tensor,  # (b, ...)
) -> FixedPointPart | StepPart:
    """The part of a layer that `Decoder` takes."""
    return StepPart(layer, like) if decodes_by_step(layer) else FixedPointPart(layer, like)


def decodes_by_step(layer: DecodedLayer) -> bool:
    """Whether a graph may capture the layer's `step`, as its class says."""
    return bool(getattr(type(layer), "captures_step", False))


def allows_graph(layer: DecodedLayer) -> bool:
    """Whether this call may replay a graph, whatever its input.

    Not where a gradient may be needed, nor where the host must read every outcome.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    if decodes_by_step(layer):
        return bool(layer.backend != "torch")
    options = layer.solve_options
    return bool(options.backend != "reference" and options.on_unconverged != "raise")


def takes_graph(
    layer: DecodedLayer,
    x_t: Tensor,  # (b, m), or tokens (b,)
) -> bool:
    """Whether a graph of this call may be captured. On a CPU only in Triton's interpreter, where a
    replay runs the token again."""
    if not allows_graph(layer) or not len(x_t) or not has_values(x_t):
        return False
    if decodes_by_step(layer):
        supported = is_cuda_device(x_t.device)
    elif layer.layout() is None:  # other mixers are user code, which may read the device
        return False
    elif is_cuda_device(x_t.device):
        # with "triton", too: the layer refuses what its kernels cannot compute
        supported = choose_backend("auto", x_t.device, layer.D.dtype) == "triton"
    else:
        supported = layer.solve_options.backend == "triton" and interpreter_is_on()
    # last, since it visits every module: a replay calls no Python functions
    return supported and all(is_untouched(module) for module in layer.modules())


def may_replay(layer: DecodedLayer, x_t: Any) -> bool:
    """Whether this call replays a graph if one exists for x_t."""
    if not isinstance(x_t, Tensor) or not x_t.is_cuda or not allows_graph(layer):
        return False
    if torch.version.hip is not None:
        return False
    return not torch.cuda.is_current_stream_capturing()


def is_buffered(
    layer: DecodedLayer,
    x_t: Tensor,  # (b, m), or tokens (b,)
) -> bool:
    """Whether a `Decoder` keeps the state of the layer in buffers for x_t.

    On a CPU only in Triton's interpreter, which captures nothing.
    """
    return takes_graph(layer, x_t) and (not x_t.is_cuda or may_replay(layer, x_t))
