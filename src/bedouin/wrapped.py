"""Projections whose module another library has wrapped or replaced, as low-rank adapters do.

A solve needs W^y as a matrix, because it multiplies every token's feedback in a kernel. The matrix
of a module that is not just a weight is found by calling it on the identity, which is
differentiable and passes through parametrizations, adapters and gathered shards alike.

Letters: p inputs and r outputs of a projection, H heads.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bedouin.heads import HeadLinear
from bedouin.kernels.linear import apply_weight

LinearModule = nn.Linear | HeadLinear
"""What a layer makes; another library may have put a module of its own in this place."""

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The dictionaries of the forward and backward hooks on the module itself, which registering a
    hook changes in place."""
    return [getattr(module, name) for name in _HOOKS]


def is_untouched(module: nn.Module) -> bool:
    """Whether a call runs the `forward` of the module's class and nothing else.

    Not with a hook on the module itself, nor with a `forward` that another library, as accelerate,
    has set on the object.
    """
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    return not (module._backward_hooks or module._backward_pre_hooks)


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module multiplies by `module.weight` and does nothing else.

    It may have parametrizations, which compute `weight`, or be of a class that FSDP derived.
    """
    if not isinstance(module, (nn.Linear, HeadLinear)) or getattr(module, "bias", None) is not None:
        return False
    if type(module).forward not in (nn.Linear.forward, HeadLinear.forward):
        return False
    if not is_untouched(module):
        return False
    # a quantized tensor, as torchao's, multiplies vectors in a call, and is no matrix for kernels
    kind = type(module._parameters.get("weight"))
    return kind is nn.Parameter or kind.__module__.partition(".")[0] in ("builtins", "torch")


def read_parameter(module: nn.Module, name: str) -> Tensor:
    """The parameter of a module that need not be called, as a call would see it.

    A module that accelerate offloads has its parameters on the meta device except in calls.
    """
    value: Tensor = getattr(module, name)
    hook = vars(module).get("_hf_hook")
    if hook is None or not value.is_meta:
        return value
    hook.pre_forward(module)
    value = getattr(module, name)
    hook.post_forward(module, ())
    return value


def refuse_mixer(mixer: nn.Module) -> NoReturn:
    """Raise TypeError for a mixer with hooks that kernels compute without calling it."""
    hooks = [hook for hooks in hooks_of(mixer) for hook in hooks.values()]
    raise TypeError(
        f"mixer must have no hooks, got {(*hooks, vars(mixer).get('forward'))[0]!r}: kernels "
        f"compute a {type(mixer).__name__} without calling it; hook the layer, or derive a mixer "
        "from bedouin.mixers.StructuredMixer, whose `forward` and hooks run"
    )


def norm_parameters(norm: nn.Module | None) -> tuple[Tensor | None, float]:
    """The weight and eps of a layer's norm; None and 0 without one.

    The output stage computes the norm itself. Raises TypeError for a module that would compute
    something else, or has hooks, which would never run.
    """
    if norm is None:
        return None, 0.0
    used: Any = norm if type(norm).forward is nn.RMSNorm.forward else _trained_copy(norm)
    own, kind = vars(used), type(used)
    # `is_untouched` without the call, which costs the host time in every call of the layer; the
    # `forward` that accelerate sets on the object moves the input or loads the weight
    hooked = used._forward_hooks or used._forward_pre_hooks
    hooked = hooked or used._backward_hooks or used._backward_pre_hooks
    hooked = hooked or ("forward" in own and "_hf_hook" not in own)
    plain = isinstance(used, nn.RMSNorm) and kind.forward is nn.RMSNorm.forward
    if hooked or not plain or used.weight is None or used.eps is None:
        raise TypeError(
            "norm must be an nn.RMSNorm with a weight, an eps and no hooks, because the output "
            f"stage computes it without calling the module, got {kind.__module__}."
            f"{kind.__qualname__}: hook the layer or out_proj, change the weight with "
            "torch.nn.utils.parametrize, or train a copy with PEFT's modules_to_save"
        )
    return read_parameter(used, "weight") if "_hf_hook" in own else used.weight, used.eps


def _trained_copy(norm: Any) -> Any:
    """The module that is in use where PEFT's modules_to_save has put a wrapper; else `norm`."""
    copies = getattr(norm, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict) or not is_untouched(norm):
        return norm
    active = norm.active_adapters
    if norm.disable_adapters or not active or any(name not in copies for name in active):
        return norm.original_module
    return copies[active[0]]


def apply_projection(
    module: LinearModule,
    v: Tensor,  # (H b, ..., p)
    dtype: torch.dtype,
) -> Tensor:  # (H b, ..., r)
    """The module's map of v in the dtype of v; a module that is not plain is called in `dtype`."""
    if is_plain(module):
        return apply_weight(v, module.weight.to(v.dtype))
    out: Tensor = module(v.to(dtype))
    return out.to(v.dtype)


def effective_weight(
    name: str,
    module: LinearModule,
    inputs: int,
    like: Tensor,  # a parameter of the layer, any shape
    num_heads: int,
) -> Tensor:  # (r, p) or (H, r, p), p = inputs
    """The matrix that the module multiplies by, which must be linear: this is not checked.

    Dropout inside of the module, as that of an adapter in training, is drawn once for the call and
    drops the same inputs for all samples and tokens. Raises TypeError for a module with hooks,
    which would never see a token.
    """
    if is_plain(module):
        return module.weight
    _refuse_hooks(name, module)
    identity = torch.eye(inputs, dtype=like.dtype, device=like.device)
    if num_heads > 1:
        identity = identity.expand(num_heads, -1, -1)
    columns: Tensor = module(identity)
    return columns.mT.contiguous()


def _refuse_hooks(name: str, module: nn.Module) -> None:
    for part_name, part in module.named_modules(prefix=name):
        for hook in (hook for hooks in hooks_of(part) for hook in hooks.values()):
            # torch's own gather a sharded weight or compute it, as those of weight_norm do
            owner = getattr(hook, "__func__", hook)
            home = getattr(owner, "__module__", None) or type(hook).__module__
            if home.partition(".")[0] != "torch":
                raise TypeError(
                    f"{part_name} must have no hooks, got {hook!r}: the solve multiplies by the "
                    f"matrix of {name} without calling it at each token; hook the layer, x_proj or "
                    "out_proj, or change the weight with torch.nn.utils.parametrize"
                )


class ReplacementWatch:
    """Detects that a module, parameter or storage of a layer or model was replaced since the watch
    was made.

    Changes in place are not detected and need not be: a graph reads the current values.
    """

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
        """Whether anything was replaced; compares addresses, so it does not synchronize. A hook
        that was registered counts, since it would not run in a replay."""
        if any(self._hooks):
            return True
        for owner, name, module in self._submodules:
            if owner.get(name) is not module:
                return True
        for owner, name, tensor, pointer in self._tensors:
            if owner.get(name) is not tensor or tensor.data_ptr() != pointer:
                return True
        return False
