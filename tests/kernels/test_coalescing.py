"""The pass that the compilation of some kernels leaves out."""

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.coalescing import without_coalescing

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")


@triton.jit
def copy_kernel(from_ptr, to_ptr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 1024)
    tl.store(to_ptr + at, tl.load(from_ptr + at))


def values_of_a_thread() -> str:
    """In the layout of the kernel: four next to each other with the pass."""
    signature = {"from_ptr": "*fp32", "to_ptr": "*fp32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
    source = ASTSource(fn=copy_kernel, signature=signature, constexprs={}, attrs=aligned)
    options = {"num_warps": 1, "enable_fp_fusion": True}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    return str(text).split("sizePerThread = ")[1].split(",")[0]


def test_the_pass_is_left_out_within_the_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    for _ in range(2):
        assert values_of_a_thread() == "[4]"
        with without_coalescing():
            assert values_of_a_thread() == "[1]"
    with pytest.raises(KeyError), without_coalescing():
        raise KeyError
    assert values_of_a_thread() == "[4]"
