"""A layer captured for one shape: forward and backward as CUDA graphs, on request.

Letters: b batch, t time, m d_model.
"""

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from bedouin.kernels.backend import autocast_dtype, is_cuda_device
from bedouin.wrapped import ReplacementWatch, is_untouched

Replay = Callable[..., Tensor]


class _Given(torch.autograd.Function):
    """Its arguments. The gradients are copies: the next backward pass overwrites a graph's."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # any shapes
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # any shapes
        return tuple(None if grad is None else grad.clone() for grad in grads)


class _Result(torch.autograd.Function):
    """A copy of the output of a graph, whose backward pass follows its own call, once."""

    @staticmethod
    def forward(ctx: Any, graphed: "Graphed", output: Tensor) -> Tensor:  # (b, t, m) -> (b, t, m)
        ctx.graphed, ctx.call = graphed, graphed.calls
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # grad: (b, t, m)
        if ctx.call != ctx.graphed.calls:
            raise RuntimeError(
                "the backward pass of a graphed layer runs once, and before the layer's next call, "
                "because both overwrite what it needs: capture a second layer.graphed(sample) for "
                "a second call, or call the layer itself for several backward passes"
            )
        ctx.call = None
        return None, grad


class Graphed:
    """A layer's call and its backward pass for inputs like `sample`, replayed as CUDA graphs. Made
    by `layer.graphed(sample)`. Parameters are read where they are, so that an optimizer's step in
    place counts. Outputs and gradients are copies. Warnings about convergence are not issued, and
    `layer.stats` are those of the last replay, without those of the backward pass."""

    def __init__(self, layer: Any, sample: Tensor) -> None:
        layer.check_input(sample, rank=3)
        for name, module in layer.named_modules():
            if not is_untouched(module):
                raise ValueError(
                    "graphed needs a layer without hooks, which a replay would not run, got some "
                    f"on {name or 'the layer'}: remove them, or call the layer itself"
                )
        if not is_cuda_device(sample.device):
            lacks = "" if torch.version.cuda else " (this build of torch has no CUDA; install one)"
            raise ValueError(
                f"graphed needs a sample on a CUDA device, got {sample.device}{lacks}: move layer "
                "and sample there, or call the layer itself, which needs no graph"
            )
        if not sample.numel():
            raise ValueError(f"the sample must not be empty, got shape {tuple(sample.shape)}")
        options = getattr(layer, "solve_options", None)  # a layer without a solver has none
        cap = None if options is None else options.cap
        if layer.training and cap is not None and cap.is_random:
            raise ValueError(
                f"a graph would replay one draw of {cap} for ever: set max_steps to an int, or "
                "capture the layer in evaluation mode"
            )
        self.calls = 0
        self._layer, self._parameters = layer, tuple(layer.parameters())
        self._sample = sample.detach().clone().requires_grad_(sample.requires_grad)
        self._mode = layer.training, torch.is_grad_enabled(), autocast_dtype(sample)
        self._run = capture(layer, self._sample, self._parameters)
        self._watch = ReplacementWatch(layer)

    def __call__(self, x: Tensor) -> Tensor:  # (b, t, m) -> (b, t, m)
        """The output for x; raises where a replay would not be the same as a call of the layer."""
        self._check(x)
        self.calls += 1
        output = self._run(*_Given.apply(x, *self._parameters))  # type: ignore[no-untyped-call]
        result: Tensor = _Result.apply(self, output)  # type: ignore[no-untyped-call]
        return result

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        sample, remedy = self._sample, "capture another layer.graphed(sample) for it"
        for name in ("shape", "dtype", "device"):
            expected, got = getattr(sample, name), getattr(x, name)
            if expected != got:
                expected, got = (tuple(v) if name == "shape" else v for v in (expected, got))
                raise ValueError(f"x must have the sample's {name} {expected}, got {got}: {remedy}")
        if x.requires_grad and not sample.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "x requires a gradient, which the sample did not: capture again with "
                "sample.requires_grad_(), or pass x.detach()"
            )
        training, records, cast_to = self._mode
        if torch.is_grad_enabled() and not records:
            raise RuntimeError(
                "the layer was captured without gradients: capture again outside torch.no_grad()"
            )
        if (self._layer.training, autocast_dtype(x)) != (training, cast_to):
            raise RuntimeError(
                f"the layer was captured with training={training} and autocast to {cast_to}, got "
                f"training={self._layer.training} and autocast to {autocast_dtype(x)}: {remedy}"
            )
        if self._watch.has_changed():
            raise RuntimeError(
                "a module, a parameter or its memory was replaced, or a hook registered, after the "
                "capture: capture layer.graphed(sample) again"
            )


def capture(layer: Any, sample: Tensor, parameters: tuple[Tensor, ...]) -> Replay:
    """The function (x, *parameters) -> output that replays graphs of the layer for the sample."""
    device, cast_to = sample.device.type, autocast_dtype(sample)
    options, collects = getattr(layer, "solve_options", None), gc.isenabled()
    # without the cache of autocast, whose casts of the weights would become constants
    autocast = torch.autocast(device, cast_to, enabled=cast_to is not None, cache_enabled=False)
    # torch takes uninitialized memory for the cotangents of the capture, which may be NaN
    if options is not None:
        layer.solve_options = replace(options, on_unconverged="ignore")
    # a graph of an earlier layer that is freed during a capture makes the capture fail
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.device_of(sample), autocast, warnings.catch_warnings():
            # torch warms up on a stream of its own before it captures on another one
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
            run = torch.cuda.make_graphed_callables(
                lambda x, *unused: layer(x), (sample, *parameters), allow_unused_input=True
            )
    finally:
        if collects:
            gc.enable()
        if options is not None:
            layer.solve_options = options
    return cast(Replay, run)
