"""Widths with which models have equal numbers of parameters."""

from collections.abc import Callable

WIDTH_STEP = 32
"""Widths of a model with a given number of parameters are multiples of this."""


def matching_width(size: Callable[[int], int], wanted: int) -> int:
    """The multiple of `WIDTH_STEP` whose `size`, a number of parameters, is nearest to `wanted`.

    Raises ValueError if even the narrowest model has 1.5 times as many parameters.
    """
    low, high = 1, 2
    while size(high * WIDTH_STEP) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle * WIDTH_STEP) < wanted else (low, middle)
    widths = low * WIDTH_STEP, high * WIDTH_STEP
    nearest = min(widths, key=lambda d_model: abs(size(d_model) - wanted))
    if size(nearest) > 1.5 * wanted:
        raise ValueError(
            f"--match-parameters must be at least {size(WIDTH_STEP)}, the size at d_model "
            f"{WIDTH_STEP}, got {wanted}"
        )
    return nearest
