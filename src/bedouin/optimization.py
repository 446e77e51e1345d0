"""The groups of parameters that an optimizer needs."""

from typing import Any

from torch import nn

from bedouin.kernels.checks import check_number


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters with and without weight decay, as the first argument of an optimizer.

        optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)

    Not decayed are parameters marked `_no_weight_decay` (A_log, omega and D of a layer), biases,
    and the parameters of norms: modules whose class is called ...Norm. Every parameter that
    requires a gradient is in one of the two groups once, also if modules share it. As for any
    optimizer, call it once the model is on its device and sharded, and before its first forward.

    Raises TypeError for a model that is not a module, ValueError for a weight_decay below 0.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_number("weight_decay", weight_decay, 0, 1e3, open_low=False)
    # one that is shared is exempt if it is so in one of its places
    exempt_ids = set()
    for module in model.modules():
        # by name, as norms are written anew in many libraries; FSDP and parametrizations derive
        # classes with a name in front of, or behind, that of the base
        is_norm = any(kind.__name__.endswith("Norm") for kind in type(module).__mro__)
        is_norm = is_norm or isinstance(module, nn.modules.batchnorm._NormBase)
        for name, v in module.named_parameters(recurse=False, remove_duplicate=False):
            is_bias = name.startswith("bias") or name.endswith("bias")
            if is_bias or is_norm or getattr(v, "_no_weight_decay", False):
                exempt_ids.add(id(v))
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[id(parameter) in exempt_ids].append(parameter)
    decayed, exempt = groups
    return [
        {"params": decayed, "weight_decay": float(weight_decay)},
        {"params": exempt, "weight_decay": 0.0},
    ]
