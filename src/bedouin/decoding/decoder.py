"""`Decoder`: a layer or a whole model, one token at a time.

Letters: b batch, m d_model, v classes.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.checks import check_batch_size, check_tensor
from bedouin.decoding.graphs import Captured, capture_layer, graph_key, is_decoded
from bedouin.decoding.parts import checked_state, is_buffered, solved_layer
from bedouin.decoding.token import may_replay
from bedouin.state import RecurrentState
from bedouin.wrapped import is_untouched


class Decoder:
    """A layer with the state of b samples, which every call updates in place.

        decoder = Decoder(layer, batch_size=1)
        for _ in range(100):
            x_t = head(decoder(x_t))

    Computes the same numbers as `layer.step`, without copying the state between two tokens, and is
    not differentiable. On a GPU a call replays a CUDA graph and returns a buffer that the next call
    overwrites: clone outputs that you keep. Where no graph is captured (on a CPU, a mixer without
    kernels, backend="reference", on_unconverged="raise") a call runs `step`.

    `Decoder(model, batch_size)` does the same for a whole `SequenceModel`, from ids (b,) to logits
    (b, v): it is then a `ModelDecoder`.

    Args:
        layer: a Bedouin, a FixedPointRNN, a Convolved one, or a SequenceModel.
        batch_size: number of samples b that are decoded side by side.
        state: the initial state, for instance from `layer(prompt, return_state=True)`; None: zeros.

    Raises TypeError for a layer or state of another type, and ValueError for a batch_size that is
    not an int >= 0 or a state of the wrong shape, dtype or device.
    """

    def __new__(cls, layer: Any, *args: Any, **options: Any) -> "Decoder":
        of_model = cls is Decoder and callable(getattr(layer, "decode", None))
        return super().__new__(ModelDecoder if of_model else cls)

    def __init__(
        self,
        layer: Any,
        batch_size: int,
        *,
        state: Any = None,
    ) -> None:
        if not is_decoded(layer):
            raise TypeError(
                "layer must be a Bedouin, a FixedPointRNN or a SequenceModel, got "
                f"{type(solved_layer(layer)).__name__}"
            )
        check_batch_size(batch_size)
        self.layer: Any = layer
        self.batch_size = batch_size
        self._captured: tuple[tuple[Any, ...], Captured] | None = None
        self.reset(state)

    def reset(self, state: Any = None) -> None:
        """Restart from `state`, or from zeros. Raises the errors of `step` for an invalid state."""
        layer, b = self.layer, self.batch_size
        if state is None:
            state = layer.init_state(b)
        self._state: RecurrentState | None = checked_state(layer, state, b).detach()

    @property
    def state(self) -> Any:
        """A copy of the state after the last token."""
        if self._state is not None:
            return self._state.clone()
        assert self._captured is not None
        return self._captured[1].copies([self.layer])[0]

    def __call__(
        self,
        x_t: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        """The output at the next token. Raises the errors of `step`."""
        if not torch.is_grad_enabled():
            return self._next(x_t)
        # entering it takes as long as a fourth of the rest, so only where it has an effect
        with torch.no_grad():
            return self._next(x_t)

    def _next(
        self,
        x_t: Tensor,  # (b, m), or tokens (b,) of a model
    ) -> Tensor:  # (b, m), or logits (b, v)
        layer = self.layer
        if self._captured is not None and may_replay(layer, x_t):
            if self._captured[0] == graph_key(x_t) and not self._captured[1].is_stale():
                return self._run(self._captured[1], x_t)
        layer.check_input(x_t, rank=2)
        if x_t.shape[0] != self.batch_size:
            raise ValueError(f"x must have batch_size = {self.batch_size} rows, got {len(x_t)}")
        if not is_buffered(layer, x_t):
            output: Tensor
            output, self._state = layer.step(x_t, self.state)
            return output
        return self._run(self._find(x_t), x_t)

    def _run(
        self,
        captured: Captured,
        x_t: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        if self._state is not None:
            captured.load([self.layer], [self._state])
            self._state = None
        return captured.run([self.layer], x_t)

    def _find(
        self,
        x_t: Tensor,  # (b, m)
    ) -> Captured:
        """The captured token for inputs like x_t; captures it if there is none or it is stale."""
        key = graph_key(x_t)
        if self._captured is None or self._captured[0] != key or self._captured[1].is_stale():
            self._state = self.state
            self._captured = key, capture_layer(self.layer, x_t)
        return self._captured[1]


class ModelDecoder(Decoder):
    """A `SequenceModel` with the state of b samples, which every call updates in place.

        decoder = Decoder(model, batch_size=1, state=state)
        logits = decoder(tokens)                                            # (b,) -> (b, v)

    On a GPU a token is one CUDA graph of the whole model if every layer has kernels for it.
    Otherwise each layer is decoded by a `Decoder`, or by its `step` if it is another one; a model
    with hooks on itself or its blocks is decoded by its own `step`.
    `state` is a tuple with the state of each layer.
    """

    def __init__(
        self,
        layer: Any,
        batch_size: int,
        *,
        state: Any = None,
    ) -> None:
        if not callable(getattr(layer, "decode", None)):
            raise TypeError(f"layer must be a SequenceModel, got {type(layer).__name__}")
        check_batch_size(batch_size)
        self.model: Any = layer
        self.batch_size = batch_size
        self.reset(state)

    def reset(self, state: Any = None) -> None:
        """Restart from `state`, or from zeros. Raises the errors of `step` for an invalid state."""
        if state is None:
            state = self.model.init_state(self.batch_size)
        mixers = self.model.mixers
        if not isinstance(state, tuple | list) or len(state) != len(mixers):
            raise ValueError(
                f"state must be a tuple with one entry for each of the {len(mixers)} layers, got "
                f"{type(state).__name__}: start from model.init_state(batch_size)"
            )
        # the states are in these until a graph of the model is captured
        self._parts = [
            _decode_layer(*part, self.batch_size) for part in zip(mixers, state, strict=True)
        ]
        self._captured: tuple[tuple[Any, ...], Captured] | None = None
        self._layer_by_layer: tuple[Any, ...] | None = None  # the key of tokens without a graph

    @property
    def state(self) -> Any:
        """The states after the last token, one for each layer, which no later call changes."""
        if self._captured is None:
            return tuple(part.state for part in self._parts)
        return self._captured[1].copies(self.model.mixers)

    def _next(
        self,
        tokens: Tensor,  # (b,)
    ) -> Tensor:  # (b, v)
        check_tensor("tokens", tokens, "(b,)")
        if tokens.shape != (self.batch_size,):
            raise ValueError(
                f"tokens must have shape (batch_size,) = ({self.batch_size},), got "
                f"{tuple(tokens.shape)}"
            )
        captured = self._find_graph(tokens)
        logits: Tensor
        if captured is not None:
            logits = captured.run(self.model.mixers, tokens)
        elif self._is_hooked():
            logits, state = self.model.step(tokens, self.state)
            self.reset(state)
            self._layer_by_layer = graph_key(tokens)
        else:
            logits = self.model.decode(tokens, self._parts)
        return logits

    def _find_graph(
        self,
        tokens: Tensor,  # (b,)
    ) -> Captured | None:
        """The graph of the model for such tokens, with the states in it; None where the layers are
        decoded one by one."""
        key, mixers = graph_key(tokens), self.model.mixers
        if self._captured is not None:
            kept, captured = self._captured
            if tokens.is_cuda:
                replays = all(may_replay(layer, tokens) for layer in mixers)
            else:
                replays = self._is_buffered(tokens)
            if kept == key and replays and not captured.is_stale():
                return captured
        elif self._layer_by_layer == key:
            return None
        states = self.state
        self.reset(states)
        if not self._is_buffered(tokens):
            self._layer_by_layer = key
            return None
        captured = Captured(self.model, mixers, tokens, self.model.decode)
        captured.load(mixers, states)
        self._captured, self._parts = (key, captured), []
        return captured

    def _is_buffered(
        self,
        tokens: Tensor,  # (b,)
    ) -> bool:
        """Whether the states of all layers may be in the buffers of one graph."""
        for mixer in self.model.mixers:
            if not is_decoded(mixer) or not is_buffered(mixer, tokens):
                return False
        # a replay calls no Python functions
        return all(is_untouched(module) for module in self.model.modules())

    def _is_hooked(self) -> bool:
        """Whether hooks, such as those with which FSDP gathers parameters, are to run in calls of
        the model or of its blocks."""
        return not all(is_untouched(module) for module in (self.model, *self.model.blocks))


def _decode_layer(mixer: Any, state: Any, batch_size: int) -> "Decoder | _SteppedLayer":
    if is_decoded(mixer):
        return Decoder(mixer, batch_size, state=state)
    return _SteppedLayer(mixer, state)


class _SteppedLayer:
    """A layer without graphs, with its state."""

    def __init__(self, layer: Any, state: Any) -> None:
        if not callable(getattr(layer, "step", None)):
            raise TypeError(
                f"mixer {type(layer).__name__} has no step(), which decoding needs: use a layer "
                "that has it, such as bedouin.Bedouin"
            )
        self.layer, self.state = layer, state

    def __call__(
        self,
        x_t: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        output: Tensor
        output, self.state = self.layer.step(x_t, self.state)
        return output
