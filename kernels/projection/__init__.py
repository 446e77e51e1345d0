"""The operands of a sweep from the projected input, in one pass (Triton)."""

from bedouin.kernels.projection.parts import GATE, Part, X, takes_split
from bedouin.kernels.projection.registered import split_projection

__all__ = ["GATE", "X", "Part", "split_projection", "takes_split"]
