"""`random_layer`: a small layer with random options."""

import random
import warnings
from typing import Any

import torch

from bedouin import Bedouin, BedouinState, FixedPointRNN, HouseholderProduct, LowRank, NoMixing
from bedouin.layers.fixed_point import FixedPointLayer


def random_layer(rng: random.Random, **fixed: Any) -> FixedPointLayer:
    """A small float64 `Bedouin` or `FixedPointRNN` with every option drawn from `rng`.

    `fixed` contains the options that are not drawn; "kind" is the class. Drawn are decay, input
    scale, eigenvalue range, feedback, mixer, beta_max in {0.5, 1, 2}, 0 to 4 reflections, the
    number of heads, and the width of a convolution.
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
        "d_conv": rng.choice((None, None, 2, 3)),
    }
    if kind is Bedouin:
        options |= {
            "d_state": rng.choice((1, 2, 4)),
            "decay": rng.choice(("mamba", "griffin")),
            "input_scale": rng.choice(("delta", "bounded_delta", "one_minus_decay")),
            "feedback": [v for v in ("delta", "B", "C", "mixer") if rng.choice((True, False))],
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


def random_state(layer: FixedPointLayer, b: int, scale: float = 0.1) -> BedouinState:
    """A state of b samples with random numbers in all of its tensors."""
    return BedouinState(*(scale * torch.randn_like(v) for v in layer.init_state(b)))
