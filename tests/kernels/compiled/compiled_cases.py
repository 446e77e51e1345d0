"""Calls of public operations and layers that launch every Triton kernel, for `compare_compiled`.

Of every option at least two values, small; and the sizes of the benchmark. A
tensor is a meta tensor, and the library is imported by the call: each checkout brings its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Case = Callable[[], None]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)


def on_meta(name: str, m: int, dtype: torch.dtype, *, mixes: bool = True, **options: Any) -> Any:
    """A layer without memory, so that its kernels are compiled only; without `mixes` Q = I."""
    import bedouin

    if not mixes:
        options["mixer"] = bedouin.NoMixing()
    return getattr(bedouin, name)(m, device="meta", dtype=dtype, backend="triton", **options)


def layer(
    b: int,
    t: int,
    m: int,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "Bedouin",
    state: bool = False,
    backward: bool = True,
    **options: Any,
) -> Case:
    """A layer, forward and perhaps backward; `state`: one is given and returned."""

    def run() -> None:
        made = on_meta(name, m, dtype, on_unconverged="ignore", **options)
        x, zeros = draw(b, t, m, dtype=dtype), made.init_state(b)
        given = type(zeros)(*(v.requires_grad_() for v in zeros)) if state else None
        with torch.set_grad_enabled(backward):
            out, last = made(x, given, return_state=True) if state else (made(x), ())
        if backward:
            (out.float().sum() + sum(v.sum() for v in last)).backward()

    return run


def iteration(solver: str, b: int, t: int, m: int, **options: Any) -> Case:
    """The same with Picard or Jacobi."""

    def run() -> None:
        from bedouin import solvers

        layer(b, t, m, solver=getattr(solvers, solver)(), max_steps=4, **options)()

    return run


def decode(
    b: int, m: int, dtype: torch.dtype = torch.bfloat16, name: str = "Bedouin", **options: Any
) -> Case:
    """One token, as it is called within a capture."""

    def run() -> None:
        made = on_meta(name, m, dtype, **options)
        with torch.no_grad():
            made.step(draw(b, m, dtype=dtype).detach(), made.init_state(b))

    return run


def scan(
    b: int,
    t: int,
    d: int,
    n: int,
    dtype: torch.dtype = torch.bfloat16,
    skip: bool = False,
    heads: int = 1,
    **options: Any,
) -> Case:
    """The scan and its adjoint; `skip`: with D; `b` samples of each head."""

    def run() -> None:
        from bedouin.kernels.scan import selective_scan

        own, samples = ((), b) if heads == 1 else ((heads,), heads * b)
        x, delta = draw(samples, t, d, dtype=dtype), draw(samples, t, d, dtype=dtype)
        A = draw(*own, d, n, dtype=torch.float32)
        D = draw(*own, d, dtype=torch.float32) if skip else None
        B, C = draw(samples, t, n, dtype=dtype), draw(samples, t, n, dtype=dtype)
        y, h = selective_scan(x, delta, A, B, C, None, D, backend="triton", **options)
        (y.float().sum() + h.sum()).backward()

    return run


def output(b: int, t: int, d: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """The gated output of `b` samples of each head, and its adjoint."""

    def run() -> None:
        from bedouin.kernels.output import gated_output

        y = draw(heads * b, t, d, dtype=torch.float32)
        x, gate, fed, z = (draw(heads * b, t, d, dtype=dtype) for _ in range(4))
        D, weight = draw(heads, d, dtype=dtype), draw(heads, d, dtype=dtype)
        gated_output(y, x, D, gate, fed, z, weight, backend="triton").sum().backward()

    return run


def baseline(name: str, b: int, t: int, m: int, **options: Any) -> Case:
    """A baseline in float32, forward and backward."""

    def run() -> None:
        from bedouin import baselines

        made = getattr(baselines, name)(m, device="meta", backend="triton", **options)
        made(draw(b, t, m, dtype=FLOAT32)).sum().backward()

    return run


FLOAT32, FLOAT16, FLOAT64 = torch.float32, torch.float16, torch.float64
BENCH: dict[str, Any] = {"d_state": 16, "num_householder": 4, "num_heads": 1}
HEADS: dict[str, Any] = BENCH | {"num_heads": 16}
DELTA: dict[str, Any] = {"d_state": 64, "num_householder": 1, "feedback": ("delta",)}
GRIFFIN: dict[str, Any] = {
    "decay": "griffin",
    "input_scale": "one_minus_decay",
    "eigenvalues": "full",
    "num_householder": 1,
    "feedback_norm": False,
    "output": "paper",
}
UNBOUNDED: dict[str, Any] = {
    "input_scale": "delta",
    "eigenvalues": "full",
    "num_householder": 3,
    "beta_max": 2.0,
    "d_state": 6,
    "feedback": ("B", "mixer"),
    "bias": False,
}

QUICK: dict[str, Case] = {
    "direct": layer(2, 18, 32),
    "direct, no feedback": layer(2, 18, 32, feedback=()),
    "direct, one head, float32": layer(2, 18, 256, FLOAT32, d_state=4, num_heads=1),
    "direct, state": layer(70, 18, 32, state=True),
    "direct, heads": layer(2, 18, 32, num_heads=4, d_state=4, num_householder=1),
    "picard": iteration("Picard", 2, 18, 32),
    "jacobi": iteration("Jacobi", 2, 18, 32),
    "jacobi, no feedback": iteration("Jacobi", 2, 18, 32, feedback=()),
    "decode": decode(2, 32),
    "scan": scan(2, 70, 64, 16),
    "scan in segments": scan(2, 4096, 64, 16),
    "delta rule": baseline("DeltaProduct", 2, 18, 64),
}
CASES: dict[str, Case] = QUICK | {
    "direct, griffin, float32": layer(2, 18, 8, FLOAT32, **GRIFFIN),
    "direct, unbounded, float16": layer(2, 18, 24, FLOAT16, state=True, **UNBOUNDED),
    "direct, vector state": layer(2, 18, 32, name="FixedPointRNN"),
    "direct, 128x16": layer(128, 16, 512, **BENCH),
    "direct, 64x256": layer(64, 256, 512, **BENCH),
    "direct, 8x4096": layer(8, 4096, 512, **BENCH),
    "direct, n 32, 64x256": layer(64, 256, 256, d_state=32, num_householder=2, num_heads=1),
    "direct, n 64, 64x256": layer(64, 256, 256, d_state=64, num_householder=2, num_heads=1),
    "direct, n 64, 128x16": layer(128, 16, 256, d_state=64, num_householder=2, num_heads=1),
    "direct, no feedback, 64x256": layer(64, 256, 512, feedback=(), **BENCH),
    "direct, no feedback, 8x4096": layer(8, 4096, 512, feedback=(), **BENCH),
    "direct, heads, griffin, float32": layer(2, 18, 32, FLOAT32, num_heads=2, **GRIFFIN),
    "direct, heads, unbounded, float16": layer(
        2, 18, 24, FLOAT16, state=True, num_heads=3, **UNBOUNDED
    ),
    "direct, heads, vector state": layer(2, 18, 32, name="FixedPointRNN", num_heads=2),
    "direct, heads, one by one": layer(2, 18, 256, FLOAT32, d_state=4, num_heads=2),
    "direct, heads, 64x256": layer(64, 256, 512, **HEADS),
    "direct, heads, 8x4096": layer(8, 4096, 512, **HEADS),
    "direct, heads of 128, 64x256": layer(64, 256, 512, **HEADS | {"num_heads": 8}),
    "direct, heads, n 32, 64x256": layer(64, 256, 256, d_state=32, num_householder=2, num_heads=8),
    "direct, heads, n 64, 64x256": layer(64, 256, 256, d_state=64, num_householder=2, num_heads=8),
    "direct, heads, n 64, 128x16": layer(128, 16, 256, d_state=64, num_householder=2, num_heads=8),
    "direct, heads, Delta, n 64, 256x16": layer(256, 16, 512, **HEADS | DELTA),
    "direct, heads, Delta, n 64, 256x16, float32": layer(256, 16, 512, FLOAT32, **HEADS | DELTA),
    "direct, heads, Delta, no reflections, n 64, 256x16": layer(
        256, 16, 512, **HEADS | DELTA | {"num_householder": None, "mixes": False}
    ),
    "direct, heads, no feedback, 64x256": layer(64, 256, 512, feedback=(), **HEADS),
    "picard, griffin, float32": iteration(
        "Picard", 2, 18, 32, dtype=FLOAT32, backward=False, **GRIFFIN
    ),
    "picard, unbounded": iteration("Picard", 2, 18, 24, backward=False, state=True, **UNBOUNDED),
    "picard, 64x256": iteration("Picard", 64, 256, 512, backward=False, **BENCH),
    "jacobi, griffin, float32": iteration(
        "Jacobi", 2, 18, 32, dtype=FLOAT32, backward=False, **GRIFFIN
    ),
    "jacobi, unbounded": iteration("Jacobi", 2, 18, 24, backward=False, state=True, **UNBOUNDED),
    "jacobi, 64x256": iteration("Jacobi", 64, 256, 512, backward=False, **BENCH),
    "jacobi, no feedback, 64x256": iteration(
        "Jacobi", 64, 256, 512, backward=False, feedback=(), **BENCH
    ),
    "decode, griffin, float32": decode(2, 32, FLOAT32, **GRIFFIN),
    "decode, unbounded": decode(2, 24, **UNBOUNDED),
    "decode, vector state": decode(2, 32, name="FixedPointRNN"),
    "decode, no reflections": decode(2, 32, mixes=False),
    "direct, no reflections": layer(2, 18, 32, mixes=False, num_heads=2, state=True),
    "decode, 1x1": decode(1, 512, **BENCH),
    "scan, D, full, exclusive": scan(
        2, 70, 60, 6, FLOAT32, skip=True, exclusive=True, eigenvalues="full"
    ),
    "scan, bounded": scan(2, 70, 64, 16, input_scale="bounded_delta"),
    "scan, one minus decay, float64": scan(2, 20, 8, 2, FLOAT64, input_scale="one_minus_decay"),
    "scan, 64x256": scan(64, 256, 1024, 16),
    "scan, 8x4096": scan(8, 4096, 1024, 16),
    "output, heads": output(2, 70, 64, 16),
    "scan, heads": scan(2, 70, 64, 16, heads=16),
    "scan, heads, segments, D": scan(1, 4096, 64, 16, skip=True, heads=2),
    "picard, heads": iteration("Picard", 2, 18, 512, backward=False, **HEADS),
    "jacobi, heads": iteration("Jacobi", 2, 18, 512, backward=False, **HEADS),
    "decode, heads, 1x1": decode(1, 512, **HEADS),
    "decode, heads, vector state": decode(2, 32, name="FixedPointRNN", num_heads=4),
    "delta rule, heads of 68, four steps": baseline(
        "DeltaProduct", 64, 120, 256, head_dim=68, expand_v=1, num_householder=4
    ),
    "delta rule, heads of 64 and 128, gated": baseline("DeltaNet", 64, 120, 256, gated=True),
    "recurrent delta net": baseline("RecurrentDeltaNet", 64, 120, 256, expand_v=0.5),
    "m2rnn": baseline("M2RNN", 64, 120, 256, expand_v=0.25),
}
