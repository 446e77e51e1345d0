"""Golden cases: what layers computed before the code was made smaller, number by number.

    python tests/golden/test_golden.py        # writes cases.safetensors anew

Parameters are filled by their names, so that the order in which they are drawn has no influence.
The file goes when that work is done. Letters: b batch, t time, m d_model.
"""

import math
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import (
    Bedouin,
    FixedPointRNN,
    GatedDeltaNet,
    Kronecker,
    LowRank,
    Tracker,
    TrackingDeltaNet,
)
from bedouin.baselines import LSTM, DeltaProduct, Mamba
from bedouin.solvers import Jacobi, OneStepAdjoint, PhantomAdjoint, Picard

FILE = Path(__file__).with_name("cases.safetensors")
M, B, T, CUT = 8, 2, 19, 7

EXACT: dict[str, Any] = {"rtol": 1e-14, "atol": 1e-300}
LAYERS: dict[str, Callable[..., Any]] = {
    "one head": partial(Bedouin, M, d_state=3),
    "heads": partial(Bedouin, M, d_state=3, num_heads=2),
    "four reflections": partial(Bedouin, M, d_state=3, num_heads=2, num_householder=4),
    "no mixing": partial(Bedouin, M, d_state=3, num_householder=0, input_scale="delta"),
    "no feedback": partial(Bedouin, M, d_state=3, num_heads=2, feedback=()),
    "part of the feedback": partial(Bedouin, M, d_state=3, feedback=("B", "C", "mixer")),
    "wide beta": partial(Bedouin, M, d_state=3, beta_max=2.0),
    "griffin": partial(Bedouin, M, d_state=3, decay="griffin", num_heads=2),
    "coupled": partial(Bedouin, M, d_state=3, input_scale="one_minus_decay"),
    "full": partial(Bedouin, M, d_state=3, eigenvalues="full", feedback_norm=False),
    "convolution": partial(Bedouin, M, d_state=3, d_conv=4, num_heads=2),
    "paper": partial(Bedouin.from_paper, M, d_state=3, max_steps=30, on_unconverged="ignore"),
    "jacobi": partial(Bedouin, M, d_state=3, solver=Jacobi(**EXACT)),
    "picard": partial(Bedouin, M, d_state=3, solver=Picard(**EXACT), max_steps=200),
    "phantom": partial(Bedouin, M, d_state=3, adjoint=PhantomAdjoint(3, 0.5)),
    "one step": partial(Bedouin, M, d_state=3, adjoint=OneStepAdjoint(), num_heads=2),
    "low rank": partial(Bedouin, M, d_state=3, mixer=LowRank(2)),
    "kronecker": partial(Bedouin, M, d_state=3, mixer=Kronecker()),
    "vector state": partial(FixedPointRNN, M),
    "vector state, heads": partial(FixedPointRNN, M, num_heads=2, decay="griffin"),
    "tracking": partial(TrackingDeltaNet, M, tracker_dim=4, tracker_state=3),
    "memory": partial(GatedDeltaNet, M),
    "trackers": partial(Tracker, M, num_trackers=2, tracker_dim=4, tracker_state=3),
    "delta product": partial(DeltaProduct, M, num_heads=2, gated=True),
    "mamba": partial(Mamba, M, d_state=3),
    "lstm": partial(LSTM, M),
}


def wave(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Numbers in [-1, 1] that the name determines."""
    phase = zlib.crc32(name.encode()) % 1000
    places = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.cos(0.7 * places * places + 0.3 * places + phase).view(shape)


@torch.no_grad()
def fill(layer: torch.nn.Module) -> None:
    for name, parameter in layer.named_parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        size *= 0.2 if "y_proj" in name else 1.0  # more feedback amplifies rounding errors
        middle = 1.0 if name.rpartition(".")[2] in ("D", "norm_weight") or "norm." in name else 0.0
        parameter.copy_(middle + size * wave(name, parameter.shape))


def computed(name: str, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Output, state, a step, and all gradients, by name."""
    layer = LAYERS[name](dtype=dtype, device=device)
    layer.train(name == "lstm")  # as cuDNN's backward requires
    fill(layer)
    x = wave("x", (B, T, M)).to(device, dtype).requires_grad_()
    y, state = layer(x, return_state=True)
    _, between = layer(x[:, :CUT], return_state=True)
    last, end = layer(x[:, CUT:], between, return_state=True)
    if dtype == torch.float64 and name != "paper":  # whose stop rule ends at a tenth
        for ours, theirs in zip([last, *end.tensors], [y[:, CUT:], *state.tensors], strict=True):
            torch.testing.assert_close(ours, theirs)
    stepped, _ = layer.step(x[:, 0], state)
    leaves = {"x": x, **dict(layer.named_parameters())}
    loss = (y * wave("along", y.shape).to(y)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = {"output": y, "step": stepped}
    found |= {f"state {i}": v for i, v in enumerate(state.tensors)}
    found |= {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}
    return {f"{name}: {n}": v.detach().double().cpu().contiguous() for n, v in found.items()}


def assert_golden(found: dict[str, Tensor], tolerance: float) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    known = safetensors.load_file(FILE)
    (name,) = {n.partition(": ")[0] for n in found}
    assert {n for n in known if n.startswith(f"{name}: ")} == found.keys()
    for n, value in found.items():
        # layouts of parameters may change, their numbers not
        expected = known[n].view(value.shape)
        scale = max([1.0, *expected.abs().flatten().tolist()])
        torch.testing.assert_close(
            value, expected, rtol=tolerance, atol=tolerance * scale, msg=partial("{}: {}".format, n)
        )


@pytest.mark.parametrize("name", LAYERS)
def test_float64(name: str) -> None:
    assert_golden(computed(name, torch.float64), 1e-11)


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("jacobi", "picard")])
def test_float32(name: str) -> None:
    assert_golden(computed(name, torch.float32), 2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("jacobi", "picard", "kronecker")])
def test_kernels(name: str) -> None:
    assert_golden(computed(name, torch.float32, "cuda"), 5e-4)


if __name__ == "__main__":
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file({k: v for n in LAYERS for k, v in computed(n, torch.float64).items()}, FILE)
