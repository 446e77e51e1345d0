"""Projections whose module another library has wrapped or replaced, as low-rank adapters do.

A solve needs W^y as a matrix, because it multiplies every token's feedback in a kernel. The matrix
of a module that is not just a weight is found by calling it on the identity, which is
differentiable and passes through parametrizations, adapters and gathered shards alike.

Letters: p inputs and r outputs of a projection, H heads.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.kernels.backend import has_values, is_transformed
from bedouin.kernels.heads import padding
from bedouin.layers.heads import HeadLinear, HeadNorm

LinearModule = nn.Linear | HeadLinear
"""What a layer makes; another library may have put a module of its own in this place."""
# The fewest tokens for which weights are copied: on a CPU for one product of several projections,
# on a GPU for rows of one projection that are aligned.
LEAST_JOINED = 64
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The dictionaries of forward and backward hooks on the module, which change in place."""
    return [getattr(module, name) for name in _HOOKS]


def is_untouched(module: nn.Module) -> bool:
    """Whether a call runs the `forward` of the module's class and nothing else: no hook on the
    module itself, and no `forward` that another library, as accelerate, has set on the object."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    return not (module._backward_hooks or module._backward_pre_hooks)


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module multiplies by `module.weight` and does nothing else. It may have
    parametrizations, which compute `weight`, or be of a class that FSDP derived."""
    is_known = type(module).forward in (nn.Linear.forward, HeadLinear.forward)
    if not is_known or getattr(module, "bias", None) is not None or not is_untouched(module):
        return False
    # a quantized tensor, as torchao's, multiplies vectors in a call, and is no matrix for kernels
    kind = type(module._parameters.get("weight"))
    return kind is nn.Parameter or kind.__module__.partition(".")[0] in ("builtins", "torch")


def read_parameter(module: nn.Module, name: str) -> Tensor:
    """The parameter of a module that need not be called, as a call would see it: one that
    accelerate offloads has its parameters on the meta device except in calls."""
    value: Tensor = getattr(module, name)
    hook = vars(module).get("_hf_hook")
    if hook is None or not value.is_meta:
        return value
    hook.pre_forward(module)
    value = getattr(module, name)
    hook.post_forward(module, ())
    return value


def tell_of_hooks(layer: nn.Module, name: str, module: nn.Module) -> None:
    """Warn once that a module is called because of its hooks, which takes longer than kernels."""
    told = layer.__dict__.setdefault("_told_of_hooks", set())
    if name in told or torch.compiler.is_compiling():
        return
    told.add(name)
    warnings.warn(
        f"{name} of {type(layer).__name__} has hooks or a forward of its own, so that "
        f"{type(module).__name__} is called in plain torch, which is slower than the kernels that "
        "compute it otherwise: remove them where speed matters",
        UserWarning,
        stacklevel=2,
    )


def norm_parameters(norm: nn.Module | None) -> tuple[Tensor | None, float]:
    """The weight and eps of a layer's norm; None and 0 without one. The output stage computes the
    norm itself, unless it is hooked; TypeError for a module that would compute something else."""
    if norm is None:
        return None, 0.0
    used: Any = norm
    if isinstance(getattr(norm, "modules_to_save", None), nn.ModuleDict) and is_untouched(norm):
        # PEFT's wrapper of the copies that it trains, one of which may be in use
        copies, active = used.modules_to_save, used.active_adapters
        trains = active and not used.disable_adapters and all(name in copies for name in active)
        used = copies[active[0]] if trains else used.original_module
    kind: Any = type(used)
    is_norm = getattr(kind, "forward", None) in (nn.RMSNorm.forward, HeadNorm.forward)
    if not is_norm or used.weight is None or used.eps is None:
        raise TypeError(
            "norm must be an nn.RMSNorm with a weight and an eps, because the output stage "
            f"computes it without calling the module, got {kind.__module__}.{kind.__qualname__}: "
            "change the weight with torch.nn.utils.parametrize, or train a copy with PEFT's "
            "modules_to_save"
        )
    return read_parameter(used, "weight"), used.eps


def calls_norm(norm: nn.Module | None) -> bool:
    """Whether the output stage calls the norm, because it has hooks or a `forward` of its own; that
    which accelerate sets on the object moves the input or loads the weight."""
    if norm is None:
        return False
    has_own = "forward" in vars(norm) and "_hf_hook" not in vars(norm)
    return has_own or any(hooks_of(norm))


def effective_weight(
    name: str, module: LinearModule, inputs: int, like: Tensor, num_heads: int
) -> Tensor:  # like: a parameter of the layer -> (r, p) or (H, r, p), p = inputs
    """The matrix that the module multiplies by. A module that is not plain is called with the unit
    vectors and with twice these, which hooks see, not the tokens; dropout inside of it is drawn
    once for the call. Raises TypeError for a module with hooks that is not linear."""
    if is_plain(module):
        return module.weight
    identity = torch.eye(inputs, dtype=like.dtype, device=like.device)
    # but for hooks of torch, which gather a sharded weight or compute it, as those of weight_norm
    hooks = (hook for part in module.modules() for each in hooks_of(part) for hook in each.values())
    owners = ((getattr(hook, "__func__", hook), type(hook)) for hook in hooks)
    homes = (getattr(own, "__module__", None) or kind.__module__ for own, kind in owners)
    hooked = any(home.partition(".")[0] != "torch" for home in homes)
    rows = torch.cat([identity, 2 * identity]) if hooked else identity
    if num_heads > 1:
        rows = rows.expand(num_heads, -1, -1)
    columns: Tensor = module(rows)
    if hooked:
        columns, twice = columns.chunk(2, -2)
        readable = not torch.compiler.is_compiling() and not is_transformed()
        if readable and has_values(columns):
            tolerance = 10 * torch.finfo(columns.dtype).eps
            if not torch.allclose(twice, 2 * columns, rtol=tolerance, atol=tolerance):
                raise TypeError(
                    f"{name} must stay linear with its hooks, since the solve multiplies by its "
                    "matrix without calling it at each token, but twice the input did not give "
                    "twice the output: hook the layer, x_proj or out_proj, or change the weight "
                    "with torch.nn.utils.parametrize"
                )
    return columns.mT.contiguous()


class ReplacementWatch:
    """Detects that a module, parameter or storage of a layer or model was replaced since the watch
    was made. Changes in place need not be: a graph reads the current values."""

    def __init__(self, layer: nn.Module) -> None:
        self._submodules: list[tuple[dict[str, Any], str, object]] = []
        self._tensors: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self._hooks = [hooks for module in layer.modules() for hooks in hooks_of(module)]
        for module in layer.modules():
            self._submodules += [(module._modules, *item) for item in module._modules.items()]
            for owner in (module._parameters, module._buffers):
                for name, tensor in owner.items():
                    if tensor is not None:
                        self._tensors.append((owner, name, tensor, tensor.data_ptr()))

    def has_changed(self) -> bool:
        """Whether anything was replaced or hooked; compares addresses, without synchronization."""
        if any(self._hooks):
            return True
        for owner, name, module in self._submodules:
            if owner.get(name) is not module:
                return True
        for owner, name, tensor, pointer in self._tensors:
            if owner.get(name) is not tensor or tensor.data_ptr() != pointer:
                return True
        return False


def side_by_side(
    x: Tensor,  # (b, t, p)
    modules: Sequence[nn.Module],  # (b, t, p) -> (b, t, r_i)
) -> Tensor:  # (b, t, sum r_i), or with more columns, which nothing may read
    """What the modules make of x, one beside the other; in one product where that is faster.
    torch.compile joins products itself, and few tokens are no reason to copy weights, except on a
    GPU, where a copy takes less time than the launches of several products."""
    # first, so that no condition on the number of tokens is traced
    joins = not torch.compiler.is_compiling() and all(map(is_plain, modules))
    if joins:
        is_long, are_several = x[..., 0].numel() >= LEAST_JOINED, len(modules) > 1
        joins = (is_long or are_several) if x.is_cuda else (is_long and are_several)
    if not joins:
        found = [module(x) for module in modules]
        return found[0] if len(found) == 1 else torch.cat(found, -1)
    weights: list[Tensor] = [module.weight for module in modules]  # type: ignore[misc]
    missing = padding(sum([len(w) for w in weights]))
    if missing and x.is_cuda:
        # Nothing reads the results of these rows, so any serve: zeros would take a launch, and one
        # row repeated is not contiguous, for which torch.cat has a slower kernel.
        most = max(weights, key=len).detach()
        weights.append(most[:missing] if missing <= len(most) else most[:1].expand(missing, -1))
    return F.linear(x, torch.cat(weights))
