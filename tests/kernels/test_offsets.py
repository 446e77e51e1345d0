"""An iteration of tokens too far apart for offsets of 32 bits, and a state of as many elements.

`test_operations.py` has the other operations.
"""

import pytest
import torch
from tests.kernels.sweeps import Case
from tests.kernels.table import BF16, far_apart

from bedouin import Bedouin
from bedouin.kernels.iteration import IterationRule, fuse_iteration
from bedouin.kernels.operands import Operands

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)


# numpy's, of rows of a program that have no sample
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
def test_the_steps_of_an_iteration(device: str) -> None:
    case = Case(heads=1, b=1, t=4, p=6, has_axis=False, starts=False, low=BF16)
    rule, operands = IterationRule("picard", 1e-4, 1e-8), case.operands(device)

    def steps(given: Operands) -> list[torch.Tensor]:
        start = torch.zeros(1, 4, 6, device=device)
        found = fuse_iteration(given, start, case.options(), (), rule, backend="triton")
        assert found is not None
        found.advance()
        found.advance()
        return [v for v in found.progress if v is not None]

    expected = steps(operands)
    for name in ("x", "raw"):
        moved = operands._replace(**{name: far_apart(getattr(operands, name))})
        # sums depend on what the compiler knows of strides
        torch.testing.assert_close(steps(moved), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_a_memory_of_more_than_32_bits() -> None:
    """2^31 states of all samples: numbers of elements that overflow are negative, and so below
    every size."""
    torch.manual_seed(0)
    options = {"expand": 2, "d_state": 16, "num_heads": 16, "num_householder": 1}
    layer = Bedouin(1024, device="cuda", dtype=torch.bfloat16, backend="triton", **options)  # type: ignore[arg-type]
    few = torch.randn(8, 1, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(few)
        found = layer(few.repeat(2**13 + 1, 1, 1))
    for part in (found[:8], found[-8:]):
        torch.testing.assert_close(part, expected, rtol=0.02, atol=0.02)
