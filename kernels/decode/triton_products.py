"""The Triton kernel of products with few samples, and its launch.

Letters: b samples, r rows of a weight, c its columns, H heads.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl

from bedouin.kernels.decode.arguments import Product
from bedouin.kernels.decode.triton_overlap import can_overlap, start_next, wait_for_last
from bedouin.kernels.launch import accumulator, ceil_div, next_power_of_two, triton_dtype

TILE = 4096
"""Elements of a weight that a program reads, rounded up to powers of two, unless one row is
longer."""

NUM_WARPS = 4


@triton.jit
def _multiply(
    weight_ptr,  # (H, r, c)
    v_ptr,  # (H, b, c)
    out_ptr,  # (H, b, r)
    program,
    r,
    c,
    v_head,
    v_row,
    out_head,
    out_row,
    SAMPLES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    SUM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Some rows of the product of one head."""
    blocks = tl.cdiv(r, ROWS)
    head = (program // blocks).to(tl.int64)
    first = program % blocks * ROWS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    in_c, in_r = cols < c, first + rows < r
    weight_ptr += (head * r + first) * c
    weight = tl.load(
        weight_ptr + rows[:, None] * c + cols[None, :],
        mask=in_r[:, None] & in_c[None, :],
        other=0.0,
    )
    weight = weight.to(LOW).to(SUM)
    wait_for_last(OVERLAPS)
    v_ptr += head * v_head
    v_row, out_row = tl.cast(v_row, tl.int64), tl.cast(out_row, tl.int64)
    out_ptr += head * out_head + first
    for sample in tl.static_range(SAMPLES):
        v = tl.load(v_ptr + sample * v_row + cols, mask=in_c, other=0.0).to(LOW).to(SUM)
        product = tl.sum(weight * v[None, :], axis=1)
        tl.store(out_ptr + sample * out_row + rows, product.to(LOW), mask=in_r)


@triton.jit(do_not_specialize=["r", "out_head", "out_row", "other_r", "programs"])
def _products_kernel(
    weight_ptr,
    v_ptr,
    out_ptr,
    other_weight_ptr,
    other_v_ptr,
    other_out_ptr,
    r,
    c,
    v_head,
    v_row,
    out_head,
    out_row,
    other_r,
    other_c,
    other_v_head,
    other_v_row,
    other_out_head,
    other_out_row,
    programs,
    SAMPLES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OTHER_ROWS: tl.constexpr,
    OTHER_COLUMNS: tl.constexpr,
    TWO: tl.constexpr,
    LOW: tl.constexpr,
    SUM: tl.constexpr,
    STARTS_NEXT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The first `programs` programs compute the first product, the others the second."""
    start_next(STARTS_NEXT)
    program = tl.program_id(0)
    if TWO:
        if program < programs:
            _multiply(
                weight_ptr, v_ptr, out_ptr, program, r, c, v_head, v_row, out_head, out_row,
                SAMPLES, ROWS, COLUMNS, LOW, SUM, OVERLAPS,
            )  # fmt: skip
        else:
            _multiply(
                other_weight_ptr, other_v_ptr, other_out_ptr, program - programs,
                other_r, other_c, other_v_head, other_v_row, other_out_head, other_out_row,
                SAMPLES, OTHER_ROWS, OTHER_COLUMNS, LOW, SUM, OVERLAPS,
            )  # fmt: skip
    else:
        _multiply(
            weight_ptr, v_ptr, out_ptr, program, r, c, v_head, v_row, out_head, out_row,
            SAMPLES, ROWS, COLUMNS, LOW, SUM, OVERLAPS,
        )  # fmt: skip


def launch_products(
    first: Product, second: Product | None, dtype: torch.dtype, overlaps: bool
) -> None:
    """Launch the kernel once, for one or two products."""
    other = first if second is None else second
    blocks, other_blocks = _block(first), _block(other)
    programs = _programs(first, blocks[0])
    total = programs + (0 if second is None else _programs(other, other_blocks[0]))
    starts_early = can_overlap(first.v.device)
    overlaps = overlaps and starts_early
    _products_kernel[(total,)](
        *first,
        *other,
        *_sizes(first),
        *_sizes(other),
        programs,
        SAMPLES=first.v.shape[-2],
        ROWS=blocks[0],
        COLUMNS=blocks[1],
        OTHER_ROWS=other_blocks[0],
        OTHER_COLUMNS=other_blocks[1],
        TWO=second is not None,
        LOW=_low(dtype),
        SUM=triton_dtype(accumulator(dtype)),
        STARTS_NEXT=starts_early,
        OVERLAPS=overlaps,
        num_warps=NUM_WARPS,
        launch_pdl=overlaps,
    )


def _block(product: Product) -> tuple[int, int]:
    """Rows and columns of a program's tile."""
    r, c = product.weight.shape[-2:]
    columns = next_power_of_two(c)
    return min(max(1, TILE // columns), next_power_of_two(r)), columns


def _programs(product: Product, rows: int) -> int:
    heads = product.weight.shape[0] if product.weight.dim() == 3 else 1
    return heads * ceil_div(product.weight.shape[-2], rows)


def _sizes(product: Product) -> tuple[int, ...]:
    """r, c, and strides of heads and samples."""
    weight, v, out = product
    strides = (v.stride(0), v.stride(-2), out.stride(0), out.stride(-2))
    return *weight.shape[-2:], *strides


def _low(dtype: torch.dtype) -> tl.dtype:
    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    found: tl.dtype = names.get(dtype) or triton_dtype(dtype)
    return found
