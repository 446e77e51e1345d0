"""What layers and baselines share: dtypes, marks, initial values and saving of parameters."""

import json
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from bedouin.kernels.launch import accumulator
from bedouin.solvers import SolveStats
from bedouin.solvers.draws import Draws
from bedouin.solvers.reporting import Outcome, stacklevel

DELTA_RANGE = (1e-3, 0.1)

ERASE_BIAS = -3.0
"""The initial bias of beta^e, which then begins near 0.05 erase: with 0, recall is learned less
well (examples/results/README.md, "Trials of the layer that tracks and recalls")."""

TEXT_BLOCK = 512
"""The text of a module's options is filled up with spaces to a multiple of this."""


def convolved_error(expected: str, got: str) -> ValueError:
    """The error for parameters or options of a `Convolved`, which was a layer behind a convolution
    with SiLU."""
    return ValueError(
        f"{expected}, got {got} of a Convolved: bedouin 0.1.0 is the last version that reads it; "
        'use that version, or train a layer with d_conv and projection="input", whose convolution '
        "is its own"
    )


class MarkedModule(nn.Module):
    """A module that keeps the marks of its parameters.

    Marks are the attributes `_no_weight_decay` and `_no_reinit`, which optimizers and initializers
    that follow Mamba read. Copies, `to_empty`, `load_state_dict(assign=True)` and sharding replace
    parameters by new ones without them; this class then sets them again on parameters of its own.
    Options that only the constructor reads cannot be set later, since that would have no effect.
    """

    settable_options: ClassVar[tuple[str, ...]] = ("backend", "layer_idx")
    """Options of the constructor that may be set later, too."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """As torch's; raises ValueError for the parameters of a `Convolved` around the layer, whose
        names begin with `conv` and `layer`."""
        inner = f"{prefix}layer."
        if f"{prefix}conv.weight" in state_dict and any(k.startswith(inner) for k in state_dict):
            raise convolved_error(
                f"state_dict must have the parameters of a {type(self).__name__} under {prefix!r}",
                "those",
            )
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _mark_parameters(self) -> None:
        """Call `mark` for the parameters that have marks; some may not exist yet."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_options", ()) and name not in self.settable_options:
            owner = type(self).__name__
            raise AttributeError(
                f"{name} of a {owner} is read by its constructor alone, got {value!r:.80}: make a "
                f"new layer, {owner}(..., {name}=...), and load the parameters that fit; these may "
                f"be set: {', '.join(self.settable_options) or 'none'}"
            )
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            self._mark_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_parameters()
        return self


class SavedOptions(MarkedModule):
    """A module whose extra state has the options on which its numbers depend but the shapes of its
    parameters do not: loading those of a module with other options would be silent otherwise.

    The extra state is a tensor of integers: `num_calls`, and the options as the characters of a
    JSON text. It is a tensor because safetensors holds nothing else, and of a size that differs
    between few layers because torch.distributed.checkpoint loads a tensor only into one of its own
    size: of its checkpoints of versions up to 0.2, which have the number of calls alone, load all
    keys but those that end in _extra_state. All dtypes to which a tool may convert a state_dict
    represent the characters exactly.
    """

    saved_options: ClassVar[tuple[str, ...]] = ()
    """Attributes in the extra state, whose values JSON can hold. Not solver, adjoint, cap and
    backend, between which `load_state_dict` works without a warning."""

    num_calls: int = 0
    """The number of training calls, where a layer counts them."""

    def number_options(self) -> dict[str, Any]:
        """The options in the extra state, by name."""
        return {name: getattr(self, name) for name in self.saved_options}

    def get_extra_state(self) -> Tensor:  # (1 + a multiple of TEXT_BLOCK,) int64
        text = json.dumps(self.number_options(), separators=(",", ":"))
        text += " " * (-len(text) % TEXT_BLOCK)
        # on the CPU also where a context makes tensors on another device
        return torch.tensor([self.num_calls, *text.encode("ascii")], device="cpu")

    def set_extra_state(
        self,
        state: Tensor,  # as of get_extra_state, or (): the number of calls alone
    ) -> None:
        """Take the number of calls, and issue a UserWarning that names the options in which the
        module that was saved and this one differ. Versions up to 0.2 saved no options."""
        num_calls, *text = state.flatten().tolist()
        self.num_calls = int(num_calls)
        message = self._compare(text) if text else ""
        if message:
            warnings.warn(message, stacklevel=stacklevel(sys._getframe()))

    def _compare(self, text: list[float]) -> str:
        """What to say about the options that were saved; nothing if they are those present."""
        owner = type_name(self)
        try:
            saved = json.loads(bytes(map(round, text)))
        except ValueError:  # such as an average of different options
            return (
                f"the options with which the parameters of this {owner} were saved cannot be read "
                "from its extra state: make sure that they are its own"
            )
        present = json.loads(json.dumps(self.number_options()))
        # an option that one of them does not know is none of another version
        names = [name for name in present if saved.get(name, present[name]) != present[name]]
        if not names:
            return ""
        was, now = (", ".join(f"{name}={of[name]!r}" for name in names) for of in (saved, present))
        return (
            f"the parameters of this {owner} were saved with {was}, but it has {now}, so that its "
            "outputs may differ from those of what was saved: make it with the saved options"
        )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        """As torch's, but a missing extra state is no error and leaves the number of calls as it
        is: tools that save parameters alone, such as averages of weights, leave it out."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *others
        )
        key = prefix + "_extra_state"
        if key in missing_keys:
            missing_keys.remove(key)


class SavedLayer(SavedOptions):
    """A layer whose extra state also has the number of its training calls, on which random caps
    depend."""

    draws: Draws
    _outcome: Outcome | None = None

    @property
    def stats(self) -> SolveStats | None:
        """Statistics of the last call, also of one that raised a ConvergenceError. None before any
        call, and in copies and pickles of a layer whose last call was within a torch.func
        transform; a state_dict contains none, and loading one does not change them. Those of a
        sample are the worst of its heads. The recomputation of non-reentrant checkpointing does not
        change them. Under torch.func transforms they are tensors of the transform: to read them,
        return them from the transformed function. Under torch.compile they are outputs of the graph
        that are not read, so nothing warns or raises, and stats.backward stays None. torch.export
        leaves them as they are. They are reduced when they are first read."""
        stats: SolveStats | None = None if self._outcome is None else self._outcome.stats
        return stats

    @property
    def num_calls(self) -> int:
        return self.draws.count

    @num_calls.setter
    def num_calls(self, value: int) -> None:
        self.draws.count = value

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without statistics of a torch.func transform."""
        state = dict(vars(self))
        measured = None if self._outcome is None else self._outcome.measured
        if measured is not None and is_functorch_wrapped_tensor(measured.defect):
            state["_outcome"] = None
        return state


def type_name(module: nn.Module) -> str:
    """The name of a module's class, or if FSDP or a parametrization has derived that, of its own.

    The module of a derived class is one of torch, or if it has abstract methods `abc`."""
    kinds = type(module).__mro__
    derived = "torch", "abc"
    return next(k.__name__ for k in kinds if k.__module__.partition(".")[0] not in derived)


def mark(parameter: Tensor | None, name: str) -> None:
    """Set the mark `name`, "_no_weight_decay" or "_no_reinit", unless the parameter is None."""
    if parameter is not None:
        setattr(parameter, name, True)


def factory_options(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """The arguments `device` and `dtype` of torch's modules and tensor factories."""
    return {"device": device, "dtype": dtype}


def at_least_float32(tensor: Tensor) -> Tensor:
    """`tensor`, of any shape, in the dtype of the solve, at least float32."""
    return tensor.to(accumulator(tensor.dtype))


def log_uniform(like: Tensor, low: float, high: float) -> Tensor:  # any shape -> as `like`
    """Random values in [low, high] with a uniformly distributed logarithm."""
    span = math.log(high) - math.log(low)
    return torch.exp(torch.rand_like(like) * span + math.log(low))


def inverse_softplus(value: Tensor) -> Tensor:  # any shape -> as `value`
    """The x with softplus(x) = `value`, for positive values."""
    return value + torch.log(-torch.expm1(-value))
