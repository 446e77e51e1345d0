"""What layers and baselines share: dtypes, marks, initial values and saving of parameters."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from bedouin.kernels.launch import accumulator
from bedouin.solvers import SolveStats
from bedouin.solvers.draws import Draws

DELTA_RANGE = (1e-3, 0.1)


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
                f"be set: {', '.join(self.settable_options)}"
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


class SavedLayer(MarkedModule):
    """A layer whose extra state is the counter of its training calls, on which random caps depend.

    The counter is always present, so that `load_state_dict(strict=True)` works between layers that
    differ only in solver, adjoint, cap or backend.
    """

    draws: Draws
    stats: SolveStats | None

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without statistics of a torch.func transform."""
        state = dict(vars(self))
        if self.stats is not None and is_functorch_wrapped_tensor(self.stats.verdict):
            state["stats"] = None
        return state

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.draws.count)

    def set_extra_state(
        self,
        state: Tensor,  # (), the count of draws
    ) -> None:
        self.draws.count = int(state)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        """As torch's, but a missing counter is no error and leaves the count as it is: tools that
        save parameters alone, such as averages of weights, leave it out."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *others
        )
        key = prefix + "_extra_state"
        if key in missing_keys:
            missing_keys.remove(key)


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
