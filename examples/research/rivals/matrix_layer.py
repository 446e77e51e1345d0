"""What the rivals share: heads whose memories are matrices, after a short convolution."""

from typing import TypeVar

import torch

from bedouin.checks import positive_int
from bedouin.layers.common import RecurrentLayer, expanded, head_size
from bedouin.layers.convolution import ShortConvolution
from bedouin.state import RecurrentState, StateShapes

StateT = TypeVar("StateT", bound=RecurrentState)


class MatrixLayer(RecurrentLayer[StateT]):
    """A layer of h heads with p key channels (None: d_model / h) and expand_v p value channels."""

    conv: ShortConvolution

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None,
        expand_v: float,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(d_model, dtype)
        h = self.num_heads = positive_int("num_heads", num_heads)
        p = head_size(d_model, h) if head_dim is None else positive_int("head_dim", head_dim)
        self.head_dim, self.value_dim = p, expanded("expand_v", expand_v, "head_dim", p)

    def _state_sizes(self) -> StateShapes:
        memory = self.num_heads, self.head_dim, self.value_dim
        return {"conv": self.conv.window_size, "memory": memory}

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"value_dim={self.value_dim}"
        )
