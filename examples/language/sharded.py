"""A language model whose parameters several processes share out among them (FSDP2)."""

from typing import Any

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy

from flags import UsageError


def accelerator_options(*, shard: bool) -> dict[str, Any]:
    """FSDP2 for accelerate, with every block of the model as a unit.

    Its own mixed precision would compute the fixed point in bf16, which autocast does not.
    """
    if not shard:
        return {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        mixed_precision_policy=MixedPrecisionPolicy(),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    return {"fsdp_plugin": plugin}


def check_processes(accelerator: Accelerator, *, shard: bool, rows: int, parts: int) -> None:
    """Raise UsageError unless the processes can share the model, if they are to, and the rows."""
    if shard and accelerator.distributed_type != DistributedType.FSDP:
        raise UsageError(
            "--shard needs several GPUs, over which accelerate can distribute a model, got "
            f"{accelerator.num_processes} processes on {accelerator.device.type}: leave it out"
        )
    if rows % parts:
        raise UsageError(
            f"--batch-size must be a multiple of {parts}, --accumulate times the processes, got "
            f"{rows}"
        )
