"""`Decoder`: a layer or a whole model, one token at a time.

Letters: b batch, m d_model, v classes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bedouin.checks import check_batch_size, check_tensor, find_method
from bedouin.decoding.graphs import Captured, graph_key, is_decoded
from bedouin.decoding.parts import decodes_by_step, is_buffered, may_replay
from bedouin.state import RecurrentState, check_state
from bedouin.wrapped import is_untouched


class Decoder:
    """A layer or a `SequenceModel` with the state of b samples, which every call updates in place.

        decoder = Decoder(layer, batch_size=1)
        for _ in range(100):
            x_t = head(decoder(x_t))                                        # (b, m) -> (b, m)

        decoder = Decoder(model, batch_size=1, state=state)
        logits = decoder(tokens)                                            # (b,) -> (b, v)

    Computes the same numbers as `step`, without copying the state between two tokens, and is not
    differentiable. On a GPU a call replays a CUDA graph, of the whole model if every layer has
    kernels for it, and returns a buffer that the next call overwrites: clone outputs that you keep.
    Where no graph is captured (on a CPU, a mixer without kernels, backend="reference",
    on_unconverged="raise") a call runs `step` of the layer, and of a model a `Decoder` of each
    layer, or its `step` if it is another one; a model with hooks on itself or its blocks is decoded
    by its own `step`.

    Args:
        layer: a Bedouin, a FixedPointRNN, a TrackingDeltaNet, GatedDeltaNet or Tracker, or a
            SequenceModel.
        batch_size: number of samples b that are decoded side by side.
        state: the initial state, for instance from `layer(prompt, return_state=True)`, of a model a
            tuple with the state of each layer; None: zeros.

    Raises TypeError for a layer or state of another type, and ValueError for a batch_size that is
    not an int >= 0 or a state of the wrong shape, dtype or device.
    """

    def __init__(self, layer: Any, batch_size: int, *, state: Any = None) -> None:
        self.is_model = callable(getattr(layer, "decode", None))
        if not self.is_model and not is_decoded(layer):
            raise TypeError(
                "layer must be a Bedouin, a FixedPointRNN, a TrackingDeltaNet or one of its parts, "
                f"or a SequenceModel, got {type(layer).__name__}"
            )
        check_batch_size(batch_size)
        self.layer, self.batch_size = layer, batch_size
        self._captured: tuple[tuple[Any, ...], Captured] | None = None
        self.reset(state)

    def reset(self, state: Any = None) -> None:
        """Restart from `state`, or from zeros. Raises the errors of `step` for an invalid state."""
        mixers = self._mixers
        if state is None:
            state = self.layer.init_state(self.batch_size)
        if not self.is_model:
            state = [state]
        elif not isinstance(state, tuple | list) or len(state) != len(mixers):
            raise ValueError(
                f"state must be a tuple with one entry for each of the {len(mixers)} layers, got "
                f"{type(state).__name__}: start from model.init_state(batch_size)"
            )
        # they have the states, unless these are in the graph
        self._parts: list[Decoder | _SteppedLayer] | None = [
            self._make_part(*pair) for pair in zip(mixers, state, strict=True)
        ]

    def _make_part(self, mixer: Any, state: Any) -> "Decoder | _SteppedLayer":
        if not is_decoded(mixer):
            return _SteppedLayer(mixer, state)
        if self.is_model:
            return Decoder(mixer, self.batch_size, state=state)
        if decodes_by_step(mixer):
            state = mixer.checked_state(state, self.batch_size)
        else:
            like = mixer.init_state(0).y
            state = check_state(state, self.batch_size, mixer.state_size, like)
        return _SteppedLayer(mixer, state.detach())

    @property
    def _mixers(self) -> Sequence[Any]:
        return self.layer.mixers if self.is_model else [self.layer]

    @property
    def state(self) -> Any:
        """A copy of the state after the last token, of a model one for each layer."""
        states = self._states()
        return states if self.is_model else states[0]

    def _states(self) -> tuple[Any, ...]:
        if self._parts is not None:
            return tuple(part.state for part in self._parts)
        assert self._captured is not None
        return self._captured[1].copies(self._mixers)

    def __call__(
        self,
        x_t: Tensor,  # (b, m), or tokens (b,) of a model
    ) -> Tensor:  # (b, m), or logits (b, v)
        """The output at the next token. Raises the errors of `step`."""
        if not torch.is_grad_enabled():
            return self._next(x_t)
        # entering it takes as long as a fourth of the rest, so only where it has an effect
        with torch.no_grad():
            return self._next(x_t)

    def _next(self, x_t: Tensor) -> Tensor:  # as __call__
        mixers, kept = self._mixers, self._captured
        if kept is not None and self._parts is None and self._replays(x_t):
            if kept[0] == graph_key(x_t) and not kept[1].is_stale():
                return kept[1].run(mixers, x_t)
        self._check(x_t)
        if not self._is_buffered(x_t):
            if self._parts is None:
                self.reset(self.state)
            self._captured = None
            return self._plain(x_t)
        key, states = graph_key(x_t), None
        if kept is None or kept[0] != key or kept[1].is_stale():
            states = self._states()
            kept = key, Captured(self.layer, mixers, x_t, self._compute)
        elif self._parts is not None:
            states = self._states()
        if states is not None:
            kept[1].load(mixers, states)
        self._captured, self._parts = kept, None
        return kept[1].run(mixers, x_t)

    def _check(self, x_t: Tensor) -> None:
        b = self.batch_size
        if not self.is_model:
            self.layer.check_input(x_t, rank=2)
            if len(x_t) != b:
                raise ValueError(f"x must have batch_size = {b} rows, got {len(x_t)}")
            return
        check_tensor("tokens", x_t, "(b,)")
        if x_t.shape != (b,):
            raise ValueError(
                f"tokens must have shape (batch_size,) = ({b},), got {tuple(x_t.shape)}"
            )

    def _replays(self, x_t: Any) -> bool:
        """Whether a graph for x_t may be replayed."""
        if isinstance(x_t, Tensor) and not x_t.is_cuda:
            return self._is_buffered(x_t)
        return all(may_replay(layer, x_t) for layer in self._mixers)

    def _is_buffered(self, x_t: Tensor) -> bool:
        """Whether the states of all layers may be in the buffers of one graph."""
        if not all(is_decoded(layer) and is_buffered(layer, x_t) for layer in self._mixers):
            return False
        # a replay calls no Python functions
        return all(is_untouched(module) for module in self.layer.modules())

    def _compute(
        self,
        x_t: Tensor,  # (b, m), or tokens (b,) of a model
        each: Sequence[Callable[[Tensor], Tensor]],  # (b, m) -> (b, m)
    ) -> Tensor:  # (b, m), or logits (b, v)
        output: Tensor = self.layer.decode(x_t, each) if self.is_model else each[0](x_t)
        return output

    def _plain(self, x_t: Tensor) -> Tensor:  # as __call__
        """A token without a graph of all layers."""
        assert self._parts is not None
        modules = (self.layer, *self.layer.blocks) if self.is_model else ()
        # hooks, such as those with which FSDP gathers parameters, run in calls
        if all(is_untouched(module) for module in modules):
            return self._compute(x_t, self._parts)
        logits: Tensor
        logits, state = self.layer.step(x_t, self.state)
        self.reset(state)
        return logits


class _SteppedLayer:
    """A layer without graphs, with its state."""

    def __init__(self, layer: Any, state: Any) -> None:
        self.step, self._state = find_method(layer, "step"), state

    @property
    def state(self) -> Any:
        """A copy of the state; the state itself if its type is that of another library."""
        return self._state.clone() if isinstance(self._state, RecurrentState) else self._state

    def __call__(
        self,
        x_t: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        output: Tensor
        output, self._state = self.step(x_t, self._state)
        return output
