"""Launches every Triton kernel once at a small shape, for compute-sanitizer; needs a GPU.

compute-sanitizer --tool memcheck python tests/kernels/sanitize.py
compute-sanitizer --tool racecheck python tests/kernels/sanitize.py    # cuBLAS has hazards, too
compute-sanitizer python tests/kernels/sanitize.py "direct" "direct, heads"     # only these
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bedouin import Bedouin, TrackingDeltaNet
from bedouin.kernels.scan import selective_scan
from bedouin.solvers import Jacobi, Picard

BATCH, TIME, WIDTH = 2, 18, 32


def draw(*shape: int) -> Tensor:
    """Random bfloat16 values with a gradient."""
    return torch.randn(shape, device="cuda").bfloat16().requires_grad_()


def scan(*heads: int) -> Callable[[], None]:
    """The scan and its adjoint, of one head or of so many."""

    def run() -> None:
        b, t, d, n = BATCH, 70, 64, 16
        x, B, C = draw(b, t, d), draw(b, t, n), draw(b, t, n)
        delta = torch.rand(b, t, d, device="cuda").bfloat16().requires_grad_()
        A = (-torch.rand(*heads, d, n, device="cuda")).requires_grad_()
        y, h = selective_scan(x, delta, A, B, C, backend="triton")
        (y.float().sum() + h.sum()).backward()

    return run


def layer(
    b: int = BATCH,
    t: int = TIME,
    m: int = WIDTH,
    make: Callable[..., nn.Module] = Bedouin,
    **options: object,
) -> Callable[[], None]:
    """A layer, forward and backward: sweep or iteration, and the output stage."""

    def run() -> None:
        torch.manual_seed(0)
        made = make(m, device="cuda", dtype=torch.bfloat16, backend="triton", **options)
        made(draw(b, t, m)).float().sum().backward()

    return run


def decode(num_heads: int = 1) -> Callable[[], None]:
    """Tokens one at a time."""

    def run() -> None:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "num_heads": num_heads}
        made = Bedouin(WIDTH, device="cuda", backend="triton", **options)
        state = made.init_state(BATCH)
        with torch.no_grad():
            for _ in range(3):
                _, state = made.step(draw(BATCH, WIDTH), state)

    return run


def main() -> None:
    """Run all, or those that are named; the first failing CUDA call raises."""
    runs: dict[str, Callable[[], None]] = {
        "scan": scan(),
        "scan, heads": scan(2),
        "direct": layer(),
        "direct without feedback": layer(feedback=()),
        "direct without feedback, 256 channels": layer(2, 18, 256, num_heads=1, feedback=()),
        "direct without feedback, 512 channels": layer(2, 6, 512, num_heads=1, feedback=()),
        "direct, many samples": layer(70, 6, 512, num_householder=4, num_heads=1),
        "direct, many states": layer(3, 18, 256, d_state=32, num_heads=1),
        "direct, 64 states": layer(2, 6, 256, d_state=64, num_heads=1),
        "direct, many states without feedback": layer(3, 18, 256, d_state=32, feedback=()),
        # a program of two samples of which one exists, and programs of eight
        "direct, heads": layer(3, num_heads=2),
        "direct, heads, many samples": layer(70, 6, 512, num_householder=4, num_heads=16),
        "direct, heads, feedback of Delta": layer(
            3, num_heads=2, d_state=64, feedback=("delta",), input_scale="delta"
        ),
        "direct, heads without feedback": layer(num_heads=2, feedback=()),
        "direct, heads of one sample": layer(1, 34, 128, num_heads=2),
        "direct, heads one by one": layer(2, 6, 256, num_heads=2),
        "tracking": layer(make=TrackingDeltaNet),
        "jacobi, heads": layer(num_heads=2, solver=Jacobi(), max_steps=4, on_unconverged="ignore"),
        "picard": layer(solver=Picard(), max_steps=4, on_unconverged="ignore"),
        "jacobi": layer(solver=Jacobi(), max_steps=4, on_unconverged="ignore"),
        "decode": decode(),
        "decode, heads": decode(2),
    }
    for name in sys.argv[1:] or runs:
        runs[name]()
        torch.cuda.synchronize()
        print(name)  # noqa: T201


if __name__ == "__main__":
    main()
