"""The groups of parameters that an optimizer needs."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from bedouin.checks import check_bool
from bedouin.layer import FixedPointLayer
from bedouin.solvers.base import check_number


def param_groups(
    model: nn.Module, weight_decay: float, *, separate_feedback: bool = False
) -> list[dict[str, Any]]:
    """The parameters with and without weight decay, as the first argument of an optimizer.

        optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)

    Not decayed are parameters marked `_no_weight_decay` (A_log, omega and D of a layer), biases,
    and the parameters of norms: modules whose class is called ...Norm. Every parameter that
    requires a gradient is in one of the two groups once, also if modules share it. As for any
    optimizer, call it once the model is on its device and sharded, and before its first forward.

    separate_feedback: the parameters of W^y, those of the modules `y_proj` of Bedouin's layers, are
        in groups of their own, whose entry "feedback" is True. A schedule can then give them a
        lower rate in the first steps, so that what a layer can learn without feedback, it learns
        first: in copying this helps strings that are longer than those of training
        (examples/results/README.md, "One layer for both tasks").

    Raises TypeError for a model that is not a module or a separate_feedback that is not a bool,
    ValueError for a weight_decay below 0.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_number("weight_decay", weight_decay, 0, 1e3, open_low=False)
    check_bool("separate_feedback", separate_feedback)
    # one that is shared is exempt if it is so in one of its places
    exempt_ids = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if _is_exempt(name, parameter, module)
    }
    feedback_ids = set(_feedback_ids(model)) if separate_feedback else set()
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {(False, False): [], (False, True): []}
    if separate_feedback:
        groups |= {(True, False): [], (True, True): []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            key = id(parameter) in feedback_ids, id(parameter) in exempt_ids
            groups[key].append(parameter)
    return [
        {"params": parameters, "weight_decay": 0.0 if exempt else float(weight_decay)}
        | ({"feedback": feedback} if separate_feedback else {})
        for (feedback, exempt), parameters in groups.items()
        if parameters or not feedback
    ]


def _feedback_ids(model: nn.Module) -> Iterator[int]:
    """The parameters of W^y, also those of adapters around it."""
    for module in model.modules():
        if isinstance(module, FixedPointLayer) and module.y_proj is not None:
            yield from map(id, module.y_proj.parameters())


def _is_exempt(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    is_bias = name.startswith("bias") or name.endswith("bias")
    # by name, as norms are written anew in many libraries; FSDP and parametrizations derive
    # classes with a name in front of, or behind, that of the base
    is_norm = any(kind.__name__.endswith("Norm") for kind in type(module).__mro__)
    is_norm = is_norm or isinstance(module, nn.modules.batchnorm._NormBase)
    return is_bias or is_norm or bool(getattr(parameter, "_no_weight_decay", False))
