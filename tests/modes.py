"""What sees every operation that is dispatched, and how much memory tensors need, on any device."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watching(TorchDispatchMode):
    """Calls `saw(function, arguments, results)` after each operation."""

    def __init__(self, saw: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saw = saw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.saw(func, args, found)
        return found


class LiveBytes(Watching):
    """The largest number of bytes of tensors made under it that were alive at once."""

    def __init__(self) -> None:
        super().__init__(self.count)
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    def count(self, func: Any, args: Any, found: Any) -> None:
        for storage in (v.untyped_storage() for v in tree_leaves(found) if isinstance(v, Tensor)):
            self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))
