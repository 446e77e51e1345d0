"""What copies, pickles and state_dicts of a layer contain beside its parameters."""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from bedouin.parameters import MarkedModule
from bedouin.solvers import SolveStats
from bedouin.solvers.draws import Draws


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
