"""How many kernels and operations of torch a call of a layer on Triton launches.

Letters: b batch, t time, m d_model.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

import bedouin.solvers.iterate
import bedouin.solvers.reporting
from bedouin import Bedouin, NoMixing
from bedouin.kernels.operation import OPERATIONS

HEADS = "sweep_kernel", "reverse_kernel"
ALL = ("delta", "B", "C", "mixer")


class Inside(TorchDispatchMode):
    """Shows every operation of torch that runs, also those within our own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def saw(self, func: Any, results: Any) -> None:
        """Called after each operation."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        own = OPERATIONS.get(func._schema.name)
        parts = own.function if own is not None else None
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            parts = func.decompose
        if parts is not None:
            with self:
                return parts(*args, **(kwargs or {}))
        results = func(*args, **(kwargs or {}))
        self.saw(func, results)
        return results


class Launches(Inside):
    """Counts what would be launched on a GPU: operations that compute, and Triton kernels, which do
    not run."""

    FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def launch(self, kernel: Any) -> None:
        self.names.append(kernel.fn.__name__)

    def saw(self, func: Any, results: Any) -> None:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in self.FREE:
            self.names.append(name)


def launches_of(
    layer: Bedouin,
    x: Tensor,  # (b, t, m)
    monkeypatch: pytest.MonkeyPatch,
    **places: Any,
) -> tuple[Launches, Launches]:
    """Those of forward and backward, on a machine whose device cannot be read."""
    # it fills uninitialized memory, which costs launches
    torch.use_deterministic_algorithms(False)
    for module in (bedouin.solvers.reporting, bedouin.solvers.iterate):
        monkeypatch.setattr(module, "can_read_device", lambda tensor: False)
    forward, backward = Launches(), Launches()
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *a, **k: forward.launch(kernel))
    with forward:
        out = layer(x, **places)
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *a, **k: backward.launch(kernel))
    with backward:
        out.backward(torch.ones_like(out))
    return forward, backward


@pytest.mark.interpreter
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("feedback", [ALL, ()])
def test_padding_and_documents_run_the_kernels_of_a_batch(
    feedback: tuple[str, ...], num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_heads": num_heads, "feedback": feedback, "backend": "triton"}
    layer = Bedouin(32 * num_heads, on_unconverged="ignore", **options)

    def kernels(b: int, t: int, **places: Tensor) -> list[list[str]]:
        """Triton's, in their order."""
        layer.zero_grad()
        x = torch.randn(b, t, 32 * num_heads, requires_grad=True)
        both = launches_of(layer, x, monkeypatch, **places)
        return [[name for name in found.names if name.endswith("_kernel")] for found in both]

    batch = kernels(3, 40)
    assert all(batch)
    ends = torch.tensor([0, 40, 50, 80])
    index = torch.searchsorted(ends, torch.arange(80), right=True).unsqueeze(0)
    mask = torch.arange(40) >= torch.tensor([[0], [13], [40]])
    assert kernels(3, 40, mask=mask) == kernels(3, 40, mask=mask.flip(1)) == batch
    assert kernels(1, 80, cu_seqlens=ends) == kernels(1, 80, seq_idx=index) == batch


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("feedback", "num_heads", "most", "mixed"),
    [
        (ALL, 1, (18, 43), {}),
        (ALL, 2, (23, 43), {}),
        # W^y is padded with rows of zeros
        (("delta", "B"), 1, (19, 44), {}),
        (("delta", "B"), 2, (24, 44), {}),
        (("delta",), 1, (20, 44), {}),
        (("delta",), 2, (27, 48), {}),
        ((), 1, (16, 32), {}),
        ((), 2, (22, 35), {}),
        (ALL, 2, (22, 40), {"mixer": NoMixing()}),
        (("delta",), 2, (26, 44), {"mixer": NoMixing()}),
    ],
)
def test_the_number_of_launches(
    feedback: Any,
    num_heads: int,
    most: tuple[int, int],
    mixed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 40 samples of 16 tokens, with and without reflections."""
    options: dict[str, Any] = {"num_heads": num_heads, "feedback": feedback, "backend": "triton"}
    layer = Bedouin(32 * num_heads, on_unconverged="ignore", **options, **mixed)
    x = torch.randn(40, 16, 32 * num_heads, requires_grad=True)
    forward, backward = launches_of(layer, x, monkeypatch)
    assert len(forward.names) <= most[0], forward.names
    assert len(backward.names) <= most[1], backward.names
    assert HEADS[0] in forward.names and HEADS[1] in backward.names
