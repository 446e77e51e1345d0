"""The states of a model whose parameters several processes share out among them (FSDP2)."""

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_WHOLE = StateDictOptions(full_state_dict=True)


def gather_states(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole states of model and optimizer in the main process, empty ones in the others; all
    processes must call this."""
    return get_state_dict(model, optimizer, options=_GATHERED)


def scatter_states(
    model: nn.Module, optimizer: Optimizer, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Give every process its part of whole states, which each of them has."""
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states[0],
        optim_state_dict=states[1],
        options=_WHOLE,
    )
