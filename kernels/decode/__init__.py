"""What a decoded token consists of: products with few samples, and one kernel for the rest."""

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.decode.arguments import (
    DecayKind,
    Product,
    StepOperands,
    StepOptions,
    StepParameters,
)
from bedouin.kernels.decode.products import multiply, takes_products
from bedouin.kernels.decode.reference import decode_token_reference
from bedouin.kernels.device import MAX_REFLECTIONS
from bedouin.kernels.guard import Launching, falls_back
from bedouin.kernels.launch import next_power_of_two
from bedouin.kernels.operands import RawLayout

__all__ = [
    "DecayKind",
    "Product",
    "StepOperands",
    "StepOptions",
    "StepParameters",
    "decode_token",
    "decode_token_reference",
    "multiply",
    "takes_products",
    "unsupported_token",
]

MAX_TILE = 32768
"""Most elements of a tile of one sample and head, both axes rounded up to a power of two: one
program holds it in registers. 2048 channels with 16 states."""


@falls_back
def decode_token(
    operands: StepOperands,
    parameters: StepParameters,
    options: StepOptions,
    *,
    backend: Backend = "auto",
    overlaps: bool = False,
) -> None:
    """Advance h and y by one token and write the results, in place; not differentiable.

        raw    = raw^x + bias + fed                      Delta, B, C, Q, gate
        (I - diag(sigma)(I - Q)) y = (lambda * h) C + sigma * Q drive
        h      = lambda * h + (s * (drive + (I - Q)(y - drive))) B^T
        hidden = SiLU(gate + z) * norm(y + D x)

    Each head by itself. The statistics are those of `Direct` for one token of a head. overlaps:
    h and the parameters are read while the launch before is still running, which therefore
    must not write them. Raises ValueError where `backend="triton"` cannot run.
    """
    b, n, d = operands.h.shape
    reason = unsupported_token(d // options.num_heads, n, options.layout)
    implementation = choose_backend(backend, operands.h.device, operands.h.dtype, reason)
    if implementation == "reference":
        decode_token_reference(operands, parameters, options)
    elif b:
        # imports Triton, which the reference does without
        from bedouin.kernels.decode.triton_kernels import launch_decode_token

        with Launching(operands.h):
            launch_decode_token(operands, parameters, options, overlaps)


def unsupported_token(p: int, n: int, layout: RawLayout | None) -> str | None:
    """What the kernel does not cover of heads with p channels, as a part of a message; None where
    it covers everything."""
    if layout is None:
        return "this mixer (only HouseholderProduct)"
    k = layout.num_householder
    if k > MAX_REFLECTIONS:
        return f"{k} reflections (at most {MAX_REFLECTIONS})"
    rows = next_power_of_two(max(1, k))
    if next_power_of_two(p) * max(next_power_of_two(n), 2 * rows) > MAX_TILE:
        return f"{p} channels with {n} states and {k} reflections (at most {MAX_TILE} together)"
    return None
