"""How products with W^y are spread over the persistent programs of a sweep."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.launch import ceil_div, next_power_of_two

MAX_ROWS = 128
"""Most rows of a tile of W^y: as many as two warpgroups multiply at a time."""

REDUCTIONS = 2048
"""Bytes of shared memory for sums over channels."""


@dataclass(frozen=True)
class Limits:
    """Sizes that bound a plan or a launch; tests give others to reach branches with little work.

    shared_memory: kilobytes for a program's tile of W^y and for the vectors it is multiplied with,
        the largest first: the first of these fits an H100 (227 KB a multiprocessor) and an A100
        (163). None that fits: no plan.
    columns: most columns of a tile of W^y, for up to 16 samples and rows that are longer than this;
        otherwise half as many. A tile is wider by half where then no program has both a tile and a
        sample, or as many as are asked for have neither.
    """

    shared_memory: tuple[tuple[int, int], ...] = ((128, 32), (64, 32), (32, 16))
    columns: int = 1024


LIMITS = Limits()


@dataclass(frozen=True)
class Plan:
    """How a product with W^y is spread over persistent programs."""

    programs: int
    block_m: int
    block_k: int  # columns of a chunk
    chunks: int  # of a tile
    block_b: int  # samples at a time
    splits: int  # parts of the sum over columns
    one_tile: bool
    separate: bool  # no program has a tile and samples


@dataclass(frozen=True)
class Device:
    """What a plan depends on; None programs: Triton's interpreter, one program after the other."""

    programs: int | None  # that run at the same time if each occupies a whole multiprocessor
    shared_memory: int  # bytes that one program can have

    @staticmethod
    def of(device: torch.device) -> "Device":
        """The properties of a GPU, or of Triton's interpreter."""
        return Device(None, 232448) if interpreter_is_on() else Device._of_gpu(device)

    @staticmethod
    @lru_cache
    def _of_gpu(device: torch.device) -> "Device":
        properties = torch.cuda.get_device_properties(device)
        shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return Device(properties.multi_processor_count, shared_memory)


def plan_product(
    m: int,
    v: int,
    W: Tensor,  # (m, v) or (v, m)
    b: int,
    device: Device | None = None,  # None: W's
    limits: Limits = LIMITS,
    helpers: int = 0,  # programs of a sample that are better left without a tile
) -> Plan | None:
    """The plan for products of a matrix (m, v) of W's dtype with b vectors.

    None if there is none: then the products are computed by torch, between launches.

    Every program keeps one tile in shared memory from token to token. A matrix with more tiles than
    the device has multiprocessors would be read again for every token, which torch does faster.
    """
    device = Device.of(W.device) if device is None else device
    return _plan(m, v, W.dtype, b, device, limits, helpers)


@lru_cache(maxsize=256)
def _plan(
    m: int, v: int, dtype: torch.dtype, b: int, device: Device, limits: Limits, helpers: int
) -> Plan | None:
    if dtype == torch.float64 and device.programs is not None:
        return None
    shared = _shared_memory(device, limits)
    if shared is None:
        return None
    tile_bytes, vector_bytes = shared
    size = dtype.itemsize
    # a float32 product consists of scalar operations, unrolled over samples and columns
    block_b = 16 if size > 2 else min(128, max(16, next_power_of_two(b)))
    # Wide tiles make few partial sums. For many vectors the tiles have MAX_ROWS rows: with several
    # chunks and fewer rows both warpgroups of a program would multiply the same 64 rows. For few
    # vectors they do that in wide tiles, which pays only if narrow ones make more than two parts.
    few_parts = block_b <= 16 and v > limits.columns
    most = limits.columns if few_parts else limits.columns // 2
    columns = max(16, min(most, next_power_of_two(v)))
    # a chunk is in shared memory while the next one is loaded
    room = vector_bytes // (block_b * size)
    block_k = columns if columns <= room else room // 2
    block_m = max(16, min(MAX_ROWS, tile_bytes // (columns * size)))
    splits = ceil_div(v, columns)
    tiles = ceil_div(m, block_m) * splits
    sizes = (block_m, block_k, columns // block_k, block_b, splits)
    if device.programs is None:
        # programs run one after the other: two that wait for each other would never finish
        return Plan(1, *sizes, one_tile=tiles == 1, separate=False)
    if tiles > device.programs or (size > 2 and columns > 256):
        return None
    separate = tiles + b <= device.programs
    wide = columns + columns // 2
    fits = block_m * wide * size + vector_bytes + REDUCTIONS <= device.shared_memory
    helped = tiles + (1 + helpers) * b <= device.programs
    wide_k = block_k if wide % block_k == 0 else columns // 2
    if not (separate and helped) and fits:
        # a program with a tile and a sample would keep all others waiting
        splits = ceil_div(v, wide)
        free = device.programs - ceil_div(m, block_m) * splits
        if free >= (1 + helpers) * b or (not separate and free >= b):
            sizes, separate = (block_m, wide_k, wide // wide_k, block_b, splits), True
    return Plan(device.programs, *sizes, one_tile=True, separate=separate)


def _shared_memory(device: Device, limits: Limits) -> tuple[int, int] | None:
    """Bytes for a tile and for vectors; None if the smallest choice does not fit the device."""
    available = device.shared_memory - REDUCTIONS
    fitting = (v for v in limits.shared_memory if sum(v) * 1024 <= available)
    chosen = next(fitting, None)
    return None if chosen is None else (chosen[0] * 1024, chosen[1] * 1024)


def multiprocessors(device: torch.device) -> int:
    """Programs that run at the same time if each occupies a whole multiprocessor."""
    return Device.of(device).programs or 1
