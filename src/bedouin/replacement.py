"""Whether what a captured graph was made of is still what a layer or model consists of."""

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from bedouin.wrapped import hooks_of


class HasModules(Protocol):
    """A module, or what is known of one."""

    def modules(self) -> Iterator[nn.Module]: ...


class ReplacementWatch:
    """Detects that a module, parameter or storage of a layer or model was replaced since the watch
    was made.

    Changes in place are not detected and need not be: a graph reads the current values.
    """

    def __init__(self, layer: HasModules) -> None:
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
