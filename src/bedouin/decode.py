"""Decoding: a layer or a whole model, one token at a time, as a CUDA graph on a GPU.

A token is the layer's own exact step: a graph removes the time that the host needs to launch it. It
reads parameters at their addresses: a change in place counts at once, another one by a new capture.

Letters: b batch, m d_model, v classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bedouin.checks import check_batch_size, check_tensor, find_method
from bedouin.kernels.backend import (
    autocast_dtype,
    choose_backend,
    has_values,
    is_cuda_device,
    is_transformed,
)
from bedouin.kernels.delta_rule import kernel_backend
from bedouin.solvers.reporting import Measured, Outcome, failure_message
from bedouin.state import RecurrentState
from bedouin.wrapped import ReplacementWatch, is_untouched

CHECK_TOKENS = 32  # tokens between two asynchronous checks of whether all of them were solved
MOST_TOGETHER = 65_536  # values that one block of threads copies if torch copies several tensors
WARMUP_RUNS = 2  # before a capture: Triton compiles and cuBLAS allocates its workspace there


class Decoder:
    """A layer or a `SequenceModel` with the state of b samples, which every call replaces.

        decoder = Decoder(layer, batch_size=1)
        for _ in range(100):
            x_t = head(decoder(x_t))                                        # (b, m) -> (b, m)

        decoder = Decoder(model, batch_size=1, state=state)
        logits = decoder(tokens)                                            # (b,) -> (b, v)

    Computes the same numbers as `step`, and is not differentiable. On a GPU a call replays a CUDA
    graph, of the whole model if every layer has kernels for it, and returns a buffer that the next
    call overwrites: clone outputs that you keep. Where no graph is captured (on a CPU, a mixer
    without kernels or with hooks, backend="reference", on_unconverged="raise") a call is `step`.

    Args:
        layer: a Bedouin, FixedPointRNN, TrackingDeltaNet, GatedDeltaNet, Tracker or SequenceModel.
        batch_size: number of samples b that are decoded side by side.
        state: the initial state, for instance from `layer(prompt, return_state=True)`, of a model a
            tuple with the state of each layer; None: zeros.

    Raises TypeError for a layer or state of another type, and ValueError for a batch_size that is
    not an int >= 0 or a state of the wrong shape, dtype or device.
    """

    def __init__(self, layer: Any, batch_size: int, *, state: Any = None) -> None:
        self.is_model = isinstance(getattr(layer, "mixers", None), list)
        if not self.is_model and not is_decoded(layer):
            raise TypeError(
                "layer must be a Bedouin, a FixedPointRNN, a TrackingDeltaNet or one of its parts, "
                f"or a SequenceModel, got {type(layer).__name__}"
            )
        check_batch_size(batch_size)
        self.layer, self.batch_size = layer, batch_size
        self.reset(state)

    @property
    def _mixers(self) -> Sequence[Any]:
        return self.layer.mixers if self.is_model else [self.layer]

    def reset(self, state: Any = None) -> None:
        """Restart from `state`, or from zeros. Raises the errors of `step` for an invalid state."""
        mixers, b = self._mixers, self.batch_size
        if state is None:
            state = self.layer.init_state(b)
        states = state if self.is_model else [state]
        if not isinstance(states, tuple | list) or len(states) != len(mixers):
            raise ValueError(
                f"state must be a tuple with one entry for each of the {len(mixers)} layers, got "
                f"{type(state).__name__}: start from model.init_state(batch_size)"
            )
        for mixer in mixers:
            find_method(mixer, "step")
        self._states: list[Any] = [
            mixer.checked_state(before, b).detach() if is_decoded(mixer) else before
            for mixer, before in zip(mixers, states, strict=True)
        ]
        self._graph: _Graph | None = None

    @property
    def state(self) -> Any:
        """A copy of the state after the last token, of a model one for each layer; an entry whose
        type is that of another library is no copy. Also sets the `stats` of the layers."""
        with torch.inference_mode(False), torch.no_grad():
            for solve in self._graph.solves if self._graph is not None else ():
                solve.keep_outcome()
            states = [v.clone() if isinstance(v, RecurrentState) else v for v in self._states]
        return tuple(states) if self.is_model else states[0]

    @torch.no_grad()
    def __call__(self, x_t: Tensor) -> Tensor:  # (b, m), or tokens (b,) -> (b, m), or (b, v)
        """The output at the next token. Raises the errors of `step`."""
        graph = self._graph
        if graph is not None and self._allows_graph(x_t) and graph.fits(x_t):
            return graph.run(x_t)
        self._check(x_t)
        if graph is not None:
            self.reset(self.state)
        takes_graph = self._allows_graph(x_t) and len(x_t) and has_values(x_t)
        takes_graph = takes_graph and all(_has_kernels(mixer, x_t) for mixer in self._mixers)
        # modules last, since that visits every one: a replay calls no Python functions
        if not takes_graph or not all(map(is_untouched, self.layer.modules())):
            output, self._states = self._step(x_t)
            return output
        # A tensor made in inference mode cannot be written outside of it. Leaving that mode turns
        # gradients on, which would make the graph copy every state.
        with torch.inference_mode(False), torch.no_grad():
            self._states = [v.clone() for v in self._states]
            self._graph = graph = _Graph(self, x_t)
        return graph.run(x_t)

    def _step(self, x_t: Tensor) -> tuple[Tensor, list[Any]]:  # as __call__
        """The output at a token, and the states of the layers after it."""
        before = tuple(self._states) if self.is_model else self._states[0]
        output, after = self.layer.step(x_t, before)
        return output, list(after) if self.is_model else [after]

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

    def _allows_graph(self, x_t: Any) -> bool:
        """Whether this call may replay a graph if there is one for x_t."""
        if not isinstance(x_t, Tensor) or not can_capture(x_t):
            return False
        return all(map(_allows_graph, self._mixers))


class _Solve:
    """What a layer that solves measures in a graph, and reports once in a while."""

    def __init__(self, layer: Any, x_t: Tensor) -> None:  # x_t: (b, m), or tokens (b,)
        self.layer, self._tokens = layer, 0
        self._measured: Measured | None = None  # of the last token, at fixed addresses
        rows = layer.num_heads * len(x_t)
        self._all_converged = torch.ones(rows, dtype=torch.bool, device=x_t.device)

    def record(self) -> None:
        """Keep what the last step measured; part of the graph."""
        self._measured = measured = self.layer._outcome.measured
        self._all_converged.logical_and_(measured.converged)

    def keep_outcome(self) -> None:
        """Set the layer's `stats` to those of the last token."""
        if self._measured is not None:
            self.layer.__dict__["_outcome"] = outcome = Outcome(self.layer.num_heads)
            outcome.take(self._copied(self._measured.converged))

    def _copied(self, converged: Tensor) -> Measured:  # (b',)
        """What was measured of the last token, at addresses of its own."""
        measured = self._measured
        assert measured is not None and measured.pivot is not None
        kept = measured.defect, measured.scale, measured.pivot
        defect, scale, pivot = (v.clone() for v in kept)
        return Measured(defect, scale, pivot, frozen=converged.unsqueeze(1).clone())

    @contextmanager
    def captured(self) -> Iterator[None]:
        """A context for a capture, after which the layer is as before."""
        layer = self.layer
        kept = layer.solve_options, layer._outcome, layer.num_calls
        layer.solve_options = replace(kept[0], on_unconverged="ignore")
        try:
            yield
        finally:
            layer.solve_options, layer._outcome, layer.num_calls = kept
            self._all_converged.fill_(True)

    def begin(self) -> None:
        """What a step does before a token that the graph does not."""
        self.layer.deferred.flush()
        if self.layer.training:
            self.layer.draws.next(self.layer.cap)

    def end(self) -> None:
        """What a step does after a token, here once in a while."""
        self._tokens += 1
        layer, subject = self.layer, type(self.layer).__name__
        if self._tokens % CHECK_TOKENS or layer.on_unconverged != "warn":
            return
        if not layer.deferred.is_pending(subject):
            measured, named = self._copied(self._all_converged), f"{subject} (an earlier call)"
            message = partial(failure_message, measured, layer.num_heads, None, named)
            layer.deferred.schedule(measured.converged, subject, message)
            self._all_converged.fill_(True)


class _Graph:
    """One token of a decoder, ready to be replayed."""

    def __init__(self, decoder: Decoder, x_t: Tensor) -> None:  # x_t: (b, m), or tokens (b,)
        states, mixers = decoder._states, decoder._mixers  # buffers that every token overwrites
        self.key, before = graph_key(x_t), [state.clone() for state in states]
        self.solves = [_Solve(mixer, x_t) for mixer in mixers if hasattr(mixer, "solve_options")]
        self.x = x_t.clone(memory_format=torch.contiguous_format)

        def run() -> Tensor:
            output, after = decoder._step(self.x)
            _load(states, after)
            for solve in self.solves:
                solve.record()
            return output

        # The cache of autocast is off because its casts of the weights would become constants.
        device, dtype = x_t.device.type, autocast_dtype(x_t)
        cast = torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)
        with torch.cuda.device_of(x_t), cast, ExitStack() as captures:
            for solve in self.solves:
                captures.enter_context(solve.captured())
            self.replay, self.output = capture(run)
        _load(states, before)
        self._watch = ReplacementWatch(decoder.layer)

    def fits(self, x_t: Tensor) -> bool:
        """Whether a replay computes what the module now computes for x_t."""
        return self.key == graph_key(x_t) and not self._watch.has_changed()

    def run(self, x_t: Tensor) -> Tensor:
        """The output for x_t, which is a buffer."""
        for solve in self.solves:
            solve.begin()
        self.x.copy_(x_t)
        self.replay()
        for solve in self.solves:
            solve.end()
        return self.output


def _load(buffers: list[RecurrentState], states: list[RecurrentState]) -> None:
    """Copy states to buffers: one launch for all small tensors, one for each larger one."""
    to, of = ([v for state in found for v in state.tensors] for found in (buffers, states))
    pairs = list(zip(to, of, strict=True))
    small = [pair for pair in pairs if pair[0].numel() <= MOST_TOGETHER]
    if small:
        torch._foreach_copy_([buffer for buffer, _ in small], [v for _, v in small])
    for buffer, v in pairs:
        if buffer.numel() > MOST_TOGETHER:
            buffer.copy_(v)


def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """(replay, output): a CUDA graph of `run`, after warming up, and its buffer."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_RUNS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # capture_error_mode: other threads may use the device during the capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = run()
    return graph.replay, output


def graph_key(x_t: Tensor) -> tuple[Any, ...]:  # (b, m), or tokens (b,)
    """The properties of an input for which a graph is valid: shape, dtypes, device and stream."""
    key = x_t.shape, x_t.dtype, autocast_dtype(x_t), x_t.device
    if not x_t.is_cuda:
        return key
    # torch.cuda.current_stream makes an object around this number at every call
    return *key, torch._C._cuda_getCurrentRawStream(x_t.get_device())


def is_decoded(layer: Any) -> bool:
    """Whether a graph may capture the layer's `step`, as its class says."""
    return bool(getattr(type(layer), "captures_step", False))


def can_capture(x_t: Tensor) -> bool:  # (b, m), or tokens (b,)
    """Whether graphs are captured for inputs on this device, and in this context."""
    if not is_cuda_device(x_t.device) or torch.compiler.is_compiling() or is_transformed():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _allows_graph(layer: Any) -> bool:
    """Whether a graph may capture the layer's `step`, of which the host need not read outcomes."""
    options = getattr(layer, "solve_options", None)
    if options is None or not is_decoded(layer):
        return is_decoded(layer) and kernel_backend(layer.backend) != "reference"
    return bool(options.backend != "reference" and options.on_unconverged != "raise")


def _has_kernels(layer: Any, x_t: Tensor) -> bool:  # (b, m), or tokens (b,)
    """Whether a layer that solves has kernels; others may be user code, which reads the device."""
    if not hasattr(layer, "solve_options"):
        return True
    # with "triton", too: the layer refuses what its kernels cannot compute
    kind = choose_backend("auto", x_t.device, layer.D.dtype)
    return layer.layout() is not None and kind == "triton"
