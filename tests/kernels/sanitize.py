"""Launches every Triton kernel at a small shape, for compute-sanitizer; needs a GPU.

compute-sanitizer --tool memcheck python tests/kernels/sanitize.py
compute-sanitizer --tool racecheck python tests/kernels/sanitize.py    # cuBLAS has hazards, too
compute-sanitizer python tests/kernels/sanitize.py "heads" "picard"    # only these
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.layer_cases import (  # noqa: E402
    GPU,
    ITERATED,
    MEMORIES,
    WITH_KERNELS,
    draw,
    earlier_state,
    make,
    results,
)

PLACE = GPU._replace(dtype=torch.bfloat16)
LAYERS = {name: name for name in (*WITH_KERNELS, *ITERATED, *MEMORIES)}
OPTIONS: dict[str, dict[str, Any]] = {
    "many states": {"d_state": 64},
    "many heads": {"num_heads": 16, "num_householder": 4},
    "samples in parts": {"num_heads": 1, "d_state": 16},
    "delta": {"num_heads": 2, "feedback": ("delta",), "input_scale": "delta"},
}
"""Of layers of one head, whose kernels have tiles of other sizes."""


def run(name: str) -> None:
    """Calls of one and of many samples, forward and backward, and a token that follows."""
    options: dict[str, Any] = {"backend": "triton"} | OPTIONS.get(name, {})
    if name in ITERATED:
        options |= {"max_steps": 4, "on_unconverged": "ignore"}
    layer = make(LAYERS.get(name, "one head"), PLACE, **options)
    for b, t in ((1, 34), (70, 6)):
        results(layer, draw(b, t, PLACE), earlier_state(layer, b))
    torch.cuda.synchronize()  # the first failing CUDA call raises


def main() -> None:
    """Run all, or those that are named."""
    for name in sys.argv[1:] or (*LAYERS, *OPTIONS):
        run(name)
        print(name)  # noqa: T201


if __name__ == "__main__":
    main()
