"""An assertion for tests, and the measurements of layers (bedouin.measurements)."""

import torch
from torch import Tensor

from bedouin.measurements import (
    FixedPoint,
    decode_gap,
    distance,
    find_fixed_point,
    layer_gradients,
    log_growth,
    lyapunov,
    measure_growth,
    relative_error,
)

__all__ = [
    "FixedPoint",
    "assert_close",
    "decode_gap",
    "find_fixed_point",
    "layer_gradients",
    "log_growth",
    "lyapunov",
    "measure_growth",
    "relative_error",
]


def assert_close(
    name: str,
    actual: Tensor,  # any shape
    expected: Tensor,  # the same shape
    rtol: float = 1e-10,
    atol: float = 0.0,
) -> None:
    """Raise AssertionError unless max|actual - expected| <= atol + rtol max|expected|.

    The message contains the name, the worst index and the relative error in the max norm. Shapes
    and dtypes must be equal; NaN equals NaN.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, not {expected.dtype}")
    a, e = actual.detach().to(torch.float64), expected.detach().to(torch.float64)
    scale = torch.where(e.isfinite(), e.abs(), 0.0).max().item() if e.numel() else 0.0
    error = relative_error(a, e)
    if error * (scale or 1.0) <= atol + rtol * scale:
        return
    worst = distance(a, e).flatten().argmax()
    index = tuple(int(i) for i in torch.unravel_index(worst, a.shape))
    raise AssertionError(
        f"{name}: relative error {error:.2e} > {rtol:.1e} (largest expected {scale:.2e}), worst at "
        f"{index}: {a[index].item():.17g}, expected {e[index].item():.17g}"
    )
