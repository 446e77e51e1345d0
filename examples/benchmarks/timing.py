"""Median times by CUDA events (by the clock on a CPU), graph capture, memory and machine speed."""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch

WARMUP = 3
CAPTURE_WARMUP = 3
MAX_POOL = 64


@dataclass(frozen=True)
class Machine:
    """The measured speed of this machine, from which floors are computed."""

    device: str
    torch: str
    triton: str | None
    cuda: str | None
    copy_gb_per_s: float
    """Bytes read and written by a large device copy."""
    gemm_tflop_per_s: float
    """Rate of a large square product in the dtype of the run."""


@dataclass(frozen=True)
class Cost:
    """Lower bounds on the bytes and the floating-point operations of an operation."""

    bytes: float
    flops: float

    def floor_ms(self, machine: Machine) -> float:
        """max(bytes / copy bandwidth, flops / GEMM rate)."""
        memory = self.bytes / (machine.copy_gb_per_s * 1e9)
        return 1e3 * max(memory, self.flops / (machine.gemm_tflop_per_s * 1e12))

    def __mul__(self, factor: float) -> "Cost":
        return Cost(self.bytes * factor, self.flops * factor)


def median_ms(
    call: Callable[[int], object],
    device: torch.device,
    repeats: int,
    before: Callable[[int], object] | None = None,
) -> float:
    """Median time in ms of call(i) for i < repeats, after a warm-up; before(i) is not timed.

    With repeats = 0, makes one call and returns NaN.
    """
    if repeats == 0:
        call(0)
        return math.nan
    for i in range(WARMUP):
        if before is not None:
            before(i)
        call(i)
    if device.type != "cuda":
        return statistics.median(_clocked(call, before, i) for i in range(repeats))
    torch.cuda.synchronize()
    pairs = []
    for i in range(repeats):
        if before is not None:
            before(i)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(i)
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    times: list[float] = [start.elapsed_time(stop) for start, stop in pairs]
    return statistics.median(times)


def _clocked(
    call: Callable[[int], object], before: Callable[[int], object] | None, i: int
) -> float:
    if before is not None:
        before(i)
    started = time.perf_counter()
    call(i)
    return 1e3 * (time.perf_counter() - started)


def capture(
    call: Callable[[], object], stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """The CUDA graph of one call, after a few warm-up calls on the same side stream."""
    side = torch.cuda.Stream() if stream is None else stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURE_WARMUP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    return graph


def peak_gib(call: Callable[[], object], device: torch.device) -> float | None:
    """torch.cuda.max_memory_allocated during a call, in GiB; None on a CPU.

    Includes the memory allocated before the call: parameters, inputs, cuBLAS workspaces.
    """
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def kept_gib(call: Callable[[], object], device: torch.device) -> float | None:
    """The memory in GiB that is allocated after a call while its result exists; None on a CPU.

    After a forward pass these are the result and the tensors saved for the backward pass.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = call()
    kept = torch.cuda.memory_allocated() - before
    del result
    return kept / 2**30


def release_memory() -> None:
    """Release the memory of earlier measurements."""
    gc.collect()
    if torch.cuda.is_available():
        # The workspaces take 32 MB on an H100 for each stream and thread with a product, and would
        # count in the peaks of later rows. No captured graph, which may use one, exists here.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def pool_size(bytes_each: float, device: torch.device) -> int:
    """How many sets of inputs to alternate so that none is in the L2 cache when it is reused."""
    if device.type != "cuda":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return int(min(MAX_POOL, max(2, -(-2 * l2 // max(1.0, bytes_each)))))


def replay_ms(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    repeats: int,
    before: Callable[[int], object] | None = None,
) -> float:
    """Median time of a replay in ms."""
    return median_ms(lambda i: graph.replay(), device, repeats, before)


def measure_machine(device: torch.device, dtype: torch.dtype, size: int) -> Machine:
    """Copy bandwidth over size^2 16-byte elements and the rate of a size^3 product."""
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        triton=metadata.version("triton") if find_spec("triton") is not None else None,
        cuda=torch.version.cuda if device.type == "cuda" else None,
        copy_gb_per_s=_copy_bandwidth(device, 16 * size * size),
        gemm_tflop_per_s=_gemm_rate(device, dtype, size),
    )


def _copy_bandwidth(device: torch.device, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda i: target.copy_(source), device, 20) / 1e6


def _gemm_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_ms(lambda i: a @ b, device, 20) / 1e9
