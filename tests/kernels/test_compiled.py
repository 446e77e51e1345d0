"""Kernels as they are compiled for a GPU, without one: registers, barriers, the order of sums."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.table import BF16, F16, F32
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

import bedouin.kernels.delta_rule.triton_chunks_backward as chunks_backward
import bedouin.kernels.direct.launch as launch
from bedouin.kernels import convolution
from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.convolution import triton_kernels as of_convolution
from bedouin.kernels.delta_rule import DeltaInputs, Tiles, launch_options, triton_chunks
from bedouin.kernels.delta_rule import Kept as KeptOfRule
from bedouin.kernels.direct.limits import MAX_SIDE, head_blocks
from bedouin.kernels.direct.triton_forward import sweep_kernel as SWEEP
from bedouin.kernels.direct.triton_reverse import reverse_kernel as REVERSE
from bedouin.kernels.launch import as_constants, next_power_of_two, without_coalescing
from bedouin.kernels.operands import Parameterization, RawLayout
from bedouin.kernels.scan import InputScale
from bedouin.kernels.scan import triton_kernels as of_scan
from bedouin.kernels.scan.reference import SCAN_CHUNK, ScanOptions
from bedouin.kernels.track import options
from bedouin.kernels.track.triton_gradients import gradients_kernel
from bedouin.kernels.track.triton_reverse import replay_kernel, reverse_kernel
from bedouin.kernels.track.triton_sweep import finish_kernel, prepare_kernel, sweep_kernel
from bedouin.kernels.track.types import PART, Kept, Layout, Recurrence

Kind = str | tuple[Any, ...]
"""Triton's type of a parameter, or those of a tuple, where "constexpr" is that of None."""


def leaves_of(kind: Kind, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    """What a type consists of, with its places."""
    if isinstance(kind, str):
        yield path, kind
    else:
        for i, part in enumerate(kind):
            yield from leaves_of(part, (*path, i))


def compile_kernel(
    kernel: Any,
    known: dict[str, Any],
    kind_of: Callable[[str], Kind],
    *,
    multiples: Collection[str] = (),
    capability: int = 90,
) -> CompiledKernel:
    """The kernel for a GPU of a compute capability.

    `known` has its constants and launch options, and may have more; `kind_of` gives Triton's type
    of every other parameter by its name. Pointers are multiples of 16, and so are the parameters
    `multiples`.
    """
    assert "options" not in kernel.arg_names, "the name of a parameter of Triton's launcher"
    kinds: dict[str, Kind] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned = []
    for i, name in enumerate(kernel.arg_names):
        v = known.get(name)
        kinds[name] = "constexpr" if name in known else kind_of(name)
        for path, kind in leaves_of(kinds[name], (i,)):
            if kind == "constexpr":
                constants[path] = v
            elif kind[0] == "*" or name in multiples:
                aligned.append(path)
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=attributes)
    by_name = "num_warps", "num_stages", "maxnreg"
    launch = {name: v for name, v in known.items() if name in by_name}
    options = launch | {"enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_size(kernel: CompiledKernel) -> int:
    """Bytes of a thread's stack, where values are that do not fit its registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [str(tool), "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", shown.stdout + shown.stderr)
    assert found is not None
    return int(found[1])


def adds_in_a_fixed_order(kernel: CompiledKernel) -> bool:
    """Whether no two programs add to one place, in an order that may differ between runs."""
    return not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])


pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")

SHARED_MEMORY = 232448
"""Bytes that a program on sm_90 can have."""

WIDE_OF_SCAN = set("start kept work A D grad_A grad_D grad_B grad_C end grad_end grad_h0".split())
WIDE_OF_RULE = {"S0", "S_LAST", "GS_LAST", "GS0"}
WIDE_OF_TRACK = set("scalars A_log W dt_bias erase_bias h0 y0 h y states read grad_past".split())
WIDE_OF_TRACK |= set("last H edges grad_y grad_y0 unit_B unit_C grad_A_log sums".split())
"""Pointers to float32; all others are to the dtype of x or of products."""


def by_kernel(kernel: Any) -> str:
    return str(kernel.__name__)


def pointer(name: str, wide: set[str], low: str = "bf16") -> str:
    """Triton's type of a parameter; only those of pointers end with _ptr."""
    if not name.endswith("_ptr"):
        return "i32"
    return "*fp32" if name.removesuffix("_ptr") in wide else f"*{low}"


@pytest.mark.parametrize("input_scale", ["bounded_delta", "one_minus_decay"])
@pytest.mark.parametrize("kernel", [of_scan.forward_kernel, of_scan.backward_kernel], ids=by_kernel)
def test_the_scan_fits_the_registers(kernel: Any, input_scale: str) -> None:
    how = as_constants(ScanOptions(input_scale, "positive", False))  # type: ignore[arg-type]
    known: dict[str, Any] = {"how": how, "CHUNK": SCAN_CHUNK}
    known |= {"BLOCK_D": 32, "BLOCK_N": 16, "num_warps": 1}
    count = 4 if kernel is of_scan.forward_kernel else 5
    tuples: dict[str, Kind] = {"rows": ("*bf16",) * count, "strides": (("i32", "i32"),) * count}

    def kind_of(name: str) -> Kind:
        return tuples.get(name) or pointer(name, WIDE_OF_SCAN)

    made = compile_kernel(kernel, known, kind_of, multiples=("d", "n"))
    assert adds_in_a_fixed_order(made)
    # the coupled scale of all states beside their decays
    assert stack_size(made) <= (64 if input_scale == "one_minus_decay" else 0)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", ["convolution_kernel", "cotangent_kernel", "input_kernel"])
def test_the_convolution_adds_in_a_fixed_order(name: str, adds: bool) -> None:
    known = {"how": as_constants(convolution.Tiles(4, 32, 128, 128, 1e-6))}
    wide = {"sums"} if name == "input_kernel" else set()
    inputs: Any = convolution.ConvolutionInputs(*("*bf16",) * 3, "*bf16" if adds else "constexpr")  # type: ignore[arg-type]

    def kind_of(name: str) -> Kind:
        return inputs if name == "inputs" else pointer(name, wide)

    made = compile_kernel(getattr(of_convolution, name), known, kind_of)
    assert adds_in_a_fixed_order(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("t", "p", "v", "dtype"),
    [(1000, 128, 256, BF16), (16, 40, 64, BF16), (1000, 256, 64, F32)],
    ids=str,
)
@pytest.mark.parametrize(
    "kernel",
    [
        *(triton_chunks.prepare_kernel, triton_chunks.sweep_kernel),
        *(chunks_backward.reverse_kernel, chunks_backward.gradients_kernel),
    ],
    ids=by_kernel,
)
def test_wgmma_of_the_delta_rule_reads_no_registers_and_the_tiles_fit(
    kernel: Any, t: int, p: int, v: int, dtype: torch.dtype
) -> None:
    """With a decay, a memory, and all that can be wanted."""
    tiles = Tiles.of(torch.empty(1, t, 1, p, dtype=dtype, device="meta"), v)
    known = launch_options(tiles, dtype) | dict.fromkeys(("STARTED", "ENDED"), True)
    low = "fp32" if dtype == F32 else "bf16"
    tokens: Any = DeltaInputs(*(f"*{low}",) * 3, "*fp32", "*fp32")  # type: ignore[arg-type]
    tuples: dict[str, Kind] = {"inputs": tokens, "grads": tokens, "apart": ("i32",) * 3}
    tuples["kept"] = KeptOfRule(*(f"*{low}",) * 4)  # type: ignore[arg-type]

    def kind_of(name: str) -> Kind:
        of_one = "*fp32" if name in WIDE_OF_RULE else f"*{low}"
        return tuples.get(name) or ("i32" if name in ("t", "H", "N") else of_one)

    made = compile_kernel(kernel, known, kind_of, multiples=("apart",))
    products = re.findall(r"warp_group_dot %\S+, .*? : (\S+?)<", made.asm["ttgir"])
    is_first = kernel is triton_chunks.prepare_kernel
    assert set(products) <= {"!ttg.memdesc"}
    assert bool(products) is (dtype == BF16 and (t >= 64 or not is_first))
    assert made.metadata.shared <= SHARED_MEMORY
    assert adds_in_a_fixed_order(made)


# -- tracker

SEQUENTIAL = sweep_kernel, replay_kernel, reverse_kernel, gradients_kernel
PAIRS = set("B C rows adjoint memory slopes past fed factors".split())
"""Pointers to words."""


def compiled_tracker(kernel: Any, c: int, n: int, dtype: torch.dtype) -> CompiledKernel:
    """The kernel with all that a call may have, for sm_90."""
    known = options(kernel, Layout.of(c, n, dtype), 1e-5) | {"KEEP": True, "PART": PART}
    low = {BF16: "bf16", F16: "fp16", F32: "fp32"}[dtype]

    def kind_of(name: str) -> Kind:
        if name == "strides":
            return (("i32", "i32"),) * 5
        if name in ("inputs", "grads"):
            kinds = [pointer(f"{field}_ptr", WIDE_OF_TRACK, low) for field in Recurrence._fields]
            return Recurrence(*kinds)  # type: ignore[arg-type]
        if name == "kept":
            return Kept(*[kind_of(f"{field}_ptr") for field in Kept._fields])  # type: ignore[arg-type]
        if name.removesuffix("_ptr") in PAIRS:
            return "*i32" if kernel is prepare_kernel else "*i64"
        return pointer(name, WIDE_OF_TRACK, low)

    with without_coalescing() if kernel in SEQUENTIAL else nullcontext():
        return compile_kernel(kernel, known, kind_of)


@pytest.mark.parametrize(("c", "n", "dtype"), [(40, 100, BF16), (64, 128, F32), (3, 128, F16)])
@pytest.mark.parametrize("kernel", [*SEQUENTIAL, prepare_kernel, finish_kernel], ids=by_kernel)
def test_every_kernel_of_the_tracker_adds_in_a_fixed_order(
    kernel: Any, c: int, n: int, dtype: torch.dtype
) -> None:
    made = compiled_tracker(kernel, c, n, dtype)
    assert adds_in_a_fixed_order(made)
    assert made.metadata.shared <= SHARED_MEMORY


# -- sweep of heads of p channels with n states and k reflections

HEADS = SWEEP, REVERSE

SM_80, SM_89, SM_90 = (80, 166912), (89, 101376), (90, SHARED_MEMORY)
"""Compute capabilities, and bytes of shared memory that one program can have."""

WEIGHTS_OF_HEADS = ("W_ptr", "first_ptr", "fed_ptr")
"""Pointers to the dtype of W^y."""

LOW_OF_HEADS = ("x_ptr", "raw_ptr", "grad_x_ptr", "grad_raw_ptr")
"""Pointers to the dtype of x; all others are to float32."""


def compiled_head(
    kernel: Any,
    p: int,
    n: int,
    k: int,
    input_scale: InputScale = "bounded_delta",
    dtype: str = "bf16",
    weights: torch.dtype | None = None,
    target: tuple[int, int] = SM_90,
) -> CompiledKernel:
    """A kernel as the launches of few samples choose it, without feedback or with W^y in the dtype
    `weights`, for a GPU with that compute capability and shared memory of a program."""
    layout = RawLayout("softplus", True, k, 1.0)
    options = Parameterization(layout, input_scale, "positive", 1e-5)
    samples = 1 if weights is None or p > MAX_SIDE else 2
    rows = samples, launch.choose_parts(max(16, next_power_of_two(p)), samples)
    _, constants = launch.head_constants((2, n, p), weights, options, rows, False, 16, target[1])

    def kind_of(name: str) -> Kind:
        if name.endswith("_strides"):
            return ("i32",) * (3 if name == "x_strides" else 2)
        if not name.endswith("_ptr"):
            return "i32"
        if name in LOW_OF_HEADS:
            return f"*{dtype}"
        return "*bf16" if name in WEIGHTS_OF_HEADS and weights == torch.bfloat16 else "*fp32"

    return compile_kernel(kernel, constants, kind_of, capability=target[0])


@pytest.mark.parametrize("kernel", HEADS, ids=by_kernel)
@pytest.mark.parametrize(
    ("p", "n", "k", "input_scale", "dtype"),
    [
        (64, 16, 0, "bounded_delta", "bf16"),
        (128, 16, 1, "bounded_delta", "bf16"),
        (64, 16, 2, "delta", "fp32"),
        (64, 64, 2, "bounded_delta", "bf16"),
        (100, 1, 4, "one_minus_decay", "bf16"),
    ],
)
def test_a_token_of_a_head_fits_the_registers(
    kernel: Any, p: int, n: int, k: int, input_scale: InputScale, dtype: str
) -> None:
    found = compiled_head(kernel, p, n, k, input_scale, dtype)
    assert stack_size(found) <= (96 if n == 64 else 0)  # H and grad_A fill half of the registers
    # no W^y: only what is exchanged between the warps of a sample
    assert found.metadata.shared <= 1024


@pytest.mark.slow
@pytest.mark.parametrize("kernel", HEADS, ids=by_kernel)
@pytest.mark.parametrize(
    ("target", "weights", "k", "streamed"),
    [
        (SM_90, torch.bfloat16, 4, False),
        (SM_90, torch.float32, 2, True),
        (SM_80, torch.bfloat16, 2, False),
        (SM_80, torch.bfloat16, 4, True),
        (SM_89, torch.float32, 4, True),
        (SM_89, torch.bfloat16, 2, True),
    ],
)
def test_weights_fit_the_shared_memory(
    kernel: Any, target: tuple[int, int], weights: torch.dtype, k: int, streamed: bool
) -> None:
    blocks = head_blocks(128, 16, RawLayout("softplus", True, k, 1.0))
    assert blocks.streams(weights.itemsize, target[1]) == streamed
    dtype = "bf16" if weights == torch.bfloat16 else "fp32"
    found = compiled_head(kernel, 128, 16, k, dtype=dtype, weights=weights, target=target)
    assert found.metadata.shared <= target[1]


# -- the pass that the compilation of some kernels leaves out


@triton.jit
def copy_kernel(from_ptr, to_ptr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 1024)
    tl.store(to_ptr + at, tl.load(from_ptr + at))


def values_of_a_thread() -> str:
    """In the layout of the kernel: four next to each other with the pass."""
    made = compile_kernel(copy_kernel, {"num_warps": 1}, lambda name: "*fp32")
    return str(made.asm["ttgir"]).split("sizePerThread = ")[1].split(",")[0]


def test_the_pass_is_left_out_within_the_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    for _ in range(2):
        assert values_of_a_thread() == "[4]"
        with without_coalescing():
            assert values_of_a_thread() == "[1]"
    with pytest.raises(KeyError), without_coalescing():
        raise KeyError
    assert values_of_a_thread() == "[4]"
