"""The recurrent state of a layer. Letters: b batch, d d_inner, n d_state."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.checks import check_tensor


class BedouinState(NamedTuple):
    """The recurrent state of a layer between two tokens, at least float32.

    A state that a layer returns owns its memory: it keeps no other tensor alive, and writing into
    `state.detach()` in place affects neither the call that returned it nor its backward pass.
    """

    ssm: Tensor  # (b, d, n), the memory h of the scan
    y: Tensor  # (b, d), the fixed point at the last token

    def detach(self) -> "BedouinState":
        """The state without its gradient history, for truncated back-propagation through time."""
        return BedouinState(self.ssm.detach(), self.y.detach())

    def to(self, *args: Any, **options: Any) -> "BedouinState":
        """The state with `Tensor.to` applied to both tensors."""
        return BedouinState(self.ssm.to(*args, **options), self.y.to(*args, **options))

    def __getitem__(self, index: Any) -> "BedouinState":  # type: ignore[override]
        """Samples of the batch: state[2:5], state[mask]; state[i] is one without a batch axis."""
        return BedouinState(self.ssm[index], self.y[index])


def check_state(state: object, b: int, d: int, n: int, like: Tensor) -> BedouinState:
    """`state` with a batch axis; a batch axis of 1 is added if it has none.

    like: a tensor of any shape with the dtype and device that the state must have.
    Raises TypeError for another type, ValueError for another shape, dtype or device.
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
    """The state before the first token: zeros."""
    ssm = torch.zeros(b, d, n, dtype=dtype, device=device)
    return BedouinState(ssm, torch.zeros(b, d, dtype=dtype, device=device))
