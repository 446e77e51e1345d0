"""A model whose parameters several processes share out among them (FSDP2), and its states."""

from typing import Any

from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_WHOLE = StateDictOptions(full_state_dict=True)


def sharding() -> FullyShardedDataParallelPlugin:
    """FSDP2 for accelerate, with every block of the model as a unit.

    Its own mixed precision would compute the fixed point in bf16, which autocast does not.
    """
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        mixed_precision_policy=MixedPrecisionPolicy(),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )


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
