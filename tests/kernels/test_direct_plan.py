"""How products with W^y are spread over persistent programs, for devices that are not here."""

from types import SimpleNamespace

import pytest
import torch

planning = pytest.importorskip("bedouin.kernels.direct.triton_plan")

H100 = {"multi_processor_count": 132, "shared_memory_per_block_optin": 232448}
A100 = {"multi_processor_count": 108, "shared_memory_per_block_optin": 166912}
SMALL = {"multi_processor_count": 46, "shared_memory_per_block_optin": 101376}
OLD = {"multi_processor_count": 80, "shared_memory_per_block_optin": 49152}


@pytest.fixture(params=[H100, A100, SMALL, OLD], ids=["h100", "a100", "small", "old"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU's properties, seen by the plan of a compiled kernel."""
    properties = SimpleNamespace(**request.param)
    monkeypatch.setattr(planning, "interpreter_is_on", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


@pytest.mark.parametrize("b", [1, 8, 16, 64, 128, 200])
@pytest.mark.parametrize("d", [6, 128, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plan_fits_the_device(
    device: SimpleNamespace, b: int, d: int, dtype: torch.dtype
) -> None:
    r = 5 * d + 36
    W = torch.empty(1, dtype=dtype)
    plan = planning.plan_product(r, d, W, b)
    if plan is None:
        return
    size = W.element_size()
    tile = plan.block_m * plan.block_k * plan.chunks
    vectors = plan.block_k * plan.block_b * (2 if plan.chunks > 1 else 1)
    assert (tile + vectors) * size <= device.shared_memory_per_block_optin
    tiles = -(-r // plan.block_m) * plan.splits
    assert tiles <= plan.programs == device.multi_processor_count
    assert plan.block_k * plan.chunks * plan.splits >= d
    assert plan.separate == (tiles + b <= plan.programs)
    # or warpgroups would repeat each other's products
    assert plan.chunks == 1 or plan.block_m == planning.MAX_ROWS or size > 2


def test_the_size_of_the_paper_is_persistent_on_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(**H100)
    monkeypatch.setattr(planning, "interpreter_is_on", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    W = torch.empty(1, dtype=torch.bfloat16)
    for b in (8, 16, 64, 128):
        assert planning.plan_product(5156, 1024, W, b) is not None
        assert planning.plan_product(1024, 5184, W, b) is not None
    # in float32 a tile would be unrolled over too many columns
    assert planning.plan_product(5156, 1024, W.float(), 8) is None
