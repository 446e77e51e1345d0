"""What decoding keeps of one layer at fixed addresses, which every token updates in place.

A layer's graphs do not refer to the layer, which refers to them: the methods of parts take it.
Letters: b batch, m d_model, w width of a convolution.
"""

from typing import Any, Protocol

from torch import Tensor

from bedouin.convolved import Convolved, ConvolvedState
from bedouin.decoding.token import Buffers, DecodedLayer, may_replay, takes_graph
from bedouin.state import BedouinState, check_state
from bedouin.wrapped import is_untouched

CHECK_EVERY = 32
"""Tokens between two asynchronous checks of whether all of them were solved."""


class Part(Protocol):
    """The state and statistics of one layer in buffers."""

    def advance(
        self,
        layer: Any,
        u: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        """The arithmetic of a token, which a graph captures."""
        ...

    def start(self) -> None:
        """Discard what the runs of a capture have recorded about convergence."""
        ...

    def load(self, layer: Any, state: Any) -> None:
        """Copy a state into the buffers."""
        ...

    def begin(self, layer: Any) -> None:
        """What comes before a token."""
        ...

    def end(self, layer: Any) -> None:
        """What comes after a token."""
        ...

    def copies(self, layer: Any) -> Any:
        """A copy of the state after the last token; also sets `layer.stats`."""
        ...


class FixedPointPart:
    """The part of a Bedouin or FixedPointRNN."""

    def __init__(
        self,
        layer: DecodedLayer,
        like: Tensor,  # (b, ...)
    ) -> None:
        self.buffers = Buffers(layer, len(like))
        self._tokens = 0
        # the state after it, with the versions of its tensors
        self._last: list[tuple[Tensor, int]] | None = None

    def advance(
        self,
        layer: DecodedLayer,
        u: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        layer.check_input(u, rank=2)
        output, after, stats = layer.advance(u, self.buffers.state)
        self.buffers.update(after, stats)
        return output

    def start(self) -> None:
        self.buffers.forget()

    def load(self, layer: DecodedLayer, state: BedouinState) -> None:
        """Copy a state into the buffers, unless it is the unchanged state of the last token."""
        last = self._last
        if last is not None and isinstance(state, BedouinState):
            same = zip(state, last, strict=False)
            if all([v is before and v._version == version for v, (before, version) in same]):
                return
        self.buffers.load(state)

    def begin(self, layer: DecodedLayer) -> None:
        layer.deferred.flush()
        if layer.training:
            layer.draws.next(layer.solve_options.cap)

    def end(self, layer: DecodedLayer) -> None:
        self._last = None
        self._tokens += 1
        if self._tokens % CHECK_EVERY == 0 and layer.solve_options.on_unconverged == "warn":
            subject = type(layer).__name__
            if not layer.deferred.is_pending(subject):
                layer.deferred.schedule(self.buffers.take_stats(), subject)

    def copies(self, layer: DecodedLayer) -> BedouinState:
        state, vars(layer)["stats"] = self.buffers.copies()
        self._last = [(v, v._version) for v in state]
        return state


class ConvolvedPart:
    """The part of a `Convolved`: the window of its convolution, and the part of its layer."""

    def __init__(
        self,
        layer: Convolved,
        like: Tensor,  # (b, ...)
    ) -> None:
        self.window = layer.init_window(len(like))  # (b, w - 1, m)
        self.inner = make_part(layer.layer, like)

    def advance(
        self,
        layer: Convolved,
        u: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        layer.check_input(u, rank=2)
        x, window = layer.convolve(u.unsqueeze(1), self.window)
        self.window.copy_(window)
        return self.inner.advance(layer.layer, x.squeeze(1))

    def start(self) -> None:
        self.inner.start()

    def load(self, layer: Convolved, state: ConvolvedState) -> None:
        state = layer.checked_state(state, len(self.window))
        self.window.copy_(state.conv)
        self.inner.load(layer.layer, state.inner)

    def begin(self, layer: Convolved) -> None:
        self.inner.begin(layer.layer)

    def end(self, layer: Convolved) -> None:
        self.inner.end(layer.layer)

    def copies(self, layer: Convolved) -> ConvolvedState:
        return ConvolvedState(self.window.clone(), self.inner.copies(layer.layer))


def make_part(
    layer: Any,
    like: Tensor,  # (b, ...)
) -> Part:
    """The part of a decoded layer for b samples."""
    if isinstance(layer, Convolved):
        return ConvolvedPart(layer, like)
    return FixedPointPart(layer, like)


def solved_layer(layer: Any) -> Any:
    """The layer with the fixed point: `layer`, or the one that it has a convolution before."""
    return solved_layer(layer.layer) if isinstance(layer, Convolved) else layer


def is_buffered(
    layer: Any,
    x_t: Tensor,  # (b, m), or tokens (b,)
) -> bool:
    """Whether a `Decoder` keeps the state of the layer in buffers for x_t.

    On a CPU only in Triton's interpreter, which captures nothing.
    """
    solved: DecodedLayer = solved_layer(layer)
    if not takes_graph(solved, x_t) or (x_t.is_cuda and not may_replay(solved, x_t)):
        return False
    # a replay calls no Python functions
    return solved is layer or all(is_untouched(module) for module in layer.modules())


def checked_state(layer: Any, state: Any, b: int) -> Any:
    """`state` of b samples with a batch axis. Raises TypeError or ValueError if it does not fit."""
    if isinstance(layer, Convolved):
        state = layer.checked_state(state, b)
        return state._replace(inner=checked_state(layer.layer, state.inner, b))
    return check_state(state, b, layer.state_size, layer.init_state(0).y)
