"""`DiagnosisLogger`: the numbers of `bedouin.diagnose` in a log of the training."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from bedouin.checks import positive_int
from bedouin.diagnosis import Diagnosis, diagnose
from bedouin.layer import FixedPointLayer
from bedouin.packing import find_packing


class DiagnosisLogger:
    """Diagnoses the layers of a model at every so many training steps.

        with DiagnosisLogger(model, wandb.log, every=500) as logger:
            for batch in batches:
                ...  # forward, backward and optimizer step
                logger.step()

    A hook on each Bedouin and FixedPointRNN keeps a part of what the layer is called with in
    training mode, in the steps that are diagnosed: the first, and every `every` steps after it. Of
    calls with padding or documents that is the longest sequence; incoming states are not kept. In
    such a step `step` takes the time of `diagnose` for each layer; in others it takes none.

    Args:
        model: the model, or a layer.
        log: called with the numbers and the index of the step, as `wandb.log` is. A key is the name
            of the layer in the model, "/", and a name of `Diagnosis.numbers`.
        every: the steps from one diagnosis to the next.
        samples, max_tokens: the most that is kept of a call.

    Raises TypeError for arguments of the wrong kind, ValueError for a model without such a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        log: Callable[[dict[str, float], int], object],
        *,
        every: int = 100,
        samples: int = 2,
        max_tokens: int = 256,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if not callable(log):
            raise TypeError(
                "log must be a function of the numbers and the index of the step, such as "
                f"wandb.log, got {log!r}"
            )
        self.log, self.every = log, positive_int("every", every)
        self.samples = positive_int("samples", samples)
        self.max_tokens = positive_int("max_tokens", max_tokens)
        self.count = 0
        self.last: dict[str, Diagnosis] = {}
        """The last diagnosis of each layer, by its name in the model."""
        self._inputs: dict[str, Tensor] = {}
        self._layers = {
            name: part for name, part in model.named_modules() if isinstance(part, FixedPointLayer)
        }
        if not self._layers:
            raise ValueError(
                f"model must contain a Bedouin or FixedPointRNN, got {type(model).__name__} without"
            )
        self._hooks = [
            layer.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, layer in self._layers.items()
        ]

    def step(self) -> None:
        """To be called after each training step.

        Raises RuntimeError if this step is to be diagnosed and no layer was called in it, as under
        torch.compile, whose graphs have no inputs to keep.
        """
        index, self.count = self.count, self.count + 1
        if index % self.every:
            return
        inputs, self._inputs = self._inputs, {}
        if not inputs:
            raise RuntimeError(
                f"DiagnosisLogger saw no call of a layer in training mode in step {index}: call "
                "step() after each training step, and run the steps that are diagnosed without "
                "torch.compile"
            )
        self.last = {name: diagnose(self._layers[name], x) for name, x in inputs.items()}
        numbers = {
            f"{name}/{key}" if name else key: value
            for name, found in self.last.items()
            for key, value in found.numbers().items()
        }
        self.log(numbers, index)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        # a function, since copies of a model copy the object of a bound method, and with it the
        # model once more
        def keep(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            due = layer.training and self.count % self.every == 0
            if not torch.compiler.is_compiling() and due and layer is self._layers[name]:
                self._keep(name, args[0] if args else options.get("x"), options)

        return keep

    @torch.no_grad()
    def _keep(
        self,
        name: str,
        x: object,  # (b, t, m)
        options: dict[str, Any],
    ) -> None:
        # the layer itself answers a wrong argument
        if not isinstance(x, Tensor) or x.dim() != 3:
            return
        places = (options.get(key) for key in ("mask", "cu_seqlens", "seq_idx"))
        packing = find_packing(x, *places)
        if packing is not None:
            longest = int(packing.lengths.argmax())
            x = packing.take(x)[longest : longest + 1, : int(packing.lengths[longest])]
        if x.numel():
            part = x[: self.samples, : self.max_tokens]
            # under autocast x may have another dtype than the layer
            self._inputs[name] = part.to(self._layers[name].D.dtype, copy=True)
