"""The recurrent state of a layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.checks import check_tensor


class BedouinState(NamedTuple):
    """What a layer carries from token to token, at least float32.

    ssm: (b, d, n), the scan's memory h; y: (b, d), the fixed point at the last token.
    A state that a layer returns owns its memory: keeping it keeps nothing else, and what is written
    into `state.detach()` in place changes neither the call that made it nor its backward.
    """

    ssm: Tensor
    y: Tensor

    def detach(self) -> "BedouinState":
        """The state without its gradient history: truncated back-propagation through time."""
        return BedouinState(self.ssm.detach(), self.y.detach())

    def to(self, *args: Any, **options: Any) -> "BedouinState":
        """Both tensors through `Tensor.to`."""
        return BedouinState(self.ssm.to(*args, **options), self.y.to(*args, **options))

    def __getitem__(self, index: Any) -> "BedouinState":  # type: ignore[override]
        """Samples of the batch: state[2:5], state[mask]; state[i] is one, without batch axis."""
        return BedouinState(self.ssm[index], self.y[index])


def check_state(state: object, b: int, d: int, n: int, like: Tensor) -> BedouinState:
    """`state` with a batch axis; TypeError or ValueError where it does not fit the input.

    `like` has the dtype and device that the state must have.
    """
    if not isinstance(state, BedouinState):
        raise TypeError(
            f"state must be a BedouinState or None, got {type(state).__name__}: make one with "
            "init_state(batch_size) or BedouinState(ssm, y)"
        )
    check_tensor("state.ssm", state.ssm, "(b, d, n)")
    check_tensor("state.y", state.y, "(b, d)")
    if state.ssm.dim() == 2 and state.y.dim() == 1:
        state = BedouinState(state.ssm.unsqueeze(0), state.y.unsqueeze(0))
    for name, tensor, shape in (("ssm", state.ssm, (b, d, n)), ("y", state.y, (b, d))):
        if tensor.shape != shape:
            raise ValueError(
                f"state.{name} must have shape {shape}, got {tuple(tensor.shape)}: "
                "make one with init_state(batch_size) or select samples with state[...]"
            )
        if tensor.dtype != like.dtype:
            raise ValueError(
                f"state.{name} must have dtype {like.dtype}, got {tensor.dtype}: "
                f"use state.to({like.dtype})"
            )
        if tensor.device != like.device:
            raise ValueError(
                f"state.{name} must be on {like.device}, got {tensor.device}: use state.to(device)"
            )
    return state


def zero_state(
    b: int, d: int, n: int, dtype: torch.dtype, device: torch.device | None
) -> BedouinState:
    """The state before any token."""
    ssm = torch.zeros(b, d, n, dtype=dtype, device=device)
    return BedouinState(ssm, torch.zeros(b, d, dtype=dtype, device=device))
