"""Assertions and random layers for tests, and the measurements of layers (bedouin.measurements)."""

import random
import warnings
from typing import Any

import torch
from torch import Tensor

from bedouin.bedouin_layer import Bedouin
from bedouin.layer import FixedPointLayer
from bedouin.measurements import (
    FixedPoint,
    decode_gap,
    distance,
    find_fixed_point,
    gradient_cosine,
    layer_gradients,
    log_growth,
    lyapunov,
    measure_growth,
    relative_error,
)
from bedouin.mixers import HouseholderProduct, LowRank, NoMixing
from bedouin.rnn_layer import FixedPointRNN

__all__ = [
    "FixedPoint",
    "assert_close",
    "decode_gap",
    "find_fixed_point",
    "gradient_cosine",
    "layer_gradients",
    "log_growth",
    "lyapunov",
    "measure_growth",
    "random_layer",
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


def random_layer(rng: random.Random, **fixed: Any) -> FixedPointLayer:
    """A small float64 `Bedouin` or `FixedPointRNN` with every option drawn from `rng`.

    `fixed` contains the options that are not drawn; "kind" is the class. Drawn are decay, input
    scale, eigenvalue range, feedback, mixer, beta_max in {0.5, 1, 2}, 0 to 4 reflections, and the
    number of heads.
    """
    kind = fixed.pop("kind", None) or rng.choice((Bedouin, FixedPointRNN))
    products = [HouseholderProduct(k, beta) for k in (1, 2, 3, 4) for beta in (0.5, 1.0, 2.0)]
    mixers = [NoMixing(), *products, *(LowRank(k) for k in (1, 2, 3))]
    options: dict[str, Any] = {
        "d_model": rng.randint(1, 5),
        "expand": rng.choice((1, 2)),
        "mixer": rng.choice(mixers),
        "eigenvalues": rng.choice(("positive", "full")),
        "feedback_norm": rng.choice((True, False)),
        "feedback_init": rng.choice((0.1, 1.0)),
    }
    if kind is Bedouin:
        options |= {
            "d_state": rng.choice((1, 2, 4)),
            "decay": rng.choice(("mamba", "griffin")),
            "input_scale": rng.choice(("delta", "bounded_delta", "one_minus_decay")),
            "feedback": [v for v in ("delta", "B", "C", "mixer") if rng.choice((True, False))],
            "output": rng.choice(("norm", "paper")),
            "bias": rng.choice((True, False)),
        }
    else:
        options["decay"] = rng.choice(("sigmoid", "griffin"))
        options["feedback"] = rng.choice((("mixer",), ()))
    options |= {"dtype": torch.float64, "on_unconverged": "ignore"} | fixed
    if "num_heads" not in options:
        d = int(options["d_model"] * options["expand"])
        options["num_heads"] = rng.choice([h for h in range(1, d + 1) if d % h == 0])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # drawn, not chosen
        warnings.filterwarnings("ignore", "input_scale='delta'", UserWarning)
        torch.manual_seed(rng.randint(0, 2**16))
        layer: FixedPointLayer = kind(options.pop("d_model"), **options)
    return layer
